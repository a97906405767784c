//! Failures that are logged and change nothing else: the work goes on without what has failed.

use std::fmt::Arguments;
use std::{error, io};

use firn_host::Chain;

pub(crate) trait OrWarn<T> {
    /// Logs a failure and its causes after `what`, such as "cannot remove the journal".
    fn or_warn(self, what: Arguments<'_>) -> Option<T>;
}

impl<T, E: error::Error> OrWarn<T> for Result<T, E> {
    fn or_warn(self, what: Arguments<'_>) -> Option<T> {
        self.inspect_err(|error| log::warn!("{what}: {}", Chain(error)))
            .ok()
    }
}

pub(crate) trait UnlessAbsent {
    /// No failure if there is nothing (any more) to work on.
    fn unless_absent(self) -> Self;
}

impl UnlessAbsent for io::Result<()> {
    fn unless_absent(self) -> Self {
        self.or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        })
    }
}
