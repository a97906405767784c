//! The phases in which something goes wrong, in their order.

use super::case::Flow;

/// A phase of a checkpoint or restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Deciding on a restore, in Create.
    Prepare,
    /// The job's hook before a checkpoint.
    PrepareHook,
    /// Looking for CUDA processes and asking for their state.
    Inspect,
    GpuLock,
    /// The driver's checkpoint.
    GpuCheckpoint,
    /// Between a pause and the resume.
    Parked,
    /// runc and CRIU, at a checkpoint.
    CriuDump,
    /// firn's copy of large memory into a store, next to CRIU.
    CopyMemory,
    /// The image is written to its disk, before its container may end.
    Sync,
    /// runc and CRIU, at a restore.
    CriuRestore,
    /// Between CRIU and the driver, at a restore.
    DevRepair,
    /// firn's copy of memory from a store, after that.
    FillMemory,
    /// Device rules, nodes and spec of other GPUs, at a resume or move.
    Grant,
    /// The driver's restore.
    GpuRestore,
    GpuUnlock,
    /// Parking again what a resume or move has restored, whose driver has failed.
    Repark,
    /// The job's hook after a checkpoint.
    ResumedHook,
    /// The end of a container that was to end with its checkpoint.
    End,
    /// Letting the tasks of a restored container run.
    Continue,
    /// The job's hook in the restored container.
    RestoredHook,
    /// The rollback of a restore whose driver has failed.
    RestoreRollback,
    /// The rollback of a checkpoint, which begins by asking for the processes' states: only as the second of
    /// a pair.
    CheckpointRollback,
}

pub(super) const PHASES: [(Flow, &[Phase]); 6] = [
    (
        Flow::Checkpoint,
        &[
            Phase::PrepareHook,
            Phase::Inspect,
            Phase::GpuLock,
            Phase::GpuCheckpoint,
            Phase::CriuDump,
            Phase::CopyMemory,
            Phase::Sync,
            Phase::GpuRestore,
            Phase::GpuUnlock,
            Phase::ResumedHook,
            Phase::End,
        ],
    ),
    (
        Flow::Restore,
        &[
            Phase::Prepare,
            Phase::CriuRestore,
            Phase::DevRepair,
            Phase::FillMemory,
            Phase::GpuRestore,
            Phase::GpuUnlock,
            Phase::Continue,
            Phase::RestoredHook,
            Phase::RestoreRollback,
        ],
    ),
    (
        Flow::Pause,
        &[
            Phase::PrepareHook,
            Phase::Inspect,
            Phase::GpuLock,
            Phase::GpuCheckpoint,
            Phase::Parked,
        ],
    ),
    (
        Flow::Resume,
        &[
            Phase::GpuRestore,
            Phase::GpuUnlock,
            Phase::Repark,
            Phase::ResumedHook,
        ],
    ),
    (
        Flow::ResumeElsewhere,
        &[
            Phase::Grant,
            Phase::GpuRestore,
            Phase::GpuUnlock,
            Phase::Repark,
            Phase::ResumedHook,
        ],
    ),
    (
        Flow::Move,
        &[
            Phase::PrepareHook,
            Phase::Inspect,
            Phase::GpuLock,
            Phase::GpuCheckpoint,
            Phase::Grant,
            Phase::GpuRestore,
            Phase::GpuUnlock,
            Phase::Repark,
            Phase::ResumedHook,
        ],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn of(flow: Flow) -> &'static [Phase] {
        let (_, phases) = PHASES.iter().find(|(of, _)| *of == flow).unwrap();
        phases
    }

    /// A phase that is added before the driver's checkpoint, or after its restore, is one of the others, too.
    /// One between the driver's checkpoint and the dump is of checkpoints alone.
    #[test]
    fn a_pause_and_a_move_begin_as_a_checkpoint_and_end_as_a_resume() {
        let checkpoint = of(Flow::Checkpoint);
        let last = checkpoint.iter().position(|phase| *phase == Phase::GpuCheckpoint);
        let common = &checkpoint[..=last.unwrap()];
        for flow in [Flow::Pause, Flow::Move] {
            assert!(of(flow).starts_with(common), "{flow:?}");
        }
        for flow in [Flow::ResumeElsewhere, Flow::Move] {
            assert!(of(flow).ends_with(of(Flow::Resume)), "{flow:?}");
        }
        let of_resume = |phase: &&Phase| of(Flow::Resume).contains(phase);
        let after = checkpoint.iter().filter(of_resume);
        let resume = of(Flow::Resume).iter().filter(|phase| **phase != Phase::Repark);
        assert!(after.eq(resume));
    }
}
