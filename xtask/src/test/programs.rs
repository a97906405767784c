//! The programs of the workspace, as cargo builds them for tests.
//!
//! Each call builds all packages: another choice of packages has other features of their dependencies, and
//! cargo then builds those once more. The programs run without cargo, for whose lock they would wait.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, ensure};
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
    /// What has compiled it.
    compiler: Compiler,
}

/// What compiles the crates of the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compiler {
    Rustc,
    /// Clippy's, which is rustc with more lints: it compiles and checks at the same time.
    Clippy,
}

impl Compiler {
    /// Makes cargo, and cargo below a program, compile with it.
    pub(super) fn choose_for(self, cargo: &mut Command) {
        if self == Self::Clippy {
            cargo.env("RUSTC_WORKSPACE_WRAPPER", CLIPPY);
        }
    }
}

const CLIPPY: &str = "clippy-driver";

/// Programs that one check builds, and others run.
#[derive(Clone, Default)]
pub(super) struct Programs(Arc<OnceLock<Vec<Program>>>);

impl Programs {
    /// The check that builds them, by these arguments of cargo. A warning fails it.
    pub(super) fn build(&self, name: &str, compiler: Compiler, arguments: &'static [&'static str]) -> Check {
        let programs = self.clone();
        Check::new(name, move |out| {
            ensure!(
                compiler == Compiler::Rustc || tools::in_path(CLIPPY).is_some(),
                "{CLIPPY} is not in PATH\nhint: rustup component add clippy"
            );
            let mut cargo = tools::cargo();
            cargo
                .args(arguments)
                .args(["--workspace", "--locked", "--message-format", "json"])
                .current_dir(workspace()?)
                .stdout(Stdio::piped());
            compiler.choose_for(&mut cargo);
            let mut cargo = cargo.spawn().context("run cargo")?;
            let stdout = cargo.stdout.take().context("cargo has no output")?;
            let (mut built, mut good) = (Vec::new(), true);
            for line in BufReader::new(stdout).lines() {
                match read(&line?, compiler)? {
                    Message::Built(program) => built.push(program),
                    Message::Diagnostic(text) => {
                        good = false;
                        out.line(text.as_bytes())?;
                    }
                    Message::Other => {}
                }
            }
            programs.0.get_or_init(|| built);
            Ok(Outcome::new(cargo.wait()?.success() && good))
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
    /// It, where cargo would run it. What it builds by cargo is compiled as it was itself, so it is there
    /// already.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command.current_dir(&self.dir);
        self.compiler.choose_for(&mut command);
        command
    }
}

/// A message of cargo's.
#[derive(Debug)]
enum Message {
    Built(Program),
    /// A warning or an error, as the compiler prints it.
    Diagnostic(String),
    Other,
}

/// `compiler`: what compiles the program that the message may be about.
fn read(message: &str, compiler: Compiler) -> Result<Message> {
    let message: Value = serde_json::from_str(message).context("read cargo's messages")?;
    if let Some(text) = message["message"]["rendered"].as_str() {
        return Ok(Message::Diagnostic(text.to_owned()));
    }
    let (Some(file), Some(name), Some(manifest)) = (
        message["executable"].as_str(),
        message["target"]["name"].as_str(),
        message["manifest_path"].as_str(),
    ) else {
        return Ok(Message::Other);
    };
    let dir = Path::new(manifest)
        .parent()
        .context("a manifest has a directory")?;
    Ok(Message::Built(Program {
        name: name.to_owned(),
        file: file.into(),
        has_tests: message["profile"]["test"] == true,
        dir: dir.into(),
        compiler,
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
        let built = |message: &str| match read(message, Compiler::Rustc).unwrap() {
            Message::Built(program) => program,
            other => panic!("{other:?}"),
        };
        let program = built(message);
        assert_eq!(
            (&*program.name, program.dir.to_str(), program.has_tests),
            ("firn_shim", Some("/w/shim"), true)
        );
        assert!(!built(&message.replace("true", "false")).has_tests);
        let library = r#"{"target":{"name":"a"},"manifest_path":"/w/a/Cargo.toml","executable":null}"#;
        assert!(matches!(read(library, Compiler::Rustc).unwrap(), Message::Other));
        assert!(read("warning: no message", Compiler::Rustc).is_err());
        let none = Programs::default();
        assert!(
            none.named("suites")
                .unwrap_err()
                .to_string()
                .contains("not built")
        );
    }

    #[test]
    fn a_warning_is_read_as_the_compiler_prints_it() {
        let warning = r#"{"reason":"compiler-message","target":{"name":"firn_shim"},
            "message":{"level":"warning","rendered":"warning: unused variable: `a`\n"}}"#;
        let Message::Diagnostic(text) = read(warning, Compiler::Rustc).unwrap() else {
            panic!("it is no diagnostic");
        };
        assert!(text.starts_with("warning: unused variable"), "{text}");
    }
}
