//! The phases of a checkpoint and of a restore. The journal, the timings, errors and failpoints use the same
//! names.
//!
//! ```text
//! checkpoint: [prepare -] inspect - gpu-lock - gpu-checkpoint - freeze - criu-dump
//!             [- copy-memory] - manifest
//!             leave running: - gpu-restore - gpu-unlock [- resumed] - sync
//!             exit:          - sync - end
//! pause:      [prepare -] inspect - gpu-lock - gpu-checkpoint
//! resume:     [grant -] gpu-restore - gpu-unlock [- resumed]
//! move:       a pause, then a resume; [gpu-detach] before gpu-lock, [gpu-attach] after gpu-unlock
//! restore:    criu-restore - compare - dev-repair [- fill-memory] - gpu-restore - gpu-unlock - continue
//!             [- restored]
//! any failure: rollback
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kind of transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    Checkpoint,
    Restore,
    /// A pause that gives GPUs free.
    Pause,
    /// The resume from it.
    Resume,
    /// Both together.
    Move,
}

impl Operation {
    /// As users and hooks name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Move => "move",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Part of a checkpoint or restore. Serialised in kebab case.
///
/// Prepare, Resumed and Restored are there only where the container names the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The job's hook `prepare`; nothing has been touched.
    Prepare,
    /// firn checks for reasons to refuse; nothing has been touched.
    Inspect,
    /// firn's library takes GPU memory out of its processes: their calls of the driver wait. A phase of the
    /// timings only.
    GpuDetach,
    /// The driver locks the CUDA processes: their calls of the driver wait.
    GpuLock,
    /// The driver copies the GPU state into the memory of the processes.
    GpuCheckpoint,
    /// The cgroup is frozen for the dump. A phase of the timings only.
    Freeze,
    /// CRIU writes the image, then firn its manifest.
    CriuDump,
    /// firn copies the memory that CRIU has only listed. A phase of the timings only.
    CopyMemory,
    /// firn writes the checksums and the manifest. A phase of the timings only.
    Manifest,
    /// firn makes sure that the image is on its disk.
    Sync,
    /// A parked container gets other GPUs: device rules, nodes, spec.
    Grant,
    /// The driver copies the GPU state back onto the GPUs and unlocks the processes.
    GpuRestore,
    /// The driver unlocks the processes. A phase of the timings only.
    GpuUnlock,
    /// firn's library puts GPU memory back into its processes. A phase of the timings only.
    GpuAttach,
    /// The job's hook `resumed`.
    Resumed,
    /// The image is complete, and the container ends as the client requested.
    End,
    /// firn rolls back a failed checkpoint or restore.
    Rollback,
    /// CRIU restores the processes, stopped.
    CriuRestore,
    /// firn compares the restored processes with the spec. A phase of the timings only.
    Compare,
    /// firn replaces the device nodes in /dev by those of the new GPUs.
    DevRepair,
    /// firn fills the memory of the stopped processes from the store. A phase of the timings only.
    FillMemory,
    /// firn continues the stopped processes.
    Continue,
    /// The job's hook `restored`.
    Restored,
}

impl Phase {
    /// The name, and what the phase does.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Prepare => ("prepare", "call the hook prepare"),
            Self::Inspect => ("inspect", "inspect the container"),
            Self::GpuDetach => ("gpu-detach", "take GPU memory out of the processes"),
            Self::GpuAttach => ("gpu-attach", "put GPU memory back into the processes"),
            Self::GpuLock => ("gpu-lock", "lock the CUDA processes"),
            Self::GpuCheckpoint => ("gpu-checkpoint", "checkpoint the GPU state"),
            Self::Freeze => ("freeze", "freeze the container"),
            Self::CriuDump => ("criu-dump", "dump the container"),
            Self::CopyMemory => ("copy-memory", "copy the memory"),
            Self::FillMemory => ("fill-memory", "fill the memory from the store"),
            Self::Manifest => ("manifest", "write the manifest"),
            Self::Sync => ("sync", "write the image to its disk"),
            Self::Grant => ("grant", "give the container other GPUs"),
            Self::GpuRestore => ("gpu-restore", "restore the GPU state"),
            Self::GpuUnlock => ("gpu-unlock", "unlock the CUDA processes"),
            Self::Resumed => ("resumed", "call the hook resumed"),
            Self::End => ("end", "end the container"),
            Self::Rollback => ("rollback", "roll back"),
            Self::CriuRestore => ("criu-restore", "restore the processes"),
            Self::Compare => ("compare", "compare the restored processes with the spec"),
            Self::DevRepair => ("dev-repair", "repair the device nodes"),
            Self::Continue => ("continue", "continue the processes"),
            Self::Restored => ("restored", "call the hook restored"),
        }
    }

    /// The name in the journal, the timings and the log.
    pub fn name(self) -> &'static str {
        self.words().0
    }
}

/// What the phase does, to follow "cannot" in a message.
impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words().1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_has_one_name() {
        use Phase::*;
        for phase in [
            Prepare,
            Inspect,
            GpuDetach,
            GpuAttach,
            GpuLock,
            GpuCheckpoint,
            Freeze,
            CriuDump,
            CopyMemory,
            FillMemory,
            Manifest,
            Sync,
            Grant,
            GpuRestore,
            GpuUnlock,
            End,
            Rollback,
            CriuRestore,
            Compare,
            DevRepair,
            Continue,
            Resumed,
            Restored,
        ] {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.name());
        }
    }
}
