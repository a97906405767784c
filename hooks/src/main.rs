//! firn-hook: what firn has the OCI runtime run at points of a container's life.
#![forbid(unsafe_code)]

mod loopback;
mod state;

use std::process::ExitCode;

const HELP: &str = "\
firn-hook: OCI hook of firn, run by runc and not by people

usage: firn-hook createRuntime < state.json

  createRuntime   brings up the loopback interface of the container's network
                  namespace, which runc does at create but not at restore.
                  Does nothing when the container uses the runtime's own
                  network namespace. Safe to repeat.

The container's state, as the OCI runtime specification defines it, is read
from standard input. Errors go to standard error.

exit status: 0 done or nothing to do, 1 failed, 2 wrong usage
";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let result = match arguments.as_slice() {
        [one] if one == "createRuntime" => {
            state::container_pid(std::io::stdin()).and_then(loopback::bring_up)
        }
        [one] if one == "--help" || one == "-h" => {
            print!("{HELP}");
            Ok(())
        }
        _ => {
            eprintln!("firn-hook: wrong usage. hint: firn-hook --help");
            return ExitCode::from(2);
        }
    };
    result.map_or_else(
        |error| {
            eprintln!("firn-hook: {error:#}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}
