//! Archives for machines that cannot install packages: `cargo xtask gpu-bundle` and
//! `cargo xtask suite-bundle`.

mod arch;
mod deb;
mod debs;
pub mod dist;
mod elf;
pub mod gpu;
mod sbom;
pub mod suites;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::tools::in_path;

/// Largest archive: 64 MiB can be copied to a GPU machine, with the scripts.
const LIMIT: u64 = 60 << 20;

/// Refuses an archive of `packed` bytes that is too large.
fn check_size(packed: u64) -> anyhow::Result<()> {
    ensure!(
        packed <= LIMIT,
        "the bundle has {}, more than the limit of {}; its biggest files are listed above",
        mib(packed),
        mib(LIMIT)
    );
    Ok(())
}

/// Prints the directories and files above 1 MiB with their sizes.
fn list(stage: &Path) -> anyhow::Result<()> {
    let options = ["--all", "--apparent-size", "--human-readable", "--threshold=1M"];
    check(Command::new("du").args(options).current_dir(stage))
}

/// Writes the archive (the same bytes for the same files) or the directory; returns its size.
fn write_out(stage: &Path, out: &Path) -> anyhow::Result<u64> {
    if let Some(parent) = out.parent() {
        fs::create_dir_all(parent)?;
    }
    if out.extension() == Some(OsStr::new("xz")) {
        let options = [
            "--sort=name",
            "--mtime=@0",
            "--owner=0",
            "--group=0",
            "--numeric-owner",
            "--mode=go-w",
        ];
        check(
            Command::new("tar")
                .args(options)
                .args(["--use-compress-program", "xz -9 -T2", "-cf"])
                .arg(out)
                .arg("-C")
                .arg(stage)
                .arg("."),
        )?;
        return Ok(fs::metadata(out)?.len());
    }
    if out.exists() {
        ensure!(
            out.join("bin/containerd").is_file() || fs::read_dir(out)?.next().is_none(),
            "{} exists and is not an earlier bundle\nhint: name another directory",
            out.display()
        );
        fs::remove_dir_all(out)?;
    }
    check(Command::new("cp").args(["-a", "--"]).arg(stage).arg(out))?;
    fs::set_permissions(out, fs::Permissions::from_mode(0o755))?;
    let size = output(Command::new("du").args(["--summarize", "--bytes"]).arg(out))?;
    let bytes = size
        .split_whitespace()
        .next()
        .and_then(|bytes| bytes.parse().ok());
    bytes.context("du printed no size")
}

/// Installs the packages of programs that are missing with apt, and prints their names before.
fn install_missing(programs: &[(&str, &str)]) -> anyhow::Result<()> {
    let missing: Vec<&str> = programs
        .iter()
        .filter(|(program, _)| in_path(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    println!("installing by apt: {}", missing.join(" "));
    check(Command::new("apt-get").arg("update").arg("-q"))?;
    check(
        Command::new("apt-get")
            .args(["install", "-y", "-q", "--no-install-recommends"])
            .args(missing),
    )
}

fn copy_into(from: &Path, dir: &Path) -> anyhow::Result<PathBuf> {
    let to = dir.join(from.file_name().context("a file has a name")?);
    fs::copy(from, &to).with_context(|| format!("cannot copy {} to {}", from.display(), dir.display()))?;
    Ok(to)
}

/// Runs a command to its end, its output going where ours goes.
fn check(command: &mut Command) -> anyhow::Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command
        .status()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Runs a command and returns what it printed.
fn output(command: &mut Command) -> anyhow::Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    String::from_utf8(output.stdout).with_context(|| format!("{program} printed no text"))
}

fn mib(bytes: u64) -> String {
    let tenths = bytes * 10 / (1 << 20);
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_in_mebibytes() {
        assert_eq!(mib(0), "0.0 MiB");
        assert_eq!(mib((1 << 20) + (1 << 19)), "1.5 MiB");
        assert_eq!(mib(LIMIT), "60.0 MiB");
    }

    #[test]
    fn a_bundle_that_is_too_large_is_refused() {
        check_size(LIMIT).unwrap();
        let error = check_size(LIMIT + (1 << 20)).unwrap_err().to_string();
        assert!(error.contains("has 61.0 MiB"), "{error}");
    }

    #[test]
    fn archives_of_the_same_files_are_equal() {
        let dir = tempfile::tempdir().unwrap();
        let archive = |name: &str| {
            let stage = dir.path().join(name);
            fs::create_dir(&stage).unwrap();
            fs::write(stage.join("b"), "two").unwrap();
            fs::write(stage.join("a"), "one").unwrap();
            let out = dir.path().join(format!("{name}.tar.xz"));
            assert!(write_out(&stage, &out).unwrap() > 0);
            fs::read(out).unwrap()
        };
        assert_eq!(archive("first"), archive("second"));
    }

    #[test]
    fn only_an_earlier_bundle_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (stage, out) = (dir.path().join("stage"), dir.path().join("out"));
        fs::create_dir(&stage).unwrap();
        fs::create_dir(&out).unwrap();
        fs::write(out.join("letter"), "dear").unwrap();
        assert!(write_out(&stage, &out).is_err());
        assert_eq!(fs::read_to_string(out.join("letter")).unwrap(), "dear");
    }
}
