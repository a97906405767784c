//! Spelling, by the program typos and `_typos.toml`.

use std::process::Command;

use anyhow::Result;

use super::outcome::{Outcome, Output, through};
use super::python;
use crate::tools::in_path;
use crate::workspace;

/// What pip installs. The dictionary is a part of the version.
const PACKAGE: &str = "typos==1.52.0";

/// Checks the tree, by the program of this node or by one that pip puts into the target directory.
pub(super) fn check(out: &mut Output) -> Result<Outcome> {
    let root = workspace()?;
    let installed = || python::program(&root.join("target/typos"), &[PACKAGE], "typos");
    let Some(typos) = in_path("typos").or_else(installed) else {
        return Ok(Outcome::skipped(format!(
            "typos is not installed, and python3 with venv cannot bring it (pip install {PACKAGE})"
        )));
    };
    let mut command = Command::new(typos);
    command.args(["--format", "brief"]).current_dir(root);
    through(command, out)
}
