//! Every effect of a checkpoint fails in turn; afterwards the workload must be as before.

use std::collections::BTreeMap;

use super::*;

#[derive(Debug, thiserror::Error, PartialEq)]
#[error("{0} was told to fail")]
struct Told(&'static str);

/// A container of CUDA processes that complains when application code runs without its GPU state.
#[derive(Default)]
struct World {
    frozen: bool,
    held: bool,
    states: BTreeMap<i32, CudaState>,
    /// Processes that appear at the n-th freeze.
    appear: BTreeMap<usize, i32>,
    calls: Vec<&'static str>,
    /// Fail the n-th call of all; every later call of the same name too when `for_good`.
    fail: Option<(usize, bool)>,
    failing: Option<&'static str>,
    dumped: Option<Vec<i32>>,
    /// The container is killed by the call that fails, and no call works any more.
    killed: bool,
    ended: bool,
    /// The call that fails panics.
    panics: bool,
    /// What the journal says.
    taking: bool,
}

impl World {
    fn new(pids: impl IntoIterator<Item = i32>, frozen: bool) -> Self {
        Self {
            frozen,
            states: pids.into_iter().map(|pid| (pid, CudaState::Running)).collect(),
            ..Self::default()
        }
    }

    /// Every effect passes here. A call that fails has done half of its work when `half` says how.
    fn call(&mut self, name: &'static str) -> Result<(), Told> {
        if self.ended {
            return Err(Told(name));
        }
        let nth = self.calls.len();
        self.calls.push(name);
        if let Some((at, for_good)) = self.fail
            && (nth == at || for_good && self.failing == Some(name))
        {
            self.failing = Some(name);
            assert!(!std::mem::take(&mut self.panics), "{name} panics");
            self.ended = self.killed;
            return Err(Told(name));
        }
        Ok(())
    }

    fn check(&self) {
        let runs = !self.frozen && !self.held;
        let taken = self.states.values().any(|s| *s == CudaState::Checkpointed);
        assert!(
            !(runs && taken),
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
        assert_eq!(self.frozen, was_frozen, "freezer: {:?}", self.calls);
        assert!(!self.held, "still held: {:?}", self.calls);
    }
}

impl Effects for World {
    type Error = Told;

    fn is_ended(&self) -> bool {
        self.ended
    }

    async fn enter(&mut self, phase: Phase) -> Result<(), Told> {
        self.call("enter")?;
        self.taking |= phase == Phase::Take;
        Ok(())
    }

    async fn leave(&mut self, _: Phase, _: bool) {}

    async fn freeze(&mut self) -> Result<(), Told> {
        self.call("freeze")?;
        self.frozen = true;
        let freezes = self.calls.iter().filter(|c| **c == "freeze").count();
        if let Some(pid) = self.appear.remove(&freezes) {
            self.states.insert(pid, CudaState::Running);
        }
        Ok(())
    }

    async fn thaw(&mut self) -> Result<(), Told> {
        self.call("thaw")?;
        self.frozen = false;
        self.check();
        Ok(())
    }

    async fn inspect(&mut self) -> Result<Vec<CudaProcess>, Told> {
        self.call("inspect")?;
        Ok(self
            .states
            .keys()
            .map(|&pid| CudaProcess {
                pid,
                restore_tid: pid + 1,
            })
            .collect())
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

    async fn release(&mut self) -> Result<(), Told> {
        self.call("release")?;
        self.held = false;
        self.check();
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
        assert!(!self.frozen && self.held);
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
            self.frozen = false;
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

#[test]
fn any_single_failure_leaves_the_workload_as_before() {
    for was_frozen in [false, true] {
        let mut world = World::new([10, 20], was_frozen);
        block_on(leave_running(&mut world)).unwrap();
        let calls = world.calls.len();
        let mut failed = BTreeSet::new();
        for nth in 0..calls {
            let mut world = World::new([10, 20], was_frozen);
            world.fail = Some((nth, false));
            let result = block_on(leave_running(&mut world));
            let name = world.failing.expect("told to fail");
            failed.insert(name);
            // Giving back is tried again, and done whether it can be noted or not: one failure there is none of the
            // checkpoint.
            if world.dumped.is_some() {
                assert!(result.is_ok(), "{name} at {nth}");
            } else {
                let failure = result.expect_err("must fail");
                assert_eq!(failure.source, Told(name), "the cause is the first failure");
                assert!(failure.lost.is_none(), "{name} at {nth}: {:?}", world.calls);
            }
            world.as_before(was_frozen);
        }
        assert_eq!(failed.len(), 13, "not every effect was made to fail: {failed:?}");
    }
}

#[test]
fn a_driver_that_never_gives_back_is_told_as_lost_and_nothing_runs() {
    let mut world = World::new([10], false);
    block_on(leave_running(&mut world)).unwrap();
    let nth = world.calls.iter().position(|c| *c == "give_back").unwrap();
    let mut world = World::new([10], false);
    world.fail = Some((nth, true));
    let failure = block_on(leave_running(&mut world)).unwrap_err();
    assert_eq!(failure.phase, Phase::GiveBack);
    assert_eq!(failure.lost, Some(Told("give_back")));
    assert!(world.frozen, "code ran without its GPU state");
    assert!(world.dumped.is_some(), "the image is valid all the same");
}

#[test]
fn undo_may_be_repeated() {
    let mut world = World::new([10, 20], false);
    block_on(async {
        let taken = Begun::new(&mut world, false)
            .lock()
            .await
            .unwrap()
            .take()
            .await
            .unwrap();
        drop(taken);
        let processes = world.inspect().await.unwrap();
        undo(&mut world, &processes, false, true).await.unwrap();
        world.as_before(false);
        undo(&mut world, &processes, false, true).await.unwrap();
    });
    world.as_before(false);
}

#[test]
fn what_somebody_else_has_locked_is_refused_and_stays_locked() {
    for was_frozen in [false, true] {
        let mut world = World::new([10, 20], was_frozen);
        world.states.insert(20, CudaState::Locked);
        let failure = block_on(leave_running(&mut world)).unwrap_err();
        assert_eq!((failure.phase, failure.lost), (Phase::Inspect, None));
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
        let mut world = World::new([10, 20], was_frozen);
        block_on(leave_running(&mut world)).unwrap();
        let calls = world.calls.clone();
        for (nth, name) in calls.iter().enumerate() {
            let mut world = World::new([10, 20], was_frozen);
            world.fail = Some((nth, true));
            // The world itself complains when code runs too early.
            let Err(failure) = block_on(leave_running(&mut world)) else {
                let noting = *name == "enter" && world.dumped.is_some();
                assert!(
                    noting,
                    "{name} at {nth} failed for good, and the checkpoint did not"
                );
                world.as_before(was_frozen);
                continue;
            };
            if failure.lost.is_none() {
                world.as_before(was_frozen);
            }
            let taken = world
                .states
                .values()
                .any(|state| *state == CudaState::Checkpointed);
            assert!(
                failure.lost.is_some() || !taken,
                "{name} at {nth}: nobody was told of the loss"
            );
        }
    }
}

#[test]
fn a_debugger_on_a_thread_costs_nothing() {
    let mut world = World::new([10], false);
    block_on(leave_running(&mut world)).unwrap();
    let nth = world.calls.iter().position(|call| *call == "hold").unwrap();
    let mut world = World::new([10], false);
    world.fail = Some((nth, true));
    let failure = block_on(leave_running(&mut world)).unwrap_err();
    assert_eq!((failure.phase, failure.lost), (Phase::Take, None));
    world.as_before(false);
}

#[test]
fn processes_that_never_stop_coming_end_the_checkpoint_and_nothing_else() {
    for was_frozen in [false, true] {
        let mut world = World::new([10], was_frozen);
        world.appear = (1..=ROUNDS + 1).zip((40..).step_by(10)).collect();
        let failure = block_on(leave_running(&mut world)).unwrap_err();
        assert_eq!((failure.phase, failure.lost), (Phase::Take, None));
        assert_eq!(world.dumped, None);
        world.as_before(was_frozen);
    }
}

#[test]
fn nothing_is_undone_for_a_container_that_is_killed() {
    for was_frozen in [false, true] {
        let mut world = World::new([10, 20], was_frozen);
        block_on(leave_running(&mut world)).unwrap();
        for nth in 0..world.calls.len() {
            let mut world = World::new([10, 20], was_frozen);
            (world.fail, world.killed) = (Some((nth, false)), true);
            let Err(failure) = block_on(leave_running(&mut world)) else {
                panic!("{:?} at {nth} was not told", world.failing);
            };
            assert_eq!(failure.lost, None, "{:?}", world.calls);
        }
    }
}

#[test]
fn a_transaction_that_panics_is_taken_back_by_what_was_noted() {
    for was_frozen in [false, true] {
        let mut world = World::new([10, 20], was_frozen);
        block_on(leave_running(&mut world)).unwrap();
        for nth in 0..world.calls.len() {
            let mut world = World::new([10, 20], was_frozen);
            (world.fail, world.panics) = (Some((nth, false)), true);
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                block_on(leave_running(&mut world)).map_err(drop)
            }));
            assert!(panicked.is_err(), "no panic at {nth}");
            world.fail = None;
            let processes = block_on(world.inspect()).unwrap();
            let taking = world.taking;
            block_on(take_back(&mut world, &processes, was_frozen, taking)).unwrap();
            world.as_before(was_frozen);
        }
    }
}
