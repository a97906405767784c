//! The effects of a checkpoint on a real container.

mod inspection;
mod kept_image;
mod manifest;

use std::collections::BTreeSet;
use std::future::Future;
use std::path::PathBuf;

use firn_config::Config;
use firn_gpu::protocol::GpuMemory;
use firn_gpu::{CudaState, SourceGpu, Topology};
use firn_image::manifest::{DriverVersion, Versions};
use firn_oci::mounts;
use firn_preflight::Assertions;

use super::Request;
use super::dump::{Found, Leftovers, dump};
use super::error::{DumpError, EffectError, EndError};
use crate::blocking::blocking;
use crate::cancel::CancellationToken;
use crate::cgroup::Cgroup;
use crate::container::Container;
use crate::driver::{Driver, WorkerError};
use crate::effects::{self, Device, Dump};
use crate::journal::{self, Journal};
use crate::phase::Phase;
use crate::procfs;
use crate::reaper::Reaper;
use crate::runc::Bounds;
use crate::timings::PhaseTimings;
use crate::tracer::{TracedThreads, threads};
use firn_gpu::CudaProcess;
use firn_host::Chain;

/// What the container's owner asserts, and what the manifest states about the source node.
#[derive(Clone)]
struct Source {
    assertions: Assertions,
    /// Bytes of memory in use on the container's GPUs, by any process.
    gpu_memory_in_use: u64,
    driver: DriverVersion,
    gpus: Vec<SourceGpu>,
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

    fn plugins(&self) -> PathBuf {
        let bundled = self.container.bundle.join(firn_config::names::BUNDLE_CRIU_LIBS);
        self.config.criu.libs_dir.clone().unwrap_or(bundled)
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
