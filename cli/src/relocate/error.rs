//! Why a container was not moved.

use std::io;

use firn_host::{Problem, ProblemLine, ProblemReport};
use firn_transaction::transfer::{StaysHere, Transfer};

use crate::checkpoint::CheckpointError;
use crate::containerd::CallError;
use crate::oci_image::ImageError;

#[derive(Debug, thiserror::Error, Problem)]
pub enum MoveError {
    #[error("cannot run firn on {target}: {message}")]
    #[problem(
        "FIRN-MOVE-SSH",
        "`ssh USER@HOST firn --version` has to work without a password and without a question; install \
         firn of this version there, or name it by --remote-firn"
    )]
    Ssh { target: String, message: String },
    #[error("{target} cannot take container {id}: {why}")]
    #[problem(
        "FIRN-MOVE-TARGET",
        "as the message describes; --name and --gpus choose others, and --dry-run only checks"
    )]
    Target { target: String, id: String, why: String },
    #[error("{}", .0.message)]
    #[problem(_0.remedy())]
    Source(ProblemReport),
    #[error("container {id} was not restored on {target}: {message}")]
    #[problem(
        "FIRN-MOVE-FAILED",
        "the container continues here; the message is that of the other node"
    )]
    Failed {
        target: String,
        id: String,
        message: String,
    },
    #[error(
        "{target} did not answer, the connection was lost or the move was interrupted, while container {id} \
         may have begun to run there"
    )]
    #[problem(
        "FIRN-MOVE-UNKNOWN",
        "it is paused here. Look there with `ctr tasks list`: if it runs there, `ctr tasks delete --force \
         ID` here; if not, `ctr tasks resume ID` here"
    )]
    Unknown { target: String, id: String },
    #[error("container {id} was started on {target}, and has ended there with status {status}")]
    #[problem(
        "FIRN-MOVE-ENDED",
        "the container continues here. Its output and containerd's log there have the reason; \
         `ctr tasks delete ID` and `ctr containers delete ID` there remove what is left"
    )]
    Died { target: String, id: String, status: u32 },
    #[error("container {id} was started on {target}, and has ended there without an error")]
    #[problem(
        "FIRN-MOVE-ENDED",
        "it is paused here. If its work is done, `ctr tasks delete --force ID` here; if not, \
         `ctr tasks resume ID` here"
    )]
    Finished { target: String, id: String },
    #[error("the checkpoint of container {id} has not ended after {seconds} s")]
    #[problem(
        "FIRN-MOVE-LATE",
        "the container continues here; see containerd's log, and [deadlines] in firn's configuration"
    )]
    Late { id: String, seconds: u64 },
    #[error("container {id} runs on {target}, and its source could not be removed here: {message}")]
    #[problem(
        "FIRN-MOVE-LEFT",
        "it is paused here: never resume it; `ctr tasks delete --force ID` and `ctr containers delete ID` \
         remove it"
    )]
    Left {
        target: String,
        id: String,
        message: String,
    },
    #[error("the move of container {id} was interrupted")]
    #[problem("FIRN-INTERRUPTED", "the container continues here, and nothing is left there")]
    Interrupted { id: String },
    #[error("container {id} is one of nerdctl, which has files of it on this node")]
    #[problem(
        "FIRN-MOVE-TARGET",
        "`firn checkpoint ID FILE`; on the other node `nerdctl create` with its options and \
         `firn restore FILE --into NAME`"
    )]
    Nerdctl { id: String },
    #[error("container {id} is one of Kubernetes'")]
    #[problem("FIRN-MOVE-TARGET", "move its pod: `firn drain NODE`")]
    Kubernetes { id: String },
    #[error("cannot handle signals")]
    #[problem("FIRN-FILE", "see the cause")]
    Signals(#[from] io::Error),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    #[problem("FIRN-CONTAINERD", "see containerd's log; --address names its socket")]
    Call(#[from] CallError),
}

impl MoveError {
    /// The proof that the source may continue; none: its copy may run, or have done its work.
    pub fn stays_here(&self, transfer: &Transfer) -> Option<StaysHere> {
        match self {
            Self::Failed { .. } => Some(StaysHere::refused()),
            Self::Died { status, .. } => StaysHere::died(*status),
            Self::Unknown { .. } | Self::Finished { .. } => None,
            _ => transfer.stays_here(),
        }
    }

    /// Whether the copy may run, or has done its work: the error names what to do.
    pub fn may_run_there(&self) -> bool {
        matches!(
            self,
            Self::Unknown { .. } | Self::Finished { .. } | Self::Left { .. }
        )
    }

    /// Whether the move is refused and nothing was touched, as [`CheckpointError::is_refusal`].
    pub fn is_refusal(&self, has_begun: bool) -> bool {
        match self {
            Self::Checkpoint(error) => error.is_refusal(has_begun),
            Self::Call(call) | Self::Image(ImageError::Call(call)) => call.is_refusal(),
            Self::Ssh { .. } | Self::Source(_) | Self::Interrupted { .. } | Self::Signals(_) => false,
            _ => !has_begun,
        }
    }

    /// With its code and hint, unless the shim has given both.
    pub fn shown(&self) -> String {
        match self {
            Self::Checkpoint(error) => error.shown(),
            error => ProblemLine(error).to_string(),
        }
    }
}
