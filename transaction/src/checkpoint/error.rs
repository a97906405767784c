//! Why a checkpoint failed, with the code and the remedy that users see.

mod end;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_host::durable::NotOnDisk;
use firn_host::{Chain, Problem, ProblemLine, Remedy};
use firn_image::criu::ImageFault;
use firn_image::manifest::{ImageError, ManifestError};
use firn_oci::mounts::MountError;
use firn_process::cancel::{CancellationToken, Interrupted};
use firn_process::cgroup::CgroupError;
use firn_process::tracer::TraceError;

use super::park::GrantChangeError;
use super::phases::Failure;
use crate::container::Container;
use crate::driver::WorkerError;
use crate::image_dir::{ImageDirError, is_containerds};
use crate::interposer::InterposeError;
use crate::job_hook::HookError;
use crate::journal::JournalError;
use crate::layer::LayerError;
use crate::lease::LeaseError;
use crate::look::{LookError, Written};
use crate::memory::CopyError;
use crate::phase::Phase;
use crate::pod_shm::PodShmError;
use crate::runc::{RuncError, UnfitRuntime};
use crate::transaction::BeginError;
pub use end::EndError;

/// A failure of one effect of the transaction, or a refusal.
#[derive(Debug, thiserror::Error, Problem)]
pub enum EffectError {
    #[error(transparent)]
    Refused(#[from] firn_preflight::Refusal),
    #[error(
        "process {pid} ({comm}) is stopped by a signal, and the freezer of cgroup v1 keeps it from being \
         traced"
    )]
    #[problem("FIRN-STOPPED", "continue it (kill -CONT), or use a node with cgroup v2")]
    Stopped { pid: i32, comm: String },
    #[error("CUDA process {pid} ({comm}) is {state} already")]
    #[problem(
        "FIRN-GPU-STATE",
        "another tool has locked or checkpointed it: unlock it there first"
    )]
    NotRunning {
        pid: i32,
        comm: String,
        state: &'static str,
    },
    #[error(transparent)]
    Runtime(#[from] UnfitRuntime),
    #[error(transparent)]
    AmdPlugin(#[from] firn_oci::amd::AmdPluginError),
    #[error("its parent dump is in {parent}, and GPU memory cannot be dumped in parts")]
    #[problem("FIRN-PARENT", "ask for the checkpoint without a parent path")]
    Parent { parent: PathBuf },
    #[error("connections of a container without GPUs are kept in its copy or refuse the checkpoint")]
    #[problem(
        "FIRN-TCP",
        "ask for --tcp keep: CRIU alone cannot close some and keep others"
    )]
    PlainClose,
    #[error(transparent)]
    Hook(#[from] HookError),
    #[error(transparent)]
    Look(#[from] LookError),
    #[error("the driver call failed")]
    Gpu(#[from] WorkerError),
    #[error(
        "process {} ({}) has written to its open file {} while the driver locked its GPU: the client had \
         copied the container's files before",
        .0.pid, .0.comm, .0.path
    )]
    #[problem(
        "FIRN-FILES",
        "use `firn checkpoint`, which copies the files afterwards; or keep the file on a volume; or try again"
    )]
    Written(Written),
    #[error("the container did not stand still while its image was made: {how}")]
    #[problem(
        "FIRN-FREEZER",
        "find who else thaws its cgroup (`systemctl thaw`, `runc resume`, another agent), and try again"
    )]
    Thawed { how: String },
    #[error("the freezer failed")]
    #[problem(
        "FIRN-FREEZER",
        "see whether a process of the container hangs in the kernel (state D)"
    )]
    Cgroup(#[from] CgroupError),
    #[error("cannot hold the threads")]
    #[problem("FIRN-HOLD", hold_hint(_0))]
    Hold(#[from] TraceError),
    #[error(transparent)]
    Config(#[from] firn_config::ConfigError),
    #[error("cannot prepare CRIU's plugins")]
    Criu(#[from] firn_oci::criu_config::CriuError),
    #[error(transparent)]
    Program(#[from] firn_config::ProgramError),
    #[error("cannot keep the journal")]
    Journal(#[from] JournalError),
    #[error("the container was killed")]
    #[problem("FIRN-ENDED", "start it again, or restore a checkpoint")]
    Killed,
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error(transparent)]
    PodShm(#[from] PodShmError),
    #[error(transparent)]
    Interpose(#[from] InterposeError),
    #[error("another container of its pod cannot be checkpointed")]
    #[problem(
        "FIRN-POD",
        "see the error of that container in containerd's log; this one continues"
    )]
    Others,
    #[error("the other containers of its pod were not ready within {} s", limit.as_secs())]
    #[problem(
        "FIRN-POD",
        "see containerd's log for the container that does not answer; all continue"
    )]
    OthersLate { limit: Duration },
    #[error("its client wants the checkpoint no more")]
    #[problem(
        "FIRN-INTERRUPTED",
        "nothing is left of it, and every container of the pod continues"
    )]
    Withdrawn,
    #[error("firn itself has failed; containerd's log has the panic")]
    #[problem("FIRN-INTERNAL", "report it with containerd's log")]
    Panicked,
    #[error("the container was suspended after its checkpoint had failed, and was resumed")]
    #[problem("FIRN-GPU-SUSPENDED", "checkpoint it again")]
    Resumed,
    #[error("there is no journal of its checkpoint")]
    #[problem("FIRN-JOURNAL", "kill and delete it")]
    NoJournal,
    #[error("a move has failed, and its processes have GPU state in different places")]
    #[problem("FIRN-GPU-SPLIT", "resume it first (`ctr tasks resume`)")]
    Split,
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error("the annotation firn.dev/bulk has the unknown value {word:?}")]
    #[problem("FIRN-STORE-UNUSABLE", "use firn.dev/bulk=inline or firn.dev/bulk=store")]
    BulkSetting { word: String },
    #[error("its large memory is to go into a store, and the configuration names none")]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "name a directory as store under [images] in the configuration, or use firn.dev/bulk=inline"
    )]
    NoStore,
    #[error(transparent)]
    Lease(#[from] LeaseError),
    #[error(transparent)]
    Grant(#[from] GrantChangeError),
    #[error("CRIU failed")]
    Dump(#[from] DumpError),
    #[error(transparent)]
    #[problem(
        "FIRN-DUMP",
        "see whether the image's file system has room and works (the kernel's log names a disk that fails)"
    )]
    NotOnDisk(#[from] NotOnDisk),
    #[error("cannot write the manifest")]
    Manifest(#[from] ManifestError),
    #[error("cannot describe the image")]
    Image(#[from] ImageError),
    #[error("cannot list the mounts")]
    Mount(#[from] MountError),
    #[error("cannot read the spec")]
    Spec(#[from] firn_oci::SpecError),
}

impl<E: Into<EffectError>> From<Interrupted<E>> for EffectError {
    fn from(interrupted: Interrupted<E>) -> Self {
        match interrupted {
            Interrupted::Cancelled => Self::Killed,
            Interrupted::Failed(error) => error.into(),
        }
    }
}

impl EffectError {
    /// Why a transaction that was stopped does not continue.
    pub(super) fn stopped(cancel: &CancellationToken) -> Self {
        if cancel.is_cancelled() {
            Self::Killed
        } else {
            Self::Withdrawn
        }
    }
}

fn hold_hint(error: &TraceError) -> &'static str {
    match error {
        TraceError::NotTraced { .. } => {
            "raise hold under [deadlines] in the configuration; on cgroup v1, continue stopped processes"
        }
        TraceError::CriuCode { .. } => {
            "see whether a CRIU still runs (`pgrep criu`), and try again once it has ended"
        }
        _ => "detach the debugger from the container's processes",
    }
}

/// `runc checkpoint` failed, or left no complete image.
#[derive(Debug, thiserror::Error, Problem)]
#[problem(
    "FIRN-DUMP",
    "see whether the image's file system is slow, or raise criu-dump under [deadlines] in the \
     configuration"
)]
pub enum DumpError {
    /// With the last errors of CRIU's log, and where the log is kept.
    #[error("{}{}", Chain(cause), quoted(lines, log))]
    #[problem("FIRN-DUMP", "the log names what CRIU could not dump")]
    Failed {
        cause: RuncError,
        lines: Vec<String>,
        log: PathBuf,
    },
    #[error("the checksums of the image were not computed within {} s", limit.as_secs_f32())]
    Checksums { limit: Duration },
    #[error("the file system did not let firn {what} within {} s", limit.as_secs_f32())]
    Stalled { what: &'static str, limit: Duration },
    #[error("cannot close connections in the image")]
    #[problem(
        "FIRN-DUMP",
        "report it with the image; firn.dev/tcp=keep leaves the image as it is"
    )]
    Connections(#[source] ImageFault),
    #[error("cannot set timers in the image")]
    #[problem("FIRN-DUMP", "report it with the image")]
    Timers(#[source] ImageFault),
    #[error(transparent)]
    Image(#[from] ImageDirError),
}

impl From<BeginError> for EffectError {
    fn from(error: BeginError) -> Self {
        match error {
            BeginError::Config(error) => error.into(),
            BeginError::Program(error) => error.into(),
            BeginError::Cgroup(error) => error.into(),
            BeginError::Journal(error) => error.into(),
        }
    }
}

impl From<ImageDirError> for EffectError {
    fn from(error: ImageDirError) -> Self {
        Self::Dump(error.into())
    }
}

/// The first errors of CRIU's log, and where it is.
pub(crate) fn quoted(lines: &[String], log: &Path) -> String {
    format!("{} (log: {})", joined(lines), log.display())
}

fn joined(lines: &[String]) -> String {
    lines.iter().map(|line| format!("; {line}")).collect()
}

/// What kind of failure a transaction ended with, for the caller's own codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The request was refused, or the container is not in a state for it.
    Refused,
    /// The request is wrong.
    Invalid,
    /// It failed and was rolled back, or the container ended.
    Aborted,
    /// The driver declared GPU state lost.
    Lost,
    /// The request was done in part.
    Internal,
    /// The OCI runtime failed.
    Unknown,
}

/// A checkpoint that failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The dump of a container without GPUs failed: in the format of the stock shim, and what CRIU's log has.
    #[error("{} path= {}{}", Chain(cause), log.display(), joined(lines))]
    Plain {
        cause: RuncError,
        lines: Vec<String>,
        log: PathBuf,
    },
    /// Refused: nothing was begun.
    #[error("{}", line(format_args!("cannot checkpoint container {container}"), cause))]
    Refused { container: String, cause: EffectError },
    /// It failed and was rolled back: the workload continues.
    #[error(
        "{}",
        line(
            format_args!(
                "checkpoint of container {container} failed, the workload continues: cannot {phase}"
            ),
            cause
        )
    )]
    RolledBack {
        container: String,
        phase: Phase,
        cause: EffectError,
    },
    /// The container ended during the checkpoint: there is nothing to roll back.
    #[error(
        "FIRN-ENDED: container {container} ended during its checkpoint: cannot {phase}: {}. hint: {}",
        Chain(cause),
        ended_hint(image, container)
    )]
    Ended {
        container: String,
        phase: Phase,
        cause: EffectError,
        image: Option<PathBuf>,
    },
    /// The rollback failed: for now, or for good if the driver reports the GPU state as lost.
    #[error(
        "{}: container {container} is suspended, its GPU state cannot be restored: {}: {}{}. hint: {}",
        suspended_code(suspended),
        suspended.code(),
        Chain(suspended),
        before(failed),
        suspended_hint(suspended, image, container)
    )]
    Suspended {
        container: String,
        /// Why the checkpoint failed; none if only the rollback did.
        failed: Option<(Phase, EffectError)>,
        suspended: EffectError,
        image: Option<PathBuf>,
    },
    /// The image is complete, but the container has not ended with its dump.
    #[error(
        "FIRN-NOT-ENDED: the checkpoint of container {container} in {} is complete and the container has not \
         ended: {}. hint: kill the container; {}",
        image.display(),
        Chain(cause),
        complete_hint(image, container)
    )]
    NotEnded {
        container: String,
        image: PathBuf,
        cause: EndError,
    },
    /// The image is complete, and the container continues, but its hook `resumed` has failed.
    #[error(
        "{}: the checkpoint of container {container} in {} is complete and the container continues: {}. \
         hint: {}; {}",
        cause.code(),
        image.display(),
        Chain(cause),
        cause.hint(),
        complete_hint(image, container)
    )]
    NotResumed {
        container: String,
        image: PathBuf,
        cause: HookError,
    },
    /// The container continues after a checkpoint for which its client had paused it, but its hook has
    /// failed.
    #[error(
        "{}: container {container} continues after its checkpoint: {}. hint: {}",
        cause.code(),
        Chain(cause),
        cause.hint()
    )]
    Hook { container: String, cause: EffectError },
    #[error("{}", line(format_args!("cannot read firn's configuration"), .0))]
    Config(firn_config::ConfigError),
    #[error("{}", ProblemLine(.0))]
    Program(firn_config::ProgramError),
    #[error("cannot read the container's spec")]
    Spec(#[from] firn_oci::SpecError),
    #[error("{}", line(format_args!("cannot prepare the container for ranks of NCCL"), .0))]
    Nccl(#[from] firn_oci::nccl::NcclError),
    #[error("{}", line(format_args!("cannot give the container firn's library"), .0))]
    Interpose(#[from] InterposeError),
    #[error("cannot edit the container's spec")]
    Edit(#[from] firn_oci::edit::EditError),
    #[error("FIRN-CRIU-CONFIG: cannot prepare CRIU's configuration. hint: {}", .0.hint())]
    Criu(#[from] firn_oci::criu_config::CriuError),
    #[error("cannot read the container's cgroup")]
    Cgroup(#[from] CgroupError),
}

/// A problem in one line, after what failed because of it.
pub(crate) fn line(failed: fmt::Arguments<'_>, problem: &dyn Problem) -> String {
    let Remedy { code, hint } = problem.remedy();
    format!("{code}: {failed}: {}. hint: {hint}", Chain(problem))
}

/// What to do with a complete image.
fn complete_hint(image: &Path, container: &str) -> String {
    let dir = image.display();
    // The image could be neither linked nor copied to the rescue directory.
    if is_containerds(image) {
        return format!(
            "the dump in {dir} is complete and can be restored, but containerd removes it: if it is still \
             there, copy it, then `firn restore --dir COPY {container}`"
        );
    }
    format!("the dump in {dir} is complete and can be restored: `firn restore --dir {dir} {container}`")
}

fn ended_hint(image: &Option<PathBuf>, container: &str) -> String {
    match image {
        Some(image) => complete_hint(image, container),
        None => "restore an earlier checkpoint, or start it again".to_owned(),
    }
}

/// Whether the driver reports the GPU state as lost.
fn is_final(error: &EffectError) -> bool {
    matches!(error, EffectError::Gpu(error) if error.is_final())
}

fn suspended_code(error: &EffectError) -> &'static str {
    if is_final(error) {
        "FIRN-GPU-LOST"
    } else {
        "FIRN-GPU-SUSPENDED"
    }
}

fn before(failed: &Option<(Phase, EffectError)>) -> String {
    match failed {
        Some((phase, cause)) => format!(" (after its checkpoint failed: cannot {phase}: {})", Chain(cause)),
        None => String::new(),
    }
}

fn suspended_hint(error: &EffectError, image: &Option<PathBuf>, container: &str) -> String {
    let hint = match error {
        _ if is_final(error) => "delete it",
        EffectError::Gpu(error @ WorkerError::NoMemory { .. }) => error.hint(),
        _ => "resume it to try again (`ctr tasks resume`), or kill and delete it",
    };
    match image {
        Some(image) => format!("{hint}; {}", complete_hint(image, container)),
        None => hint.to_owned(),
    }
}

impl EffectError {
    /// In one line, for the journal.
    pub(super) fn line(&self) -> String {
        format!("{}: {}", self.code(), Chain(self))
    }
}

impl CheckpointError {
    /// Why the container is suspended.
    pub(super) fn suspended_by(&self) -> Option<String> {
        match self {
            Self::Suspended { suspended, .. } => Some(suspended.line()),
            _ => None,
        }
    }

    /// A refusal: nothing was begun.
    pub(super) fn refused(container: &Container, cause: impl Into<EffectError>) -> Self {
        let (container, cause) = (container.id.clone(), cause.into());
        Self::Refused { container, cause }
    }

    /// A transaction that could not begin.
    pub(super) fn not_begun(container: &Container, error: BeginError) -> Self {
        match error {
            BeginError::Config(error) => Self::Config(error),
            BeginError::Program(error) => Self::Program(error),
            BeginError::Cgroup(error) => Self::Cgroup(error),
            BeginError::Journal(error) => Self::refused(container, error),
        }
    }

    /// From a transaction that failed; `image` when its dump is complete.
    pub(super) fn from_failure(
        container: &str,
        failure: Failure<EffectError>,
        image: Option<PathBuf>,
        is_alive: bool,
    ) -> Self {
        let container = container.to_owned();
        let (phase, cause) = (failure.phase, failure.source);
        match (phase, failure.suspended) {
            _ if !is_alive => Self::Ended {
                container,
                phase,
                cause,
                image,
            },
            (Phase::Inspect, None) => Self::Refused { container, cause },
            (_, None) => Self::RolledBack {
                container,
                phase,
                cause,
            },
            (_, Some(suspended)) => Self::Suspended {
                container,
                // If gpu-restore failed, it is the rollback that failed: there is no other cause.
                failed: (phase != Phase::GpuRestore).then_some((phase, cause)),
                suspended,
                image,
            },
        }
    }

    /// Whether it failed because another container of its pod has.
    pub fn is_of_others(&self) -> bool {
        let cause = match self {
            Self::Refused { cause, .. } | Self::RolledBack { cause, .. } => Some(cause),
            _ => None,
        };
        matches!(cause, Some(EffectError::Others | EffectError::OthersLate { .. }))
    }

    /// Whether the image is complete all the same.
    pub fn keeps_image(&self) -> bool {
        match self {
            Self::Suspended { image, .. } | Self::Ended { image, .. } => image.is_some(),
            Self::NotEnded { .. } | Self::NotResumed { .. } => true,
            _ => false,
        }
    }

    /// What kind of failure it is, for the caller's own codes.
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Refused { .. } | Self::Config(_) | Self::Program(_) => FailureKind::Refused,
            Self::Criu(_) | Self::Interpose(_) => FailureKind::Refused,
            Self::Nccl(_) => FailureKind::Invalid,
            Self::Suspended { suspended, .. } if is_final(suspended) => FailureKind::Lost,
            Self::RolledBack { .. } | Self::Ended { .. } | Self::Suspended { .. } => FailureKind::Aborted,
            Self::NotEnded { .. } | Self::NotResumed { .. } | Self::Hook { .. } => FailureKind::Internal,
            Self::Plain { .. } | Self::Spec(_) | Self::Edit(_) | Self::Cgroup(_) => FailureKind::Unknown,
        }
    }
}

#[cfg(test)]
mod tests;
