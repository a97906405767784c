//! The phases of a checkpoint and of a restore. The journal, the timings, errors and failpoints use the same
//! names.
//!
//! ```text
//! checkpoint: inspect - gpu-lock - gpu-checkpoint - freeze - criu-dump - manifest
//!             leave running: - gpu-restore - gpu-unlock
//!             exit:          - end
//! restore:    criu-restore - compare - dev-repair - gpu-restore - gpu-unlock - continue
//! any failure: rollback
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

/// Part of a checkpoint or restore. Serialised in kebab case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// firn checks for reasons to refuse; nothing has been touched.
    Inspect,
    /// The driver locks the CUDA processes: their calls of the driver wait.
    GpuLock,
    /// The driver copies the GPU state into the memory of the processes.
    GpuCheckpoint,
    /// The cgroup is frozen for the dump. A phase of the timings only.
    Freeze,
    /// CRIU writes the image, then firn its manifest.
    CriuDump,
    /// firn writes the checksums and the manifest. A phase of the timings only.
    Manifest,
    /// The driver copies the GPU state back onto the GPUs and unlocks the processes.
    GpuRestore,
    /// The driver unlocks the processes. A phase of the timings only.
    GpuUnlock,
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
    /// firn continues the stopped processes.
    Continue,
}

impl Phase {
    /// The name in the journal, the timings and the log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inspect => "inspect",
            Self::GpuLock => "gpu-lock",
            Self::GpuCheckpoint => "gpu-checkpoint",
            Self::Freeze => "freeze",
            Self::CriuDump => "criu-dump",
            Self::Manifest => "manifest",
            Self::GpuRestore => "gpu-restore",
            Self::GpuUnlock => "gpu-unlock",
            Self::End => "end",
            Self::Rollback => "rollback",
            Self::CriuRestore => "criu-restore",
            Self::Compare => "compare",
            Self::DevRepair => "dev-repair",
            Self::Continue => "continue",
        }
    }
}

/// What the phase does, to follow "cannot" in a message.
impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inspect => "inspect the container",
            Self::GpuLock => "lock the CUDA processes",
            Self::GpuCheckpoint => "checkpoint the GPU state",
            Self::Freeze => "freeze the container",
            Self::CriuDump => "dump the container",
            Self::Manifest => "write the manifest",
            Self::GpuRestore => "restore the GPU state",
            Self::GpuUnlock => "unlock the CUDA processes",
            Self::End => "end the container",
            Self::Rollback => "roll back",
            Self::CriuRestore => "restore the processes",
            Self::Compare => "compare the restored processes with the spec",
            Self::DevRepair => "repair the device nodes",
            Self::Continue => "continue the processes",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_has_one_name() {
        use Phase::*;
        for phase in [
            Inspect,
            GpuLock,
            GpuCheckpoint,
            Freeze,
            CriuDump,
            Manifest,
            GpuRestore,
            GpuUnlock,
            End,
            Rollback,
            CriuRestore,
            Compare,
            DevRepair,
            Continue,
        ] {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.name());
        }
    }
}
