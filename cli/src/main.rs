//! firn: checkpoints, restores and moves GPU containers, and shows their checkpoints and their nodes.
//!
//! These change something: `cdi generate`, `checkpoint`, `doctor --fix`, `drain`, `images prune`,
//! `install`, `labels`, `move`, `move-gpu`, `node-agent`, `restore`, `resume`, `sign`, `store`, `uninstall`.
//! The driver is reached through `firn-gpu`.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod agent;
mod archive;
mod args;
mod audit;
mod cdi;
mod checkpoint;
mod complete;
mod config;
mod containerd;
mod daemon;
mod doctor;
mod drain;
#[cfg(test)]
mod fuzz;
mod history;
mod image;
mod images;
mod inspect;
mod install;
mod leftovers;
mod logs;
mod manual;
mod metrics;
mod moves;
mod oci_image;
mod outcome;
mod outlet;
mod output;
mod place;
mod program;
mod ps;
mod relocate;
mod restore;
mod serving;
mod sign;
mod state_after;
mod steps;
mod store;
mod stored;
mod text;
mod view;
mod work_dir;

use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches};

use anyhow::Result;
use args::{Args, Command};
use outcome::Outcome;

fn main() -> ExitCode {
    if complete::answer(Args::command) {
        return ExitCode::SUCCESS;
    }
    let matches = Args::command().get_matches();
    let args = Args::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let result: Result<Outcome> = match args.command {
        Command::Inspect(args) => inspect::run(&args).map(Outcome::from),
        Command::Audit(args) => audit::run(&args).map(Outcome::from),
        Command::Sign(args) => sign::run(&args).map(Outcome::from),
        Command::Restore(args) => restore::run(&args),
        Command::Resume(args) => moves::resume(&args),
        Command::Checkpoint(args) => checkpoint::run(&args),
        Command::Move(args) => relocate::run(&args),
        Command::MoveGpu(args) => moves::move_gpu(&args),
        Command::Doctor(args) => doctor::run(&args).map(Outcome::from),
        Command::Images(command) => images::run(&command).map(Outcome::from),
        Command::Ps(args) => ps::run(&args).map(Outcome::from),
        Command::History(args) => history::run(&args).map(Outcome::from),
        Command::Logs(args) => logs::run(&args).map(Outcome::from),
        Command::Metrics(args) => metrics::run(&args).map(Outcome::from),
        Command::Drain(args) => drain::run(&args).map(Outcome::from),
        Command::Install(args) => install::install(&args).map(Outcome::from),
        Command::Uninstall(args) => install::uninstall(&args).map(Outcome::from),
        Command::Labels(args) => agent::labels::run(&args).map(Outcome::from),
        Command::NodeAgent(args) => agent::run(&args).map(Outcome::from),
        Command::Version(args) => manual::version(&args).map(Outcome::from),
        Command::Completions(args) => manual::completions(&args).map(Outcome::from),
        Command::Man(args) => manual::pages(&args).map(Outcome::from),
        Command::Cdi(command) => cdi::run(&command).map(Outcome::from),
        Command::Config(command) => config::run(&command).map(Outcome::from),
        Command::Store(command) => store::run(&command).map(Outcome::from),
    };
    match result {
        Ok(_) if !output::is_complete() => {
            output::note!("firn: cannot write to standard output");
            ExitCode::FAILURE
        }
        Ok(outcome) => outcome.status(),
        Err(error) => {
            // A text is always JSON.
            let _shown = output::failed(wants_json(&matches), format_args!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Whether the command has the option --json.
fn wants_json(matches: &ArgMatches) -> bool {
    match matches.subcommand() {
        Some((_, below)) => wants_json(below),
        None => matches.try_get_one("json").ok().flatten() == Some(&true),
    }
}
