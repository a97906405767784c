//! Why an action of the command line failed.

use std::io;
use std::path::{Path, PathBuf};

use crate::args::ArgsError;
use crate::options::DecodeError;
use firn_transaction::look::ChildError;

/// An action that failed.
#[derive(Debug, thiserror::Error)]
pub enum ActionError {
    /// The command line makes no sense.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// `look` failed.
    #[error(transparent)]
    Look(#[from] ChildError),
    /// A call of the system failed.
    #[error("cannot {what}")]
    Io {
        /// What, with the file if it was one.
        what: String,
        /// Cause.
        source: io::Error,
    },
    /// stdin of `start` holds something else than a request.
    #[error("cannot understand the request on stdin")]
    Request(#[source] DecodeError),
    /// stdin of `-info` holds no options.
    #[error("cannot understand the options on stdin")]
    Options(#[source] DecodeError),
    /// The container's spec is no JSON.
    #[error("cannot understand {path}")]
    Spec {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: serde_json::Error,
    },
    /// The directory for the socket is too deep.
    #[error("socket path {path} is longer than {limit} bytes. hint: configure a shorter socket directory")]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// Longest allowed.
        limit: usize,
    },
    /// Core scheduling was asked for and refused.
    #[error("cannot make a core scheduling group. hint: it needs a kernel with CONFIG_SCHED_CORE and SMT")]
    SchedCore(#[source] io::Error),
    /// The cgroup of the `ShimCgroup` option does not exist.
    #[error("no cgroup {0:?} for the shim. hint: make it, or remove ShimCgroup from the runtime's options")]
    NoCgroup(String),
    /// The OCI runtime is not installed.
    #[error(
        "no OCI runtime {0:?} found. hint: install it, or name it as BinaryName in the runtime's options"
    )]
    NoRuntime(String),
    /// The answer cannot be encoded.
    #[error("cannot encode the answer")]
    Encode(#[source] protobuf::Error),
    /// The inherited descriptor is not what `start` passes on.
    #[error("no listener on descriptor {fd} hint: the shim is started by containerd with the action start")]
    Listener {
        /// The descriptor.
        fd: i32,
        /// Cause.
        source: io::Error,
    },
    /// The RPC library refused to serve.
    #[error("cannot serve the task API")]
    Serve(#[source] ttrpc::Error),
}

/// The error of a call that was to do `what`.
pub(crate) fn failed<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> ActionError {
    move |error| ActionError::Io {
        what: what.into(),
        source: error.into(),
    }
}

/// The error of a call that was to do `what` with a file.
pub(crate) fn failed_at<E: Into<io::Error>>(
    what: &str,
    path: impl AsRef<Path>,
) -> impl FnOnce(E) -> ActionError {
    failed(format!("{what} {}", path.as_ref().display()))
}
