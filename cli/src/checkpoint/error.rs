//! Why there is no checkpoint of a container.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use firn_host::durable::NotOnDisk;
use firn_host::{Problem, ProblemLine};

use crate::containerd::CallError;
use crate::moves::is_firns;
use crate::oci_image::ImageError;
use crate::place::Ambiguous;
use crate::serving::START_UNDER_FIRN;
use crate::stored::CompareError;

#[derive(Debug, thiserror::Error, Problem)]
pub enum CheckpointError {
    #[error("containerd knows no container {id} in namespace {namespace}")]
    #[problem("FIRN-NO-CONTAINER", "see `ctr containers list` and --namespace")]
    NoContainer { id: String, namespace: String },
    #[error("several containers are called {word}")]
    #[problem(
        "FIRN-SEVERAL-CONTAINERS",
        "give the whole id: `ctr containers list` shows them"
    )]
    Several { word: String },
    #[error("container {id} does not run")]
    #[problem(
        "FIRN-NOT-RUNNING",
        "only a running or paused container can be checkpointed: see `ctr tasks list`"
    )]
    NotRunning { id: String },
    #[error("container {id} runs under {}, which is not firn's shim, and has GPUs", shim.display())]
    #[problem("FIRN-RUNTIME-OTHER", START_UNDER_FIRN)]
    OtherShim { id: String, shim: PathBuf },
    #[error("another command of firn checkpoints or moves container {id}")]
    #[problem("FIRN-BUSY", "try again when it has ended; `firn ps` shows how far it is")]
    Busy { id: String },
    #[error("cannot lock the container")]
    #[problem("FIRN-FILE", "run it as root; `/run` has to be writable")]
    Lock(#[source] io::Error),
    #[error("container {id} was made without an image or without a snapshot")]
    #[problem(
        "FIRN-NO-IMAGE",
        "checkpoint it into a directory (`firn checkpoint ID ./DIR`), and restore it into a container with \
         the same root file system"
    )]
    NoBase { id: String },
    #[error("{what} is there already")]
    #[problem(
        "FIRN-EXISTS",
        "take another name, or remove it: `ctr images rm --sync NAME`, `rm -r PATH`"
    )]
    Exists { what: String },
    #[error("cannot make {}", path.display())]
    #[problem(
        "FIRN-FILE",
        "name a place whose parent directory is there and can be written"
    )]
    Make { path: PathBuf, source: io::Error },
    #[error("the checkpoint of container {id} needs a store, and was to have all memory")]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "its shim is of an older firn: create the container again with the annotation firn.dev/bulk=inline"
    )]
    NotWhole { id: String },
    #[error(transparent)]
    Manifest(#[from] firn_image::manifest::ManifestError),
    #[error(transparent)]
    Memory(#[from] CompareError),
    #[error("the checkpoint of container {id} was interrupted")]
    #[problem("FIRN-INTERRUPTED", "nothing is left of it, and the container is as it was")]
    Interrupted { id: String },
    #[error("the shim of container {id} makes no image directories: {message}")]
    #[problem(
        "FIRN-CHECKPOINT-CLIENT",
        "run the container with io.containerd.firn.v2 and the shim of this version, or name an image or a \
         file in the place of the directory"
    )]
    Shim { id: String, message: String },
    #[error("container {id} stands still and cannot be resumed: {message}")]
    #[problem("FIRN-CONTAINERD", "resume it: `ctr tasks resume ID`")]
    StillPaused { id: String, message: String },
    #[error("the checkpoint is given up: {what} has taken {} s", limit.as_secs())]
    #[problem(
        "FIRN-DUMP",
        "nothing is left of it, and the container is as it was; see whether the disk of the checkpoint and \
         that of the store answer, or raise [deadlines] criu-dump"
    )]
    Slow { what: &'static str, limit: Duration },
    #[error("container {id} was paused and cannot be ended: {message}")]
    #[problem("FIRN-CONTAINERD", "end it: `ctr tasks kill --signal SIGKILL --all ID`")]
    NotEnded { id: String, message: String },
    #[error(
        "checkpoint {checkpoint} is complete, but container {id} was paused and cannot be ended: {message}"
    )]
    #[problem(
        "FIRN-CONTAINERD",
        "end it: `ctr tasks kill --signal SIGKILL --all ID`, or let it run on: `ctr tasks resume ID`"
    )]
    Complete {
        checkpoint: String,
        id: String,
        message: String,
    },
    #[error(
        "the checkpoint is complete, but container {id} was resumed or started again meanwhile, and stays so"
    )]
    #[problem(
        "FIRN-FREEZER",
        "what it has done since is not in the checkpoint: make another one once nobody resumes the container"
    )]
    Resumed { id: String },
    #[error("somebody has resumed container {id} meanwhile, and it stays as it is")]
    #[problem(
        "FIRN-FREEZER",
        "nothing has left it: try again once nobody resumes the container"
    )]
    NotOurs { id: String },
    #[error("cannot handle signals")]
    #[problem("FIRN-FILE", "see the cause")]
    Signals(#[from] io::Error),
    #[error("the checkpoint is lost, and the container is as it was")]
    #[problem("FIRN-DUMP", "see whether its file system has room and works (`dmesg`)")]
    NotOnDisk(#[from] NotOnDisk),
    #[error(transparent)]
    Location(#[from] Ambiguous),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    #[problem("FIRN-CONTAINERD", "see containerd's log; --address names its socket")]
    Call(#[from] CallError),
}

impl CheckpointError {
    /// After a checkpoint that is complete.
    pub fn with(self, checkpoint: String) -> Self {
        match self {
            Self::NotEnded { id, message } => Self::Complete {
                checkpoint,
                id,
                message,
            },
            Self::NotOurs { id } => Self::Resumed { id },
            error => error,
        }
    }

    /// Whether the checkpoint is refused and nothing was touched, by firn or by the shim. `has_begun`: the
    /// container was paused, or the shim was called.
    pub fn is_refusal(&self, has_begun: bool) -> bool {
        match self {
            Self::Call(call) | Self::Image(ImageError::Call(call)) => call.is_refusal(),
            Self::Lock(_) | Self::Interrupted { .. } | Self::Signals(_) | Self::Slow { .. } => false,
            _ => !has_begun,
        }
    }

    /// With its code and hint, unless the shim has given both.
    pub fn shown(&self) -> String {
        let call = match self {
            Self::Call(call) | Self::Image(ImageError::Call(call)) => Some(call),
            _ => None,
        };
        match call {
            Some(CallError::Call { status, .. }) if is_firns(status.message()) => status.message().to_owned(),
            _ => ProblemLine(self).to_string(),
        }
    }
}
