//! Who takes the way back, and when nobody does.

use super::*;

#[test]
fn undo_may_be_repeated() {
    let mut world = World::new([10, 20], false);
    block_on(async {
        let taken = Begun::new(&mut world, false)
            .gpu_lock()
            .await
            .unwrap()
            .gpu_checkpoint()
            .await
            .unwrap();
        drop(taken);
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
fn nothing_is_undone_for_a_container_that_is_killed() {
    for was_frozen in [false, true] {
        for nth in 0..calls(was_frozen, &[]) {
            let mut world = World::new([10, 20], was_frozen);
            (world.faults, world.killed) = (vec![Fault { nth, for_good: false }], Some(nth));
            let Err(failure) = block_on(leave_running(&mut world)) else {
                panic!("{:?} was not told", world.calls.last());
            };
            assert_eq!(failure.suspended, None, "{:?}", world.calls);
        }
    }
}

#[test]
fn what_is_killed_in_the_last_attempt_to_give_back_is_not_suspended() {
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
fn every_phase_is_noted_and_the_way_back_too() {
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

/// Only what has no GPU state must not run.
#[test]
fn a_checkpoint_that_has_taken_nothing_stops_no_thread_on_its_way_back() {
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
fn threads_that_a_dead_criu_has_left_thawed_are_stopped_before_anything_else() {
    let (mut world, _) = World::after(false, &[]);
    let locked = world.processes();
    for state in world.states.values_mut() {
        *state = CudaState::Checkpointed;
    }
    // The world complains when another call comes first.
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
fn a_transaction_that_panics_is_taken_back_by_what_was_noted() {
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
