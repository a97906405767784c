//! firn-runc: runc for clients that call an OCI runtime, as podman and CRI-O do.
//!
//! ```text
//! create              the spec is edited, then runc creates the container
//! checkpoint, restore of containers with GPUs: firn's transactions
//! features            runc's, with the annotations that firn reads
//! anything else       runc's, argument for argument
//! ```
//!
//! The called process ([`front`]) does nothing by itself: it starts another one for what is firn's, and
//! becomes runc for the rest. So there is somebody who rolls a transaction back if its process is killed, and
//! a client that is interrupted does not interrupt the transaction. If both are killed, the next call for the
//! container rolls it back ([`open`], [`recover`]).
#![forbid(unsafe_code)]

mod action;
mod back;
mod checkpoint;
mod command_line;
mod container;
mod create;
mod error;
mod features;
mod front;
mod logger;
mod open;
mod program;
mod recover;
mod restore;

use std::process::ExitCode;

use firn_config::names;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    match words.split_first() {
        Some((option, [])) if option == names::RUNC_VERSION_OPTION => {
            println!("{} {}", names::RUNC_PROGRAM, env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Some((action, rest)) if action::Action::of(action).is_some() => back::run(action, rest),
        _ => front::run(&words),
    }
}
