//! Programs and packages of Python, which pip installs into the target directory.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An environment of its own for these packages: where its program `name` is. None: it cannot be made.
pub(super) fn program(dir: &Path, packages: &[&str], name: &str) -> Option<PathBuf> {
    let program = dir.join("bin").join(name);
    let marker = dir.join(format!("installed-{}", packages.join("-")));
    if marker.is_file() && program.is_file() {
        return Some(program);
    }
    let make = ["-m", "venv", "--clear", dir.to_str()?];
    let install = ["install", "--retries", "1", "--disable-pip-version-check"];
    let made = succeeds(Command::new("python3").args(make));
    let mut pip = Command::new(dir.join("bin/pip"));
    let installed = made && succeeds(pip.args(install).args(packages)) && program.is_file();
    (installed && std::fs::write(marker, "").is_ok()).then_some(program)
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}
