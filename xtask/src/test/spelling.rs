//! Spelling, by the program typos and `_typos.toml`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Result;

use super::outcome::{Outcome, Output, through};
use crate::tools::in_path;
use crate::workspace;

/// What pip installs. The dictionary is a part of the version.
const PACKAGE: &str = "typos==1.52.0";

/// Checks the tree, by the program of this node or by one that pip puts into the target directory.
pub(super) fn check(out: &mut Output) -> Result<Outcome> {
    let root = workspace()?;
    let Some(typos) = in_path("typos").or_else(|| installed(&root)) else {
        return Ok(Outcome::skipped(format!(
            "typos is not installed, and python3 with venv cannot bring it (pip install {PACKAGE})"
        )));
    };
    let mut command = Command::new(typos);
    command.args(["--format", "brief"]).current_dir(root);
    through(command, out)
}

/// The program in an environment of Python's; none: it cannot be made.
fn installed(root: &Path) -> Option<PathBuf> {
    let dir = root.join("target/typos");
    let program = dir.join("bin/typos");
    if program.is_file() {
        return Some(program);
    }
    let pip = dir.join("bin/pip");
    let make = [dir.to_str()?];
    let install = [
        "install",
        "--retries",
        "1",
        "--disable-pip-version-check",
        PACKAGE,
    ];
    let made = succeeds(Command::new("python3").args(["-m", "venv"]).args(make));
    (made && succeeds(Command::new(pip).args(install)) && program.is_file()).then_some(program)
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}
