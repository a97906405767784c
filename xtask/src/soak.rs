//! `cargo xtask soak`: hundreds of checkpoints and restores, a third of them with a fault.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use firn_lab::faults::{Soak, Subject, has_cgroup_v1, soak};
use firn_node::{Cgroup, Suite};

use crate::tools::{need_root, seed};

/// Checkpoint and restore one workload hundreds of times, with a random fault in one of three
///
/// Four processes count in GPU memory. Checkpoints that leave them running are first, then restores of an
/// image. The faults are those of `cargo xtask faults` after which the container exists; each cycle is
/// evaluated as there. Exit status 0 only if nothing was lost and nothing has piled up: descriptors, threads
/// and memory of the shim, processes, mounts, cgroups, files of the node. Needs root.
#[derive(clap::Args)]
pub struct Cmd {
    /// Checkpoints, and as many restores
    #[arg(long, default_value_t = 200)]
    cycles: usize,
    /// Chooses the faults; printed, to repeat a run
    #[arg(long)]
    seed: Option<u64>,
    /// Processes of the workload
    #[arg(long, default_value_t = 4)]
    processes: usize,
    /// Debian suite of the node
    #[arg(long, default_value = "forky")]
    suite: Suite,
    /// Give the node cgroup v2 also where it could have v1
    #[arg(long)]
    v2: bool,
}

/// Runs it and prints the result.
pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    need_root("soak")?;
    let seed = seed(cmd.seed);
    println!("seed {seed}");
    let begun = Instant::now();
    let what = Soak {
        suite: cmd.suite,
        subject: Subject {
            cgroup: if cmd.v2 || !has_cgroup_v1() {
                Cgroup::V2
            } else {
                Cgroup::V1
            },
            processes: cmd.processes,
            stored: false,
        },
        cycles: cmd.cycles,
        seed,
    };
    let done = soak(&what, |cycle| {
        println!("{:>5} s {cycle}", begun.elapsed().as_secs())
    })
    .with_context(|| format!("seed {seed}"))?;
    println!(
        "{done}: nothing lost, nothing left, {} s",
        begun.elapsed().as_secs()
    );
    Ok(ExitCode::SUCCESS)
}
