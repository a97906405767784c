//! What the task service answers when it cannot do what it was asked.
//!
//! The texts of the plain variants are those of containerd's own shim, because clients look for them.

use firn_config::text::printable;
use firn_process::cgroup;
use firn_transaction::checkpoint::FailureKind;
use nix::errno::Errno;
use ttrpc::Code;

use crate::mounts;
use firn_host::{Absent, Chain};
use firn_transaction::checkpoint::park::ParkError;
use firn_transaction::checkpoint::{CheckpointError, UnknownOverride};
use firn_transaction::container::{Action, ExecRefused, InitState, NotAllowed};
use firn_transaction::create::PrepareError;
use firn_transaction::layer::LayerError;
use firn_transaction::options;
use firn_transaction::restore::RestoreError;
use firn_transaction::runc::{PidFileError, RuncError, RuntimeMessage};
use firn_transaction::{history, stdio};

/// A request that failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TaskError {
    #[error("container not created: not found")]
    NoContainer,
    #[error("container {id}: already exists")]
    ContainerExists { id: String },
    #[error("process does not exist {exec_id}: not found")]
    NoProcess { exec_id: String },
    #[error("id {exec_id}: already exists")]
    ExecExists { exec_id: String },
    #[error("cannot decode the process")]
    ExecSpec(#[source] serde_json::Error),
    /// CloseIO alone reports an unknown id with an unknown code.
    #[error("process does not exist {exec_id}: not found")]
    NoStdin { exec_id: String },
    #[error("cannot resize a stopped container")]
    Resize,
    #[error("process already finished: not found")]
    Finished,
    #[error("no such container: not found")]
    Absent,
    #[error("unknown error after kill")]
    Kill(#[source] RuntimeMessage),
    #[error("exec kill error: unknown error after kill: {}", .0.desc().to_lowercase())]
    KillExec(Errno),
    #[error("process not created: failed precondition")]
    NotStarted,
    #[error("cannot {verb} a {state} process")]
    ExecState { verb: &'static str, state: &'static str },
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    #[error(transparent)]
    ExecRefused(#[from] ExecRefused),
    #[error("OCI runtime {verb} failed")]
    Runtime {
        verb: &'static str,
        #[source]
        source: RuncError,
    },
    #[error("failed to delete task")]
    Delete(#[source] RuncError),
    #[error("failed rootfs umount")]
    Unmount(#[source] firn_process::unmount::UnmountError),
    #[error(transparent)]
    Message(#[from] RuntimeMessage),
    #[error("cannot decode the options")]
    Options(#[from] crate::options::DecodeError),
    #[error("cannot keep the options")]
    OptionsFile(#[from] options::FileError),
    #[error("failed to mount rootfs component")]
    Mount(#[from] mounts::MountError),
    #[error("failed to create init process I/O")]
    Stdio(#[from] stdio::Error),
    #[error("cannot read the cgroup")]
    Cgroup(#[from] cgroup::CgroupError),
    #[error("cannot {what}")]
    File {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error(transparent)]
    PidFile(#[from] PidFileError),
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Park(#[from] ParkError),
    #[error(
        "FIRN-PAUSE-SETTING: the annotation {name} is {value:?}. \
         hint: docs/reference/annotations.md lists the values"
    )]
    Annotation { name: &'static str, value: String },
    #[error(
        "FIRN-POD: the annotation firn.dev/checkpoint-pod has no image directory for each container. \
         hint: firn checkpoint sends it"
    )]
    PodSetting,
    #[error("{}", firn_host::ProblemLine(_0))]
    Override(#[from] UnknownOverride),
    #[error("{}", of_pod(id, cause))]
    Pod { id: String, cause: Box<TaskError> },
    #[error("{}", firn_host::ProblemLine(_0))]
    Layer(#[from] LayerError),
    #[error(transparent)]
    Restore(#[from] RestoreError),
    #[error(
        "FIRN-BUSY: cannot update container {id}: another operation, such as its checkpoint, has been under \
         way for {} s. \
         hint: try again when that is over",
        waited.as_secs()
    )]
    Busy { id: String, waited: std::time::Duration },
    #[error("the shim is shutting down")]
    Closing,
}

/// The gRPC code of a transaction's failure.
fn code_of(kind: FailureKind) -> Code {
    match kind {
        FailureKind::Refused => Code::FAILED_PRECONDITION,
        FailureKind::Invalid => Code::INVALID_ARGUMENT,
        FailureKind::Aborted => Code::ABORTED,
        FailureKind::Lost => Code::DATA_LOSS,
        FailureKind::Internal => Code::INTERNAL,
        FailureKind::Unknown => Code::UNKNOWN,
    }
}

impl TaskError {
    /// The error of a call of the OCI runtime.
    pub(super) fn runtime(verb: &'static str) -> impl FnOnce(RuncError) -> Self {
        move |source| Self::Runtime { verb, source }
    }

    /// firn's code, if it has one: what its text begins with, for clients too.
    pub(super) fn of_firn(&self) -> Option<String> {
        history::code_of(self)
    }

    fn code(&self) -> Code {
        match self {
            Self::NoContainer | Self::NoProcess { .. } | Self::Finished | Self::Absent => Code::NOT_FOUND,
            Self::NotAllowed(NotAllowed {
                action: Action::Delete,
                state: InitState::Deleted,
            }) => Code::NOT_FOUND,
            Self::OptionsFile(options::FileError::Write { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                Code::NOT_FOUND
            }
            Self::ContainerExists { .. } | Self::ExecExists { .. } => Code::ALREADY_EXISTS,
            Self::NotAllowed(NotAllowed {
                state: InitState::Suspended,
                ..
            }) => Code::FAILED_PRECONDITION,
            Self::NotStarted | Self::ExecRefused(ExecRefused::InitGone { .. }) => Code::FAILED_PRECONDITION,
            Self::Pod { cause, .. } => cause.code(),
            Self::Options(_) | Self::Annotation { .. } | Self::PodSetting | Self::Override(_) => {
                Code::INVALID_ARGUMENT
            }
            Self::Runtime { source, .. } if source.is_absent() => Code::NOT_FOUND,
            Self::Cgroup(error) if error.is_absent() => Code::NOT_FOUND,
            Self::Prepare(PrepareError::JobHook(_)) => Code::INVALID_ARGUMENT,
            Self::Prepare(PrepareError::GpuRequest(_)) => Code::FAILED_PRECONDITION,
            Self::Checkpoint(error) | Self::Prepare(PrepareError::Checkpoint(error)) => code_of(error.kind()),
            Self::Park(error) => code_of(error.kind()),
            Self::Restore(error) | Self::Prepare(PrepareError::Restore(error)) => code_of(error.kind()),
            Self::Busy { .. } | Self::Closing => Code::UNAVAILABLE,
            // As the stock shim answers with an error that has no code.
            _ => Code::UNKNOWN,
        }
    }
}

/// The error of a container of a pod, with a code: those of the OCI runtime have none.
fn of_pod(id: &str, error: &TaskError) -> String {
    let text = Chain(error).to_string();
    if text.contains("FIRN-") {
        text
    } else {
        format!(
            "FIRN-POD: cannot checkpoint container {id}: {text}. \
             hint: see containerd's log; every container of the pod continues"
        )
    }
}

/// Line ends stay in the text, which clients know from containerd's own shim.
impl From<TaskError> for ttrpc::Error {
    fn from(error: TaskError) -> Self {
        let text = Chain(&error).to_string();
        ttrpc::Error::RpcStatus(ttrpc::get_status(error.code(), printable(&text)))
    }
}
