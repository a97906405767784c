//! The process that does what is firn's.

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

use firn_process::reaper::Reaper;
use firn_transaction::look;
use firn_transaction::recording;
use nix::sys::prctl;

use crate::action::{Action, CallEnd, PASS};
use crate::command_line::{CommandLine, Verb};
use crate::error::{Failure, Trouble};
use crate::open::{self, Open, OpenState};
use crate::{checkpoint, create, logger, recover, restore};

pub fn run(action: &OsStr, words: &[OsString]) -> ExitCode {
    let action = Action::of(action);
    if action == Some(Action::Look) {
        return match look::run_child() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let Some(line) = CommandLine::parse(words) else {
        return ExitCode::from(PASS);
    };
    // `firn ps` knows the owner of a transaction by it. The kernel has it as "exe", from /proc/self/exe.
    let _named = prctl::set_name(c"firn-runc");
    logger::start(&line);
    match serve(action == Some(Action::Recover), &line) {
        Ok(CallEnd::Here) => ExitCode::SUCCESS,
        Ok(CallEnd::Pass) => ExitCode::from(PASS),
        Err(failure) => {
            logger::report(Some(&line), &failure);
            ExitCode::FAILURE
        }
    }
}

fn serve(recovers: bool, line: &CommandLine) -> Result<CallEnd, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Trouble::Start)?;
    let done = runtime.block_on(recording::within_call(async {
        let reaper = Reaper::start().map_err(Trouble::Start)?;
        if recovers {
            return left(line, &reaper).await;
        }
        match line.verb {
            Verb::Create => create::run(line, &reaper).await,
            Verb::Checkpoint => {
                left(line, &reaper).await?;
                checkpoint::run(line, &reaper).await
            }
            Verb::Restore => {
                left(line, &reaper).await?;
                restore::run(line, &reaper).await
            }
            Verb::Kill | Verb::Delete | Verb::Pause | Verb::Resume | Verb::Features | Verb::Other => {
                Ok(CallEnd::Pass)
            }
        }
    }));
    // A call that is stuck in the kernel must not keep the answer back.
    runtime.shutdown_background();
    done
}

/// Rolls back what an earlier process has left of a transaction. A kill is done with it, and a resume if the
/// container runs.
async fn left(line: &CommandLine, reaper: &Reaper) -> Result<CallEnd, Failure> {
    let Some(id) = open::named(line) else {
        return Ok(CallEnd::Pass);
    };
    match Open::find(line, id).map_err(Trouble::Notes)? {
        OpenState::Nothing => Ok(CallEnd::Pass),
        OpenState::Busy if matches!(line.verb, Verb::Pause | Verb::Resume) => {
            Err(Trouble::Busy { id: id.to_owned() }.into())
        }
        // The client may end or see a container that is under way.
        OpenState::Busy => Ok(CallEnd::Pass),
        OpenState::Left(open) => recover::run(line, id, open, reaper).await,
    }
}
