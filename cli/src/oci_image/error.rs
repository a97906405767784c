//! Why a checkpoint image cannot be read or written.

use std::io;

use firn_host::Problem;
use firn_image::form::FormError;

use crate::containerd::CallError;

#[derive(Debug, thiserror::Error, Problem)]
pub enum ImageError {
    #[error("{what} is no checkpoint of a container: {why}")]
    #[problem(
        "FIRN-NO-CHECKPOINT",
        "make one with `firn checkpoint`; `ctr containers checkpoint` needs --task, and `ctr images export` \
         needs --local --skip-manifest-json"
    )]
    NoCheckpoint { what: String, why: String },
    #[error("containerd has no image {name}")]
    #[problem(
        "FIRN-NO-IMAGE",
        "see `ctr images list` and --namespace; `ctr images pull` brings it"
    )]
    NoImage { name: String },
    #[error("containerd does not have all of image {name}: {digest} is missing")]
    #[problem(
        "FIRN-NO-IMAGE",
        "`ctr images pull` brings it; the other node may have it already"
    )]
    NotWhole { name: String, digest: String },
    #[error("image {name} is not the one that the container began with, whose layers are {chain}")]
    #[problem(
        "FIRN-BASE-MOVED",
        "its tag was moved: pull that image by its digest and give it the name again (`ctr images tag`)"
    )]
    BaseMoved { name: String, chain: String },
    #[error("cannot {action}")]
    #[problem("FIRN-FILE", "see the cause, and `df` of that file system")]
    File { action: String, source: io::Error },
    #[error("cannot unpack {digest}")]
    #[problem(
        "FIRN-IMAGE-UNREADABLE",
        "take the checkpoint from its origin again; it has nothing but CRIU's files, which are regular files"
    )]
    Entry { digest: String, source: io::Error },
    #[error(transparent)]
    Form(#[from] FormError),
    #[error(transparent)]
    #[problem("FIRN-CONTAINERD", "see containerd's log; --address names its socket")]
    Call(#[from] CallError),
}

impl ImageError {
    /// For a failure to do something with a file.
    pub fn file(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::File { action, source }
    }
}
