//! Failures that are logged and change nothing else: the work continues without what has failed.

use std::error;
use std::fmt::Arguments;

use firn_host::Chain;

pub trait OrWarn<T> {
    /// Logs a failure and its causes after `what`, such as "cannot remove the journal".
    fn or_warn(self, what: Arguments<'_>) -> Option<T>;

    /// Logs a failure, whose message is complete, and its causes.
    fn or_log(self) -> Option<T>;
}

impl<T, E: error::Error> OrWarn<T> for Result<T, E> {
    fn or_warn(self, what: Arguments<'_>) -> Option<T> {
        self.inspect_err(|error| log::warn!("{what}: {}", Chain(error)))
            .ok()
    }

    fn or_log(self) -> Option<T> {
        self.inspect_err(|error| log::warn!("{}", Chain(error))).ok()
    }
}
