//! `simgpu`: sets up, shows and disturbs the simulated GPUs of a test node.

mod cdi;
mod cli;
mod install;
mod loops;
mod setup;
mod smi;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match cli::run(cli::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("simgpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}
