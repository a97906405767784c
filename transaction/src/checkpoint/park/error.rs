//! Why a pause, a resume or a move failed, with the code and the remedy that users see.

use firn_config::{ConfigError, ProgramError};
use firn_host::{Chain, Problem, ProblemLine};
use firn_oci::dev_repair::DevError;
use firn_oci::edit::EditError;
use firn_process::cgroup::CgroupError;
use firn_remap::{AssignmentError, GrantError};

use crate::checkpoint::error::{CheckpointError, EffectError, FailureKind, line};
use crate::checkpoint::phases::Failure;
use crate::journal::Operation;
use crate::lease::{Lease, LeaseError};
use crate::phase::Phase;

/// GPUs that a container cannot be given.
#[derive(Debug, thiserror::Error, Problem)]
pub enum GrantChangeError {
    #[error("the annotation {name} is {value:?}")]
    #[problem("FIRN-PAUSE-SETTING", "docs/reference/annotations.md lists the values")]
    Setting { name: &'static str, value: String },
    #[error("it is a container of a pod, whose GPUs the kubelet has allocated")]
    #[problem(
        "FIRN-MOVE-POD",
        "resume it onto its own GPUs, or restore a checkpoint of it in another pod"
    )]
    Pod,
    #[error("its device cgroup opens every GPU of the node, so that none is allocated to it")]
    #[problem("FIRN-MOVE-PRIVILEGED", "give the container single GPUs, as with CDI devices")]
    Privileged,
    #[error("cannot find out which GPUs it may have")]
    Grant(#[from] GrantError),
    #[error("the GPUs do not fit")]
    Assignment(#[from] AssignmentError),
    #[error("cannot edit its spec")]
    Edit(#[from] EditError),
    #[error("systemd does not let its unit have other devices")]
    #[problem(
        "FIRN-MOVE-SYSTEMD",
        "resume it onto its own GPUs; with cgroup v1, run containers with runc's own cgroup driver"
    )]
    Unit(#[source] CgroupError),
    #[error("cannot replace the rules of its device cgroup")]
    #[problem(
        "FIRN-DEVICE-RULES",
        "see that the cgroup hierarchy is mounted and writable; bpf(2) is needed with cgroup v2"
    )]
    Rules(#[source] CgroupError),
    #[error("cannot replace its device nodes")]
    Dev(#[from] DevError),
    #[error("cannot write its spec")]
    Spec(#[from] firn_oci::SpecError),
    #[error("the file system of the container did not answer within {} s", limit.as_secs_f32())]
    #[problem("FIRN-LOOK-TIMEOUT", "see whether a mount of the container hangs")]
    Late { limit: std::time::Duration },
}

/// A pause that frees GPUs, a resume from it, or a move, that failed.
#[derive(Debug, thiserror::Error)]
pub enum ParkError {
    /// Nothing was touched.
    #[error("{}", line(format_args!("cannot {operation} container {container}"), cause))]
    Refused {
        operation: Operation,
        container: String,
        cause: EffectError,
    },
    /// It failed and was rolled back: the workload continues with its own GPUs.
    #[error(
        "{}",
        line(
            format_args!(
                "{operation} of container {container} failed, the workload continues: cannot {phase}"
            ),
            cause
        )
    )]
    RolledBack {
        operation: Operation,
        container: String,
        phase: Phase,
        cause: EffectError,
    },
    /// It stays paused, and its GPUs are free.
    #[error(
        "{}",
        line(
            format_args!(
                "{operation} of container {container} failed, it stays paused with its GPU state in host \
                 memory"
            ),
            cause
        )
    )]
    Parked {
        operation: Operation,
        container: String,
        cause: EffectError,
    },
    #[error(
        "FIRN-ENDED: container {container} ended during its {operation}: {}. hint: start it again, or \
         restore a checkpoint",
        Chain(cause)
    )]
    Ended {
        operation: Operation,
        container: String,
        cause: EffectError,
    },
    /// The rollback of a pause failed, or was done by the journal after a panic.
    #[error(transparent)]
    ByJournal(CheckpointError),
    /// It continues, but its hook has failed.
    #[error(
        "{}",
        line(format_args!("container {container} continues after its pause"), cause)
    )]
    Hook { container: String, cause: EffectError },
    #[error("{}", line(format_args!("cannot read firn's configuration"), .0))]
    Config(#[from] ConfigError),
    #[error("{}", ProblemLine(.0))]
    Program(#[from] ProgramError),
    #[error("cannot read the container's cgroup")]
    Cgroup(#[from] CgroupError),
}

impl ParkError {
    /// From a pause that failed, or the first half of a move.
    pub(super) fn of_failure(
        operation: Operation,
        container: &str,
        failure: Failure<EffectError>,
        is_alive: bool,
    ) -> Self {
        if is_alive && failure.suspended.is_some() {
            return Self::ByJournal(CheckpointError::from_failure(container, failure, None, true));
        }
        let (phase, cause, container) = (failure.phase, failure.source, container.to_owned());
        match phase {
            _ if !is_alive => Self::Ended {
                operation,
                container,
                cause,
            },
            Phase::Inspect => Self::Refused {
                operation,
                container,
                cause,
            },
            phase => Self::RolledBack {
                operation,
                container,
                phase,
                cause,
            },
        }
    }

    /// The container whose GPUs this one is to wait for. Nothing was touched.
    pub fn awaited(&self) -> Option<&Lease> {
        match self {
            Self::Refused {
                cause: EffectError::Lease(LeaseError::Busy { holder, awaited, .. }),
                ..
            } => awaited.then_some(holder),
            _ => None,
        }
    }

    /// What kind of failure it is, for the caller's own codes.
    pub fn kind(&self) -> FailureKind {
        match self {
            // Another container has the GPUs: the driver was not called.
            Self::Parked {
                operation: Operation::Resume,
                cause: EffectError::Lease(LeaseError::Busy { .. }),
                ..
            } => FailureKind::Refused,
            Self::Refused { .. } | Self::Config(_) | Self::Program(_) => FailureKind::Refused,
            Self::Parked { .. } | Self::RolledBack { .. } | Self::Ended { .. } => FailureKind::Aborted,
            Self::ByJournal(error) => error.kind(),
            Self::Hook { .. } => FailureKind::Internal,
            Self::Cgroup(_) => FailureKind::Unknown,
        }
    }
}
