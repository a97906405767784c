//! The stdin, stdout and stderr of a process.
//!
//! The steps for one process are [`StdioConfig::parse`]; [`StdioConfig::prepare`], which opens the client's
//! side and creates the process's side; [`Prepared::attach`] to the command of the OCI runtime; and once that
//! call has succeeded [`Prepared::start`], which returns the [`Copier`] that runs until the process and its
//! children have closed their ends.
//!
//! Invariants:
//! - Nothing is copied before `start`, so what a failing runtime writes to its stderr never reaches the
//!   client.
//! - Fifos, pipes and terminals are non-blocking here and driven by the reactor: a client that does not read
//!   blocks the writing process and nothing else. Only writes to regular files use the thread pool for
//!   blocking calls.
//! - The shim holds a read side of each output fifo and, until `close_stdin`, a write side of the stdin fifo:
//!   a restart of containerd causes neither an EPIPE nor an end of input for the process.

mod binary;
mod console;
mod copier;
mod endpoint;
#[cfg(any(test, fuzzing, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
mod prepare;
mod pump;
mod uri;

use std::path::PathBuf;
use std::time::Duration;
use std::{fmt, io};

pub use copier::Copier;
pub use copier::Patience;
pub use prepare::{Owner, Prepared};
pub use uri::{log_file, log_uri};

use uri::Target;

/// A client's stdio request, with the field names of the task service.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Container, or the container of the exec.
    pub id: &'a str,
    /// containerd namespace.
    pub namespace: &'a str,
    /// Fifo, or empty.
    pub stdin: &'a str,
    /// Fifo or URI, or empty. Its scheme applies to stderr too.
    pub stdout: &'a str,
    /// Fifo, or empty.
    pub stderr: &'a str,
    /// Whether the process gets a terminal.
    pub terminal: bool,
}

/// A parsed request. Nothing has been opened yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StdioConfig {
    id: String,
    namespace: String,
    stdin: Option<PathBuf>,
    target: Target,
    terminal: bool,
}

impl StdioConfig {
    /// Parses the request; refuses schemes other than null, fifo, file and binary.
    pub fn parse(request: &Request<'_>) -> Result<Self, Error> {
        Ok(Self {
            id: request.id.to_owned(),
            namespace: request.namespace.to_owned(),
            stdin: uri::fifo(request.stdin)?,
            target: Target::parse(request.stdout, request.stderr)?,
            terminal: request.terminal,
        })
    }
}

/// One of the three standard streams, or the terminal that replaces them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard input.
    Stdin,
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// The pty master.
    Terminal,
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stdin => "stdin",
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
            Self::Terminal => "terminal",
        })
    }
}

/// A failure to set up stdio.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The scheme of stdout's URI is not supported.
    #[error("unknown STDIO scheme {scheme}")]
    UnknownScheme { scheme: String },
    /// The URI names no file or program.
    #[error("stdio uri {uri} has no absolute path")]
    NoPath { uri: String },
    /// A fifo or file of the client could not be opened.
    #[error("cannot open {path} for the process's {stream}")]
    Open {
        stream: Stream,
        path: PathBuf,
        source: io::Error,
    },
    /// The pipe to the process could not be created.
    #[error("cannot make a pipe for the process's {stream}")]
    Pipe { stream: Stream, source: io::Error },
    /// The reactor refused a descriptor.
    #[error("cannot watch the process's {stream}")]
    Watch { stream: Stream, source: io::Error },
    /// The socket that receives the terminal could not be created.
    #[error("cannot make a console socket at {path}")]
    ConsoleSocket { path: PathBuf, source: io::Error },
    /// The path of the console socket does not fit a socket address.
    #[error(
        "console socket path {path} is longer than {limit} bytes. \
         hint: set XDG_RUNTIME_DIR to a shorter directory"
    )]
    ConsolePathTooLong { path: PathBuf, limit: usize },
    /// The runtime's connection to the console socket broke.
    #[error("cannot receive the terminal from the runtime")]
    ConsoleReceive { source: io::Error },
    /// The runtime connected and sent no descriptor.
    #[error("the runtime closed the console socket without sending a terminal")]
    ConsoleEmpty,
    /// The runtime did not send the terminal in time.
    #[error("the runtime sent no terminal within {limit:?}")]
    ConsoleTimeout { limit: Duration },
    /// The logging binary could not be started.
    #[error("cannot start the logging binary {program}")]
    LoggerSpawn { program: PathBuf, source: io::Error },
    /// The logging binary did not report in time that it is ready.
    #[error("the logging binary {program} was not ready within {limit:?}")]
    LoggerTimeout { program: PathBuf, limit: Duration },
    /// The logging binary closed its ready pipe where its protocol requires a byte.
    #[error("the logging binary {program} ended before it was ready")]
    LoggerNotReady { program: PathBuf },
}

#[cfg(test)]
mod tests;
