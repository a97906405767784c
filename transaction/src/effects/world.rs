//! A fake container for tests: it fails the calls that a test names, and panics when application code runs
//! without its GPU state.

mod restore;

use std::collections::{BTreeMap, BTreeSet};

use super::*;

#[derive(Debug, thiserror::Error, PartialEq)]
#[error("injected failure of {0}")]
pub(crate) struct Injected(pub &'static str);

/// A call that fails: the n-th of all; every later call of the same name too when `for_good`.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub nth: usize,
    pub for_good: bool,
}

/// Who thaws the container against what firn relies on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Thaws {
    /// A CRIU that is killed.
    #[default]
    Failure,
    /// Nobody: CRIU fails, and has frozen it again.
    Nobody,
    /// CRIU, which has succeeded.
    Dump,
    /// Somebody else, while firn reads the image.
    Describe,
}

/// A container of CUDA processes. It panics when application code runs without its GPU state.
#[derive(Default)]
pub(crate) struct World {
    pub frozen: bool,
    /// The freezer was turned on, and a thread has not stopped.
    pub freezing: bool,
    pub held: bool,
    pub states: BTreeMap<i32, CudaState>,
    /// Processes that appear at the n-th freeze.
    pub appear: BTreeMap<usize, i32>,
    pub calls: Vec<&'static str>,
    pub faults: Vec<Fault>,
    pub failing: BTreeSet<&'static str>,
    /// How often threads that must not run could not be stopped or held.
    pub unstoppable: usize,
    /// CRIU was killed and has left the tasks thawed: the next call must stop them.
    pub criu_died: bool,
    /// A CRIU that was killed has left their connections unusable.
    pub locked_network: bool,
    /// Its code has not come to its end in the tasks: it would unmap what the driver maps.
    pub criu_code: bool,
    /// Nothing could stop these tasks yet.
    pub let_run: bool,
    /// How often it has met the other containers of the same checkpoint.
    pub met: usize,
    /// How many more inspections find a process in cuInit, unless somebody waits for it.
    pub starts: usize,
    pub is_starting: bool,
    /// Of a dump that has no manifest yet.
    pub dumping: Option<Vec<i32>>,
    pub dumped: Option<Vec<i32>>,
    pub thaws: Thaws,
    /// The container is killed in the n-th call of all, and no call works any more.
    pub killed: Option<usize>,
    pub ended: bool,
    /// The call that fails panics.
    pub panics: bool,
    /// The journal has entered gpu-checkpoint.
    pub gpu_checkpointing: bool,
    pub phases: Vec<Phase>,
    /// There are processes.
    pub exists: bool,
    /// It was frozen at the begin: nothing is taken out of it.
    pub was_frozen: bool,
    /// GPU memory is out of the processes.
    pub out: bool,
    /// A restore: CRIU has left the processes stopped.
    pub stopped: bool,
    /// A restore: the restore threads run.
    pub selected: bool,
    /// A restore: the rights of the processes were compared with the spec.
    pub compared: bool,
    /// A restore: the next dump does not leave the processes stopped.
    pub can_be_dumped: bool,
    /// A restore: the driver worker runs.
    pub has_worker: bool,
}

impl World {
    pub fn new(pids: impl IntoIterator<Item = i32>, frozen: bool) -> Self {
        Self {
            frozen,
            was_frozen: frozen,
            states: pids.into_iter().map(|pid| (pid, CudaState::Running)).collect(),
            exists: true,
            ..Self::default()
        }
    }

    /// An image with the GPU state of these processes.
    pub fn image(pids: impl IntoIterator<Item = i32>) -> Self {
        let states = pids.into_iter().map(|pid| (pid, CudaState::Checkpointed));
        Self {
            states: states.collect(),
            ..Self::default()
        }
    }

    /// Every effect passes here.
    pub fn call(&mut self, name: &'static str) -> Result<(), Injected> {
        if self.ended {
            return Err(Injected(name));
        }
        self.check();
        if std::mem::take(&mut self.criu_died) {
            assert_eq!(name, "keep_frozen", "tasks run after {:?}", self.calls);
        }
        let nth = self.calls.len();
        self.calls.push(name);
        let now = self.faults.iter().find(|fault| fault.nth == nth);
        if now.is_some_and(|fault| fault.for_good) {
            self.failing.insert(name);
        }
        if now.is_some() || self.failing.contains(name) {
            assert!(!std::mem::take(&mut self.panics), "{name} panics");
            self.ended = self.killed == Some(nth);
            if matches!(name, "keep_frozen" | "hold") {
                self.unstoppable += 1;
            }
            return Err(Injected(name));
        }
        Ok(())
    }

    /// No thread runs without its GPU state, unless CRIU has just died, or what stops threads has failed
    /// twice.
    pub fn check(&self) {
        let runs = self.exists && !self.frozen && !self.held && !self.stopped;
        let checkpointed = self.states.values().any(|s| *s == CudaState::Checkpointed);
        assert!(
            !(runs && checkpointed) || self.let_run || self.unstoppable > 1,
            "application code ran without its GPU state: {:?}",
            self.calls
        );
    }

    pub fn set(&mut self, pids: &[i32], from: CudaState, to: CudaState) {
        for pid in pids {
            let state = self.states.get_mut(pid).expect("known pid");
            assert_eq!(*state, from, "pid {pid} -> {to:?}: {:?}", self.calls);
            *state = to;
        }
    }

    pub(crate) fn as_before(&self, was_frozen: bool) {
        assert!(
            self.states.values().all(|s| *s == CudaState::Running),
            "{:?}: {:?}",
            self.states,
            self.calls
        );
        let freezer = self.frozen || self.freezing;
        assert_eq!(freezer, was_frozen, "freezer: {:?}", self.calls);
        assert!(!self.held, "still held: {:?}", self.calls);
        assert!(!self.out, "GPU memory is out: {:?}", self.calls);
    }

    /// No thread runs but those that nothing could stop, and none stays held.
    pub fn expect_suspended(&self) {
        assert!(self.frozen || self.freezing, "it runs: {:?}", self.calls);
        assert!(
            self.frozen || self.unstoppable > 0,
            "not even stopped: {:?}",
            self.calls
        );
        // In the end frozen threads are released, unless the release fails: nobody traces them for ever.
        let last = self.calls.len() - 1;
        let failed =
            self.failing.contains(self.calls[last]) || self.faults.iter().any(|fault| fault.nth == last);
        assert!(!self.held || failed, "held for ever: {:?}", self.calls);
    }

    pub fn processes(&self) -> Vec<CudaProcess> {
        let process = |&pid: &i32| CudaProcess {
            pid,
            restore_tid: pid + 1,
        };
        self.states.keys().map(process).collect()
    }
}

/// Those of several processes that a call which fails has been through.
fn half(pids: &[i32]) -> &[i32] {
    &pids[..pids.len() / 2]
}

impl Gpu for World {
    type Error = Injected;

    async fn enter(&mut self, phase: Phase) -> Result<(), Injected> {
        self.call("enter")?;
        self.gpu_checkpointing |= phase == Phase::GpuCheckpoint;
        self.phases.push(phase);
        Ok(())
    }

    async fn gpu_restore(&mut self, pids: &[i32]) -> Result<(), Injected> {
        assert!(!self.frozen && (self.held || self.selected || self.unstoppable > 1));
        assert!(
            !self.criu_code,
            "CRIU's code unmaps GPU memory later: {:?}",
            self.calls
        );
        if let Err(failed) = self.call("gpu_restore") {
            // Some have been through it.
            self.set(half(pids), CudaState::Checkpointed, CudaState::Locked);
            return Err(failed);
        }
        self.set(pids, CudaState::Checkpointed, CudaState::Locked);
        Ok(())
    }

    async fn gpu_unlock(&mut self, pids: &[i32]) -> Result<(), Injected> {
        if let Err(failed) = self.call("gpu_unlock") {
            self.set(half(pids), CudaState::Locked, CudaState::Running);
            return Err(failed);
        }
        self.set(pids, CudaState::Locked, CudaState::Running);
        Ok(())
    }
}

impl Device for World {
    fn is_ended(&self) -> bool {
        self.ended
    }

    async fn leave(&mut self, _: Phase, _: bool) {
        // The journal's file system may hang or be full: nobody relies on the line.
        let _ = self.call("leave");
    }

    async fn freeze(&mut self) -> Result<(), Injected> {
        if let Err(failed) = self.call("freeze") {
            self.frozen = false;
            return Err(failed);
        }
        self.frozen = true;
        let freezes = self.calls.iter().filter(|c| **c == "freeze").count();
        if let Some(pid) = self.appear.remove(&freezes) {
            self.states.insert(pid, CudaState::Running);
        }
        Ok(())
    }

    async fn keep_frozen(&mut self) -> Result<(), Injected> {
        if let Err(failed) = self.call("keep_frozen") {
            self.freezing = !self.frozen;
            return Err(failed);
        }
        (self.frozen, self.freezing, self.let_run) = (true, false, false);
        Ok(())
    }

    async fn thaw(&mut self) -> Result<(), Injected> {
        self.call("thaw")?;
        assert!(
            !self.locked_network,
            "it runs without its connections: {:?}",
            self.calls
        );
        (self.frozen, self.freezing) = (false, false);
        Ok(())
    }

    async fn expect_running(&mut self, pids: &[i32]) -> Result<(), Injected> {
        assert!(
            !self.frozen,
            "the driver waits for ever for the state of a frozen process"
        );
        self.call("expect_running")?;
        if pids.iter().any(|pid| self.states[pid] != CudaState::Running) {
            return Err(Injected("a locked process"));
        }
        Ok(())
    }

    async fn hold(&mut self, except: BTreeSet<i32>) -> Result<(), Injected> {
        self.call("hold")?;
        assert!(self.frozen, "held while running: {:?}", self.calls);
        // While threads are held, the driver works only on locked and checkpointed processes.
        let worked_on = self
            .states
            .iter()
            .filter(|(_, state)| **state != CudaState::Running);
        assert!(
            worked_on
                .map(|(pid, _)| pid)
                .all(|pid| except.contains(&(pid + 1))),
            "a restore thread is held"
        );
        self.held = true;
        Ok(())
    }

    fn is_held(&self) -> bool {
        self.held
    }

    async fn end_criu_code(&mut self) -> Result<(), Injected> {
        assert!(!self.frozen, "frozen code does not end: {:?}", self.calls);
        self.call("end_criu_code")?;
        self.criu_code = false;
        Ok(())
    }

    async fn release(&mut self) -> Result<(), Injected> {
        self.call("release")?;
        self.held = false;
        Ok(())
    }

    async fn gpu_detach(&mut self, pids: &[i32]) -> Result<(), Injected> {
        assert!(!self.frozen && !self.held, "the library's threads do not run");
        let called = self.call("gpu_detach");
        // What fails may have taken a part out.
        self.out = !self.was_frozen && !self.ended && !pids.is_empty();
        called
    }

    async fn gpu_attach(&mut self) -> Result<(), Injected> {
        let runs = !self.frozen && !self.held;
        assert!(
            !self.out || runs,
            "the library's threads do not run: {:?}",
            self.calls
        );
        let is_running = |state: &CudaState| *state == CudaState::Running;
        let all_run = self.states.values().all(is_running);
        assert!(!self.out || all_run, "the driver is locked: {:?}", self.calls);
        self.call("gpu_attach")?;
        self.out = false;
        Ok(())
    }

    async fn gpu_lock(&mut self, pids: &[i32]) -> Result<(), Injected> {
        assert!(!self.frozen && !self.held, "lock needs the threads to run");
        if let Err(failed) = self.call("gpu_lock") {
            // The first one was locked before the second failed.
            self.set(&pids[..1], CudaState::Running, CudaState::Locked);
            return Err(failed);
        }
        self.set(pids, CudaState::Running, CudaState::Locked);
        Ok(())
    }

    async fn gpu_checkpoint(&mut self, pids: &[i32]) -> Result<(), Injected> {
        assert!(!self.frozen && self.held);
        if pids.iter().any(|pid| self.states[pid] != CudaState::Locked) {
            return Err(Injected("a process that is not locked"));
        }
        if let Err(failed) = self.call("gpu_checkpoint") {
            self.set(&pids[..1], CudaState::Locked, CudaState::Checkpointed);
            return Err(failed);
        }
        self.set(pids, CudaState::Locked, CudaState::Checkpointed);
        Ok(())
    }

    async fn states(&mut self, pids: &[i32]) -> Result<Vec<(i32, CudaState)>, Injected> {
        assert!(
            !self.frozen,
            "the driver waits for ever for the state of a frozen process"
        );
        self.call("states")?;
        Ok(pids
            .iter()
            .filter_map(|pid| Some((*pid, *self.states.get(pid)?)))
            .collect())
    }
}

impl Dump for World {
    async fn inspect(&mut self, may_start: bool) -> Result<Vec<CudaProcess>, Injected> {
        self.call("inspect")?;
        self.is_starting = may_start && self.starts > 0;
        assert!(
            may_start || self.starts == 0,
            "CRIU cannot dump it: {:?}",
            self.calls
        );
        Ok(self.processes())
    }

    fn is_starting(&self) -> bool {
        self.is_starting
    }

    async fn expect_started(&mut self) -> Result<(), Injected> {
        assert!(!self.frozen, "a frozen process starts nothing: {:?}", self.calls);
        self.call("expect_started")?;
        if std::mem::take(&mut self.is_starting) {
            self.starts -= 1;
        }
        Ok(())
    }

    async fn expect_files(&mut self) -> Result<(), Injected> {
        assert!(self.frozen, "it may write: {:?}", self.calls);
        self.call("expect_files")
    }

    async fn meet(&mut self) -> Result<(), Injected> {
        self.call("meet")?;
        self.met += 1;
        assert!(
            self.met == 1 || self.frozen,
            "it meets others and runs: {:?}",
            self.calls
        );
        Ok(())
    }

    async fn dump(&mut self, processes: &[CudaProcess]) -> Result<(), Injected> {
        assert_eq!(self.met, 2, "dump without the others: {:?}", self.calls);
        assert!(
            self.frozen && !self.held,
            "dump of a running container: {:?}",
            self.calls
        );
        if let Err(failed) = self.call("dump") {
            // CRIU that is killed leaves the freezer off. One that fails does not.
            if self.thaws == Thaws::Failure {
                (self.frozen, self.criu_died, self.let_run) = (false, true, true);
                self.criu_code = true;
            }
            self.locked_network = true;
            return Err(failed);
        }
        if self.thaws == Thaws::Dump {
            // CRIU does not look whether it has frozen the cgroup again.
            (self.frozen, self.let_run) = (false, true);
        }
        assert!(
            self.states.values().all(|s| *s == CudaState::Checkpointed),
            "dump with a GPU in use"
        );
        self.dumping = Some(processes.iter().map(|p| p.pid).collect());
        Ok(())
    }

    async fn expect_frozen(&mut self) -> Result<(), Injected> {
        // Whoever finds threads that run stops them before anything else.
        self.criu_died |= !self.frozen;
        if self.frozen {
            self.call("expect_frozen")
        } else {
            Err(Injected("expect_frozen"))
        }
    }

    async fn describe(&mut self) -> Result<(), Injected> {
        assert!(self.frozen, "it is described while it runs: {:?}", self.calls);
        self.call("describe")?;
        if self.thaws == Thaws::Describe {
            (self.frozen, self.let_run) = (false, true);
        }
        Ok(())
    }

    async fn complete(&mut self) -> Result<(), Injected> {
        assert!(self.frozen, "an image of threads that run: {:?}", self.calls);
        self.call("complete")?;
        self.dumped = self.dumping.take();
        Ok(())
    }

    async fn sync(&mut self) -> Result<EndProof, Injected> {
        assert!(self.dumped.is_some(), "there is no image: {:?}", self.calls);
        if let Err(failed) = self.call("sync") {
            self.dumped = None;
            return Err(failed);
        }
        Ok(EndProof::of_test())
    }

    async fn release_from_criu(&mut self) {
        // What cannot be released is logged: the workload continues with connections that hang.
        let _ = self.call("release_from_criu");
        self.locked_network = false;
    }
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(future)
}
