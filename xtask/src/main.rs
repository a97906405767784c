//! Commands of the workspace: `cargo xtask NAME`.
#![forbid(unsafe_code)]

mod bundle;
mod cluster;
mod faults;
mod fuzz;
mod mutants;
mod node;
mod soak;
mod supervise;
mod test;
mod tools;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use supervise::supervised;

/// Commands of the firn workspace
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Cmd {
    Demo(firn_demo::Cmd),
    Test(test::Cmd),
    Faults(faults::Cmd),
    Fuzz(fuzz::Cmd),
    Mutants(mutants::Cmd),
    Bench(firn_bench::Cmd),
    Cluster(cluster::Cmd),
    Dist(bundle::dist::Cmd),
    Node(node::Cmd),
    Soak(soak::Cmd),
    GpuBundle(bundle::gpu::Cmd),
    SuiteBundle(bundle::suites::Cmd),
}

fn main() -> ExitCode {
    let done = match Cmd::parse() {
        Cmd::Demo(cmd) => {
            supervised(|| firn_demo::run(&cmd, &workspace()?, bundle::gpu::stage_without_tools))
        }
        Cmd::Test(cmd) => supervised(|| test::run(&cmd)),
        Cmd::Bench(cmd) => supervised(|| firn_bench::run(cmd)),
        Cmd::Cluster(cmd) => supervised(|| cluster::run(&cmd)),
        Cmd::Dist(cmd) => bundle::dist::run(&cmd).map(|()| ExitCode::SUCCESS),
        Cmd::Faults(cmd) => supervised(|| faults::run(&cmd)),
        Cmd::Fuzz(cmd) => fuzz::run(&cmd),
        Cmd::Mutants(cmd) => mutants::run(&cmd),
        Cmd::Node(cmd) => node::run(cmd),
        Cmd::Soak(cmd) => supervised(|| soak::run(&cmd)),
        Cmd::GpuBundle(cmd) => bundle::gpu::run(cmd).map(|()| ExitCode::SUCCESS),
        Cmd::SuiteBundle(cmd) => bundle::suites::run(cmd).map(|()| ExitCode::SUCCESS),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// Root of the workspace that this program was built in.
fn workspace() -> Result<PathBuf> {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(xtask.parent().context("xtask lies in the workspace")?.to_owned())
}
