//! What several commands need.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus};
use std::time::UNIX_EPOCH;

use anyhow::{Result, ensure};
use nix::unistd::geteuid;

/// The program of the cargo that runs this; its subcommands are found by it.
pub fn cargo_program() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

pub fn cargo() -> Command {
    Command::new(cargo_program())
}

/// A file of this name in PATH.
pub fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// Refuses to start test nodes without root.
pub fn need_root(command: &str) -> Result<()> {
    ensure!(
        geteuid().is_root(),
        "test nodes need root\nhint: sudo -E cargo xtask {command}"
    );
    Ok(())
}

pub fn exit_code(good: bool) -> ExitCode {
    ExitCode::from(u8::from(!good))
}

/// The exit status of a command as that of this program; a signal as shells report it.
pub fn exit_as(status: ExitStatus) -> ExitCode {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    let code = code.and_then(|code| u8::try_from(code).ok());
    code.map_or(ExitCode::FAILURE, ExitCode::from)
}

/// The seed of random choices: as given, or the time.
pub fn seed(given: Option<u64>) -> u64 {
    given.unwrap_or_else(|| UNIX_EPOCH.elapsed().map_or(1, |time| time.as_secs()))
}
