//! What the shim knows of a container.
//!
//! Two kinds of lock. [`Container::operation`] is held over a whole operation that changes the container (start, pause,
//! checkpoint, delete); State, Connect, Stats, Pids, Kill and Wait never take it, so they answer at once during a long
//! dump. The status lock is held for a few instructions only, never over an `await` or a runtime call.

mod admission;
mod exits;
mod process;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

pub use admission::{Action, InitState, NotAllowed, admit};
pub use exits::{Exits, Owner};
pub use process::{Process, StdioPaths};

use crate::cancel::{self, CancellationToken, TransactionGuard};
use crate::cgroup::{Cgroup, CgroupError, OomWatch};
use crate::options::RuncOptions;
use crate::prepared_restore::PreparedRestore;
use crate::reaper::Exit;
use crate::runc::Runc;
use crate::tracer::TracedThreads;

/// A container of this shim.
pub struct Container {
    pub id: String,
    pub bundle: PathBuf,
    pub runc: Runc,
    pub options: RuncOptions,
    pub init: Arc<Process>,
    /// Whether the spec asks for GPUs; a container that does not is treated as the stock shim would.
    pub gpu: bool,
    /// Whether the spec gives it GPUs or accelerators that are not NVIDIA's.
    pub other_gpus: bool,
    /// Whether its dumps take established TCP connections along, whatever the client says.
    pub open_tcp: bool,
    /// Whether its processes die with init because they share a private pid namespace.
    pub private_pids: bool,
    /// Serialises operations that change the container; execs start beside each other.
    pub operation: tokio::sync::RwLock<()>,
    /// What Start has to bring back; absent in a container that was not made from a checkpoint.
    checkpoint: Mutex<Option<PreparedRestore>>,
    /// Threads that must not run because their GPU state is not where they left it. Here, and not with the transaction
    /// that holds them: they stay held whatever becomes of that.
    held: Mutex<Option<TracedThreads>>,
    transaction: cancel::Slot,
    /// A call of the runtime that runs hooks.
    hooks: cancel::Slot,
    status: Mutex<Status>,
    cgroup: Mutex<Option<Cgroup>>,
    /// Tells when memory runs out; set once there are processes and the host accounts memory.
    pub oom: OnceLock<Arc<OomWatch>>,
    /// How many calls that signal init are under way.
    kills: watch::Sender<usize>,
}

/// A call that signals init is under way.
pub struct Killing<'a>(&'a watch::Sender<usize>);

impl Drop for Killing<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|kills| *kills -= 1);
    }
}

struct Status {
    state: InitState,
    execs: BTreeMap<String, Arc<Process>>,
    running_execs: usize,
    /// Init has ended: no exec starts any more.
    init_gone: bool,
    /// Its exit, told when no exec runs any more.
    init_exit: Option<Exit>,
    /// Start is under way: an exit of init is told after it.
    starting: bool,
    exit_while_starting: Option<Exit>,
}

/// Why an exec cannot begin.
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
            gpu: traits.gpu,
            other_gpus: traits.other_gpus,
            open_tcp: traits.open_tcp,
            private_pids: traits.private_pids,
            operation: tokio::sync::RwLock::new(()),
            checkpoint: Mutex::new(checkpoint),
            held: Mutex::new(None),
            transaction: cancel::Slot::default(),
            hooks: cancel::Slot::default(),
            status: Mutex::new(Status {
                state,
                execs: BTreeMap::new(),
                running_execs: 0,
                init_gone: false,
                init_exit: None,
                starting: false,
                exit_while_starting: None,
            }),
            cgroup: Mutex::new(None),
            oom: OnceLock::new(),
            kills: watch::Sender::new(0),
        }
    }

    /// Init's exit is not told while this is held: who hears of it may close the connection on which the answer to
    /// the call would come.
    pub fn killing(&self) -> Killing<'_> {
        self.kills.send_modify(|kills| *kills += 1);
        Killing(&self.kills)
    }

    /// Whether a call that signals init is under way.
    pub fn is_being_killed(&self) -> bool {
        *self.kills.borrow() > 0
    }

    /// Waits until no such call is under way, but not longer than `limit`.
    pub async fn is_killed(&self, limit: Duration) {
        let mut kills = self.kills.subscribe();
        if tokio::time::timeout(limit, kills.wait_for(|kills| *kills == 0))
            .await
            .is_err()
        {
            log::warn!("a call that signals {} takes its time", self.id);
        }
    }

    /// State as clients are told.
    pub fn state(&self) -> InitState {
        self.status().state
    }

    /// A new state, unless init has ended.
    pub fn set_state(&self, state: InitState) {
        let mut status = self.status();
        let is_final = match status.state {
            InitState::Stopped | InitState::Deleted => state != InitState::Deleted,
            _ => false,
        };
        if !is_final {
            status.state = state;
        }
    }

    /// Whether `action` may begin now.
    pub fn admit(&self, action: Action) -> Result<(), NotAllowed> {
        admit(action, self.state())
    }

    /// The cgroup, found by init while that is alive and remembered from then on.
    pub fn cgroup(&self) -> Result<Cgroup, CgroupError> {
        let mut known = self.cgroup.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cgroup) = known.as_ref() {
            return Ok(cgroup.clone());
        }
        let cgroup = Cgroup::of_pid(self.init.pid())?;
        *known = Some(cgroup.clone());
        Ok(cgroup)
    }

    /// Has it be in this cgroup.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_cgroup(&self, cgroup: Cgroup) {
        *self.cgroup.lock().unwrap_or_else(PoisonError::into_inner) = Some(cgroup);
    }

    /// Takes what Start has to restore.
    pub fn take_checkpoint(&self) -> Option<PreparedRestore> {
        self.checkpoint
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// Puts it back after a restore that failed: it may be tried again.
    pub fn put_checkpoint(&self, prepared: PreparedRestore) {
        *self.checkpoint.lock().unwrap_or_else(PoisonError::into_inner) = Some(prepared);
    }

    /// Holds these threads until they are taken back.
    pub fn keep_held(&self, hold: TracedThreads) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(hold);
    }

    /// Whether threads are held.
    pub fn is_held(&self) -> bool {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Takes back what is held.
    pub fn take_held(&self) -> Option<TracedThreads> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// A checkpoint or restore begins, which can be cut off. The caller holds the operation lock.
    pub fn begin_transaction(&self) -> TransactionGuard<'_> {
        self.transaction.begin()
    }

    /// The container is to end: cuts off the checkpoint or restore that is under way, if one is.
    pub fn cancel_transaction(&self) -> Option<CancellationToken> {
        self.transaction.cancel_transaction()
    }

    /// Hooks run from now on, for as long as they take. The caller holds the operation lock.
    pub fn begin_hooks(&self) -> TransactionGuard<'_> {
        self.hooks.begin()
    }

    /// The container is killed: whoever runs hooks is not waited for any more. Whether somebody does.
    pub fn cancel_hooks(&self) -> bool {
        self.hooks.cancel_transaction().is_some()
    }

    /// Whether a checkpoint or restore is under way.
    pub fn is_in_transaction(&self) -> bool {
        self.transaction.is_taken()
    }

    /// Puts an exec under its id; whether the id was free.
    pub fn add_exec(&self, process: Arc<Process>) -> bool {
        let mut status = self.status();
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
            self.status().execs.get(exec_id).cloned()
        }
    }

    /// The exec that has this pid.
    pub fn exec_of_pid(&self, pid: i32) -> Option<String> {
        self.status()
            .execs
            .values()
            .find(|p| p.pid() == pid)
            .map(|p| p.exec_id.clone())
    }

    /// Forgets an exec.
    pub fn remove_exec(&self, exec_id: &str) {
        self.status().execs.remove(exec_id);
    }

    /// Counts an exec that is about to run; init's exit is not told before its own.
    ///
    /// What else stands against it, a freezer above all, is for the runtime to see.
    pub fn begin_exec(&self) -> Result<(), ExecRefused> {
        let mut status = self.status();
        if status.init_gone {
            return Err(ExecRefused::InitGone { id: self.id.clone() });
        }
        if status.state == InitState::Suspended {
            admit(Action::Exec, status.state)?;
        }
        status.running_execs += 1;
        Ok(())
    }

    /// An exec has ended or did not start: init's exit, when it was waiting for that.
    pub fn end_exec(&self) -> Option<Exit> {
        let mut status = self.status();
        status.running_execs = status.running_execs.saturating_sub(1);
        if status.running_execs == 0 {
            status.init_exit.take()
        } else {
            None
        }
    }

    /// From now on an exit of init is kept for [`Container::end_start`].
    pub fn begin_start(&self) {
        self.status().starting = true;
    }

    /// Start is over: the exit of init, when that has ended meanwhile.
    pub fn end_start(&self) -> Option<Exit> {
        let mut status = self.status();
        status.starting = false;
        status.exit_while_starting.take()
    }

    /// Keeps the exit of init while Start is under way; gives it back otherwise.
    pub fn keep_while_starting(&self, exit: Exit) -> Option<Exit> {
        let mut status = self.status();
        if !status.starting {
            return Some(exit);
        }
        status.exit_while_starting = Some(exit);
        None
    }

    /// Init has ended: execs are refused from now on.
    pub fn set_init_gone(&self) {
        self.status().init_gone = true;
    }

    /// Init has ended: its exit comes back when it can be told now, else with the last exec's.
    pub fn end_init(&self, exit: Exit) -> Option<Exit> {
        let mut status = self.status();
        if status.running_execs == 0 {
            return Some(exit);
        }
        status.init_exit = Some(exit);
        None
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the spec says that the shim needs later.
#[derive(Clone, Copy, Debug)]
pub struct ContainerTraits {
    pub gpu: bool,
    pub other_gpus: bool,
    pub open_tcp: bool,
    pub private_pids: bool,
}
