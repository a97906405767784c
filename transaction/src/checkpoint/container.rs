//! The effects of a checkpoint on a real container.

mod copying;
mod image;
mod inspection;
mod kept_image;
mod manifest;
mod pieces;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::{Tcp, find_program, names};
use firn_gpu::protocol::GpuMemory;
use firn_gpu::{CudaProcess, CudaState, SourceGpu, Topology};
use firn_host::procfs;
use firn_host::{UnlessAbsent, atomic_file};
use firn_image::criu::{Continued, close_connections, close_unix_sockets, set_expired_timers};
use firn_image::manifest::{CheckpointedProcess, DriverVersion, DumpFlags, ImageFile, Versions};
use firn_image::memory::call::Ready;
use firn_oci::criu_config::{self, CriuError};
use firn_oci::mounts;
use firn_preflight::{Assertions, Inherited, OtherEnd, UnixSocket, is_outside_vfork, read_connections};
use firn_process::OrWarn;
use firn_process::blocking::blocking;
use firn_process::cancel::CancellationToken;
use firn_process::cgroup::{Cgroup, Still};
use firn_process::tracer::{TracedThreads, criu_code, threads};
use firn_store::Owner;

use super::Request;
use super::dump::{FailedDump, Leftovers, bounded};
use super::error::{DumpError, EffectError, EndError};
use crate::driver::{Driver, WorkerError};
use crate::effects::{self, Device, Dump as _};
use crate::end_proof::EndProof;
use crate::huge_pages;
use crate::journal;
use crate::parked::{Parked, RestoreCall};
use crate::phase::Phase;
use crate::transaction::{Means, Transaction};
use copying::Copied;
pub(super) use pieces::is_exchange;

/// How many pids a request to the worker has at most as well as those it names: eight bytes each.
const MOST_PIDS: usize = 100_000;

/// What the container's owner asserts, and what the manifest states about the source node.
#[derive(Clone)]
pub(super) struct Source {
    /// Hooks that the container names.
    hooks: BTreeMap<String, String>,
    assertions: Assertions,
    /// The store that gets large memory; none: the image gets it.
    store: Option<PathBuf>,
    /// Whose that memory is.
    owner: Option<Owner>,
    /// Options of the dump.
    dump: DumpFlags,
    /// Bytes of memory in use on the container's GPUs, by any process.
    gpu_memory_in_use: u64,
    driver: DriverVersion,
    pub(super) gpus: Vec<SourceGpu>,
    topology: Topology,
    mounts: Vec<mounts::RequiredMount>,
    /// Mount points of the tmpfs whose files are in a checkpoint.
    tmpfs: Vec<PathBuf>,
    /// One of them is the pod's /dev/shm.
    has_pod_shm: bool,
    /// Its seccomp profile asks an agent.
    seccomp_agent: bool,
    versions: Versions,
    /// Name of the image that the container began with, if its spec has it.
    image: String,
    /// Arguments of its first process.
    command: String,
}

/// A container under checkpoint, and what the checkpoint uses.
pub(super) struct ContainerEffects<'a> {
    pub transaction: &'a Transaction<'a>,
    pub cgroup: Cgroup,
    pub request: &'a Request,
    pub gpu: Driver,
    /// GPU memory that the processes had when they were locked, as far as NVML reports it.
    pub needs: GpuMemory,
    /// firn's plugin for CRIU, if it is installed.
    pub criu_plugin: Option<PathBuf>,
    pub progress: Progress,
}

/// What a checkpoint has done so far.
#[derive(Default)]
pub(super) struct Progress {
    /// Read once, by the first inspection.
    pub(super) source: Option<Source>,
    /// What was found when the store was made ready.
    store_ready: Option<Ready>,
    /// The hook `prepare` was called, or could have been.
    pub(super) prepared: bool,
    /// CRIU has dumped the container, and has come to its end by itself.
    is_dumped: bool,
    /// The container is parked.
    pub(super) parked: Option<Parked>,
    /// CUDA processes, as the last inspection found.
    pub(super) cuda: Vec<CudaProcess>,
    /// When the client's copy of the container's files was made, at the latest, in the time since 1970.
    copied_at: Option<Duration>,
    /// How often it has joined the other containers that are checkpointed at the same moment.
    met: usize,
    /// GPUs that processes without CUDA have inherited, as the last inspection found.
    inherited: Vec<Inherited>,
    /// It was tried to take GPU memory out of the processes.
    is_detach_tried: bool,
    /// The processes whose memory is out have next to nothing left for the driver.
    is_context_left: bool,
    /// Whether a process may be in cuInit, as the last inspection found.
    is_starting: bool,
    /// Whether CRIU has to make links of files whose name was deleted, as the last inspection found.
    link_remap: bool,
    /// Where CRIU finds the files that processes watch, as the last inspection found.
    watched: Vec<PathBuf>,
    /// Unix sockets that the copy finds closed, as the last inspection found.
    unix_sockets: Vec<UnixSocket>,
    /// How many processes the dump leaves out, as last logged.
    omitted: usize,
    /// What the manifest will have.
    described: Vec<CheckpointedProcess>,
    copied: Copied,
    images: Vec<ImageFile>,
    /// How the container stood still when that was looked at first.
    still: Option<Still>,
    /// Files that the dump has left. They are removed once the workload runs again or has ended.
    leftovers: Leftovers,
    pub complete: bool,
    /// The second directory of an image whose client may remove the first.
    rescued: Option<PathBuf>,
}

impl Progress {
    /// Of a transaction that has ended, by its journal.
    pub(super) fn recorded(cuda: Vec<CudaProcess>) -> Self {
        Self {
            cuda,
            ..Self::default()
        }
    }

    /// Of a container that is parked, or not.
    pub(super) fn of(parked: Option<Parked>) -> Self {
        Self {
            parked,
            ..Self::default()
        }
    }
}

impl<'a> ContainerEffects<'a> {
    pub(super) fn new(
        transaction: &'a Transaction<'a>,
        means: Means,
        request: &'a Request,
        progress: Progress,
    ) -> Self {
        Self {
            transaction,
            cgroup: means.cgroup,
            request,
            gpu: transaction.driver(means.worker),
            needs: GpuMemory::new(),
            criu_plugin: None,
            progress,
        }
    }
}

impl ContainerEffects<'_> {
    /// Cleans up after the dump. Adds the errors of CRIU's log to `failure`, or replaces it if the image
    /// directory has gone.
    pub(super) async fn tidy(&mut self, failure: Option<&mut EffectError>) {
        let failed = failure.filter(|error| matches!(error, EffectError::Dump(DumpError::Failed { .. })));
        let (leftovers, cancel) = (
            std::mem::take(&mut self.progress.leftovers),
            self.transaction.cancel(),
        );
        let tidied = leftovers.tidy(
            self.transaction.container,
            failed.is_some(),
            self.progress.complete,
            cancel,
        );
        match (failed, tidied.await) {
            (Some(error), FailedDump { gone: Some(gone), .. }) => *error = gone.into(),
            (Some(EffectError::Dump(DumpError::Failed { lines, .. })), found) => *lines = found.lines,
            _ => {}
        }
    }

    /// Kills a container that is to end, and releases its held threads.
    pub(super) async fn kill(&mut self) {
        let killed = self.cgroup.kill_all(self.transaction.config.deadlines.end).await;
        killed
            .unless_absent()
            .or_warn(format_args!("cannot kill {}", self.transaction.container.id));
        // Order matters: held threads are released once they cannot run any more.
        drop(self.transaction.container.take_held());
    }

    /// After a failure: ends a container that is to end, and leaves nothing of one that has ended stopped.
    /// Returns whether it lives.
    pub(super) async fn is_left_alive(&mut self) -> bool {
        let is_cancelled = self.transaction.cancel().is_cancelled();
        if is_cancelled {
            // Containers of the same pod share its network.
            self.release_from_criu().await;
            self.kill().await;
        }
        // A killed process that still frees its memory is no zombie yet.
        let is_alive = !is_cancelled && procfs::is_alive(self.transaction.container.init.pid());
        if !is_alive {
            self.leave_thawed().await;
            drop(self.transaction.container.take_held());
        }
        is_alive
    }

    /// Thaws the cgroup of a container that has ended: the runtime would take a frozen one for paused and not
    /// delete it, and a client that has paused it cannot resume it any more.
    pub(super) async fn leave_thawed(&mut self) {
        let thawed = self.cgroup.thaw(self.transaction.config.deadlines.freeze).await;
        thawed
            .unless_absent()
            .or_warn(format_args!("cannot thaw {}", self.transaction.container.id));
    }

    /// Ends a container whose image is on its disk: kills it, deletes the runtime's state, and waits until
    /// init is reaped.
    pub(super) async fn finish_container(&mut self, proof: EndProof) -> Result<(), EndError> {
        log::info!("container={} ends: {proof}", self.transaction.container.id);
        self.transaction.journal.enter_anyway(Phase::End).await;
        let limit = self.transaction.config.deadlines.end;
        self.cgroup.kill_all(limit).await?;
        journal::point("finish-killed").await;
        // Not the transaction's own token: the end of init cancels that, and here init shall end.
        let hooks = self.transaction.container.hooks.begin();
        self.transaction
            .container
            .runc
            .finish(hooks.cancel.cancelled())
            .await?;
        drop(hooks);
        journal::point("finish-deleted").await;
        // The client may ask for the exit status as soon as this returns.
        tokio::time::timeout(limit, self.transaction.container.init.wait())
            .await
            .map_err(|_| EndError::InitAlive)?;
        Ok(())
    }

    /// Processes of the container that may have memory on its GPUs: all of them, or those with CUDA if there
    /// are very many. The worker's lines are of 1 MiB at most, and a rollback must not fail by that.
    fn own_pids(&self) -> Result<Vec<i32>, EffectError> {
        let pids = self.cgroup.pids()?;
        let parked = self.progress.parked.as_ref();
        let cuda = parked.map_or(&self.progress.cuda, |parked| &parked.processes);
        if pids.len() > MOST_PIDS && !cuda.is_empty() {
            Ok(cuda.iter().map(|process| process.pid).collect())
        } else {
            Ok(pids)
        }
    }

    fn source(&self) -> &Source {
        self.progress
            .source
            .as_ref()
            .expect("the first inspection reads it")
    }

    /// Closes connections in the image that the copy does not continue.
    async fn close_connections(&mut self) -> Result<(), EffectError> {
        let continued = match self.source().assertions.tcp {
            Tcp::Keep => return Ok(()),
            Tcp::Auto => Continued::Inside,
            // With `refuse` there are none but those that have ended.
            Tcp::Refuse | Tcp::Close => Continued::None,
        };
        let (image, limit) = (
            self.request.image.inside(),
            self.transaction.config.deadlines.look,
        );
        let unix_sockets = self.progress.unix_sockets.len();
        // CRIU has not written down what the connections hold. The container stands still.
        let looked_at =
            (self.source().assertions.tcp == Tcp::Close).then(|| self.transaction.container.init.pid());
        let close = move || {
            if unix_sockets > 0 {
                close_unix_sockets(&image)?;
            }
            let read = looked_at.map(|pid| {
                let read = read_connections(pid);
                read.or_warn(format_args!("cannot see which connections have unread bytes"))
                    .unwrap_or_default()
            });
            close_connections(&image, continued, read.as_ref())
        };
        let found = bounded(
            "close connections in the image",
            limit,
            self.transaction.cancel(),
            close,
        )
        .await?;
        let found = found.map_err(DumpError::Connections)?;
        if let Some(source) = &mut self.progress.source {
            source.dump.open_tcp = found.kept > 0;
        }
        let id = &self.transaction.container.id;
        if unix_sockets > 0 {
            log::info!("{unix_sockets} Unix sockets are closed in the checkpoint of {id}");
        }
        if found.closed > 0 {
            log::info!(
                "{} TCP sockets are closed in the checkpoint of {id}, {} continue",
                found.closed,
                found.kept
            );
        }
        Ok(())
    }

    /// Sets the timers that would never expire again in a copy.
    async fn set_expired_timers(&self) -> Result<(), EffectError> {
        let (image, limit) = (
            self.request.image.inside(),
            self.transaction.config.deadlines.look,
        );
        let (what, cancel) = ("set timers in the image", self.transaction.cancel());
        let count = bounded(what, limit, cancel, move || set_expired_timers(&image)).await?;
        let count = count.map_err(DumpError::Timers)?;
        if count > 0 {
            let id = &self.transaction.container.id;
            log::info!("{count} expired timers are set again in the checkpoint of {id}");
        }
        Ok(())
    }

    /// Whether CRIU makes links in the pod's /dev/shm, which are kept before it removes them.
    fn keeps_shm_in_dump(&self) -> bool {
        let source = self.source();
        source.has_pod_shm && (self.progress.link_remap || source.assertions.link_remap)
    }

    /// firn-hook, if CRIU has to call it.
    fn dump_script(&self) -> Result<Option<PathBuf>, EffectError> {
        if !self.keeps_shm_in_dump() {
            return Ok(None);
        }
        let hook = self.transaction.config.hook.path.as_deref();
        Ok(Some(find_program(names::HOOK_PROGRAM, hook)?))
    }

    /// Writes CRIU's configuration for the dump. Returns the directory of CRIU's plugins, with firn's own
    /// where the dump needs it.
    fn configure_criu(&self) -> Result<PathBuf, EffectError> {
        let plugins = self.transaction.container.bundle.join(names::BUNDLE_CRIU_LIBS);
        if let Some(criu) = self.transaction.container.traits.criu.clone() {
            let unix_sockets = &self.progress.unix_sockets;
            let is_needed = !self.progress.inherited.is_empty() || !unix_sockets.is_empty();
            let plugin = self.criu_plugin.clone().filter(|_| is_needed);
            criu.with_tcp(self.source().assertions.tcp)
                .with_dump_script(self.dump_script()?)
                .with_link_remap(self.progress.link_remap)
                .with_scanned(self.progress.watched.clone())
                .with_plugins(self.transaction.config.criu.libs_dir.clone(), plugin)
                .write(criu_config::Operation::Dump)?;
            if !unix_sockets.is_empty() {
                list(unix_sockets, &plugins).map_err(|source| CriuError::Write {
                    path: plugins.join(names::CRIU_UNIX_SOCKETS),
                    source,
                })?;
            }
        }
        Ok(plugins)
    }
}

/// Lists for firn's plugin the Unix sockets that are closed in the image.
fn list(sockets: &[UnixSocket], plugins: &Path) -> std::io::Result<()> {
    let line = |socket: &UnixSocket| match socket.other_end {
        OtherEnd::Hidden(peer) => format!("hidden {} {peer}\n", socket.inode),
        OtherEnd::Client => format!("unseen {} {}\n", socket.inode, socket.kind.number()),
        _ => format!("seen {}\n", socket.inode),
    };
    let lines: String = sockets.iter().map(line).collect();
    atomic_file::write(plugins, names::CRIU_UNIX_SOCKETS, lines.as_bytes(), 0o600)
}

/// Waits for an effect, unless the container is to end meanwhile. A driver worker whose call is cancelled
/// ends later.
fn unless_cancelled<T, E: Into<EffectError>>(
    cancel: &CancellationToken,
    effect: impl Future<Output = Result<T, E>>,
) -> impl Future<Output = Result<T, EffectError>> {
    let done = cancel.unless_cancelled(effect);
    async move { done.await.ok_or(EffectError::Killed)?.map_err(Into::into) }
}

impl effects::Gpu for ContainerEffects<'_> {
    type Error = EffectError;

    async fn enter(&mut self, phase: Phase) -> Result<(), EffectError> {
        Ok(self.transaction.journal.enter(phase).await?)
    }

    async fn gpu_restore(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        let calls = match &self.progress.parked {
            Some(parked) => parked.calls(pids),
            None => vec![RestoreCall {
                pids: pids.to_vec(),
                pairs: Vec::new(),
                needs: self.needs.clone(),
            }],
        };
        self.transaction.journal.measure(Phase::GpuRestore);
        let own = self.own_pids()?;
        for RestoreCall { pids, pairs, needs } in calls {
            unless_cancelled(
                self.transaction.cancel(),
                self.gpu.restore(&pids, &pairs, needs, own.clone()),
            )
            .await?;
        }
        Ok(())
    }

    async fn gpu_unlock(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        self.transaction.journal.show(Phase::GpuUnlock);
        unless_cancelled(self.transaction.cancel(), self.gpu.unlock(pids)).await?;
        Ok(())
    }
}

impl Device for ContainerEffects<'_> {
    fn is_ended(&self) -> bool {
        self.transaction.cancel().is_cancelled() || !procfs::is_alive(self.transaction.container.init.pid())
    }

    async fn leave(&mut self, phase: Phase, ok: bool) {
        self.transaction.journal.leave(phase, ok).await;
    }

    async fn freeze(&mut self) -> Result<(), EffectError> {
        let freeze = self
            .cgroup
            .freeze_when(is_outside_vfork, self.transaction.config.deadlines.freeze);
        unless_cancelled(self.transaction.cancel(), freeze).await
    }

    async fn keep_frozen(&mut self) -> Result<(), EffectError> {
        unless_cancelled(
            self.transaction.cancel(),
            self.cgroup.keep_frozen(self.transaction.config.deadlines.freeze),
        )
        .await
    }

    async fn thaw(&mut self) -> Result<(), EffectError> {
        unless_cancelled(
            self.transaction.cancel(),
            self.cgroup.thaw(self.transaction.config.deadlines.freeze),
        )
        .await
    }

    async fn expect_running(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        let states = self.gpu.states(pids, self.transaction.config.deadlines.discover);
        for (pid, state) in unless_cancelled(self.transaction.cancel(), states).await? {
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
        let pids = self.cgroup.pids()?;
        // On a blocking thread, as in `refuse_stopped`.
        let tids = blocking(move || threads(&pids, &except)).await?;
        let hold = TracedThreads::hold(tids, self.transaction.config.deadlines.hold);
        self.transaction
            .container
            .keep_held(unless_cancelled(self.transaction.cancel(), hold).await?);
        Ok(())
    }

    fn is_held(&self) -> bool {
        self.transaction.container.is_held()
    }

    async fn end_criu_code(&mut self) -> Result<(), EffectError> {
        // A CRIU that succeeded has left nothing.
        if self.progress.is_dumped {
            return Ok(());
        }
        let (pids, limit) = (self.cgroup.pids()?, self.transaction.config.deadlines.hold);
        match self.transaction.container.end_criu_code(pids.clone(), limit) {
            Some(ended) => unless_cancelled(self.transaction.cancel(), ended).await,
            None => {
                let ended = blocking(move || criu_code::wait_for_end(&pids, limit));
                unless_cancelled(self.transaction.cancel(), ended).await
            }
        }
    }

    async fn release(&mut self) -> Result<(), EffectError> {
        match self.transaction.container.take_held() {
            None => Ok(()),
            Some(hold) => unless_cancelled(self.transaction.cancel(), hold.release()).await,
        }
    }

    async fn gpu_detach(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        self.detach(pids).await
    }

    async fn gpu_attach(&mut self) -> Result<(), EffectError> {
        self.attach().await
    }

    async fn gpu_lock(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        self.transaction.journal.measure(Phase::GpuLock);
        unless_cancelled(self.transaction.cancel(), self.gpu.lock(pids)).await?;
        // In a container that its client has paused, stopped processes show only after the thaw.
        self.refuse_stopped(&self.cgroup.pids()?).await
    }

    async fn gpu_checkpoint(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        // Order matters: locked processes allocate no more GPU memory, and checkpointed ones have none.
        // Of a parked container it is known, and some of its processes have none.
        if self.progress.parked.is_none() {
            self.needs = unless_cancelled(self.transaction.cancel(), self.gpu.memory(pids)).await?;
            self.transaction.journal.memory(&self.needs).await?;
        }
        self.transaction.journal.measure(Phase::GpuCheckpoint);
        // From now on the driver may open its files again: only this record shows what is inherited.
        self.transaction
            .journal
            .keep_inherited(self.progress.inherited.clone())
            .await;
        let copy = unless_cancelled(self.transaction.cancel(), self.gpu.checkpoint(pids));
        let copied = match pids {
            [] => copy.await,
            _ => huge_pages::during(self.transaction.config.checkpoint.huge_pages, copy).await,
        };
        if let Err(EffectError::Gpu(error)) = &copied
            && let Some((pid, answer)) = error.refusal()
        {
            // The driver answers this once; from then on only the record shows why.
            self.transaction.journal.keep_refused(pid, answer).await;
        }
        copied?;
        if self.is_dump() {
            self.transaction.journal.measure(Phase::Freeze);
        }
        Ok(())
    }

    async fn states(&mut self, pids: &[i32]) -> Result<Vec<(i32, CudaState)>, EffectError> {
        // The driver finishes a call also when the worker that made it was killed, and that takes time.
        let limit = self.transaction.config.deadlines.rollback;
        let gpu = &mut self.gpu;
        let states = unless_cancelled(self.transaction.cancel(), async {
            gpu.wait_until_gone(limit).await?;
            gpu.states(pids, limit).await
        })
        .await?;
        for &(pid, state) in &states {
            if matches!(state, CudaState::Failed | CudaState::Unknown(_)) {
                let (op, state) = ("state", Some(state));
                return Err(WorkerError::State { pid, op, state }.into());
            }
        }
        Ok(states)
    }
}
