//! When a checkpoint is rolled back, and when it is not.

use super::*;

#[test]
fn a_rollback_may_be_repeated() {
    let mut world = World::new([10, 20], false);
    block_on(async {
        let checkpointed = Begun::new(&mut world, false)
            .gpu_lock()
            .await
            .unwrap()
            .gpu_checkpoint()
            .await
            .unwrap();
        drop(checkpointed);
        let locked = world.processes();
        let back = Rollback {
            locked: &locked,
            was_frozen: false,
            gpu_checkpointing: true,
        };
        for _ in 0..2 {
            assert!(attempt(&mut world, back, Threads::Held).await.is_ok());
            world.as_before(false);
        }
    });
}

#[test]
fn a_container_that_is_killed_is_not_rolled_back() {
    for was_frozen in [false, true] {
        for nth in 0..calls(was_frozen, &[]) {
            let mut world = World::new([10, 20], was_frozen);
            (world.faults, world.killed) = (vec![Fault { nth, for_good: false }], Some(nth));
            let Err(failure) = block_on(leave_running(&mut world)) else {
                panic!("the failure of {:?} was not reported", world.calls.last());
            };
            assert_eq!(failure.suspended, None, "{:?}", world.calls);
        }
    }
}

#[test]
fn a_container_killed_in_the_last_rollback_attempt_is_not_suspended() {
    let (clean, _) = World::after(false, &[]);
    let nth = clean
        .calls
        .iter()
        .position(|call| *call == "gpu_restore")
        .unwrap();
    let fault = Fault { nth, for_good: true };
    let (stuck, _) = World::after(false, &[fault]);
    for name in ["thaw", "states", "gpu_restore"] {
        let killed = stuck.calls.iter().rposition(|call| *call == name).unwrap();
        assert!(killed > nth);
        let mut world = World::new([10, 20], false);
        let in_time = Fault {
            nth: killed,
            for_good: false,
        };
        (world.faults, world.killed) = (vec![fault, in_time], Some(killed));
        let failure = block_on(leave_running(&mut world)).unwrap_err();
        assert_eq!(failure.suspended, None, "{:?}", world.calls);
    }
}

#[test]
fn every_phase_and_the_rollback_are_written_to_the_journal() {
    let whole = [
        Phase::Inspect,
        Phase::GpuLock,
        Phase::GpuCheckpoint,
        Phase::CriuDump,
    ];
    let (clean, _) = World::after(false, &[]);
    assert_eq!(clean.phases, [&whole[..], &[Phase::GpuRestore]].concat());
    let nth = clean.calls.iter().position(|call| *call == "dump").unwrap();
    let (world, _) = World::after(false, &[Fault { nth, for_good: false }]);
    assert_eq!(world.phases, [&whole[..], &[Phase::Rollback]].concat());
}

/// Only threads without their GPU state must not run.
#[test]
fn a_rollback_before_gpu_checkpoint_stops_no_thread() {
    let (clean, _) = World::after(false, &[]);
    for name in ["gpu_lock", "freeze", "hold"] {
        let nth = clean.calls.iter().position(|call| *call == name).unwrap();
        let (mut world, result) = World::after(false, &[Fault { nth, for_good: false }]);
        assert!(result.is_err());
        let locked = world.processes();
        let back = Rollback {
            locked: &locked,
            was_frozen: false,
            gpu_checkpointing: false,
        };
        block_on(rollback(&mut world, back)).unwrap();
        assert!(!world.calls.contains(&"keep_frozen"), "{:?}", world.calls);
    }
}

#[test]
fn threads_that_a_dead_criu_has_left_thawed_are_stopped_first() {
    let (mut world, _) = World::after(false, &[]);
    let locked = world.processes();
    for state in world.states.values_mut() {
        *state = CudaState::Checkpointed;
    }
    // The world panics if another call comes first.
    (world.criu_died, world.let_run) = (true, true);
    let back = Rollback {
        locked: &locked,
        was_frozen: false,
        gpu_checkpointing: true,
    };
    block_on(rollback(&mut world, back)).unwrap();
    world.as_before(false);
}

#[test]
fn a_transaction_that_panics_is_rolled_back_by_its_journal() {
    for was_frozen in [false, true] {
        for nth in 0..calls(was_frozen, &[]) {
            let mut world = World::new([10, 20], was_frozen);
            (world.faults, world.panics) = (vec![Fault { nth, for_good: false }], true);
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                block_on(leave_running(&mut world)).map_err(drop)
            }));
            assert!(panicked.is_err(), "no panic at {nth}");
            world.faults = Vec::new();
            let locked = world.processes();
            let back = Rollback {
                locked: &locked,
                was_frozen,
                gpu_checkpointing: world.gpu_checkpointing,
            };
            block_on(rollback(&mut world, back)).unwrap();
            world.as_before(was_frozen);
        }
    }
}
