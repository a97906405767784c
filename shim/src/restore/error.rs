//! Why a restore was refused or failed, with the code and the remedy that users see.

use std::path::PathBuf;
use std::time::Duration;

use firn_oci::devnodes::DevError;
use firn_oci::manifest::{ImageError, ManifestError};
use firn_oci::script::Refusal as ScriptRefusal;
use ttrpc::Code;

use super::compare::Differs;
use crate::cgroup::CgroupError;
use crate::hold::HoldError;
use crate::journal::JournalError;
use crate::logger::Chain;
use crate::look::LookError;
use crate::runc::{PidFileError, RuncError};
use crate::worker::GpuError;

/// The cause of a refusal.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
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
        "restores by a create call of Kubernetes are off: whoever may make a pod could restore an image of theirs"
    )]
    Cri,
    #[error("cannot read the node's GPUs")]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    Decide(#[from] firn_oci::DecideError),
    #[error(transparent)]
    Look(#[from] LookError),
    #[error("the image could not be read within {} s", limit.as_secs_f32())]
    ImageLate { limit: Duration },
    #[error("nobody waits for the container any more")]
    Killed,
    #[error("cannot make {}", path.display())]
    EmptyFile { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Edit(#[from] firn_oci::edit::EditError),
    #[error(transparent)]
    Criu(#[from] firn_oci::criu::CriuError),
    #[error("cannot use the container's spec")]
    Spec(#[from] firn_oci::SpecError),
    #[error("{runtime} cannot do it")]
    Runtime { runtime: &'static str },
    #[error("the checkpoint holds GPU state and the container asks for no GPU")]
    NoGpuAsked,
    #[error("cgroup {path} is in use by other processes")]
    CgroupBusy { path: String },
    #[error("cannot look at the cgroup")]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Job(#[from] firn_oci::job::JobError),
}

/// The cause of a restore that had begun.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Cause {
    #[error("the container's cgroup is in use by other processes")]
    CgroupBusy,
    #[error("the container was killed")]
    Killed,
    #[error("cannot {what} within {} s", limit.as_secs_f32())]
    Late { what: &'static str, limit: Duration },
    #[error("firn itself has failed, as containerd's log tells")]
    Panicked,
    #[error("cannot keep the journal")]
    Journal(#[from] JournalError),
    #[error("cannot write CRIU's configuration")]
    Criu(#[from] firn_oci::criu::CriuError),
    #[error("{}", Chain(error))]
    Runtime {
        error: RuncError,
        lines: Vec<String>,
        log: PathBuf,
    },
    #[error(transparent)]
    PidFile(#[from] PidFileError),
    #[error("the restored container has no process {pid} with a thread {tid}, which the manifest names")]
    ProcessMissing { pid: i32, tid: i32 },
    #[error("process {pid} of the restored container is not in the container's cgroup {path}")]
    Outside { pid: i32, path: String },
    #[error(transparent)]
    Exceeds(Differs),
    #[error("CUDA process {pid} of the restored container is not in the manifest")]
    Unlisted { pid: i32 },
    #[error("cannot use the restored container's cgroup")]
    Cgroup(#[from] CgroupError),
    #[error("cannot use the container's spec")]
    Spec(#[from] firn_oci::SpecError),
    #[error("cannot repair /dev of the container")]
    Dev(#[from] DevError),
    #[error("firn-hook has ended it")]
    Script(#[source] ScriptRefusal),
    #[error("cannot let the restore threads run")]
    Hold(#[from] HoldError),
    #[error("the driver refused")]
    Gpu(#[from] GpuError),
    #[error("cannot continue pid {pid}")]
    Continue {
        pid: i32,
        #[source]
        source: std::io::Error,
    },
}

/// A restore that did not happen. The image is as it was and nothing of the container runs.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoreError {
    /// Before the runtime was called.
    #[error("{}: cannot restore from {}: {}. hint: {}", cause.code(), image.display(), Chain(cause), cause.hint())]
    Refused { image: PathBuf, cause: Refusal },
    /// As the stock shim tells it, for an image without GPU state.
    #[error("OCI runtime restore failed: {}{}", Chain(error), quoted(lines, log))]
    Plain {
        error: RuncError,
        lines: Vec<String>,
        log: PathBuf,
    },
    /// After it was called; everything that was made is gone again.
    #[error(
        "{}: restore from {} failed and was undone: {}{}. hint: {}",
        cause.code(), image.display(), Chain(cause), cause.quote(), cause.hint()
    )]
    Failed { image: PathBuf, cause: Cause },
}

fn quoted(lines: &[String], log: &std::path::Path) -> String {
    let lines: String = lines.iter().map(|line| format!("; {line}")).collect();
    format!("{lines} (log: {})", log.display())
}

impl RestoreError {
    /// Code of the RPC's answer.
    pub(crate) fn rpc_code(&self) -> Code {
        match self {
            Self::Refused { .. } => Code::FAILED_PRECONDITION,
            Self::Failed { .. } => Code::ABORTED,
            Self::Plain { .. } => Code::UNKNOWN,
        }
    }
}

impl Refusal {
    fn code(&self) -> &str {
        match self {
            Self::Config(error) => error.code(),
            Self::Program(error) => error.code(),
            Self::Manifest(error) => error.code(),
            Self::Damaged(error) => error.code(),
            Self::Image(error) => error.code(),
            Self::Cri => "FIRN-RESTORE-CRI",
            Self::Gpu(error) => error.code(),
            Self::Decide(error) => error.code(),
            Self::Look(error) => error.code(),
            Self::ImageLate { .. } => "FIRN-LOOK-TIMEOUT",
            Self::Killed => "FIRN-ENDED",
            Self::EmptyFile { .. } => "FIRN-SPEC-UNWRITABLE",
            Self::Edit(error) => error.code(),
            Self::Criu(error) => error.code(),
            Self::Spec(error) => error.code(),
            Self::Runtime { .. } => "FIRN-RUNTIME",
            Self::NoGpuAsked => "FIRN-GPU-COUNT",
            Self::CgroupBusy { .. } => "FIRN-CGROUP-BUSY",
            Self::Cgroup(_) => "FIRN-FREEZER",
            Self::Job(error) => error.code(),
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Config(error) => error.hint(),
            Self::Program(error) => error.hint(),
            Self::Manifest(error) => error.hint(),
            Self::Damaged(error) => error.hint(),
            Self::Image(error) => error.hint(),
            Self::Cri => "cri = true under [restore] in the configuration allows them",
            Self::Gpu(error) => error.hint(),
            Self::Decide(error) => error.hint(),
            Self::Look(error) => error.hint(),
            Self::ImageLate { .. } => {
                "see whether the image's file system is slow, or raise verify under [deadlines] in the configuration"
            }
            Self::Killed => "the checkpoint can be used again",
            Self::EmptyFile { .. } => "check that the bundle's file system is writable and not full",
            Self::Edit(error) => error.hint(),
            Self::Criu(error) => error.hint(),
            Self::Spec(error) => error.hint(),
            Self::CgroupBusy { .. } => "stop the container that is in it, or restore under another id",
            Self::Cgroup(_) => "see that the cgroup hierarchies are mounted",
            Self::Runtime { .. } => {
                "run the container with runc: leave BinaryName out of the runtime's options"
            }
            Self::Job(error) => error.hint(),
            Self::NoGpuAsked => "grant the container as many GPUs as it had when it was checkpointed",
        }
    }
}

impl Cause {
    fn code(&self) -> &str {
        match self {
            Self::Criu(error) => error.code(),
            Self::Runtime { .. } | Self::PidFile(_) | Self::Continue { .. } => "FIRN-RESTORE",
            Self::CgroupBusy => "FIRN-CGROUP-BUSY",
            Self::Killed => "FIRN-ENDED",
            Self::Late { .. } => "FIRN-LOOK-TIMEOUT",
            Self::Panicked => "FIRN-INTERNAL",
            Self::Journal(error) => error.code(),
            Self::ProcessMissing { .. } | Self::Unlisted { .. } => "FIRN-MANIFEST-CORRUPT",
            Self::Outside { .. } => "FIRN-IMAGE-PRIVILEGE",
            Self::Exceeds(error) => error.code(),
            Self::Cgroup(_) => "FIRN-FREEZER",
            Self::Spec(error) => error.code(),
            Self::Dev(error) => error.code(),
            Self::Script(refusal) => &refusal.code,
            Self::Hold(_) => "FIRN-HOLD",
            Self::Gpu(error) => error.code(),
        }
    }

    fn quote(&self) -> String {
        match self {
            Self::Runtime { lines, log, .. } => quoted(lines, log),
            _ => String::new(),
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Criu(error) => error.hint(),
            Self::Runtime { .. } => {
                "the log names what CRIU could not restore; the checkpoint can be used again"
            }
            Self::PidFile(_) | Self::Continue { .. } | Self::Cgroup(_) => {
                "try again; the checkpoint can be used again"
            }
            Self::CgroupBusy => "stop the container that is in it, or restore under another id",
            Self::Killed => "the checkpoint can be used again",
            Self::Late { .. } => {
                "see whether a file system of the container or of the image does not answer; the checkpoint can be used again"
            }
            Self::Panicked => "report it with containerd's log; the checkpoint can be used again",
            Self::Journal(error) => error.hint(),
            Self::ProcessMissing { .. } | Self::Unlisted { .. } => {
                "copy the checkpoint from its origin again"
            }
            Self::Outside { .. } => "restore from where you trust the checkpoint's origin",
            Self::Exceeds(error) => error.hint(),
            Self::Spec(error) => error.hint(),
            Self::Dev(error) => error.hint(),
            Self::Script(refusal) => &refusal.hint,
            Self::Hold(_) => "detach debuggers; the checkpoint can be used again",
            Self::Gpu(error) => error.hint(),
        }
    }
}
