//! The programs of the workspace, as cargo builds them for tests.
//!
//! Each call builds all packages: another choice of packages has other features of their dependencies, and
//! cargo then builds those once more. The programs run without cargo, for whose lock they would wait.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use serde_json::Value;

use super::Check;
use super::outcome::{Outcome, Verdict, through};
use crate::{tools, workspace};

/// A program that cargo has built.
#[derive(Clone, Debug)]
pub(super) struct Program {
    /// Of its target: a crate's for unit tests.
    pub(super) name: String,
    file: PathBuf,
    /// Whether it consists of tests. Cargo also builds the programs that tests start.
    has_tests: bool,
    /// Of its package, where cargo would run it.
    dir: PathBuf,
}

/// Programs that one check builds, and others run.
#[derive(Clone, Default)]
pub(super) struct Programs(Arc<OnceLock<Vec<Program>>>);

impl Programs {
    /// The check that builds them, by these arguments of cargo.
    pub(super) fn build(&self, name: &str, arguments: &'static [&'static str]) -> Check {
        let programs = self.clone();
        Check::new(name, move |_| {
            let mut cargo = tools::cargo();
            cargo
                .args(arguments)
                .args([
                    "--workspace",
                    "--locked",
                    "--message-format",
                    "json-render-diagnostics",
                ])
                .current_dir(workspace()?)
                .stderr(Stdio::inherit());
            let output = cargo.output().context("run cargo")?;
            let messages = String::from_utf8_lossy(&output.stdout);
            let built: Result<Vec<Program>> = messages
                .lines()
                .filter_map(|line| read(line).transpose())
                .collect();
            let built = built?;
            programs.0.get_or_init(|| built);
            Ok(Outcome::new(output.status.success()))
        })
    }

    pub(super) fn all(&self) -> Result<&[Program]> {
        let programs = self.0.get().context("they were not built")?;
        Ok(programs)
    }

    pub(super) fn named(&self, name: &str) -> Result<&Program> {
        let named = self.all()?.iter().find(|program| program.name == name);
        named.with_context(|| format!("cargo has built no {name}"))
    }
}

impl Program {
    /// It, where cargo would run it.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command.current_dir(&self.dir);
        command
    }
}

/// The program that one of cargo's messages is about.
fn read(message: &str) -> Result<Option<Program>> {
    let message: Value = serde_json::from_str(message).context("read cargo's messages")?;
    let (Some(file), Some(name), Some(manifest)) = (
        message["executable"].as_str(),
        message["target"]["name"].as_str(),
        message["manifest_path"].as_str(),
    ) else {
        return Ok(None);
    };
    let dir = Path::new(manifest)
        .parent()
        .context("a manifest has a directory")?;
    Ok(Some(Program {
        name: name.to_owned(),
        file: file.into(),
        has_tests: message["profile"]["test"] == true,
        dir: dir.into(),
    }))
}

/// The check that runs all of these one after the other, also after one that failed.
pub(super) fn unit_tests(programs: &Programs, left_out: &'static [&'static str]) -> Check {
    let programs = programs.clone();
    let check = Check::new("unit tests", move |out| {
        let mut all = Outcome::new(true);
        for program in programs.all()? {
            if !program.has_tests || left_out.contains(&&*program.name) {
                continue;
            }
            out.line(format!("\n-- {} of {}", program.name, program.dir.display()).as_bytes())?;
            let mut outcome = through(program.command(), out)?;
            all.tests += outcome.tests;
            all.failures.append(&mut outcome.failures);
            if outcome.verdict == Verdict::Failed {
                all.verdict = Verdict::Failed;
            }
        }
        Ok(all)
    });
    check.again(&["--workspace"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_read_from_the_messages_of_cargo() {
        let message = r#"{"reason":"compiler-artifact","manifest_path":"/w/shim/Cargo.toml",
            "target":{"name":"firn_shim"},"executable":"/w/target/debug/deps/firn_shim-1",
            "profile":{"test":true}}"#;
        let program = read(message).unwrap().unwrap();
        assert_eq!(
            (&*program.name, program.dir.to_str(), program.has_tests),
            ("firn_shim", Some("/w/shim"), true)
        );
        let started = read(&message.replace("true", "false")).unwrap().unwrap();
        assert!(!started.has_tests);
        let library = r#"{"target":{"name":"a"},"manifest_path":"/w/a/Cargo.toml","executable":null}"#;
        assert!(read(library).unwrap().is_none());
        assert!(read("warning: no message").is_err());
        let none = Programs::default();
        assert!(
            none.named("suites")
                .unwrap_err()
                .to_string()
                .contains("not built")
        );
    }
}
