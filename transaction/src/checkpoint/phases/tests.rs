//! Every effect of a checkpoint fails in turn; afterwards the workload must be as before.

mod end;
mod parked;
mod rollback;

use std::collections::BTreeSet;

use super::*;
use crate::effects::world::{Fault, Injected, Thaws, World, block_on};

impl World {
    /// A container of two processes, after a checkpoint with these faults that leaves it running.
    fn after(was_frozen: bool, faults: &[Fault]) -> (Self, Result<(), Failure<Injected>>) {
        let mut world = Self::new([10, 20], was_frozen);
        world.faults = faults.to_vec();
        let result = block_on(leave_running(&mut world));
        (world, result)
    }

    /// Repeats the rollback without faults: the container runs as before.
    fn resumes(&mut self) {
        (self.faults, self.failing) = (Vec::new(), BTreeSet::new());
        self.unstoppable = 0;
        self.let_run = self.freezing;
        let locked = self.processes();
        let back = Rollback {
            locked: &locked,
            was_frozen: false,
            gpu_checkpointing: self.gpu_checkpointing,
        };
        block_on(rollback(self, back)).expect("no call fails");
        self.as_before(false);
    }
}

async fn leave_running(world: &mut World) -> Result<(), Failure<Injected>> {
    let was_frozen = world.frozen;
    Begun::new(world, was_frozen)
        .gpu_lock()
        .await?
        .gpu_checkpoint()
        .await?
        .dump()
        .await?
        .leave_running()
        .await
}

#[test]
fn leave_running_dumps_all_processes_and_restores_their_gpu_state() {
    for was_frozen in [false, true] {
        let mut world = World::new([10, 20, 30], was_frozen);
        block_on(leave_running(&mut world)).unwrap();
        assert_eq!(world.dumped.as_deref(), Some(&[10, 20, 30][..]));
        world.as_before(was_frozen);
    }
}

#[test]
fn a_process_that_appears_after_the_lock_is_checkpointed_too() {
    let mut world = World::new([10], false);
    world.appear.insert(1, 40);
    block_on(leave_running(&mut world)).unwrap();
    assert_eq!(world.dumped.as_deref(), Some(&[10, 40][..]));
    world.as_before(false);
}

#[test]
fn a_process_in_cu_init_is_waited_for_while_the_container_runs() {
    for was_frozen in [false, true] {
        // Found by the first inspection, by that at the freeze, and by every one but the last.
        for starts in 1..=ROUNDS {
            let mut world = World::new([10], was_frozen);
            world.starts = starts;
            block_on(leave_running(&mut world)).unwrap();
            assert_eq!(world.starts, 0);
            world.as_before(was_frozen);
        }
    }
    // The others of a pod meet a container that has waited.
    let mut world = World::new([10], false);
    world.starts = 1;
    block_on(leave_running(&mut world)).unwrap();
    let at = |name| world.calls.iter().position(|call| *call == name);
    assert!(at("expect_started") < at("meet"), "{:?}", world.calls);
}

/// How many calls a checkpoint of this container makes with these faults.
fn calls(was_frozen: bool, faults: &[Fault]) -> usize {
    World::after(was_frozen, faults).0.calls.len()
}

/// Asserts that the end is one of those that are promised.
fn is_as_promised(world: &mut World, result: Result<(), Failure<Injected>>, was_frozen: bool) {
    match result {
        Ok(()) => {
            assert!(world.dumped.is_some(), "done without an image: {:?}", world.calls);
            world.as_before(was_frozen);
        }
        Err(Failure { suspended: None, .. }) => {
            assert!(
                world.dumped.is_none(),
                "rolled back with an image: {:?}",
                world.calls
            );
            world.as_before(was_frozen);
        }
        Err(Failure {
            suspended: Some(_), ..
        }) => {
            world.expect_suspended();
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
            // gpu-restore is tried a second time, and runs even if the journal cannot be written: one failure
            // there does not fail the checkpoint.
            if name == "leave" {
                assert!(result.is_ok(), "a line of the journal has cost a checkpoint");
            } else if world.dumped.is_none() {
                let failure = result.as_ref().expect_err("must fail");
                assert_eq!(failure.source, Injected(name), "the cause is the first failure");
                assert_eq!(failure.suspended, None, "{name} at {nth}: {:?}", world.calls);
            } else {
                assert!(result.is_ok(), "{name} at {nth}");
            }
            is_as_promised(&mut world, result, was_frozen);
        }
        assert_eq!(failed.len(), 24, "not every effect was made to fail: {failed:?}");
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
        assert!(suspended > 0, "no pair of failures made the rollback fail");
    }
}

#[test]
fn a_gpu_restore_that_fails_suspends_the_container_until_it_succeeds() {
    let (world, _) = World::after(false, &[]);
    let nth = world.calls.iter().position(|c| *c == "gpu_restore").unwrap();
    let (mut world, result) = World::after(false, &[Fault { nth, for_good: true }]);
    let failure = result.unwrap_err();
    assert_eq!(failure.phase, Phase::GpuRestore);
    assert_eq!(failure.suspended, Some(Injected("gpu_restore")));
    assert!(world.frozen, "code ran without its GPU state");
    assert!(world.dumped.is_some(), "the image is valid all the same");
    // One of them has got its state before the other failed.
    let states: Vec<CudaState> = world.states.values().copied().collect();
    assert_eq!(states, [CudaState::Locked, CudaState::Checkpointed]);
    // Resume may be repeated.
    let locked = world.processes();
    let back = Rollback {
        locked: &locked,
        was_frozen: false,
        gpu_checkpointing: true,
    };
    for _ in 0..3 {
        assert_eq!(block_on(rollback(&mut world, back)), Err(Injected("gpu_restore")));
        world.expect_suspended();
    }
    world.resumes();
}

/// CRIU succeeds and leaves the tasks thawed, or somebody else thaws them before the image is complete.
#[test]
fn an_image_of_a_container_that_does_not_stand_still_is_none() {
    for thaws in [Thaws::Dump, Thaws::Describe] {
        for was_frozen in [false, true] {
            let begun = || {
                let mut world = World::new([10, 20], was_frozen);
                world.thaws = thaws;
                world
            };
            let mut world = begun();
            let failure = block_on(leave_running(&mut world)).unwrap_err();
            assert_eq!(failure.source, Injected("expect_frozen"), "{thaws:?}");
            assert_eq!((failure.phase, failure.suspended), (Phase::CriuDump, None));
            assert_eq!(world.dumped, None);
            world.as_before(was_frozen);
            for nth in 0..world.calls.len() {
                for for_good in [false, true] {
                    let mut world = begun();
                    world.faults = vec![Fault { nth, for_good }];
                    let result = block_on(leave_running(&mut world));
                    assert!(result.is_err(), "{thaws:?}: {:?}", world.calls);
                    is_as_promised(&mut world, result, was_frozen);
                }
            }
        }
    }
}

#[test]
fn a_dump_that_fails_and_freezes_the_tasks_again_is_rolled_back() {
    for was_frozen in [false, true] {
        let (clean, _) = World::after(was_frozen, &[]);
        let nth = clean.calls.iter().position(|call| *call == "dump").unwrap();
        let mut world = World::new([10, 20], was_frozen);
        (world.faults, world.thaws) = (vec![Fault { nth, for_good: false }], Thaws::Nobody);
        let failure = block_on(leave_running(&mut world)).unwrap_err();
        assert_eq!((failure.phase, failure.suspended), (Phase::CriuDump, None));
        world.as_before(was_frozen);
    }
}

#[test]
fn threads_that_cannot_be_stopped_cost_no_gpu_state() {
    for was_frozen in [false, true] {
        let (clean, _) = World::after(was_frozen, &[]);
        for name in ["keep_frozen", "hold"] {
            let held = clean.calls.iter().position(|call| *call == "hold").unwrap();
            // The first such call after gpu_checkpoint fails for good.
            let checkpoint = clean
                .calls
                .iter()
                .position(|call| *call == "gpu_checkpoint")
                .unwrap();
            let after = clean
                .calls
                .iter()
                .skip(checkpoint)
                .position(|call| *call == name)
                .unwrap();
            assert!(checkpoint + after > held);
            let fault = Fault {
                nth: checkpoint + after,
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
fn a_process_that_another_tool_has_locked_is_refused_and_stays_locked() {
    for was_frozen in [false, true] {
        let mut world = World::new([10, 20], was_frozen);
        world.states.insert(20, CudaState::Locked);
        let failure = block_on(leave_running(&mut world)).unwrap_err();
        assert_eq!((failure.phase, failure.suspended), (Phase::Inspect, None));
        assert_eq!(
            world.states[&20],
            CudaState::Locked,
            "another tool's lock was released"
        );
        assert_eq!(world.states[&10], CudaState::Running);
        assert_eq!(world.frozen, was_frozen);
    }
}

#[test]
fn an_effect_that_fails_for_good_never_lets_code_run_without_its_gpu_state() {
    for was_frozen in [false, true] {
        for nth in 0..calls(was_frozen, &[]) {
            // The world panics if code runs too early.
            let (mut world, result) = World::after(was_frozen, &[Fault { nth, for_good: true }]);
            is_as_promised(&mut world, result, was_frozen);
        }
    }
}

#[test]
fn a_debugger_on_a_thread_fails_the_checkpoint_only() {
    let (world, _) = World::after(false, &[]);
    let nth = world.calls.iter().position(|call| *call == "hold").unwrap();
    let (world, result) = World::after(false, &[Fault { nth, for_good: true }]);
    let failure = result.unwrap_err();
    assert_eq!((failure.phase, failure.suspended), (Phase::GpuCheckpoint, None));
    world.as_before(false);
}

#[test]
fn a_workload_that_keeps_starting_processes_fails_the_checkpoint_only() {
    for was_frozen in [false, true] {
        let mut world = World::new([10], was_frozen);
        world.appear = (1..=ROUNDS + 1).zip((40..).step_by(10)).collect();
        let failure = block_on(leave_running(&mut world)).unwrap_err();
        assert_eq!((failure.phase, failure.suspended), (Phase::GpuCheckpoint, None));
        assert_eq!(world.dumped, None);
        world.as_before(was_frozen);
    }
}
