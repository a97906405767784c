//! `cargo xtask words`: runs the crate in `tests/words`, so that its dictionaries are no part of this
//! program.

use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::tools::{cargo, exit_code};
use crate::workspace;

/// Check spelling, banned words and line lengths by words.toml
///
/// Each area of the tree has a ceiling for each kind of finding, which may only fall. Exit status 0 only if
/// no area is above its ceilings.
#[derive(clap::Args)]
pub struct Cmd {
    /// Print every finding of this area; `all` for all areas
    #[arg(long, value_name = "AREA")]
    list: Option<String>,
    /// Lower the ceilings in words.toml to today's counts
    #[arg(long)]
    lower: bool,
}

pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    let mut cargo = cargo();
    cargo
        .args(["run", "--quiet", "--package", "firn-words", "--"])
        .current_dir(workspace()?);
    if let Some(area) = &cmd.list {
        cargo.arg("--list").arg(area);
    }
    if cmd.lower {
        cargo.arg("--lower");
    }
    let status = cargo.status().context("run cargo")?;
    Ok(exit_code(status.success()))
}
