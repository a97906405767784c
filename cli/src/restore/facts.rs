//! What is known of a running container for the node that would restore it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use firn_config::{Config, Keys};
use firn_gpu::protocol::GpuMemory;
use firn_gpu::{Backend, CudaState, Gpu, GpuUuid, Inventory, SourceGpu};
use firn_host::{CpuFeatures, ProblemReport, procfs};
use firn_image::criu::{HugePages, Pids, VolumeFile};
use firn_image::manifest::{CheckpointedProcess, DriverVersion, DumpFlags, Manifest, Versions};
use firn_oci::job_hook::JobHook;
use firn_oci::mounts::RequiredMount;
use firn_oci::{Spec, job_hook, mounts};
use firn_preflight::{Address, Tree, image_bytes};
use firn_process::cgroup::Cgroup;
use serde::{Deserialize, Serialize};

use super::error::RestoreError;
use crate::program;

/// What a checkpoint of the container would hold. The firn that reads it is of the same release: it has no
/// schema.
#[derive(Serialize, Deserialize)]
pub struct Facts {
    /// As containerd has it, and a checkpoint takes along.
    pub spec: serde_json::Value,
    /// None if it has no GPU.
    pub manifest: Option<Manifest>,
    /// Least size of the checkpoint.
    pub bytes: u64,
    /// Least memory that its processes need.
    pub memory: u64,
    /// Chain id of the layers that it began with; none if they are no image's.
    pub chain: Option<String>,
    /// What the CPU can do that its processes use.
    pub cpu: CpuFeatures,
    /// Addresses of the node that it uses.
    pub addresses: BTreeSet<Address>,
    /// Files of its volumes that it has open or mapped.
    pub files: Vec<VolumeFile>,
    /// What its processes have of the node's pools of huge pages.
    #[serde(default)]
    pub huge_pages: HugePages,
    /// Ids of its processes and threads.
    #[serde(default)]
    pub pids: Pids,
}

/// A container that runs.
pub struct Running<'a> {
    /// As containerd has it.
    pub spec: Spec,
    /// Its bundle, whose spec has the GPUs that it has now.
    pub bundle: &'a Path,
    /// Pid of its first process.
    pub init: i32,
    pub chain: Option<String>,
}

impl Facts {
    /// Runs firn-gpu: not to be called by a future.
    ///
    /// # Errors
    /// Why it cannot be checkpointed here.
    pub fn of(container: Running<'_>) -> Result<Self, ProblemReport> {
        // A containerd whose state is not next to its socket has the bundle elsewhere.
        let own = Spec::load(container.bundle).unwrap_or_else(|_| container.spec.clone());
        let members = Cgroup::of_pid(container.init).and_then(|cgroup| cgroup.pids());
        let tree: Vec<i32> = Tree::of(container.init, &members.unwrap_or_default())
            .dumped
            .into_iter()
            .collect();
        let (mut manifest, mut gpu) = (None, 0);
        if own.requests_gpu() {
            let mut found = Gpus::of(&tree)?;
            // What the job's hook lets go of is not known before it was called.
            if JobHook::Prepare.is_named(&own) {
                found.used.clear();
            }
            let mut made = manifest_of(&own, &found.here, &found.used)?;
            if !found.is_in_use {
                made.processes.clear();
            }
            gpu = found.used.values().copied().fold(0, u64::saturating_add);
            manifest = Some(made);
        }
        // The job's hook may close its sockets and files, free memory and end processes, too.
        let (addresses, files, huge_pages, pids) = if JobHook::Prepare.is_named(&own) {
            (BTreeSet::new(), Vec::new(), HugePages::default(), Pids::default())
        } else {
            (
                Address::of(&tree),
                VolumeFile::of_processes(&tree, &container.spec)?,
                HugePages::of_processes(&tree),
                Pids::of_processes(&container.spec, &tree),
            )
        };
        // Pages that a forked process shares count once in memory, and for each process in the image.
        let anonymous = tree.iter().map(|&pid| procfs::anonymous(pid)).max();
        Ok(Self {
            spec: container.spec.into_value(),
            manifest,
            bytes: image_bytes(&tree, gpu),
            memory: gpu.saturating_add(anonymous.unwrap_or_default()),
            chain: container.chain,
            cpu: CpuFeatures::here(),
            addresses,
            files,
            huge_pages,
            pids,
        })
    }
}

/// This node's GPUs, and what processes have of them.
struct Gpus {
    here: Inventory,
    used: GpuMemory,
    /// Whether one of the processes uses CUDA.
    is_in_use: bool,
}

impl Gpus {
    fn of(pids: &[i32]) -> Result<Self, RestoreError> {
        let config = Config::load(Keys::RESTORE)?;
        let unread = |error: anyhow::Error| RestoreError::Node(format!("{error:#}"));
        let here = program::inventory(&config).map_err(unread)?;
        let (mut used, mut is_in_use) = (GpuMemory::new(), false);
        for process in program::discover(&config, pids).map_err(unread)? {
            is_in_use |= process.restore_tid.is_some();
            for (uuid, bytes) in process.gpu_memory {
                let of_gpu = used.entry(uuid).or_default();
                *of_gpu = of_gpu.saturating_add(bytes);
            }
        }
        Ok(Self {
            here,
            used,
            is_in_use,
        })
    }
}

/// What a process uses of them is not known before the checkpoint: what would be refused nevertheless counts.
fn unused(mounts: Vec<RequiredMount>) -> Vec<RequiredMount> {
    let unused = |mount| RequiredMount {
        in_use: false,
        ..mount
    };
    mounts.into_iter().map(unused).collect()
}

/// The manifest that a checkpoint would have, as far as a plan needs it. `used`: what its processes have of
/// each GPU.
pub fn manifest_of(spec: &Spec, here: &Inventory, used: &GpuMemory) -> Result<Manifest, ProblemReport> {
    let node = firn_preflight::check_node(here, Some(spec)).accepted()?;
    let source = |gpu: &Gpu| SourceGpu {
        memory_used: used.get(&gpu.uuid).copied().unwrap_or_default(),
        ..gpu.into()
    };
    let gpus: Vec<_> = node.gpus.iter().map(source).collect();
    let uuids: Vec<GpuUuid> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let manifest = Manifest {
        checkpoint: String::new(),
        origin: None,
        hooks: BTreeMap::new(),
        backend: Backend::Nvidia,
        dump: DumpFlags::default(),
        driver: Some(DriverVersion {
            driver: here.driver_version.clone(),
            cuda: here.cuda_version,
        }),
        topology: here.topology.of(&uuids),
        gpus,
        // One is enough for the image to have GPU state.
        processes: vec![CheckpointedProcess {
            pid: 1,
            restore_tid: 1,
            state: CudaState::Running,
        }],
        inherited_gpus: Vec::new(),
        released_gpus: None,
        bulk: None,
        mounts: unused(mounts::required(spec)?),
        // Of this node, on which a container is that runs.
        cpu: CpuFeatures::default(),
        versions: Versions::default(),
        images: Vec::new(),
    };
    Ok(if job_hook::releases_devices(spec) {
        manifest.without_devices()
    } else {
        manifest
    })
}
