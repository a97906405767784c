//! `cargo xtask mutants`: small changes to the code that the guarantees depend on. Some unit test has to fail
//! for each.
//!
//! .cargo/mutants.toml lists the files, and the changes that are equivalent to the code as it is, with
//! reasons. This is no part of `cargo xtask test`: each change is built and tested, which takes hours for
//! all.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};

use crate::tools::{exit_code, in_path};
use crate::workspace;

/// Where cargo-mutants writes its results.
const OUTPUT: &str = "target/mutants";

/// Change the code that the guarantees depend on, one place at a time, and run the unit tests
///
/// Needs cargo-mutants. Fails when no test fails for a change that is not listed as equivalent in
/// .cargo/mutants.toml. Works on a copy of the tree.
#[derive(clap::Args)]
pub struct Cmd {
    /// One of the files that .cargo/mutants.toml names; all when none is named
    #[arg(long = "file")]
    files: Vec<PathBuf>,
    /// List the changes and make none
    #[arg(long)]
    list: bool,
    /// Changes that are tested at the same time
    #[arg(long, default_value_t = 1)]
    jobs: usize,
}

pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    let root = workspace()?;
    ensure!(
        in_path("cargo-mutants").is_some(),
        "cargo-mutants is not installed: cargo install cargo-mutants --locked"
    );
    for file in &cmd.files {
        ensure!(
            root.join(file).is_file(),
            "no file {} in the workspace",
            file.display()
        );
    }
    let mut mutants = Command::new("cargo");
    mutants
        .args(["mutants", "--workspace", "--no-shuffle"])
        .current_dir(&root);
    for file in &cmd.files {
        // `--file` of cargo-mutants would add to the files of the settings. A change is named after its
        // place.
        mutants
            .arg("--re")
            .arg(format!("^{}:", file.display().to_string().replace('.', r"\.")));
    }
    if cmd.list {
        let status = mutants.arg("--list").status().context("run cargo-mutants")?;
        return Ok(exit_code(status.success()));
    }
    let output = root.join(OUTPUT);
    fs::create_dir_all(&output).with_context(|| format!("make {}", output.display()))?;
    let status = mutants
        .arg("--output")
        .arg(&output)
        .args(["--jobs", &cmd.jobs.to_string()])
        .status()
        .context("run cargo-mutants")?;
    match status.code() {
        // 0: tests failed for all. 2: for some they did not. 3: some timed out, which counts as failed.
        Some(0 | 2 | 3) => {}
        _ => bail!("cargo-mutants: {status}"),
    }
    let survivors = survivors(&output.join("mutants.out/missed.txt"))?;
    for survivor in &survivors {
        println!("survives: {survivor}");
    }
    println!("{} survive", survivors.len());
    Ok(exit_code(survivors.is_empty()))
}

/// One line for each change for which no test failed.
fn survivors(missed: &Path) -> Result<Vec<String>> {
    match fs::read_to_string(missed) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("read {}", missed.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_a_survivor_and_no_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let missed = dir.path().join("missed.txt");
        assert!(survivors(&missed).unwrap().is_empty());
        fs::write(&missed, "a.rs:1: replace + with -\na.rs:2: delete !\n").unwrap();
        assert_eq!(survivors(&missed).unwrap().len(), 2);
    }

    /// A file that was moved must not be left out unnoticed.
    #[test]
    fn the_files_of_the_settings_exist() {
        let root = workspace().unwrap();
        let text = fs::read_to_string(root.join(".cargo/mutants.toml")).unwrap();
        let globs = text.split("examine_globs = [").nth(1).unwrap();
        let globs = globs.split(']').next().unwrap();
        let named: Vec<&str> = globs.split('"').skip(1).step_by(2).collect();
        assert!(named.len() > 10, "{named:?}");
        for file in named {
            assert!(root.join(file).is_file(), "no {file}");
        }
    }

    /// An exclusion of a file that was moved excludes nothing.
    #[test]
    fn the_files_of_the_exclusions_exist() {
        let root = workspace().unwrap();
        let text = fs::read_to_string(root.join(".cargo/mutants.toml")).unwrap();
        let all = text.split("exclude_re = [").nth(1).unwrap();
        let named = all.lines().filter_map(|line| {
            let (files, _) = line.trim().strip_prefix('\'')?.split_once("\\.rs")?;
            Some(files)
        });
        let tracked = Command::new("git")
            .arg("-C")
            .arg(&root)
            .arg("ls-files")
            .output()
            .unwrap();
        let tracked = String::from_utf8(tracked.stdout).unwrap();
        let is_there = |name: &str| tracked.lines().any(|file| file.ends_with(&format!("{name}.rs")));
        let mut count = 0;
        for files in named {
            let (directory, names) = files.rsplit_once('/').unwrap_or(("", files));
            let names = names.trim_start_matches('(').trim_end_matches(')');
            for name in names.split('|') {
                let name = if directory.is_empty() {
                    format!("/{name}")
                } else {
                    format!("{directory}/{name}")
                };
                assert!(is_there(&name), "no {name}.rs");
                count += 1;
            }
        }
        assert!(count > 10, "{count}");
    }
}
