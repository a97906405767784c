//! The phases of the restore of a GPU container.
//!
//! | after        | processes                   | GPU state            |
//! |--------------|-----------------------------|----------------------|
//! | criu-restore | stopped                     | in their memory      |
//! | dev-repair   | stopped, as the spec allows | in their memory      |
//! | gpu-restore  | stopped                     | on the target's GPUs |
//! | continue     | running                     | on the target's GPUs |
//! | any failure  | none                        | in the image         |
//!
//! No thread of the application runs before the GPU state of all processes is on the GPUs. What the phases
//! touch is behind the trait [`Restore`], so that every failure of every phase is tested.

use crate::effects::{Restore, note};
use crate::phase::Phase;
use firn_gpu::CudaProcess;

/// Restores a container and lets it run. After a failure nothing of it is left.
pub async fn run<R: Restore>(effects: &mut R) -> Result<(), R::Error> {
    let done = steps(effects).await;
    effects.end(done.is_ok()).await;
    if done.is_err() {
        note(effects, Phase::Rollback).await;
        effects.rollback().await;
    }
    done
}

async fn steps<R: Restore>(effects: &mut R) -> Result<(), R::Error> {
    effects.enter(Phase::CriuRestore).await?;
    effects.criu_restore().await?;
    // Order matters: only the comparison finds the processes that CRIU has restored, and their /dev.
    effects.enter(Phase::DevRepair).await?;
    effects.compare().await?;
    effects.dev_repair().await?;
    effects.fill_memory().await?;
    let processes = effects.find_cuda().await?;
    effects.enter(Phase::GpuRestore).await?;
    let tids = processes.iter().map(|process| process.restore_tid);
    effects.run_selected(tids.collect()).await?;
    let restored = restore_and_unlock(effects, &processes).await;
    effects.stop_selected().await?;
    restored?;
    // Order matters: what may fail comes before anything runs.
    effects.configure_dump().await?;
    effects.write_facts().await?;
    effects.enter(Phase::Continue).await?;
    effects.continue_processes().await
}

async fn restore_and_unlock<R: Restore>(effects: &mut R, processes: &[CudaProcess]) -> Result<(), R::Error> {
    let pids: Vec<i32> = processes.iter().map(|process| process.pid).collect();
    effects.gpu_restore(&pids).await?;
    effects.gpu_unlock(&pids).await
}

#[cfg(test)]
mod tests {
    //! Every effect of a restore fails in turn; afterwards the container runs, or nothing of it is left.

    use std::collections::BTreeSet;

    use firn_gpu::CudaState;

    use super::*;
    use crate::effects::world::{Fault, Injected, World, block_on};

    /// An image of two processes is restored with these faults.
    fn after(faults: &[Fault]) -> (World, Result<(), Injected>) {
        let mut world = World::image([10, 20]);
        world.faults = faults.to_vec();
        let done = block_on(run(&mut world));
        (world, done)
    }

    /// The container runs with its GPU state, or nothing of it is left.
    fn is_as_promised(world: &World, done: &Result<(), Injected>) {
        assert!(!world.has_worker, "the worker is left: {:?}", world.calls);
        match done {
            Ok(()) => {
                assert!(
                    world.exists && !world.stopped,
                    "it does not run: {:?}",
                    world.calls
                );
                let is_running = |state: &CudaState| *state == CudaState::Running;
                assert!(world.states.values().all(is_running), "{:?}", world.states);
                assert!(world.can_be_dumped, "the next dump leaves it stopped");
            }
            Err(_) => assert!(!world.exists, "something is left: {:?}", world.calls),
        }
    }

    #[test]
    fn a_restored_container_runs_with_its_gpu_state() {
        let (world, done) = after(&[]);
        is_as_promised(&world, &done);
        assert_eq!(done, Ok(()));
        let phases = [
            Phase::CriuRestore,
            Phase::DevRepair,
            Phase::GpuRestore,
            Phase::Continue,
        ];
        assert_eq!(world.phases, phases);
    }

    #[test]
    fn any_failure_leaves_nothing() {
        let (clean, _) = after(&[]);
        let mut failed = BTreeSet::new();
        for for_good in [false, true] {
            for nth in 0..clean.calls.len() {
                let (world, done) = after(&[Fault { nth, for_good }]);
                failed.insert(world.calls[nth]);
                is_as_promised(&world, &done);
                assert_eq!(done, Err(Injected(world.calls[nth])), "{:?}", world.calls);
                if world.calls[nth] != "enter" || !for_good {
                    assert_eq!(world.phases.last(), Some(&Phase::Rollback));
                }
            }
        }
        assert_eq!(failed.len(), 13, "not every effect was made to fail: {failed:?}");
    }

    #[test]
    fn any_two_failures_leave_nothing_and_the_first_is_reported() {
        let (clean, _) = after(&[]);
        for nth in 0..clean.calls.len() {
            let first = Fault { nth, for_good: false };
            let (once, _) = after(&[first]);
            for second in nth + 1..once.calls.len() {
                let (world, done) = after(&[
                    first,
                    Fault {
                        nth: second,
                        for_good: true,
                    },
                ]);
                is_as_promised(&world, &done);
                // A thread that cannot be stopped again is worse than what came before.
                let worse = world.calls[second] == "stop_selected";
                let reported = if worse { second } else { nth };
                assert_eq!(done, Err(Injected(world.calls[reported])), "{:?}", world.calls);
            }
        }
    }
}
