//! Programs in a node whose failure is as interesting as their success.

use std::fmt;
use std::io::{Seek, Write};
use std::process::{Child, Output};

use anyhow::{Context, Error, Result, bail, ensure};
use firn_documents::schema;
use serde_json::Value;

use crate::GpuHost;

/// How a program in a node went.
#[derive(Debug)]
pub struct CommandOutput {
    /// Exit code; none when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl CommandOutput {
    /// Waits for the end of a program.
    pub fn wait(program: Child) -> Result<Self> {
        Ok(Self::from(program.wait_with_output()?))
    }

    /// Whether it has succeeded.
    pub fn is_ok(&self) -> bool {
        self.code == Some(0)
    }

    /// Both outputs.
    pub fn text(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// Fails unless it has succeeded.
    pub fn expect_success(self) -> Result<()> {
        ensure!(self.is_ok(), "{self}");
        Ok(())
    }

    /// What it printed; fails if it has succeeded.
    pub fn failed(self) -> Result<String> {
        ensure!(!self.is_ok(), "success was reported: {self}");
        Ok(self.text())
    }
}

impl From<Output> for CommandOutput {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl fmt::Display for CommandOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.code.map_or("none".to_owned(), |code| code.to_string());
        write!(f, "code {code}\nout {}\nerr {}", self.stdout, self.stderr)
    }
}

impl GpuHost {
    /// Runs ctr with this on its standard input, and returns how it went, success or not.
    pub fn ctr(&self, arguments: &[&str], stdin: &str) -> Result<CommandOutput> {
        self.output_of(&[&["ctr"], arguments].concat(), stdin)
    }

    /// Runs firn with these words and `--json`, which succeeds, and returns what it prints.
    pub fn firn(&self, words: &[&str]) -> Result<Value> {
        let output = self.node().run(&[&["firn"], words, &["--json"]].concat())?;
        answer(words, &output.stdout)
    }

    /// As [`Self::firn`], success or not. Returns its exit code, too.
    pub fn firn_shows(&self, words: &[&str]) -> Result<(Option<i32>, Value)> {
        let output = self.output_of(&[&["firn"], words, &["--json"]].concat(), "")?;
        Ok((
            output.code,
            answer(words, &output.stdout).with_context(|| output.to_string())?,
        ))
    }

    /// Runs a program with this on its standard input, and returns how it went, success or not.
    pub fn output_of(&self, argv: &[&str], stdin: &str) -> Result<CommandOutput> {
        let input = tempfile::tempfile().and_then(|mut file| {
            file.write_all(stdin.as_bytes())?;
            file.rewind()?;
            Ok(file)
        });
        let mut command = self.node().command("timeout");
        command.args(["--kill-after=5", "60"]).args(argv);
        let output = command.stdin(input?).output().with_context(|| argv.join(" "))?;
        Ok(output.into())
    }
}

/// What firn has printed with these words and `--json`. Its schema describes it.
pub fn answer(words: &[&str], printed: &str) -> Result<Value> {
    schema::printed(words, printed).map_err(Error::msg)
}

/// The error of a command that must fail.
pub fn failure<T>(done: Result<T>) -> Result<String> {
    match done {
        Ok(_) => bail!("success was reported"),
        Err(error) => Ok(format!("{error:#}")),
    }
}
