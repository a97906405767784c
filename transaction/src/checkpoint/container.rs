//! The effects of a checkpoint on a real container.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::Config;
use firn_gpu::protocol::GpuMemory;
use firn_gpu::{Backend, CudaState, Topology};
use firn_image::manifest;
use firn_image::manifest::{DriverVersion, Manifest, Versions};
use firn_oci::{Spec, mounts};
use firn_preflight::{Assertions, Capacity, Workload, check_node};
use serde::de::DeserializeOwned;

use super::Request;
use super::dump::{Found, Leftovers, bounded, describe, dump};
use super::error::{DumpError, EffectError, EndError};
use crate::blocking::blocking;
use crate::cancel::CancellationToken;
use crate::cgroup::Cgroup;
use crate::container::Container;
use crate::driver::{Driver, WorkerError};
use crate::effects::{self, Device, Dump};
use crate::image_dir::{ImageDir, rescue};
use crate::journal::{self, ImageWas, Journal};
use crate::look::{self, Checked};
use crate::phase::Phase;
use crate::procfs;
use crate::reaper::Reaper;
use crate::runc::Bounds;
use crate::timings::PhaseTimings;
use crate::tracer::{TracedThreads, threads};
use firn_gpu::CudaProcess;
use firn_host::Chain;

/// How long firn waits for the file system of the rescue directory.
const RESCUE: Duration = Duration::from_secs(10);

/// How long a tool may take to print its version. The version is for people only: after that it stays empty.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// What the container's owner asserts, and what the manifest states about the source node.
#[derive(Clone)]
struct Source {
    assertions: Assertions,
    /// Bytes of memory in use on the container's GPUs, by any process.
    gpu_memory_in_use: u64,
    driver: DriverVersion,
    gpus: Vec<manifest::SourceGpu>,
    topology: Topology,
    mounts: Vec<mounts::RequiredMount>,
    versions: Versions,
}

/// What a checkpoint uses in addition to the container and the request.
pub(super) struct Context<'a> {
    pub cgroup: Cgroup,
    /// The driver worker.
    pub worker: PathBuf,
    pub reaper: &'a Reaper,
    pub timings: &'a mut PhaseTimings,
    pub journal: Journal,
    pub cancel: CancellationToken,
}

/// A container under checkpoint.
pub(super) struct ContainerEffects<'a> {
    container: &'a Container,
    request: &'a Request,
    config: &'a Config,
    context: Context<'a>,
    gpu: Driver,
    /// Read once, by the first inspection.
    source: Option<Source>,
    /// How many processes the dump leaves out, as last logged.
    omitted: usize,
    /// GPU memory that the processes had when they were locked, as far as NVML reports it.
    needs: GpuMemory,
    /// Files that the dump has left. They are removed once the workload runs again or has ended.
    leftovers: Leftovers,
    complete: bool,
    /// The second directory of an image whose client may remove the first.
    rescued: Option<PathBuf>,
}

impl<'a> ContainerEffects<'a> {
    pub(super) fn new(
        container: &'a Container,
        request: &'a Request,
        config: &'a Config,
        context: Context<'a>,
    ) -> Self {
        let reaper = context.reaper.clone();
        let gpu = Driver::new(context.worker.clone(), reaper, config.deadlines.worker_end)
            .with_journal(context.journal.clone());
        Self {
            container,
            request,
            config,
            context,
            gpu,
            source: None,
            omitted: 0,
            needs: GpuMemory::new(),
            leftovers: Leftovers::default(),
            complete: false,
            rescued: None,
        }
    }

    /// For a rollback by the journal: the GPU memory that it records.
    pub(super) fn with_needs(self, needs: GpuMemory) -> Self {
        Self { needs, ..self }
    }

    /// Whether the image is complete.
    pub(super) fn complete(&self) -> bool {
        self.complete
    }

    /// Cleans up after the dump. Adds the errors of CRIU's log to `failure`, or replaces it if the image
    /// directory has gone.
    pub(super) async fn tidy(&mut self, failure: Option<&mut EffectError>) {
        let failed = failure.filter(|error| matches!(error, EffectError::Dump(DumpError::Failed { .. })));
        let (leftovers, cancel) = (std::mem::take(&mut self.leftovers), &self.context.cancel);
        let tidied = leftovers.tidy(self.container, failed.is_some(), self.complete, cancel);
        match (failed, tidied.await) {
            (Some(error), Found { gone: Some(gone), .. }) => *error = gone.into(),
            (Some(EffectError::Dump(DumpError::Failed { lines, .. })), found) => *lines = found.lines,
            _ => {}
        }
    }

    /// Links the image into a second directory if containerd may remove the first: it does so as soon as the
    /// shim is killed.
    async fn link_image(&self) -> Option<PathBuf> {
        let image = self.request.image.clone();
        if !image.is_containerds() {
            return None;
        }
        let dir = self.rescue_dir();
        let sibling = rescue::sibling(image.path(), &dir);
        for (dir, link) in [
            (dir, rescue::link as fn(&ImageDir, &Path) -> std::io::Result<()>),
            (sibling, rescue::link_sibling),
        ] {
            self.context.journal.rescue(&dir).await;
            let (image, to) = (image.clone(), dir.clone());
            let link = move || link(&image, &to);
            match bounded("link the image", RESCUE, &self.context.cancel, link).await {
                Ok(Ok(())) => return Some(dir),
                Ok(Err(error)) => log::debug!("cannot link the image to {}: {error}", dir.display()),
                Err(error) => {
                    log::warn!("{}", Chain(&error));
                    return None;
                }
            }
        }
        None
    }

    fn rescue_dir(&self) -> PathBuf {
        let Container { bundle, id, .. } = self.container;
        rescue::place(self.config.checkpoint.rescue_dir(), bundle, id)
    }

    /// The directory in which a complete image stays for the client that reads the error. None: the image has
    /// gone.
    pub(super) async fn keep_image(&mut self) -> Option<PathBuf> {
        let linked = self.rescued.take();
        let root = self.config.checkpoint.rescue_dir();
        let is_sibling = |dir: &PathBuf| !dir.starts_with(root);
        let image = match linked.clone() {
            Some(dir) if !is_sibling(&dir) => return Some(dir),
            Some(dir) => blocking(move || ImageDir::known(&dir, ImageWas::Filled, None)).await,
            None if self.request.image.is_containerds() => self.request.image.clone(),
            None => {
                let path = self.request.image.path().to_owned();
                return (!self.has_lost_image().await).then_some(path);
            }
        };
        let dir = self.rescue_dir();
        match rescue::copy_within(
            &image,
            &dir,
            self.config.deadlines.criu_dump,
            &self.context.cancel,
        )
        .await
        {
            Ok(()) => {
                self.context.journal.rescue(&dir).await;
                if let Some(sibling) = linked {
                    let _late =
                        tokio::time::timeout(RESCUE, blocking(move || rescue::remove(&sibling))).await;
                }
                Some(dir)
            }
            Err(error) => {
                log::warn!("cannot copy the image to {}: {error}", dir.display());
                let path = self.request.image.path().to_owned();
                match linked {
                    None if self.has_lost_image().await => None,
                    linked => Some(linked.unwrap_or(path)),
                }
            }
        }
    }

    /// Whether the image has gone, for example with its client.
    pub(super) async fn has_lost_image(&self) -> bool {
        let image = self.request.image.clone();
        let look = move || image.check();
        let looked = tokio::time::timeout(RESCUE, blocking(look)).await;
        matches!(looked, Ok(Err(_)))
    }

    /// Removes the image's second directory: the client has the first.
    pub(super) async fn drop_rescue(&mut self) {
        if let Some(dir) = self.rescued.take() {
            let remove = move || rescue::remove(&dir);
            let _late = tokio::time::timeout(RESCUE, blocking(remove)).await;
        }
    }

    /// Kills a container that is to end, and releases its held threads.
    pub(super) async fn kill(&mut self) {
        if let Err(error) = self.context.cgroup.kill_all(self.config.deadlines.end).await
            && !error.is_absent()
        {
            log::warn!("cannot kill {}: {}", self.container.id, Chain(&error));
        }
        // Order matters: held threads are released once they cannot run any more.
        drop(self.container.take_held());
    }

    /// Thaws the cgroup of a container that has ended: the runtime would take a frozen one for paused and not
    /// delete it, and a client that has paused it cannot resume it any more.
    pub(super) async fn leave_thawed(&mut self) {
        if let Err(error) = self.context.cgroup.thaw(self.config.deadlines.freeze).await
            && !error.is_absent()
        {
            log::warn!("cannot thaw {}: {}", self.container.id, Chain(&error));
        }
    }

    /// Ends the driver worker.
    pub(super) async fn end(mut self) {
        self.gpu.end().await;
    }

    /// Ends a container whose image is complete: kills it, deletes the runtime's state, and waits until init
    /// is reaped.
    pub(super) async fn finish_container(&mut self) -> Result<(), EndError> {
        if let Err(error) = self.context.journal.enter(Phase::End).await {
            log::warn!("{}", Chain(&error));
        }
        let limit = self.config.deadlines.end;
        self.context.cgroup.kill_all(limit).await?;
        journal::point("finish-killed").await;
        // Not the transaction's own token: the end of init cancels that, and here init shall end.
        let hooks = self.container.begin_hooks();
        self.container.runc.finish(hooks.cancel.cancelled()).await?;
        drop(hooks);
        journal::point("finish-deleted").await;
        // The client may ask for the exit status as soon as this returns.
        tokio::time::timeout(limit, self.container.init.wait())
            .await
            .map_err(|_| EndError::InitAlive)?;
        self.context.timings.mark(Phase::End);
        Ok(())
    }

    /// Reads the node, the spec and the tools' versions. Refuses what needs no look at the processes.
    async fn read_source(&mut self) -> Result<Source, EffectError> {
        if let Some(parent) = self.request.parent.clone() {
            return Err(EffectError::Parent { parent });
        }
        let inventory = self.gpu.inventory(self.config.deadlines.inventory).await?;
        let spec = Spec::load(&self.container.bundle)?;
        let node = check_node(&inventory, Some(&spec)).accepted()?;
        let versions = Versions {
            firn: env!("CARGO_PKG_VERSION").to_owned(),
            criu: self.version_of("criu").await,
            runc: self.version_of(self.container.options.runtime()).await,
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
        };
        Ok(Source {
            assertions: Assertions::of(Some(&spec), self.config),
            gpu_memory_in_use: node.gpu_memory_in_use(),
            driver: DriverVersion {
                driver: inventory.driver_version,
                cuda: inventory.cuda_version,
            },
            gpus: node.gpus.iter().map(Into::into).collect(),
            topology: (inventory.topology).of(&node
                .gpus
                .iter()
                .map(|gpu| gpu.uuid.clone())
                .collect::<Vec<_>>()),
            mounts: mounts::required(&spec)?,
            versions,
        })
    }

    /// The version that a tool prints, for people; empty if it prints nothing.
    async fn version_of(&self, program: &str) -> String {
        let mut command = std::process::Command::new(program);
        let output = self
            .context
            .reaper
            .output(command.arg("--version"), VERSION_LIMIT)
            .await;
        let text = output
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .unwrap_or_default();
        text.lines().next().unwrap_or_default().trim().to_owned()
    }

    async fn look<T: DeserializeOwned>(&self, request: look::Request) -> Result<T, EffectError> {
        let limit = self.config.deadlines.look;
        Ok(look::look(&request, self.context.reaper, limit, &self.context.cancel).await?)
    }

    /// Refusals by what the processes are and do.
    async fn refuse_by_process(
        &mut self,
        assertions: Assertions,
        all: &[i32],
        cuda: &[CudaProcess],
    ) -> Result<(), EffectError> {
        self.refuse_stopped(all).await?;
        let workload = Workload {
            init: self.container.init.pid(),
            pids: all.to_vec(),
            cuda: cuda.iter().map(|process| process.pid).collect(),
            processes: Some(assertions),
            ..Workload::default()
        };
        let request = look::Request::Check(Box::new(workload));
        let Checked { left_out, .. } = self.look(request).await?;
        if left_out.count != std::mem::replace(&mut self.omitted, left_out.count) && left_out.count > 0 {
            let named = left_out.some.iter().map(|(pid, comm)| format!("{pid} ({comm})"));
            let named: Vec<String> = named.collect();
            let more = if named.len() < left_out.count { ", ..." } else { "" };
            log::warn!(
                "the checkpoint of {} leaves out processes that are no children of init ({}): {}{more}",
                self.container.id,
                left_out.count,
                named.join(", ")
            );
        }
        Ok(())
    }

    /// Refuses by memory and disk space, mounts and standard streams.
    async fn refuse_by_environment(
        &mut self,
        all: Vec<i32>,
        cuda: &[CudaProcess],
    ) -> Result<(), EffectError> {
        let source = self.source.as_ref().expect("it was read before");
        let in_use = source.gpu_memory_in_use;
        let pids: Vec<i32> = cuda.iter().map(|process| process.pid).collect();
        let gpu_memory = match pids.is_empty() {
            true => 0,
            // On some virtual machines NVML reports no memory per process: then all that is in use on the
            // GPUs counts.
            false => {
                let memory = self.gpu.memory(&pids, self.config.deadlines.inventory);
                let known = unless_cancelled(&self.context.cancel, memory).await?;
                match known.is_empty() {
                    true => in_use,
                    false => known.values().copied().fold(0, u64::saturating_add),
                }
            }
        };
        let bundle = &self.container.bundle;
        let workload = Workload {
            init: self.container.init.pid(),
            pids: all,
            cuda: pids,
            capacity: Some(Capacity {
                gpu_memory,
                image: self.request.image.inside(),
                work: self.request.work.as_ref().unwrap_or(bundle).clone(),
            }),
            bundle: Some(bundle.clone()),
            ..Workload::default()
        };
        self.look::<Checked>(look::Request::Check(Box::new(workload)))
            .await?;
        let (image, others) = (self.request.image.clone(), self.config.checkpoint.open_image_dir);
        let (limit, cancel) = (self.config.deadlines.look, &self.context.cancel);
        let admitted = bounded("look at the image directory", limit, cancel, move || {
            image.admit(others)
        });
        Ok(admitted.await??)
    }

    /// Refuses processes that a signal has stopped: while a v1 freezer holds them, neither firn nor CRIU can
    /// trace them.
    async fn refuse_stopped(&self, pids: &[i32]) -> Result<(), EffectError> {
        if !self.context.cgroup.is_v1() {
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

    fn plugins(&self) -> PathBuf {
        let bundled = self.container.bundle.join(firn_config::names::BUNDLE_CRIU_LIBS);
        self.config.criu.libs_dir.clone().unwrap_or(bundled)
    }

    /// The processes for the manifest. Read before the dump, because they may have gone when the image is
    /// complete.
    fn describe(&self, processes: &[CudaProcess]) -> Vec<manifest::CheckpointedProcess> {
        let inner = |task: String| procfs::inner_pid(&task);
        processes
            .iter()
            .filter_map(|CudaProcess { pid, restore_tid, .. }| {
                Some(manifest::CheckpointedProcess {
                    pid: inner(pid.to_string())?,
                    restore_tid: inner(format!("{pid}/task/{restore_tid}"))?,
                    state: CudaState::Running,
                })
            })
            .collect()
    }

    /// Which of the mounts processes have in use. None if that cannot be read: then all of them may be.
    async fn in_use(&self, mounts: &[mounts::RequiredMount]) -> Result<Option<Vec<bool>>, EffectError> {
        let Ok(pids) = self.context.cgroup.pids() else {
            return Ok(None);
        };
        let places = mounts.iter().map(|mount| mount.destination.clone()).collect();
        match self.look(look::Request::InUse { pids, places }).await {
            Err(EffectError::Look(error)) => {
                log::warn!(
                    "all mounts of {} may be in use: {}",
                    self.container.id,
                    Chain(&error)
                );
                Ok(None)
            }
            seen => seen,
        }
    }

    async fn write_manifest(&self, processes: Vec<manifest::CheckpointedProcess>) -> Result<(), EffectError> {
        let source = self.source.clone().expect("a dump follows an inspection");
        let (image, dump) = (self.request.image.clone(), self.request.flags.clone());
        let (limit, cancel) = (self.config.deadlines.criu_dump, &self.context.cancel);
        let images = describe(&image, limit, cancel).await?;
        let mut mounts = source.mounts;
        if let Some(used) = self.in_use(&mounts).await? {
            mounts::mark_unused(&mut mounts, &used);
        }
        let write = move || {
            let manifest = Manifest {
                backend: Backend::Nvidia,
                dump,
                driver: Some(source.driver),
                gpus: source.gpus,
                topology: source.topology,
                processes,
                mounts,
                versions: source.versions,
                images,
            };
            manifest.write_by(&image.inside(), image.path())?;
            image.seal();
            Ok(image.check()?)
        };
        bounded("write the manifest", limit, cancel, write).await?
    }
}

/// Waits for an effect, unless the container is to end meanwhile. A driver worker whose call is cancelled
/// ends later.
async fn unless_cancelled<T, E: Into<EffectError>>(
    cancel: &CancellationToken,
    effect: impl Future<Output = Result<T, E>>,
) -> Result<T, EffectError> {
    tokio::select! {
        biased;
        () = cancel.cancelled() => Err(EffectError::Killed),
        done = effect => done.map_err(Into::into),
    }
}

impl effects::Gpu for ContainerEffects<'_> {
    type Error = EffectError;

    async fn enter(&mut self, phase: Phase) -> Result<(), EffectError> {
        Ok(self.context.journal.enter(phase).await?)
    }

    async fn gpu_restore(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        let restored = self
            .gpu
            .restore(pids, &[], &self.needs, self.config.deadlines.gpu_restore);
        unless_cancelled(&self.context.cancel, restored).await?;
        self.context.timings.mark(Phase::GpuRestore);
        Ok(())
    }

    async fn gpu_unlock(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        unless_cancelled(
            &self.context.cancel,
            self.gpu.unlock(pids, self.config.deadlines.gpu_unlock),
        )
        .await?;
        self.context.timings.mark(Phase::GpuUnlock);
        Ok(())
    }
}

impl Device for ContainerEffects<'_> {
    fn is_ended(&self) -> bool {
        self.context.cancel.is_cancelled() || !procfs::is_alive(self.container.init.pid())
    }

    async fn leave(&mut self, phase: Phase, ok: bool) {
        self.context.journal.leave(phase, ok).await;
    }

    async fn freeze(&mut self) -> Result<(), EffectError> {
        unless_cancelled(
            &self.context.cancel,
            self.context.cgroup.freeze(self.config.deadlines.freeze),
        )
        .await
    }

    async fn keep_frozen(&mut self) -> Result<(), EffectError> {
        unless_cancelled(
            &self.context.cancel,
            self.context.cgroup.keep_frozen(self.config.deadlines.freeze),
        )
        .await
    }

    async fn thaw(&mut self) -> Result<(), EffectError> {
        unless_cancelled(
            &self.context.cancel,
            self.context.cgroup.thaw(self.config.deadlines.freeze),
        )
        .await
    }

    async fn expect_running(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        let states = self.gpu.states(pids, self.config.deadlines.discover);
        for (pid, state) in unless_cancelled(&self.context.cancel, states).await? {
            let state = match state {
                CudaState::Running => continue,
                CudaState::Locked => "locked",
                CudaState::Checkpointed => "checkpointed",
                CudaState::Failed | CudaState::Unknown(_) => "failed",
            };
            return Err(EffectError::NotRunning {
                pid,
                comm: procfs::comm(pid),
                state,
            });
        }
        Ok(())
    }

    async fn hold(&mut self, except: BTreeSet<i32>) -> Result<(), EffectError> {
        let pids = self.context.cgroup.pids()?;
        // On a blocking thread, as in `refuse_stopped`.
        let tids = blocking(move || threads(&pids, &except)).await?;
        let hold = TracedThreads::seize(tids, self.config.deadlines.hold);
        let hold = unless_cancelled(&self.context.cancel, hold).await?;
        self.container.keep_held(hold);
        Ok(())
    }

    fn is_held(&self) -> bool {
        self.container.is_held()
    }

    async fn release(&mut self) -> Result<(), EffectError> {
        match self.container.take_held() {
            None => Ok(()),
            Some(hold) => unless_cancelled(&self.context.cancel, hold.release()).await,
        }
    }

    async fn gpu_lock(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        unless_cancelled(
            &self.context.cancel,
            self.gpu.lock(pids, self.config.deadlines.gpu_lock),
        )
        .await?;
        self.context.timings.mark(Phase::GpuLock);
        // In a container that its client has paused, stopped processes show only after the thaw.
        self.refuse_stopped(&self.context.cgroup.pids()?).await
    }

    async fn gpu_checkpoint(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        // Order matters: locked processes allocate no more GPU memory, and checkpointed ones have none.
        let needs = self.gpu.memory(pids, self.config.deadlines.inventory);
        self.needs = unless_cancelled(&self.context.cancel, needs).await?;
        self.context.journal.memory(&self.needs).await?;
        let checkpointed = self.gpu.checkpoint(pids, self.config.deadlines.gpu_checkpoint);
        unless_cancelled(&self.context.cancel, checkpointed).await?;
        self.context.timings.mark(Phase::GpuCheckpoint);
        Ok(())
    }

    async fn states(&mut self, pids: &[i32]) -> Result<Vec<(i32, CudaState)>, EffectError> {
        // The driver finishes a call also when the worker that made it was killed, and that takes time.
        let limit = self.config.deadlines.rollback;
        let gpu = &mut self.gpu;
        let states = unless_cancelled(&self.context.cancel, async {
            gpu.gone(limit).await?;
            gpu.states(pids, limit).await
        })
        .await?;
        for &(pid, state) in &states {
            if matches!(state, CudaState::Failed | CudaState::Unknown(_)) {
                return Err(WorkerError::State {
                    pid,
                    op: "state",
                    state: Some(state),
                }
                .into());
            }
        }
        Ok(states)
    }
}

impl Dump for ContainerEffects<'_> {
    async fn inspect(&mut self) -> Result<Vec<CudaProcess>, EffectError> {
        let pids = self.context.cgroup.pids()?;
        let first = self.source.is_none();
        let source = match self.source.take() {
            Some(source) => source,
            None => {
                let cancel = self.context.cancel.clone();
                unless_cancelled(&cancel, self.read_source()).await?
            }
        };
        let assertions = self.source.insert(source).assertions;
        let found = self.gpu.discover(pids.clone(), self.config.deadlines.discover);
        let cuda = unless_cancelled(&self.context.cancel, found).await?;
        self.refuse_by_process(assertions, &pids, &cuda).await?;
        if first {
            self.refuse_by_environment(pids, &cuda).await?;
        }
        self.context.journal.cuda(&cuda).await?;
        self.context.timings.mark(Phase::Inspect);
        Ok(cuda)
    }

    async fn dump(&mut self, processes: &[CudaProcess]) -> Result<(), EffectError> {
        self.context.timings.mark(Phase::Freeze);
        let described = self.describe(processes);
        let (plugins, limit) = (self.plugins(), self.config.deadlines.criu_dump);
        let bounds = Bounds {
            deadline: Some(limit),
            journal: &self.context.journal,
            cancel: &self.context.cancel,
            freezer: Some(&self.context.cgroup),
        };
        let others = self.config.checkpoint.open_image_dir;
        let left = &mut self.leftovers;
        dump(self.container, self.request, &plugins, others, bounds, left).await?;
        self.context.timings.mark(Phase::CriuDump);
        self.write_manifest(described).await?;
        self.context.timings.mark(Phase::Manifest);
        self.complete = true;
        self.rescued = self.link_image().await;
        Ok(())
    }
}
