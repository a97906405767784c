//! From the command line to the action, and from its failure to the exit code.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use crate::args::{Action, Args, ArgsError, USAGE};
use crate::bootstrap::{self, InfoError, StartError};
use crate::delete::{self, DeleteError};
use crate::server::{self, ServerError};
use crate::task::{Service, TaskService};
use firn_transaction::look::{self, ChildError};

/// Why the action failed.
#[derive(Debug, thiserror::Error)]
pub enum ActionError {
    /// The command line makes no sense.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// `start` failed.
    #[error(transparent)]
    Start(#[from] StartError),
    /// `delete` failed.
    #[error(transparent)]
    Delete(#[from] DeleteError),
    /// `look` failed.
    #[error(transparent)]
    Look(#[from] ChildError),
    /// `-info` failed.
    #[error(transparent)]
    Info(#[from] InfoError),
    /// The server failed.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// Nobody reads what is printed.
    #[error("cannot write stdout")]
    Print(#[source] io::Error),
}

impl From<&ActionError> for ExitCode {
    fn from(error: &ActionError) -> Self {
        match error {
            // As Go's flags: a flag that cannot be parsed is not one that is missing.
            ActionError::Args(error) if !matches!(error, ArgsError::Required(_)) => Self::from(2),
            ActionError::Args(_)
            | ActionError::Start(_)
            | ActionError::Delete(_)
            | ActionError::Look(_)
            | ActionError::Info(_)
            | ActionError::Server(_)
            | ActionError::Print(_) => Self::FAILURE,
        }
    }
}

/// Does what the command line, without the program's name, asks for.
pub fn run(words: impl IntoIterator<Item = OsString>) -> Result<(), ActionError> {
    let args = Args::parse(words)?;
    match args.action {
        Action::Help => print(USAGE)?,
        Action::Version => print(&bootstrap::version(std::env::args_os().next()))?,
        Action::Info => bootstrap::info()?,
        Action::Start => bootstrap::start(&args)?,
        Action::Look => look::run_child()?,
        Action::Delete => delete::delete(&args)?,
        Action::Serve => server::run(&args, |context| Arc::new(TaskService(Service::start(context))))?,
    }
    Ok(())
}

fn print(text: &str) -> Result<(), ActionError> {
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(ActionError::Print)
}
