//! Programs in a node whose failure is as interesting as their success.

use std::fmt;
use std::io::{Seek, Write};

use anyhow::{Context, Result, bail};

use crate::GpuHost;

/// How a program in a node went.
#[derive(Debug)]
pub struct Said {
    /// Exit code; none when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.code.map_or("none".to_owned(), |code| code.to_string());
        write!(f, "code {code}\nout {}\nerr {}", self.stdout, self.stderr)
    }
}

impl GpuHost {
    /// Runs ctr with this on its standard input, and tells how it went, whatever that is.
    pub fn ctr(&self, arguments: &[&str], stdin: &str) -> Result<Said> {
        self.said(&[&["ctr"], arguments].concat(), stdin)
    }

    /// Runs a program with this on its standard input, and tells how it went, whatever that is.
    pub fn said(&self, argv: &[&str], stdin: &str) -> Result<Said> {
        let input = tempfile::tempfile().and_then(|mut file| {
            file.write_all(stdin.as_bytes())?;
            file.rewind()?;
            Ok(file)
        });
        let mut command = self.node().command("timeout");
        command.args(["--kill-after=5", "60"]).args(argv);
        let output = command.stdin(input?).output().with_context(|| argv.join(" "))?;
        Ok(Said {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }
}

/// What was said by a command that must fail.
pub fn failure<T>(done: Result<T>) -> Result<String> {
    match done {
        Ok(_) => bail!("success was reported"),
        Err(error) => Ok(format!("{error:#}")),
    }
}
