//! Why a pod is not checkpointed or restored, as the caller of CRI gets it.

use std::io;
use std::path::PathBuf;

use firn_host::{Problem, ProblemLine};
use tonic::{Code, Status};

use crate::containerd::CallError;
use crate::moves::is_firns;

#[derive(Debug, thiserror::Error, Problem)]
pub enum CriError {
    #[error("the call has no deadline")]
    #[problem("FIRN-POD", "set one: CRI has it so")]
    NoDeadline,
    #[error("the option {0:?} is not known")]
    #[problem("FIRN-POD", "leave options out: there are none")]
    Option(String),
    #[error("{what} is {given:?}")]
    #[problem("FIRN-POD", "see the comments of the message in k8s.io/cri-api")]
    Request { what: &'static str, given: String },
    #[error("no sandbox {id} is on this node")]
    #[problem("FIRN-NO-CONTAINER", "see `crictl pods`")]
    NoSandbox { id: String },
    #[error("container {id} is none of pod {sandbox} that runs")]
    #[problem("FIRN-NOT-RUNNING", "see `crictl ps --pod ID`")]
    NotRunning { id: String, sandbox: String },
    #[error("the sandbox {id} does not run")]
    #[problem("FIRN-NOT-RUNNING", "see `crictl pods`")]
    NoReady { id: String },
    #[error("container {id} of pod {sandbox} runs, and the request does not name it")]
    #[problem("FIRN-POD", "name all containers of the pod that run")]
    NotNamed { id: String, sandbox: String },
    #[error("{} is not below a directory in which checkpoints may be", path.display())]
    #[problem(
        "FIRN-POD",
        "name another directory, or add it to --checkpoints of `firn cri-pods`"
    )]
    Place { path: PathBuf },
    #[error("cannot use {}", path.display())]
    #[problem("FIRN-POD", "name a directory that is there and, for a new checkpoint, empty")]
    Directory { path: PathBuf, source: io::Error },
    #[error("{} is no checkpoint of a pod: {reason}", path.display())]
    #[problem("FIRN-POD", "name the directory that CheckpointPod has written")]
    Checkpoint { path: PathBuf, reason: String },
    #[error("the checkpoint has the containers {there}, and the request {wanted}")]
    #[problem("FIRN-POD-MISMATCH", "restore the pod that was checkpointed")]
    Names { there: String, wanted: String },
    #[error("{what} of container {name} was {there} in the checkpoint, and is {wanted}")]
    #[problem("FIRN-POD-MISMATCH", "restore the pod as it was checkpointed")]
    Mismatch {
        name: String,
        what: String,
        there: String,
        wanted: String,
    },
    #[error("the runtime handler {handler:?} does not restore pods: {reason}")]
    #[problem(
        "FIRN-POD",
        "use the handler that `firn install --containerd` has made, with the shim of this version"
    )]
    Handler { handler: String, reason: String },
    #[error("the caller's deadline has passed, or it has gone")]
    #[problem("FIRN-INTERRUPTED", "nothing is left of it; call again with a later deadline")]
    Left,
    #[error("{what} of container {id} cannot be read from containerd's record")]
    #[problem("FIRN-CONTAINERD", "see that containerd's version is one that firn supports")]
    Record { id: String, what: &'static str },
    #[error(transparent)]
    #[problem("FIRN-CONTAINERD", "see containerd's log; --address names its socket")]
    Call(#[from] CallError),
}

impl CriError {
    fn code_of_grpc(&self) -> Code {
        match self {
            Self::NoDeadline | Self::Option(_) | Self::Request { .. } | Self::Place { .. } => {
                Code::InvalidArgument
            }
            Self::NoSandbox { .. } => Code::NotFound,
            Self::NotRunning { .. }
            | Self::NoReady { .. }
            | Self::NotNamed { .. }
            | Self::Directory { .. }
            | Self::Checkpoint { .. }
            | Self::Names { .. }
            | Self::Mismatch { .. }
            | Self::Handler { .. } => Code::FailedPrecondition,
            Self::Left => Code::DeadlineExceeded,
            Self::Record { .. } => Code::Internal,
            Self::Call(CallError::Call { status, .. }) => status.code(),
            Self::Call(_) => Code::Unavailable,
        }
    }
}

impl From<CriError> for Status {
    fn from(error: CriError) -> Self {
        let message = match &error {
            // It has its own code and remedy.
            CriError::Call(CallError::Call { status, .. }) if is_firns(status.message()) => {
                status.message().to_owned()
            }
            error => ProblemLine(error).to_string(),
        };
        Self::new(error.code_of_grpc(), message)
    }
}
