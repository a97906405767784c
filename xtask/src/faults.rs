//! `cargo xtask faults`: the fault matrix, as a table.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use firn_lab::faults::{self, Case, Outcome, Pairs, Tried, Why};
use firn_node::Suite;
use serde_json::json;

use crate::tools::{exit_code, need_root, seed};

/// Fail everything that can fail in a checkpoint, restore, pause or move, and check the workload afterwards
///
/// For every phase: errors, hangs and crashes of driver calls, of runc and of CRIU, SIGKILL of worker, shim,
/// containerd and client, and file systems that are full, read-only or broken; from running and from paused
/// containers, with and without exit, with one and with four processes, under cgroup v1 and v2, with real
/// containerd, runc and CRIU in test nodes. Pauses are those that give the GPU free, with their resumes. Each
/// case is evaluated by the workload's own lines, the freezer, containerd's status, a second operation, and a
/// sweep of the node. Exit status 0 only if every case keeps firn's guarantees. Needs root.
#[derive(clap::Args)]
pub struct Cmd {
    /// Only the cases of `cargo xtask test`
    #[arg(long)]
    quick: bool,
    /// Only cases whose names contain all of these, as in checkpoint/gpu-lock/driver-hang/paused/exit/v2/4
    #[arg(long, value_name = "SUBSTRING")]
    only: Vec<String>,
    /// This number of random pairs of faults instead of single faults: the second happens while firn handles
    /// the first. Pairs whose second fault does not happen are evaluated but not counted
    #[arg(long, value_name = "COUNT", conflicts_with = "quick")]
    pairs: Option<usize>,
    /// Draws the same pairs again
    #[arg(long, requires = "pairs")]
    seed: Option<u64>,
    /// Debian suite of the nodes
    #[arg(long, default_value = "forky")]
    suite: Suite,
    /// Nodes at the same time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// List the cases and do nothing
    #[arg(long)]
    list: bool,
    /// Print the result as JSON; the progress goes to standard error
    #[arg(long)]
    json: bool,
}

/// Runs the cases and prints the table.
pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    let wanted = |case: &Case| {
        let name = case.to_string();
        cmd.only.iter().all(|part| name.contains(part))
    };
    let (all, left_out) = faults::all();
    let seed = seed(cmd.seed);
    let mut draw: Draw<'_> = match cmd.pairs {
        None => {
            let cases = if cmd.quick { faults::quick() } else { all };
            let mut cases: Vec<Case> = cases.into_iter().filter(wanted).collect();
            Box::new(move |_| std::mem::take(&mut cases))
        }
        Some(count) => {
            let mut pairs = Pairs::new(seed, wanted);
            let left = pairs.left();
            eprintln!("seed {seed}: {count} of {left} pairs");
            Box::new(move |tried| {
                let whole = tried.iter().filter(|tried| tried.whole || tried.outcome.is_err());
                // More than this would not help.
                let limit = (2 * count).saturating_sub(tried.len());
                pairs.draw(count.saturating_sub(whole.count()).min(limit))
            })
        }
    };
    if cmd.list {
        let names = draw(&[])
            .iter()
            .map(|case| format!("{case}\n"))
            .collect::<String>();
        return match io::stdout().write_all(names.as_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(ExitCode::SUCCESS),
        };
    }
    need_root("faults")?;
    let begun = Instant::now();
    let mut tried = Vec::new();
    loop {
        let cases = draw(&tried);
        if cases.is_empty() {
            break;
        }
        tried.extend(faults::run(cmd.suite, &cases, cmd.jobs, |tried| {
            report(tried, begun)
        })?);
    }
    ensure!(!tried.is_empty(), "no case has such a name");
    if cmd.json {
        println!("{:#}", as_json(&tried));
    } else {
        print_table(&tried, cmd.pairs.map_or(&left_out, |_| &[]));
    }
    Ok(print_summary(cmd, seed, &tried, begun))
}

/// Returns the cases to run next; none at the end.
type Draw<'a> = Box<dyn FnMut(&[Tried]) -> Vec<Case> + 'a>;

/// Prints the number of cases, and how to repeat each that breaks a guarantee.
fn print_summary(cmd: &Cmd, seed: u64, tried: &[Tried], begun: Instant) -> ExitCode {
    let outside: Vec<&Tried> = tried.iter().filter(|tried| tried.outcome.is_err()).collect();
    if !cmd.json {
        let whole = tried.iter().filter(|tried| tried.whole).count();
        let what = match cmd.pairs {
            None => format!("{} cases", tried.len()),
            Some(_) => format!("seed {seed}: {} pairs, both faults in {whole}", tried.len()),
        };
        let (outside, seconds) = (outside.len(), begun.elapsed().as_secs_f64());
        println!("\n{what}, {outside} outside of the guarantees, {seconds:.0} s");
    }
    for Tried { case, outcome, .. } in &outside {
        let why = outcome.as_ref().err().map(|why| first_line(why));
        println!("OUTSIDE {case}: {}", why.unwrap_or_default());
        let pairs = if case.second.is_some() { " --pairs 1" } else { "" };
        println!(
            "  again: cargo xtask faults --suite {}{pairs} --only {case}",
            cmd.suite
        );
    }
    exit_code(outside.is_empty())
}

/// Prints the progress: one line per case, and the whole message of one that breaks a guarantee.
fn report(tried: &Tried, begun: Instant) {
    let what = match &tried.outcome {
        Ok(outcome) if tried.whole => outcome.to_string(),
        Ok(outcome) => format!("{outcome} (one fault)"),
        Err(why) => format!("OUTSIDE: {why}"),
    };
    let (at, took) = (begun.elapsed().as_secs(), tried.took.as_secs_f64());
    eprintln!("{at:>5} s  {:<60} {took:>5.1} s  {what}", tried.case.to_string());
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// Prints a row per phase and fault, with the number of each outcome.
fn print_table(tried: &[Tried], left_out: &[(Why, usize)]) {
    let mut rows: Vec<(String, BTreeMap<Option<Outcome>, usize>)> = Vec::new();
    for tried in tried {
        let Case {
            flow, first, second, ..
        } = tried.case;
        // Of pairs only the phases: few pairs have the same faults.
        let what = match second {
            None => format!("{} {}", first.phase, first.fault),
            Some(second) => format!("{}, then {}", first.phase, second.phase),
        };
        let name = format!("{flow:?} {what}").to_lowercase();
        let outcome = tried.outcome.as_ref().ok().copied();
        let at = rows.iter().position(|(row, _)| *row == name).unwrap_or_else(|| {
            rows.push((name, BTreeMap::new()));
            rows.len() - 1
        });
        *rows[at].1.entry(outcome).or_default() += 1;
    }
    println!("\n{:<55} outcomes", "phase and fault");
    for (name, outcomes) in rows {
        let counts = outcomes.iter().map(|(outcome, count)| match outcome {
            None => format!("{count} OUTSIDE"),
            Some(outcome) => format!("{count} {outcome}"),
        });
        println!("{name:<55} {}", counts.collect::<Vec<_>>().join(", "));
    }
    if !left_out.is_empty() {
        println!("\nno cases:");
    }
    for (why, count) in left_out {
        println!("{count:>6} combinations: {why}");
    }
}

fn as_json(tried: &[Tried]) -> serde_json::Value {
    let cases = tried.iter().map(|tried| {
        json!({
            "case": tried.case.to_string(),
            "whole": tried.whole,
            "outcome": tried.outcome.as_ref().ok().map(ToString::to_string),
            "outside": tried.outcome.as_ref().err(),
            "seconds": tried.took.as_secs_f64(),
        })
    });
    json!({ "cases": cases.collect::<Vec<_>>() })
}
