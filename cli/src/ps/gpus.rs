//! Which GPUs the containers have, and how much of their memory: by firn-gpu.

use std::time::{Duration, Instant};

use firn_config::{Config, Keys};
use firn_gpu::Inventory;
use firn_remap::Grant;

use super::container::{Container, Gpu};
use crate::program;

/// How long a look is good for with --watch.
const FRESH: Duration = Duration::from_secs(5);

/// What the driver has reported last.
#[derive(Default)]
pub struct Gpus {
    inventory: Option<Inventory>,
    memory: Vec<(i32, u64)>,
    looked: Option<Instant>,
    /// Why it reports nothing.
    pub failure: Option<String>,
}

impl Gpus {
    /// Puts GPUs and memory into the containers.
    pub fn show(&mut self, containers: &mut [Container]) {
        if !containers.iter().any(Container::has_gpus) {
            return;
        }
        if self.looked.is_none_or(|looked| looked.elapsed() > FRESH) {
            self.failure = self.look(containers).err().map(|error| format!("{error:#}"));
            self.looked = Some(Instant::now());
        }
        let Some(inventory) = &self.inventory else {
            return;
        };
        for container in containers.iter_mut().filter(|container| container.has_gpus()) {
            container.gpus = of(container, inventory);
            let own = self.memory.iter().filter(|(pid, _)| container.pids.contains(pid));
            let own: Vec<u64> = own.map(|(_, bytes)| *bytes).collect();
            container.gpu_memory = (!own.is_empty()).then(|| own.iter().sum());
        }
    }

    fn look(&mut self, containers: &[Container]) -> anyhow::Result<()> {
        let config = Config::load(Keys::CDI).map_err(firn_host::ProblemReport::from)?;
        if self.inventory.is_none() {
            self.inventory = Some(program::inventory(&config)?);
        }
        // Order matters: a process in a transaction may keep the driver busy.
        let idle = containers
            .iter()
            .filter(|one| one.has_gpus() && one.transaction.is_none());
        let pids: Vec<i32> = idle.flat_map(|one| &one.pids).copied().collect();
        self.memory.retain(|(pid, _)| !pids.contains(pid));
        if !pids.is_empty() {
            let replies = program::discover(&config, &pids)?.into_iter();
            let replies = replies.filter(|reply| !reply.gpu_memory.is_empty());
            self.memory
                .extend(replies.map(|reply| (reply.pid, reply.gpu_memory.values().sum())));
        }
        Ok(())
    }
}

fn of(container: &Container, inventory: &Inventory) -> Vec<Gpu> {
    let grant = container
        .spec
        .as_ref()
        .map(|spec| Grant::of_spec(spec, inventory));
    let Some(Ok(grant)) = grant else {
        return Vec::new();
    };
    let all = inventory.gpus.iter().enumerate();
    let own = all.filter(|(_, gpu)| grant.gpus.iter().any(|granted| granted.uuid == gpu.uuid));
    own.map(|(index, gpu)| Gpu {
        index,
        uuid: gpu.uuid.to_string(),
    })
    .collect()
}
