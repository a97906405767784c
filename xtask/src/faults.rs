//! `cargo xtask faults`: the fault matrix, as a table.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use firn_lab::faults::{self, Cell, Outcome, Tried, Why};
use firn_node::Suite;
use nix::unistd::geteuid;
use serde_json::json;

/// Fail everything that can fail in a checkpoint or restore, and look what is left of the workload
///
/// For every phase: errors, hangs and crashes of driver calls, of runc and of CRIU, SIGKILL of worker, shim, containerd and
/// client, and file systems that are full, read-only or broken; from running and from paused containers, with and without
/// exit, with one and with four processes, under cgroup v1 and v2, with real containerd, runc and CRIU in test nodes.
/// Each cell is judged by the workload's own lines, the freezer, containerd's status, a second checkpoint or restore, and a
/// sweep of the node. Exit status 0 only if every cell is within firn's promise. Needs root.
#[derive(clap::Args)]
pub struct Cmd {
    /// Only the cells that `cargo xtask test` tries
    #[arg(long)]
    quick: bool,
    /// Only cells whose names contain all of these, as in checkpoint/lock/driver-hang/paused/exit/v2/4
    #[arg(long, value_name = "SUBSTRING")]
    only: Vec<String>,
    /// Debian suite of the nodes
    #[arg(long, default_value = "forky")]
    suite: Suite,
    /// Hosts at a time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Name the cells and do nothing
    #[arg(long)]
    list: bool,
    /// Print the result as JSON; the progress goes to standard error
    #[arg(long)]
    json: bool,
}

/// Tries the cells and prints the table.
pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    let (all, left_out) = faults::all();
    let cells = if cmd.quick { faults::quick() } else { all };
    let cells: Vec<Cell> = cells
        .into_iter()
        .filter(|cell| cmd.only.iter().all(|part| cell.to_string().contains(part)))
        .collect();
    ensure!(!cells.is_empty(), "no cell has such a name");
    if cmd.list {
        cells.iter().for_each(|cell| println!("{cell}"));
        return Ok(ExitCode::SUCCESS);
    }
    ensure!(
        geteuid().is_root(),
        "test nodes need root\nhint: sudo -E cargo xtask faults"
    );
    let begun = Instant::now();
    let tried = faults::run(cmd.suite, &cells, cmd.jobs, |tried| tell(tried, begun))?;
    let outside: Vec<&Tried> = tried.iter().filter(|tried| tried.outcome.is_err()).collect();
    if cmd.json {
        println!("{:#}", as_json(&tried));
    } else {
        print_table(&tried, &left_out);
        println!(
            "\n{} cells, {} outside of the promise, {:.0} s",
            tried.len(),
            outside.len(),
            begun.elapsed().as_secs_f64()
        );
    }
    for tried in &outside {
        let why = tried.outcome.as_ref().err().map(|why| first_line(why));
        println!("OUTSIDE {}: {}", tried.cell, why.unwrap_or_default());
    }
    match outside.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => Ok(ExitCode::FAILURE),
    }
}

/// The progress, one line per cell; all that is known of one that is outside.
fn tell(tried: &Tried, begun: Instant) {
    let what = match &tried.outcome {
        Ok(outcome) => outcome.to_string(),
        Err(why) => format!("OUTSIDE: {why}"),
    };
    let (at, took) = (begun.elapsed().as_secs(), tried.took.as_secs_f64());
    eprintln!("{at:>5} s  {:<60} {took:>5.1} s  {what}", tried.cell.to_string());
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// A row per phase and fault, with how often each came of it.
fn print_table(tried: &[Tried], left_out: &[(Why, usize)]) {
    let mut rows: Vec<(String, BTreeMap<Option<Outcome>, usize>)> = Vec::new();
    for tried in tried {
        let name = format!("{:?} {} {}", tried.cell.flow, tried.cell.phase, tried.cell.fault).to_lowercase();
        let outcome = tried.outcome.as_ref().ok().copied();
        let at = rows.iter().position(|(row, _)| *row == name).unwrap_or_else(|| {
            rows.push((name, BTreeMap::new()));
            rows.len() - 1
        });
        *rows[at].1.entry(outcome).or_default() += 1;
    }
    println!("\n{:<55} outcomes", "phase and fault");
    for (name, outcomes) in rows {
        let told = outcomes.iter().map(|(outcome, count)| match outcome {
            None => format!("{count} OUTSIDE"),
            Some(outcome) => format!("{count} {outcome}"),
        });
        println!("{name:<55} {}", told.collect::<Vec<_>>().join(", "));
    }
    println!("\nno cells:");
    for (why, count) in left_out {
        println!("{count:>6} combinations: {why}");
    }
}

fn as_json(tried: &[Tried]) -> serde_json::Value {
    let cells = tried.iter().map(|tried| {
        json!({
            "cell": tried.cell.to_string(),
            "outcome": tried.outcome.as_ref().ok().map(ToString::to_string),
            "outside": tried.outcome.as_ref().err(),
            "seconds": tried.took.as_secs_f64(),
        })
    });
    json!({ "cells": cells.collect::<Vec<_>>() })
}
