//! containerd-shim-firn-v2.

use std::process::ExitCode;

fn main() -> ExitCode {
    match firn_shim::run(std::env::args_os().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("containerd-shim-firn-v2: {}", firn_shim::Chain(&error));
            ExitCode::from(&error)
        }
    }
}
