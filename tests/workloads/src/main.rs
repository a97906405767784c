//! `gpu-counter`: computes in GPU memory for ever and reports in every iteration whether all of it is as it
//! should be.
//!
//! One line per iteration, thread and GPU: `counter pid=7 thread=0 gpu=0 uuid=GPU-... iter=12 checksum=123456
//! ok`. Exits with 1 on the first wrong element or driver error, naming it. Holds no descriptor but the
//! standard ones and the driver's, and with `--ranks` TCP connections.

#![forbid(unsafe_code)]

mod ranks;
mod run;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match run::run(&run::Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu-counter pid={}: {error:#}", std::process::id());
            ExitCode::FAILURE
        }
    }
}
