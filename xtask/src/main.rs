//! Commands of the workspace: `cargo xtask NAME`.
#![forbid(unsafe_code)]

mod bundle;
mod node;

use std::process::ExitCode;

use clap::Parser;

/// Commands of the firn workspace
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Cmd {
    Node(node::Cmd),
    GpuBundle(bundle::Cmd),
}

fn main() -> ExitCode {
    let done = match Cmd::parse() {
        Cmd::Node(cmd) => node::run(cmd),
        Cmd::GpuBundle(cmd) => bundle::run(cmd).map(|()| ExitCode::SUCCESS),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
