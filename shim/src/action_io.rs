//! What actions of the command line share: stdin, stdout and the runtime.

use std::io::{self, Read, Write};

use tokio::runtime::{Builder, Runtime};

use crate::error::{ActionError, failed};

/// What an action finds on stdin, up to a limit.
pub(crate) fn read_stdin(limit: u64) -> Result<Vec<u8>, ActionError> {
    let mut stdin = Vec::new();
    let read = io::stdin().take(limit).read_to_end(&mut stdin);
    read.map(|_| stdin).map_err(failed("read stdin"))
}

/// Answers on stdout.
pub(crate) fn print(answer: &[u8]) -> Result<(), ActionError> {
    io::stdout().write_all(answer).map_err(failed("write stdout"))
}

/// The runtime of an action: everything asynchronous runs on this thread.
pub(crate) fn runtime() -> Result<Runtime, ActionError> {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.map_err(failed("start the runtime"))
}
