//! The facts of CUDA's headers in `interposer/facts`, against the headers.

use std::process::Command;

use anyhow::Result;

use super::outcome::{Outcome, Output, through};
use super::python;
use crate::workspace;

/// What pip installs: it parses the headers.
const PACKAGE: &str = "pycparser==3.12";

/// Makes the table again, from packages that pip brings into the target directory.
pub(super) fn check(out: &mut Output) -> Result<Outcome> {
    let root = workspace()?;
    let dir = root.join("target/cuda-facts");
    let Some(python) = python::program(&dir.join("python"), &[PACKAGE], "python3") else {
        return Ok(Outcome::skipped(format!(
            "python3 with venv cannot bring {PACKAGE}"
        )));
    };
    let mut command = Command::new(python);
    command
        .arg("-B")
        .arg(root.join("interposer/facts/make.py"))
        .arg(dir.join("packages"))
        .arg("--check");
    through(command, out)
}
