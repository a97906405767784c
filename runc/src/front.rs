//! The process that the client calls.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, ExitStatus};

use firn_config::names::RUNC_PROGRAM;
use firn_config::search_path;

use crate::action::{Action, PASS};
use crate::command_line::{CommandLine, Verb};
use crate::error::{Failure, Trouble};
use crate::program::runc;
use crate::{features, logger, open};

/// Exit status of a Rust program that has panicked.
const PANICKED: i32 = 101;

/// Does what the command line requests.
pub fn run(words: &[OsString]) -> ExitCode {
    let line = CommandLine::parse(words);
    match serve(words, line.as_ref()) {
        Ok(code) => code,
        Err(trouble) => {
            logger::report(line.as_ref(), &Failure::Here(trouble));
            ExitCode::FAILURE
        }
    }
}

fn serve(words: &[OsString], line: Option<&CommandLine>) -> Result<ExitCode, Trouble> {
    let Some(line) = line else {
        match become_runc(words)? {}
    };
    match line.verb {
        // runc reports what is missing.
        Verb::Create | Verb::Checkpoint | Verb::Restore if line.id().is_none_or(|id| !open::is_id(id)) => {
            match become_runc(words)? {}
        }
        Verb::Create | Verb::Checkpoint | Verb::Restore => {
            let id = line.id().unwrap_or_default().to_owned();
            let done = call(Action::Transact, words)?;
            match done.code() {
                Some(code) if code == i32::from(PASS) => match become_runc(words)? {},
                Some(code) if code != PANICKED => Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
                _ => {
                    let recovered = call(Action::Recover, words)?;
                    Err(match recovered.code() {
                        Some(code) if code == i32::from(PASS) => Trouble::Killed { id },
                        _ => Trouble::Left { id },
                    })
                }
            }
        }
        Verb::Features => match features::of_runc(words)? {
            Some(features) => {
                println!("{features}");
                Ok(ExitCode::SUCCESS)
            }
            None => match become_runc(words)? {},
        },
        Verb::Kill | Verb::Delete | Verb::Pause | Verb::Resume | Verb::Other => recover(words, line),
    }
}

/// Rolls back what is left of a transaction of the container, before runc gets the call.
fn recover(words: &[OsString], line: &CommandLine) -> Result<ExitCode, Trouble> {
    if let Some(id) = open::named(line) {
        let recovered = call(Action::Recover, words)?;
        match (recovered.code(), line.verb) {
            (Some(0), _) => return Ok(ExitCode::SUCCESS),
            (Some(code), _) if code == i32::from(PASS) => {}
            // runc would freeze or thaw the container in the middle of a dump, or thaw it without its GPU
            // state.
            (Some(_), Verb::Pause | Verb::Resume) => return Ok(ExitCode::FAILURE),
            (None, Verb::Pause | Verb::Resume) => return Err(Trouble::Left { id: id.to_owned() }),
            // After a failure, which the recovery has reported, runc's call shows what the container is.
            _ => {}
        }
    }
    match become_runc(words)? {}
}

/// Calls this program again, in a process group of its own: a Ctrl-C is for the client. Waits for its end.
fn call(action: Action, words: &[OsString]) -> Result<ExitStatus, Trouble> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(action.name()).args(words);
    command
        .arg0(RUNC_PROGRAM)
        .env("PATH", search_path())
        .process_group(0);
    command.status().map_err(Trouble::Start)
}

fn become_runc(words: &[OsString]) -> Result<Infallible, Trouble> {
    let program = runc()?;
    let mut command = Command::new(&program);
    let source = command.args(words).env("PATH", search_path()).exec();
    Err(Trouble::Exec { program, source })
}
