//! Why a restore was refused or failed, with the code and the remedy that users see.

use std::path::PathBuf;
use std::time::Duration;

use crate::checkpoint::{FailureKind, line, quoted};
use firn_host::{Chain, Problem, ProblemReport};
use firn_image::manifest::{ImageError, ManifestError};
use firn_image::signature::SignatureError;
use firn_oci::dev_repair::DevError;

use firn_process::cancel::Interrupted;
use firn_process::cgroup::CgroupError;
use firn_process::tracer::TraceError;

use super::compare::Differs;
use super::named::NameError;
use crate::driver::WorkerError;
use crate::interposer::InterposeError;
use crate::job_hook::HookError;
use crate::journal::JournalError;
use crate::look::LookError;
use crate::memory::CopyError;
use crate::pod_shm::PodShmError;
use crate::runc::{PidFileError, RuncError, UnfitRuntime};

/// The cause of a refusal.
#[derive(Debug, thiserror::Error, Problem)]
pub enum Refusal {
    #[error(transparent)]
    Config(#[from] firn_config::ConfigError),
    #[error(transparent)]
    Program(#[from] firn_config::ProgramError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Damaged(#[from] ImageError),
    #[error(transparent)]
    Image(Differs),
    #[error(
        "restores by a create call of Kubernetes are off: anyone who may create a pod could restore an image \
         of their own"
    )]
    #[problem(
        "FIRN-RESTORE-CRI",
        "cri = true under [restore] in the configuration allows them"
    )]
    Cri,
    #[error(transparent)]
    Named(#[from] NameError),
    #[error(transparent)]
    Signature(#[from] SignatureError),
    #[error("cannot unpack {layer}, the files that the container had written: {output}")]
    #[problem(
        "FIRN-RESTORE-FROM",
        "see that the archive is complete and that the disk is not full: image-cap under [restore] limits it"
    )]
    Layer { layer: PathBuf, output: String },
    #[error(transparent)]
    Node(#[from] firn_preflight::Refusal),
    #[error(transparent)]
    Unfit(#[from] firn_preflight::Unfit),
    #[error("cannot read the node's GPUs")]
    Gpu(#[from] WorkerError),
    #[error(transparent)]
    Interpose(#[from] InterposeError),
    #[error(transparent)]
    Decide(#[from] firn_remap::AssignmentError),
    #[error("cannot find out which GPUs the container may use")]
    Grant(#[from] firn_remap::GrantError),
    #[error(transparent)]
    Hook(#[from] HookError),
    #[error(transparent)]
    Look(#[from] LookError),
    #[error(transparent)]
    Memory(#[from] CopyError),
    #[error("the pod names an image that is not signed, and its memory is in the node's store")]
    #[problem(
        "FIRN-STORE-OWNER",
        "make the image with its memory (`firn.dev/bulk: inline`) or have it signed; images-from-store = \
         true under [restore] permits memory of the pod's own namespace"
    )]
    ImageFromStore,
    #[error("the image could not be read within {} s", limit.as_secs_f32())]
    #[problem(
        "FIRN-LOOK-TIMEOUT",
        "see whether the image's file system is slow, or raise verify under [deadlines] in the configuration"
    )]
    ImageLate { limit: Duration },
    #[error("the client no longer waits for the container")]
    #[problem("FIRN-ENDED", "the checkpoint can be used again")]
    Killed,
    #[error("cannot make {path}")]
    #[problem(
        "FIRN-SPEC-UNWRITABLE",
        "check that the bundle's file system is writable and not full"
    )]
    EmptyFile { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Edit(#[from] firn_oci::edit::EditError),
    #[error(transparent)]
    Criu(#[from] firn_oci::criu_config::CriuError),
    #[error("processes of the checkpoint had inherited GPUs, which CRIU restores only with firn's plugin")]
    #[problem("FIRN-CRIU-PLUGIN", firn_config::INSTALL_CRIU_PLUGIN)]
    NoPlugin,
    #[error("cannot use the container's spec")]
    Spec(#[from] firn_oci::SpecError),
    #[error(transparent)]
    Runtime(#[from] UnfitRuntime),
    #[error("the checkpoint holds GPU state and the container requests no GPU")]
    #[problem(
        "FIRN-GPU-COUNT",
        "grant the container as many GPUs as it had when it was checkpointed"
    )]
    NoGpuRequested,
    #[error("cgroup {path} is in use by other processes")]
    #[problem(
        "FIRN-CGROUP-BUSY",
        "stop the container that is in it, or restore under another id"
    )]
    CgroupBusy { path: String },
    #[error("cannot read the cgroup")]
    #[problem("FIRN-FREEZER", "see that the cgroup hierarchies are mounted")]
    Cgroup(#[from] CgroupError),
}

/// The cause of a restore that failed after it had begun.
#[derive(Debug, thiserror::Error, Problem)]
pub enum Cause {
    #[error("the container's cgroup is in use by other processes")]
    #[problem(
        "FIRN-CGROUP-BUSY",
        "stop the container that is in it, or restore under another id"
    )]
    CgroupBusy,
    #[error("the container was killed")]
    #[problem("FIRN-ENDED", "the checkpoint can be used again")]
    Killed,
    #[error(transparent)]
    Hook(#[from] HookError),
    #[error("cannot {what} within {} s", limit.as_secs_f32())]
    #[problem(
        "FIRN-LOOK-TIMEOUT",
        "see whether a file system of the container or of the image does not answer; the checkpoint can be \
         used again"
    )]
    Late { what: &'static str, limit: Duration },
    #[error("firn itself has failed; containerd's log has the panic")]
    #[problem(
        "FIRN-INTERNAL",
        "report it with containerd's log; the checkpoint can be used again"
    )]
    Panicked,
    #[error("cannot keep the journal")]
    Journal(#[from] JournalError),
    #[error(transparent)]
    PodShm(#[from] PodShmError),
    #[error("cannot write CRIU's configuration")]
    Criu(#[from] firn_oci::criu_config::CriuError),
    #[error("{}", Chain(error))]
    #[problem(
        "FIRN-RESTORE",
        "the log names what CRIU could not restore; the checkpoint can be used again"
    )]
    Runtime {
        error: RuncError,
        lines: Vec<String>,
        log: PathBuf,
    },
    #[error(transparent)]
    #[problem("FIRN-RESTORE", "try again; the checkpoint can be used again")]
    PidFile(#[from] PidFileError),
    #[error("the restored container has no process {pid} with a thread {tid}, which the manifest names")]
    #[problem("FIRN-MANIFEST-CORRUPT", "copy the checkpoint from its origin again")]
    ProcessMissing { pid: i32, tid: i32 },
    #[error("process {pid} of the restored container is not in the container's cgroup {path}")]
    #[problem(
        "FIRN-IMAGE-PRIVILEGE",
        "restore from where you trust the checkpoint's origin"
    )]
    Outside { pid: i32, path: String },
    #[error(transparent)]
    Exceeds(Differs),
    #[error("CUDA process {pid} of the restored container is not in the manifest")]
    #[problem("FIRN-MANIFEST-CORRUPT", "copy the checkpoint from its origin again")]
    Unlisted { pid: i32 },
    #[error("cannot use the restored container's cgroup")]
    #[problem("FIRN-FREEZER", "try again; the checkpoint can be used again")]
    Cgroup(#[from] CgroupError),
    #[error("cannot use the container's spec")]
    Spec(#[from] firn_oci::SpecError),
    #[error("cannot repair /dev of the container")]
    Dev(#[from] DevError),
    #[error(transparent)]
    Memory(#[from] CopyError),
    #[error(transparent)]
    Damaged(#[from] ImageError),
    #[error("firn-hook refused it: {}", .0.message)]
    #[problem(_0.remedy())]
    Script(ProblemReport),
    #[error("cannot let the restore threads run")]
    #[problem("FIRN-HOLD", "detach debuggers; the checkpoint can be used again")]
    Hold(#[from] TraceError),
    #[error("the driver call failed")]
    Gpu(#[from] WorkerError),
    #[error("cannot continue pid {pid}")]
    #[problem("FIRN-RESTORE", "try again; the checkpoint can be used again")]
    Continue { pid: i32, source: std::io::Error },
}

impl<E: Into<Cause>> From<Interrupted<E>> for Cause {
    fn from(interrupted: Interrupted<E>) -> Self {
        match interrupted {
            Interrupted::Cancelled => Self::Killed,
            Interrupted::Failed(error) => error.into(),
        }
    }
}

impl<E: Into<Refusal>> From<Interrupted<E>> for Refusal {
    fn from(interrupted: Interrupted<E>) -> Self {
        match interrupted {
            Interrupted::Cancelled => Self::Killed,
            Interrupted::Failed(error) => error.into(),
        }
    }
}

/// A restore that did not happen. The image is as it was and nothing of the container runs.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Refused: the OCI runtime was not called.
    #[error("{}", line(format_args!("cannot restore container {id} from {}", image.display()), cause))]
    Refused {
        id: String,
        image: PathBuf,
        cause: Refusal,
    },
    /// The restore of an image without GPU state failed: in the format of the stock shim.
    #[error("OCI runtime restore failed: {}{}", Chain(error), quoted(lines, log))]
    Plain {
        error: RuncError,
        lines: Vec<String>,
        log: PathBuf,
    },
    /// It failed after the OCI runtime was called, and was rolled back.
    #[error(
        "{}: restore of container {id} from {} failed and was rolled back: {}{}. hint: {}",
        cause.code(), image.display(), Chain(cause), cause.quote(), cause.hint()
    )]
    Failed {
        id: String,
        image: PathBuf,
        cause: Cause,
    },
}

impl RestoreError {
    /// What kind of failure it is, for the caller's own codes.
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Refused { .. } => FailureKind::Refused,
            Self::Failed { .. } => FailureKind::Aborted,
            Self::Plain { .. } => FailureKind::Unknown,
        }
    }
}

impl Cause {
    fn quote(&self) -> String {
        match self {
            Self::Runtime { lines, log, .. } => quoted(lines, log),
            _ => String::new(),
        }
    }
}
