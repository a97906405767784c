//! State of a container.
//!
//! There are two kinds of lock. [`Container::operation`] is held during a whole operation that changes the
//! container (start, pause, checkpoint, delete); State, Connect, Stats, Pids, Kill and Wait never take it, so
//! they are answered at once during a long dump. The status lock is held for a few instructions only, never
//! over an `await` or a runtime call.

mod admission;
mod exits;
mod process;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use firn_gpu::Backend;
use firn_oci::criu_config::CriuConfig;
use firn_oci::job_hook::Facts;
use tokio::sync::watch;

pub use admission::{Action, InitState, NotAllowed, admit};
pub use exits::{Exits, Expectation, Owner};
pub use process::{Process, StdioPaths};

use firn_host::ProcessTag;
use firn_process::cancel::Slot;
use firn_process::cgroup::{Cgroup, CgroupError, OomWatch};
use firn_process::panics::lock;
use firn_process::reaper::Exit;
use firn_process::tracer::{TraceError, TracedThreads};

use crate::options::RuncOptions;
use crate::parked::Parked;
use crate::pieces::Pieces;
use crate::prepared_restore::PreparedRestore;
use crate::runc::Runc;
use crate::steps::Follower;

/// A container of this shim.
pub struct Container {
    pub id: String,
    pub bundle: PathBuf,
    pub runc: Runc,
    pub options: RuncOptions,
    pub init: Arc<Process>,
    pub traits: ContainerTraits,
    /// Serialises operations that change the container; execs may start concurrently.
    pub operation: tokio::sync::RwLock<()>,
    /// The checkpoint that Start restores; none in a container that was not created from a checkpoint.
    checkpoint: Mutex<Option<PreparedRestore>>,
    /// Threads that must not run because their GPU state is in memory and not on the GPU. They are kept here
    /// and not in the transaction that holds them, so that they stay held when the transaction ends.
    held: Mutex<Option<TracedThreads>>,
    /// The checkpoint or restore in progress. Who begins it holds the operation lock.
    pub transaction: Slot,
    /// GPU memory that is out of its processes: it is kept here for the same reason.
    pieces: Mutex<Option<Pieces>>,
    /// Its processes may have GPUs that they did not begin with.
    has_other_gpus: AtomicBool,
    /// What is known of a container that its client has parked.
    parked: Mutex<Option<Parked>>,
    /// The hook of the job that Resume calls.
    pending_hook: Mutex<Option<Facts>>,
    /// The call in progress that runs hooks, which have no deadline. Who begins it holds the operation lock.
    pub hooks: Slot,
    /// Held while a thread works on the container's /dev, also by one that nobody waits for any more.
    pub(crate) dev: Arc<tokio::sync::Mutex<()>>,
    status: Mutex<Status>,
    cgroup: Mutex<Option<Cgroup>>,
    /// Gets the steps of its checkpoints and restores; set where they are firn's own.
    pub follower: OnceLock<Follower>,
    /// Reports when memory runs out; set once there are processes and the host accounts memory.
    pub oom: OnceLock<Arc<OomWatch>>,
    /// Number of calls in progress that signal init.
    kills: watch::Sender<usize>,
}

/// GPU memory that is out of its processes, while it is put back.
pub(crate) struct HeldPieces<'c> {
    pieces: Option<Pieces>,
    kept: &'c Mutex<Option<Pieces>>,
}

impl HeldPieces<'_> {
    pub(crate) fn pieces(&mut self) -> &mut Pieces {
        self.pieces.as_mut().expect("it is there until the end")
    }

    /// All is back.
    pub(crate) fn forget(mut self) {
        self.pieces = None;
    }
}

impl Drop for HeldPieces<'_> {
    fn drop(&mut self) {
        if let Some(pieces) = self.pieces.take() {
            *lock(self.kept) = Some(pieces);
        }
    }
}

/// A call in progress that signals init.
pub struct Killing<'a>(&'a watch::Sender<usize>);

impl Drop for Killing<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|kills| *kills -= 1);
    }
}

#[derive(Default)]
struct Status {
    state: InitState,
    execs: BTreeMap<String, Arc<Process>>,
    running_execs: usize,
    /// Init has ended: no exec starts any more.
    init_gone: bool,
    /// Exit of init, published when no exec runs any more.
    init_exit: Option<Exit>,
    /// Start is in progress: an exit of init is published after it.
    starting: bool,
    exit_while_starting: Option<Exit>,
    /// The command of firn for which it is paused.
    paused_for: Option<ProcessTag>,
    /// The command whose pause stays when it ends.
    kept_for: Option<ProcessTag>,
}

/// Why an exec is refused.
#[derive(Debug, thiserror::Error)]
pub enum ExecRefused {
    /// The container is suspended.
    #[error(transparent)]
    State(#[from] NotAllowed),
    /// Init has ended; the container is about to stop.
    #[error("container {id} init process is not running: failed precondition")]
    InitGone { id: String },
}

impl Container {
    pub fn new(
        id: &str,
        bundle: PathBuf,
        runc: Runc,
        options: RuncOptions,
        init: Process,
        traits: ContainerTraits,
        checkpoint: Option<PreparedRestore>,
    ) -> Self {
        let state = if checkpoint.is_some() {
            InitState::CreatedCheckpoint
        } else {
            InitState::Created
        };
        Self {
            id: id.to_owned(),
            bundle,
            runc,
            options,
            init: Arc::new(init),
            traits,
            operation: tokio::sync::RwLock::new(()),
            checkpoint: Mutex::new(checkpoint),
            held: Mutex::new(None),
            pieces: Mutex::new(None),
            has_other_gpus: AtomicBool::new(state == InitState::CreatedCheckpoint),
            parked: Mutex::new(None),
            transaction: Slot::default(),
            pending_hook: Mutex::new(None),
            hooks: Slot::default(),
            dev: Arc::default(),
            status: Mutex::new(Status {
                state,
                ..Status::default()
            }),
            cgroup: Mutex::new(None),
            follower: OnceLock::new(),
            oom: OnceLock::new(),
            kills: watch::Sender::new(0),
        }
    }

    /// Delays publishing init's TaskExit while the guard is held: a client may close its connection on
    /// TaskExit before it has the Kill response.
    pub fn killing(&self) -> Killing<'_> {
        self.kills.send_modify(|kills| *kills += 1);
        Killing(&self.kills)
    }

    /// Whether a call that signals init is in progress.
    pub fn is_being_killed(&self) -> bool {
        *self.kills.borrow() > 0
    }

    /// Waits until no such call is in progress, at most for `limit`.
    pub async fn is_killed(&self, limit: Duration) {
        let mut kills = self.kills.subscribe();
        if tokio::time::timeout(limit, kills.wait_for(|kills| *kills == 0))
            .await
            .is_err()
        {
            log::warn!("a call that signals init of {} is still in progress", self.id);
        }
    }

    /// The state, as clients see it.
    pub fn state(&self) -> InitState {
        lock(&self.status).state
    }

    /// Sets the state, unless init has ended.
    pub fn set_state(&self, state: InitState) {
        let mut status = lock(&self.status);
        let is_final = match status.state {
            InitState::Stopped | InitState::Deleted => state != InitState::Deleted,
            _ => false,
        };
        if !is_final {
            status.state = state;
        }
        if status.state != InitState::Paused {
            (status.paused_for, status.kept_for) = (None, None);
        }
    }

    /// The command of firn for which it is paused, and which is to resume it. None: its user has paused it,
    /// or it is not paused.
    pub fn paused_for(&self) -> Option<ProcessTag> {
        lock(&self.status).paused_for
    }

    /// It is paused for this command from now on. Nothing changes unless it is paused.
    pub fn pause_for(&self, command: ProcessTag) {
        let mut status = lock(&self.status);
        if status.state == InitState::Paused {
            (status.paused_for, status.kept_for) = (Some(command), None);
        }
    }

    /// It stays paused when this command ends. False: it is not paused for that. May be called again.
    pub fn keep_paused_for(&self, command: ProcessTag) -> bool {
        let mut status = lock(&self.status);
        if status.paused_for == Some(command) {
            (status.paused_for, status.kept_for) = (None, Some(command));
        }
        status.kept_for == Some(command)
    }

    /// Whether `action` may begin now.
    pub fn admit(&self, action: Action) -> Result<(), NotAllowed> {
        admit(action, self.state())
    }

    /// The cgroup, found through init while init is alive, and remembered.
    pub fn cgroup(&self) -> Result<Cgroup, CgroupError> {
        let mut known = lock(&self.cgroup);
        if let Some(cgroup) = known.as_ref() {
            return Ok(cgroup.clone());
        }
        let cgroup = Cgroup::of_pid(self.init.pid())?;
        *known = Some(cgroup.clone());
        Ok(cgroup)
    }

    /// Sets the cgroup, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_cgroup(&self, cgroup: Cgroup) {
        *lock(&self.cgroup) = Some(cgroup);
    }

    /// Takes the checkpoint that Start restores.
    pub fn take_checkpoint(&self) -> Option<PreparedRestore> {
        lock(&self.checkpoint).take()
    }

    /// Stores the checkpoint again after a failed restore, for another attempt.
    pub fn put_checkpoint(&self, prepared: PreparedRestore) {
        *lock(&self.checkpoint) = Some(prepared);
    }

    /// What is known of it, if it is parked.
    pub fn parked(&self) -> Option<Parked> {
        lock(&self.parked).clone()
    }

    /// Whether it is parked: its GPU state is in host memory, as its client requested.
    pub fn is_parked(&self) -> bool {
        lock(&self.parked).is_some()
    }

    /// It is parked from now on, or no more.
    pub(crate) fn put_parked(&self, parked: Option<Parked>) {
        *lock(&self.parked) = parked;
    }

    /// It was deleted: it is not parked any more. Returns whether it was.
    pub fn take_parked(&self) -> bool {
        lock(&self.parked).take().is_some()
    }

    /// Lets Resume call a hook of the job, instead of an earlier one.
    pub fn put_pending_hook(&self, facts: Facts) {
        *lock(&self.pending_hook) = Some(facts);
    }

    /// Takes the hook that Resume is to call.
    pub fn take_pending_hook(&self) -> Option<Facts> {
        lock(&self.pending_hook).take()
    }

    /// Holds these threads until [`Container::take_held`].
    pub fn keep_held(&self, hold: TracedThreads) {
        *lock(&self.held) = Some(hold);
    }

    /// Whether threads are held.
    pub fn is_held(&self) -> bool {
        lock(&self.held).is_some()
    }

    /// Lets the held threads of these processes end what a killed CRIU has put into them; none if none are
    /// held. See [`TracedThreads::end_criu_code`].
    pub fn end_criu_code(
        &self,
        pids: Vec<i32>,
        limit: Duration,
    ) -> Option<impl Future<Output = Result<(), TraceError>> + Send + use<>> {
        let held = lock(&self.held);
        held.as_ref().map(|held| held.end_criu_code(pids, limit))
    }

    /// Its processes get GPUs that they did not begin with.
    pub(crate) fn put_other_gpus(&self) {
        self.has_other_gpus.store(true, Ordering::Relaxed);
    }

    /// Whether its processes may have GPUs that they did not begin with, also those of a restored container.
    pub(crate) fn has_other_gpus(&self) -> bool {
        self.has_other_gpus.load(Ordering::Relaxed)
    }

    /// Keeps GPU memory that is about to leave its processes.
    pub(crate) fn put_pieces(&self, pieces: Pieces) {
        *lock(&self.pieces) = Some(pieces);
    }

    /// The GPU memory that is out of its processes; it is kept again unless [`HeldPieces::forget`] is called.
    pub(crate) fn hold_pieces(&self) -> Option<HeldPieces<'_>> {
        let pieces = lock(&self.pieces).take()?;
        let kept = &self.pieces;
        Some(HeldPieces {
            pieces: Some(pieces),
            kept,
        })
    }

    /// The processes whose GPU memory is out of them.
    pub(crate) fn without_memory(&self) -> Vec<i32> {
        lock(&self.pieces).as_ref().map(Pieces::pids).unwrap_or_default()
    }

    /// Whether GPU memory is out of its processes.
    pub(crate) fn has_pieces(&self) -> bool {
        lock(&self.pieces).is_some()
    }

    /// Its processes have ended: their GPU memory is freed. Nobody waits for that, as it may take its time.
    pub fn free_pieces(&self) {
        if let Some(pieces) = lock(&self.pieces).take() {
            thread::spawn(move || drop(pieces));
        }
    }

    /// Takes the held threads.
    pub fn take_held(&self) -> Option<TracedThreads> {
        lock(&self.held).take()
    }

    /// Adds an exec under its id; returns whether the id was free.
    pub fn add_exec(&self, process: Arc<Process>) -> bool {
        let mut status = lock(&self.status);
        if status.execs.contains_key(&process.exec_id) {
            return false;
        }
        status.execs.insert(process.exec_id.clone(), process);
        true
    }

    /// Init for an empty id, else the exec of that id.
    pub fn process(&self, exec_id: &str) -> Option<Arc<Process>> {
        if exec_id.is_empty() {
            Some(self.init.clone())
        } else {
            lock(&self.status).execs.get(exec_id).cloned()
        }
    }

    /// The exec that has this pid.
    pub fn exec_of_pid(&self, pid: i32) -> Option<String> {
        let status = lock(&self.status);
        let mut execs = status.execs.values();
        execs.find(|p| p.pid() == pid).map(|p| p.exec_id.clone())
    }

    /// Removes an exec.
    pub fn remove_exec(&self, exec_id: &str) {
        lock(&self.status).execs.remove(exec_id);
    }

    /// Counts an exec that is about to run; init's exit is published after the exec's.
    ///
    /// Other obstacles, above all a frozen cgroup, are for the runtime to detect.
    pub fn begin_exec(&self) -> Result<(), ExecRefused> {
        let mut status = lock(&self.status);
        if status.init_gone {
            return Err(ExecRefused::InitGone { id: self.id.clone() });
        }
        if status.state == InitState::Suspended {
            admit(Action::Exec, status.state)?;
        }
        status.running_execs += 1;
        Ok(())
    }

    /// An exec has ended or did not start. Returns init's exit if it was waiting for this exec.
    pub fn end_exec(&self) -> Option<Exit> {
        let mut status = lock(&self.status);
        status.running_execs = status.running_execs.saturating_sub(1);
        if status.running_execs == 0 {
            status.init_exit.take()
        } else {
            None
        }
    }

    /// From now on an exit of init is kept for [`Container::end_start`].
    pub fn begin_start(&self) {
        lock(&self.status).starting = true;
    }

    /// Start is over. Returns the exit of init, if init has ended meanwhile.
    pub fn end_start(&self) -> Option<Exit> {
        let mut status = lock(&self.status);
        status.starting = false;
        status.exit_while_starting.take()
    }

    /// Keeps the exit of init while Start is in progress; returns it otherwise.
    pub fn keep_while_starting(&self, exit: Exit) -> Option<Exit> {
        let mut status = lock(&self.status);
        if !status.starting {
            return Some(exit);
        }
        status.exit_while_starting = Some(exit);
        None
    }

    /// Init has ended: execs are refused from now on.
    pub fn set_init_gone(&self) {
        lock(&self.status).init_gone = true;
    }

    /// Init has ended. Returns its exit if it can be published now; otherwise [`Container::end_exec`] of the
    /// last exec returns it.
    pub fn end_init(&self, exit: Exit) -> Option<Exit> {
        let mut status = lock(&self.status);
        if status.running_execs == 0 {
            return Some(exit);
        }
        status.init_exit = Some(exit);
        None
    }
}

/// What Create has decided from the spec.
#[derive(Clone, Debug)]
pub struct ContainerTraits {
    /// What carries its GPU state through a checkpoint. A container without GPUs is handled as by the stock
    /// shim.
    pub backend: Backend,
    /// Whether the spec gives it GPUs or accelerators of other vendors.
    pub other_gpus: bool,
    /// Whether its processes die with init because they share a private pid namespace.
    pub private_pids: bool,
    /// Whether its job lets go of every device before a checkpoint, which then holds nothing of any.
    pub device_free: bool,
    /// Whether its programs have firn's library between them and NVIDIA's driver.
    pub interposed: bool,
    /// CRIU's configuration for a container whose checkpoints are firn's own.
    pub criu: Option<CriuConfig>,
}

impl ContainerTraits {
    /// Whether it has NVIDIA's GPUs.
    pub fn has_nvidia(&self) -> bool {
        self.backend == Backend::Nvidia
    }

    /// Whether its checkpoints have firn's phases. Others are dumped as by the stock shim.
    pub fn by_firn(&self) -> bool {
        self.has_nvidia() || self.device_free
    }
}
