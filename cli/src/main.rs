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
mod manual;
mod metrics;
mod moves;
mod oci_image;
mod outlet;
mod output;
mod place;
mod program;
mod ps;
mod relocate;
mod restore;
mod serving;
mod sign;
mod steps;
mod store;
mod stored;
mod text;
mod view;
mod work_dir;

use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches};

use args::{Args, Command};
use audit::Verdict;

/// Exit status of an audit that refuses nothing and suspects something.
const SUSPECTED: u8 = 3;

fn main() -> ExitCode {
    let matches = Args::command().get_matches();
    let args = Args::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let result = match args.command {
        Command::Inspect(args) => inspect::run(&args),
        Command::Audit(args) => match audit::run(&args) {
            Ok(Verdict::Suspected) => return ExitCode::from(SUSPECTED),
            verdict => verdict.map(|verdict| verdict == Verdict::Can),
        },
        Command::Sign(args) => sign::run(&args),
        Command::Restore(args) => restore::run(&args),
        Command::Resume(args) => moves::resume(&args),
        Command::Checkpoint(args) => checkpoint::run(&args),
        Command::Move(args) => relocate::run(&args),
        Command::MoveGpu(args) => moves::move_gpu(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Images(command) => images::run(&command),
        Command::Ps(args) => ps::run(&args),
        Command::History(args) => history::run(&args),
        Command::Metrics(args) => metrics::run(&args),
        Command::Drain(args) => drain::run(&args),
        Command::Install(args) => install::install(&args),
        Command::Uninstall(args) => install::uninstall(&args),
        Command::Labels(args) => agent::labels::run(&args),
        Command::NodeAgent(args) => agent::run(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::pages(&args),
        Command::Cdi(command) => cdi::run(&command),
        Command::Config(command) => config::run(&command),
        Command::Store(command) => store::run(&command),
    };
    match result {
        Ok(_) if !output::is_complete() => {
            output::note!("firn: cannot write to standard output");
            ExitCode::FAILURE
        }
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
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
