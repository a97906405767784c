//! From the command line to the action, and from its failure to the exit code.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use crate::action_io::print;
use crate::args::{Action, Args, ArgsError, USAGE};
use crate::error::ActionError;
use crate::task::{Service, TaskService};
use crate::{bootstrap, delete, server};
use firn_transaction::look;

impl From<&ActionError> for ExitCode {
    fn from(error: &ActionError) -> Self {
        match error {
            // As Go's flags: a flag that cannot be parsed is not one that is missing.
            ActionError::Args(error) if !matches!(error, ArgsError::Required(_)) => Self::from(2),
            _ => Self::FAILURE,
        }
    }
}

/// Does what the command line, without the program's name, asks for.
pub fn run(words: impl IntoIterator<Item = OsString>) -> Result<(), ActionError> {
    let args = Args::parse(words)?;
    match args.action {
        Action::Help => print(USAGE.as_bytes())?,
        Action::Version => print(bootstrap::version(std::env::args_os().next()).as_bytes())?,
        Action::Info => bootstrap::info()?,
        Action::Start => bootstrap::start(&args)?,
        Action::Look => look::run_child()?,
        Action::Delete => delete::delete(&args)?,
        Action::Serve => server::run(&args, |context| Arc::new(TaskService(Service::start(context))))?,
    }
    Ok(())
}
