//! What the first phase reads, and what it refuses.

use std::time::Duration;

use firn_config::{Tcp, names};
use firn_gpu::{CudaProcess, Inventory};
use firn_host::procfs;
use firn_image::manifest::{DriverVersion, Versions};
use firn_oci::criu_config::CriuConfig;
use firn_oci::{Spec, job_hook, mounts};
use firn_preflight::{Assertions, Capacity, CriuLimits, Workload, check_node, expect_criu};
use firn_process::blocking::blocking;
use serde::de::DeserializeOwned;

use super::{ContainerEffects, Source, unless_cancelled};
use crate::checkpoint::dump::bounded;
use crate::checkpoint::error::EffectError;
use crate::checkpoint::park::is_worked_on;
use crate::journal::Operation;
use crate::look::{self, Checked};
use crate::memory_owner;

/// How long a tool may take to print its version. The version is for people only: after that it stays empty.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

impl ContainerEffects<'_> {
    /// Reads the node, the spec and the tools' versions. Refuses what needs no look at the processes.
    pub(super) async fn read_source(&mut self) -> Result<Source, EffectError> {
        if let Some(parent) = self.request.parent.clone() {
            return Err(EffectError::Parent { parent });
        }
        // Only runc before 1.1 has another one by its options.
        if self.is_dump() && self.transaction.container.options.criu_path.is_empty() {
            expect_criu(&std::env::var_os("PATH").unwrap_or_default())?;
        }
        let mut spec = Spec::load(&self.transaction.container.bundle)?;
        self.request.overrides.apply(&mut spec)?;
        // Only NVIDIA's driver is asked, and a node without it need not have one.
        let inventory = if self.transaction.container.traits.has_nvidia() {
            self.gpu.inventory().await?
        } else {
            Inventory::default()
        };
        let node = check_node(&inventory, Some(&spec)).accepted()?;
        let uuids: Vec<_> = node.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let criu = self.transaction.container.traits.criu.as_ref();
        let users_tcp = criu.and_then(CriuConfig::users_tcp);
        let mut assertions = Assertions::of(Some(&spec), &self.transaction.config, users_tcp);
        let mut dump = self.request.flags.clone();
        if dump.open_tcp && spec.annotation(names::ANNOTATION_TCP).is_none() {
            assertions.tcp = Tcp::Keep;
        }
        assertions.external_unix =
            dump.external_unix_sockets || criu.is_some_and(CriuConfig::users_external_unix);
        assertions.link_remap = criu.is_some_and(CriuConfig::users_link_remap);
        dump.open_tcp = matches!(assertions.tcp, Tcp::Keep | Tcp::Auto);
        let versions = if self.is_dump() {
            self.versions().await
        } else {
            Versions::default()
        };
        Ok(Source {
            store: self.store_for(&spec)?,
            owner: memory_owner::owner(&spec, self.transaction.container.runc.namespace()),
            hooks: job_hook::named(&spec),
            assertions,
            dump,
            gpu_memory_in_use: node.gpu_memory_in_use(),
            driver: DriverVersion {
                driver: inventory.driver_version,
                cuda: inventory.cuda_version,
            },
            gpus: node.gpus.iter().map(Into::into).collect(),
            topology: inventory.topology.of(&uuids),
            mounts: mounts::required(&spec)?,
            has_pod_shm: spec.pod_shm()?.is_some(),
            tmpfs: spec.kept_tmpfs()?,
            seccomp_agent: spec.has_seccomp_agent(),
            versions,
            image: spec
                .annotation(names::ANNOTATION_CRI_IMAGE)
                .unwrap_or_default()
                .to_owned(),
            command: spec.args().collect::<Vec<_>>().join(" "),
        })
    }

    /// Whether an image is written. A pause has no other reason to refuse than the driver's.
    pub(super) fn is_dump(&self) -> bool {
        self.transaction.operation == Operation::Checkpoint
    }

    async fn versions(&self) -> Versions {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Versions {
            firn: env!("CARGO_PKG_VERSION").to_owned(),
            criu: self.version_of("criu").await,
            runc: self
                .version_of(self.transaction.container.options.runtime())
                .await,
            kernel: kernel.trim().to_owned(),
        }
    }

    /// The version that a tool prints, for people; empty if it prints nothing.
    async fn version_of(&self, program: &str) -> String {
        let mut command = std::process::Command::new(program);
        let output = self
            .transaction
            .reaper
            .output(command.arg("--version"), VERSION_LIMIT)
            .await;
        let stdout = output.map(|output| output.stdout).unwrap_or_default();
        let text = String::from_utf8_lossy(&stdout);
        text.lines().next().unwrap_or_default().trim().to_owned()
    }

    /// Whether the client has copied the container's files, as it is before they are written again.
    pub(super) fn finds_files_copied(&self) -> bool {
        self.request.files_copied && self.progress.parked.is_none() && self.transaction.was_frozen
    }

    /// Whether its processes may run for a while before they are locked: not if somebody else than a command
    /// of firn has paused it.
    pub(super) fn may_run(&self) -> bool {
        !self.transaction.was_frozen || is_worked_on(self.transaction.container)
    }

    pub(super) async fn look<T: DeserializeOwned>(&self, request: look::Request) -> Result<T, EffectError> {
        let limit = self.transaction.config.deadlines.look;
        Ok(look::look(
            &request,
            self.transaction.reaper,
            limit,
            self.transaction.cancel(),
        )
        .await?)
    }

    /// Refusals by what the processes are and do. `may_start`: a process may be in cuInit, for which the
    /// caller waits.
    pub(super) async fn refuse_by_process(
        &mut self,
        all: &[i32],
        cuda: &[CudaProcess],
        may_start: bool,
    ) -> Result<(), EffectError> {
        self.refuse_stopped(all).await?;
        let versions = &self.source().versions;
        let repaired = self.transaction.config.criu.repaired;
        let workload = Workload {
            init: self.transaction.container.init.pid(),
            pids: all.to_vec(),
            cuda: cuda.iter().map(|process| process.pid).collect(),
            processes: Some(self.source().assertions),
            pause: !self.is_dump(),
            may_start,
            criu_plugin: self.criu_plugin.is_some(),
            inherited: Some(self.transaction.container.bundle.join(names::BUNDLE_INHERITED)),
            taken_out: self.taken_out(cuda),
            refused_before: Some(self.transaction.container.bundle.join(names::BUNDLE_REFUSED)),
            tmpfs: self.source().tmpfs.clone(),
            seccomp_agent: self.source().seccomp_agent,
            no_inet: CriuLimits::of(&versions.criu, &versions.kernel, repaired).no_inet,
            scanned: self.progress.watched.clone(),
            ..Workload::default()
        };
        let request = look::Request::Check(Box::new(workload));
        let Checked {
            left_out,
            inherited,
            is_starting,
            link_remap,
            watched,
            unix_sockets,
            ..
        } = self.look(request).await?;
        self.progress.is_starting = is_starting;
        (self.progress.inherited, self.progress.link_remap) = (inherited, link_remap);
        (self.progress.unix_sockets, self.progress.watched) = (unix_sockets, watched);
        if left_out.count != std::mem::replace(&mut self.progress.omitted, left_out.count)
            && left_out.count > 0
        {
            let named = left_out.some.iter().map(|(pid, comm)| format!("{pid} ({comm})"));
            let named: Vec<String> = named.collect();
            let more = if named.len() < left_out.count { ", ..." } else { "" };
            log::warn!(
                "the checkpoint of {} leaves out processes that are no children of init ({}): {}{more}",
                self.transaction.container.id,
                left_out.count,
                named.join(", ")
            );
        }
        Ok(())
    }

    /// Refuses by memory and disk space, mounts and standard streams.
    pub(super) async fn refuse_by_environment(
        &mut self,
        all: Vec<i32>,
        cuda: &[CudaProcess],
    ) -> Result<(), EffectError> {
        let in_use = self.source().gpu_memory_in_use;
        let pids: Vec<i32> = cuda.iter().map(|process| process.pid).collect();
        let mut gpu_memory = 0;
        // What is not copied into the host's memory needs none of it.
        let is_copied = self.taken_out(cuda).len() < pids.len();
        if is_copied && self.progress.parked.is_none() {
            let known = unless_cancelled(self.transaction.cancel(), self.gpu.memory(&pids)).await?;
            gpu_memory = if known.is_empty() {
                // On some virtual machines NVML reports no memory per process: then all that is in use on the
                // GPUs counts.
                in_use
            } else {
                known.values().copied().fold(0, u64::saturating_add)
            };
        }
        let bundle = &self.transaction.container.bundle;
        let workload = Workload {
            init: self.transaction.container.init.pid(),
            pids: all,
            cuda: pids,
            capacity: Some(Capacity {
                gpu_memory,
                stored: self.source().store.is_some(),
                image: self.request.image.inside(),
                work: self.request.work.as_ref().unwrap_or(bundle).clone(),
            }),
            bundle: self.is_dump().then(|| bundle.clone()),
            pause: !self.is_dump(),
            ..Workload::default()
        };
        self.look::<Checked>(look::Request::Check(Box::new(workload)))
            .await?;
        if !self.is_dump() {
            return Ok(());
        }
        let (image, others) = (
            self.request.image.clone(),
            self.transaction.config.checkpoint.open_image_dir,
        );
        let (limit, cancel) = (self.transaction.config.deadlines.look, self.transaction.cancel());
        let admitted = bounded("look at the image directory", limit, cancel, move || {
            image.admit(others)
        });
        Ok(admitted.await??)
    }

    /// Refuses processes that a signal has stopped: while a v1 freezer holds them, neither firn nor CRIU can
    /// trace them.
    pub(super) async fn refuse_stopped(&self, pids: &[i32]) -> Result<(), EffectError> {
        if !self.cgroup.is_v1() {
            return Ok(());
        }
        let pids = pids.to_vec();
        // On a blocking thread, because there may be many processes. Reading their state never hangs.
        let stopped = blocking(move || pids.into_iter().find(|pid| procfs::state(*pid) == Some('T'))).await;
        match stopped {
            None => Ok(()),
            Some(pid) => Err(EffectError::Stopped {
                pid,
                comm: procfs::comm(pid),
            }),
        }
    }
}
