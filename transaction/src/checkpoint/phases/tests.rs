//! Every effect of a checkpoint fails in turn; afterwards the workload must be as before.

mod rollback;

use std::collections::BTreeMap;

use super::*;

#[derive(Debug, thiserror::Error, PartialEq)]
#[error("{0} was told to fail")]
struct Told(&'static str);

/// A call that fails: the n-th of all; every later call of the same name too when `for_good`.
#[derive(Clone, Copy, Debug)]
struct Fault {
    nth: usize,
    for_good: bool,
}

/// A container of CUDA processes that complains when application code runs without its GPU state.
#[derive(Default)]
struct World {
    frozen: bool,
    /// The freezer was turned on, and a thread has not stopped.
    freezing: bool,
    held: bool,
    states: BTreeMap<i32, CudaState>,
    /// Processes that appear at the n-th freeze.
    appear: BTreeMap<usize, i32>,
    calls: Vec<&'static str>,
    faults: Vec<Fault>,
    failing: BTreeSet<&'static str>,
    /// How often threads could not be stopped or held that must not run.
    unstoppable: usize,
    /// CRIU was killed and has left the tasks thawed: they are to be stopped by the next call.
    criu_died: bool,
    /// Nothing could stop them yet.
    let_run: bool,
    dumped: Option<Vec<i32>>,
    /// The container is killed in the n-th call of all, and no call works any more.
    killed: Option<usize>,
    ended: bool,
    /// The call that fails panics.
    panics: bool,
    /// What the journal says.
    taking: bool,
    phases: Vec<Phase>,
}

impl World {
    fn new(pids: impl IntoIterator<Item = i32>, frozen: bool) -> Self {
        Self {
            frozen,
            states: pids.into_iter().map(|pid| (pid, CudaState::Running)).collect(),
            ..Self::default()
        }
    }

    /// Of two processes, with these faults, after a checkpoint that leaves it running.
    fn after(was_frozen: bool, faults: &[Fault]) -> (Self, Result<(), Failure<Told>>) {
        let mut world = Self::new([10, 20], was_frozen);
        world.faults = faults.to_vec();
        let result = block_on(leave_running(&mut world));
        (world, result)
    }

    /// Every effect passes here.
    fn call(&mut self, name: &'static str) -> Result<(), Told> {
        if self.ended {
            return Err(Told(name));
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
            return Err(Told(name));
        }
        Ok(())
    }

    /// No thread runs without its GPU state, unless CRIU has just died, or what stops threads has failed twice.
    fn check(&self) {
        let runs = !self.frozen && !self.held;
        let taken = self.states.values().any(|s| *s == CudaState::Checkpointed);
        assert!(
            !(runs && taken) || self.let_run || self.unstoppable > 1,
            "application code ran without its GPU state: {:?}",
            self.calls
        );
    }

    fn set(&mut self, pids: &[i32], from: CudaState, to: CudaState) {
        for pid in pids {
            let state = self.states.get_mut(pid).expect("known pid");
            assert_eq!(*state, from, "pid {pid} -> {to:?}: {:?}", self.calls);
            *state = to;
        }
    }

    fn as_before(&self, was_frozen: bool) {
        assert!(
            self.states.values().all(|s| *s == CudaState::Running),
            "{:?}: {:?}",
            self.states,
            self.calls
        );
        let freezer = self.frozen || self.freezing;
        assert_eq!(freezer, was_frozen, "freezer: {:?}", self.calls);
        assert!(!self.held, "still held: {:?}", self.calls);
    }

    /// No thread runs but those that nothing could stop, and nobody has to look after it.
    fn suspended(&self) {
        assert!(self.frozen || self.freezing, "it runs: {:?}", self.calls);
        assert!(
            self.frozen || self.unstoppable > 0,
            "not even stopped: {:?}",
            self.calls
        );
        // Unless that fails, what is frozen is let go in the end: nobody goes on tracing it.
        let last = self.calls.len() - 1;
        let failed =
            self.failing.contains(self.calls[last]) || self.faults.iter().any(|fault| fault.nth == last);
        assert!(!self.held || failed, "held for ever: {:?}", self.calls);
    }

    /// The way back, once more, when nothing is in the way any more: the container runs as it did.
    fn resumes(&mut self) {
        (self.faults, self.failing) = (Vec::new(), BTreeSet::new());
        self.unstoppable = 0;
        self.let_run = self.freezing;
        let locked = self.processes();
        let back = Back {
            locked: &locked,
            was_frozen: false,
            taking: self.taking,
        };
        block_on(take_back(self, back)).expect("nothing is in the way");
        self.as_before(false);
    }

    fn processes(&self) -> Vec<CudaProcess> {
        let process = |&pid: &i32| CudaProcess {
            pid,
            restore_tid: pid + 1,
        };
        self.states.keys().map(process).collect()
    }
}

impl Effects for World {
    type Error = Told;

    fn is_ended(&self) -> bool {
        self.ended
    }

    async fn enter(&mut self, phase: Phase) -> Result<(), Told> {
        self.call("enter")?;
        self.taking |= phase == Phase::GpuCheckpoint;
        self.phases.push(phase);
        Ok(())
    }

    async fn leave(&mut self, _: Phase, _: bool) {}

    async fn freeze(&mut self) -> Result<(), Told> {
        if let Err(told) = self.call("freeze") {
            self.frozen = false;
            return Err(told);
        }
        self.frozen = true;
        let freezes = self.calls.iter().filter(|c| **c == "freeze").count();
        if let Some(pid) = self.appear.remove(&freezes) {
            self.states.insert(pid, CudaState::Running);
        }
        Ok(())
    }

    async fn keep_frozen(&mut self) -> Result<(), Told> {
        if let Err(told) = self.call("keep_frozen") {
            self.freezing = !self.frozen;
            return Err(told);
        }
        (self.frozen, self.freezing, self.let_run) = (true, false, false);
        Ok(())
    }

    async fn thaw(&mut self) -> Result<(), Told> {
        self.call("thaw")?;
        (self.frozen, self.freezing) = (false, false);
        Ok(())
    }

    async fn inspect(&mut self) -> Result<Vec<CudaProcess>, Told> {
        self.call("inspect")?;
        Ok(self.processes())
    }

    async fn expect_running(&mut self, pids: &[i32]) -> Result<(), Told> {
        assert!(
            !self.frozen,
            "the driver waits for ever for the state of a frozen process"
        );
        self.call("expect_running")?;
        if pids.iter().any(|pid| self.states[pid] != CudaState::Running) {
            return Err(Told("a locked process"));
        }
        Ok(())
    }

    async fn hold(&mut self, except: BTreeSet<i32>) -> Result<(), Told> {
        self.call("hold")?;
        assert!(self.frozen, "held while running: {:?}", self.calls);
        // A process that is neither locked nor taken is nothing the driver works on while threads are held.
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

    async fn release(&mut self) -> Result<(), Told> {
        self.call("release")?;
        self.held = false;
        Ok(())
    }

    async fn lock(&mut self, pids: &[i32]) -> Result<(), Told> {
        assert!(!self.frozen && !self.held, "lock needs the threads to run");
        if let Err(told) = self.call("lock") {
            // The first one was locked before the second failed.
            self.set(&pids[..1], CudaState::Running, CudaState::Locked);
            return Err(told);
        }
        self.set(pids, CudaState::Running, CudaState::Locked);
        Ok(())
    }

    async fn take(&mut self, pids: &[i32]) -> Result<(), Told> {
        assert!(!self.frozen && self.held);
        if pids.iter().any(|pid| self.states[pid] != CudaState::Locked) {
            return Err(Told("a process that is not locked"));
        }
        if let Err(told) = self.call("take") {
            self.set(&pids[..1], CudaState::Locked, CudaState::Checkpointed);
            return Err(told);
        }
        self.set(pids, CudaState::Locked, CudaState::Checkpointed);
        Ok(())
    }

    async fn give_back(&mut self, pids: &[i32]) -> Result<(), Told> {
        assert!(!self.frozen && (self.held || self.unstoppable > 1));
        self.call("give_back")?;
        self.set(pids, CudaState::Checkpointed, CudaState::Locked);
        Ok(())
    }

    async fn unlock(&mut self, pids: &[i32]) -> Result<(), Told> {
        self.call("unlock")?;
        self.set(pids, CudaState::Locked, CudaState::Running);
        Ok(())
    }

    async fn states(&mut self, pids: &[i32]) -> Result<Vec<(i32, CudaState)>, Told> {
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

    async fn dump(&mut self, processes: &[CudaProcess]) -> Result<(), Told> {
        assert!(
            self.frozen && !self.held,
            "dump of a running container: {:?}",
            self.calls
        );
        if let Err(told) = self.call("dump") {
            // CRIU that is killed leaves the freezer off.
            (self.frozen, self.criu_died, self.let_run) = (false, true, true);
            return Err(told);
        }
        assert!(
            self.states.values().all(|s| *s == CudaState::Checkpointed),
            "dump with a GPU in use"
        );
        self.dumped = Some(processes.iter().map(|p| p.pid).collect());
        Ok(())
    }
}

async fn leave_running(world: &mut World) -> Result<(), Failure<Told>> {
    let was_frozen = world.frozen;
    Begun::new(world, was_frozen)
        .lock()
        .await?
        .take()
        .await?
        .dump()
        .await?
        .run_on()
        .await
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(future)
}

#[test]
fn leave_running_dumps_all_processes_and_gives_everything_back() {
    for was_frozen in [false, true] {
        let mut world = World::new([10, 20, 30], was_frozen);
        block_on(leave_running(&mut world)).unwrap();
        assert_eq!(world.dumped.as_deref(), Some(&[10, 20, 30][..]));
        world.as_before(was_frozen);
    }
}

#[test]
fn exit_leaves_the_state_in_the_processes_that_are_gone() {
    let mut world = World::new([10], true);
    block_on(async {
        Begun::new(&mut world, true)
            .lock()
            .await
            .unwrap()
            .take()
            .await
            .unwrap()
            .dump()
            .await
            .unwrap();
    });
    assert!(world.frozen && world.states.values().all(|s| *s == CudaState::Checkpointed));
}

#[test]
fn a_process_that_appears_after_the_lock_is_taken_too() {
    let mut world = World::new([10], false);
    world.appear.insert(1, 40);
    block_on(leave_running(&mut world)).unwrap();
    assert_eq!(world.dumped.as_deref(), Some(&[10, 40][..]));
    world.as_before(false);
}

/// How many calls a checkpoint of this container makes with these faults.
fn calls(was_frozen: bool, faults: &[Fault]) -> usize {
    World::after(was_frozen, faults).0.calls.len()
}

/// That the end is one of those that are promised.
fn is_as_promised(world: &mut World, result: Result<(), Failure<Told>>, was_frozen: bool) {
    match result {
        Ok(()) => {
            assert!(world.dumped.is_some(), "done without an image: {:?}", world.calls);
            world.as_before(was_frozen);
        }
        Err(Failure { suspended: None, .. }) => {
            assert!(world.dumped.is_none(), "undone with an image: {:?}", world.calls);
            world.as_before(was_frozen);
        }
        Err(Failure {
            suspended: Some(_), ..
        }) => {
            world.suspended();
            world.resumes();
        }
    }
}

#[test]
fn any_single_failure_leaves_the_workload_as_before() {
    for was_frozen in [false, true] {
        let mut failed = BTreeSet::new();
        for nth in 0..calls(was_frozen, &[]) {
            let (mut world, result) = World::after(was_frozen, &[Fault { nth, for_good: false }]);
            let name = world.calls[nth];
            failed.insert(name);
            // Giving back is tried again, and done whether it can be noted or not: one failure there is none of the
            // checkpoint.
            if world.dumped.is_none() {
                let failure = result.as_ref().expect_err("must fail");
                assert_eq!(failure.source, Told(name), "the cause is the first failure");
                assert_eq!(failure.suspended, None, "{name} at {nth}: {:?}", world.calls);
            } else {
                assert!(result.is_ok(), "{name} at {nth}");
            }
            is_as_promised(&mut world, result, was_frozen);
        }
        assert_eq!(failed.len(), 14, "not every effect was made to fail: {failed:?}");
    }
}

#[test]
fn any_two_failures_end_as_promised() {
    for was_frozen in [false, true] {
        let mut suspended = 0;
        for first in 0..calls(was_frozen, &[]) {
            for (one, other) in [(false, false), (false, true), (true, false), (true, true)] {
                let fault = Fault {
                    nth: first,
                    for_good: one,
                };
                for second in first + 1..calls(was_frozen, &[fault]) {
                    let faults = [
                        fault,
                        Fault {
                            nth: second,
                            for_good: other,
                        },
                    ];
                    let (mut world, result) = World::after(was_frozen, &faults);
                    suspended +=
                        usize::from(result.as_ref().is_err_and(|failure| failure.suspended.is_some()));
                    is_as_promised(&mut world, result, was_frozen);
                }
            }
        }
        assert!(suspended > 0, "no pair of failures has hindered the way back");
    }
}

#[test]
fn a_driver_that_never_gives_back_suspends_the_container_until_it_does() {
    let (world, _) = World::after(false, &[]);
    let nth = world.calls.iter().position(|c| *c == "give_back").unwrap();
    let (mut world, result) = World::after(false, &[Fault { nth, for_good: true }]);
    let failure = result.unwrap_err();
    assert_eq!(failure.phase, Phase::GpuRestore);
    assert_eq!(failure.suspended, Some(Told("give_back")));
    assert!(world.frozen, "code ran without its GPU state");
    assert!(world.dumped.is_some(), "the image is valid all the same");
    assert!(
        world
            .states
            .values()
            .all(|state| *state == CudaState::Checkpointed),
        "{:?}",
        world.states
    );
    // As often as somebody asks.
    let locked = world.processes();
    let back = Back {
        locked: &locked,
        was_frozen: false,
        taking: true,
    };
    for _ in 0..3 {
        assert_eq!(block_on(take_back(&mut world, back)), Err(Told("give_back")));
        world.suspended();
    }
    world.resumes();
}

#[test]
fn threads_that_cannot_be_stopped_cost_no_gpu_state() {
    for was_frozen in [false, true] {
        let (clean, _) = World::after(was_frozen, &[]);
        for name in ["keep_frozen", "hold"] {
            let held = clean.calls.iter().position(|call| *call == "hold").unwrap();
            // From the first one after the GPU state was taken.
            let taken = clean.calls.iter().position(|call| *call == "take").unwrap();
            let after = clean
                .calls
                .iter()
                .skip(taken)
                .position(|call| *call == name)
                .unwrap();
            assert!(taken + after > held);
            let fault = Fault {
                nth: taken + after,
                for_good: true,
            };
            let (mut world, result) = World::after(was_frozen, &[fault]);
            if let Err(failure) = &result {
                assert_eq!(failure.suspended, None, "{name}: {:?}", world.calls);
            }
            is_as_promised(&mut world, result, was_frozen);
        }
    }
}

#[test]
fn what_somebody_else_has_locked_is_refused_and_stays_locked() {
    for was_frozen in [false, true] {
        let mut world = World::new([10, 20], was_frozen);
        world.states.insert(20, CudaState::Locked);
        let failure = block_on(leave_running(&mut world)).unwrap_err();
        assert_eq!((failure.phase, failure.suspended), (Phase::Inspect, None));
        assert_eq!(
            world.states[&20],
            CudaState::Locked,
            "another tool's lock was taken away"
        );
        assert_eq!(world.states[&10], CudaState::Running);
        assert_eq!(world.frozen, was_frozen);
    }
}

#[test]
fn an_effect_that_fails_for_good_never_lets_code_run_without_its_gpu_state() {
    for was_frozen in [false, true] {
        for nth in 0..calls(was_frozen, &[]) {
            // The world itself complains when code runs too early.
            let (mut world, result) = World::after(was_frozen, &[Fault { nth, for_good: true }]);
            is_as_promised(&mut world, result, was_frozen);
        }
    }
}

#[test]
fn a_debugger_on_a_thread_costs_nothing() {
    let (world, _) = World::after(false, &[]);
    let nth = world.calls.iter().position(|call| *call == "hold").unwrap();
    let (world, result) = World::after(false, &[Fault { nth, for_good: true }]);
    let failure = result.unwrap_err();
    assert_eq!((failure.phase, failure.suspended), (Phase::GpuCheckpoint, None));
    world.as_before(false);
}

#[test]
fn processes_that_never_stop_coming_end_the_checkpoint_and_nothing_else() {
    for was_frozen in [false, true] {
        let mut world = World::new([10], was_frozen);
        world.appear = (1..=ROUNDS + 1).zip((40..).step_by(10)).collect();
        let failure = block_on(leave_running(&mut world)).unwrap_err();
        assert_eq!((failure.phase, failure.suspended), (Phase::GpuCheckpoint, None));
        assert_eq!(world.dumped, None);
        world.as_before(was_frozen);
    }
}
