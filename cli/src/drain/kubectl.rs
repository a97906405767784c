//! Calls of kubectl, which knows how to reach the cluster and as whom.

use std::io::{self, Read, Write};
use std::process::{Child, Command, Output, Stdio};

use serde::de::DeserializeOwned;

use super::error::DrainError;

/// Namespace and label of the agents.
const AGENTS: [&str; 4] = ["--namespace", "firn-agents", "--selector", "app=firn-agent"];
const COPY: usize = 1 << 20;

/// kubectl, for a context of the user's configuration.
pub struct Kubectl {
    program: &'static str,
    options: Vec<String>,
}

/// A shell script that an agent runs.
pub struct Script<'a> {
    /// Name of its pod.
    pub agent: &'a str,
    pub text: &'a str,
    pub arguments: &'a [&'a str],
}

impl Kubectl {
    pub fn new(context: Option<&str>) -> Self {
        let context = context.map(|context| ["--context".to_owned(), context.to_owned()]);
        Self {
            program: "kubectl",
            options: context.into_iter().flatten().collect(),
        }
    }

    /// A shell script in its place.
    #[cfg(test)]
    pub fn of(script: &std::path::Path) -> Self {
        Self {
            program: "sh",
            options: vec![script.display().to_string()],
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program);
        command.args(&self.options).args(arguments);
        command
    }

    /// What it prints.
    pub fn run(&self, arguments: &[&str]) -> Result<String, DrainError> {
        let output = self.command(arguments).stdin(Stdio::null()).output();
        printed(arguments, output)
    }

    /// Posts a body to a path of the API server. Returns its answer.
    pub fn post(&self, path: &str, body: &str) -> Result<String, DrainError> {
        let arguments = ["create", "--raw", path, "--filename", "-"];
        let mut post = self.command(&arguments);
        post.stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut post = post.spawn().map_err(DrainError::NoKubectl)?;
        // A kubectl that does not read it fails.
        let _written = post
            .stdin
            .take()
            .map(|mut stdin| stdin.write_all(body.as_bytes()));
        printed(&arguments, post.wait_with_output())
    }

    /// Objects, as JSON.
    pub fn get<T: DeserializeOwned>(&self, what: &[&str]) -> Result<T, DrainError> {
        let arguments = [&["get", "--output", "json"], what].concat();
        let shown = self.run(&arguments)?;
        serde_json::from_str(&shown).map_err(|error| failed(&arguments, error.to_string().as_bytes()))
    }

    /// The agents that run.
    pub fn agents<T: DeserializeOwned>(&self) -> Result<T, DrainError> {
        let running = ["--field-selector", "status.phase=Running"];
        self.get(&[&["pods"], &AGENTS[..], &running].concat())
    }

    /// Arguments that run a shell script in an agent.
    fn script<'a>(agent: &'a str, script: &'a str, arguments: &[&'a str]) -> Vec<&'a str> {
        let exec = [
            "exec",
            "--stdin",
            "--namespace",
            AGENTS[1],
            agent,
            "--",
            "sh",
            "-euc",
        ];
        [&exec[..], &[script, "agent"], arguments].concat()
    }

    /// What a shell script prints in an agent.
    pub fn on(&self, agent: &str, script: &str, arguments: &[&str]) -> Result<String, DrainError> {
        self.run(&Self::script(agent, script, arguments))
    }

    /// Sends what one script prints in an agent to another one in another agent. `sent` learns how many bytes
    /// that were, from time to time.
    pub fn pipe(
        &self,
        read: &Script<'_>,
        write: &Script<'_>,
        mut sent: impl FnMut(u64),
    ) -> Result<(), DrainError> {
        let (read, write) = (
            Self::script(read.agent, read.text, read.arguments),
            Self::script(write.agent, write.text, write.arguments),
        );
        let mut source = self.command(&read);
        source
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut source = source.spawn().map_err(DrainError::NoKubectl)?;
        let mut target = self.command(&write);
        target
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let copied = target.spawn().map_err(DrainError::NoKubectl).map(|mut target| {
            let copied = copy(&mut source, &mut target, &mut sent);
            (copied, target)
        });
        let (copied, target) = match copied {
            Ok(both) => both,
            Err(error) => {
                let _gone = source.kill().and_then(|()| source.wait());
                return Err(error);
            }
        };
        // The target sees the end of its input by now, the source a closed pipe at the latest.
        let (source, target) = (source.wait_with_output(), target.wait_with_output());
        for (arguments, ended) in [(&read, source), (&write, target)] {
            printed(arguments, ended)?;
        }
        copied.map_err(|error| failed(&write, error.to_string().as_bytes()))
    }
}

/// Copies all of a program's output to another's input, and closes both.
fn copy(source: &mut Child, target: &mut Child, sent: &mut impl FnMut(u64)) -> io::Result<()> {
    let (Some(mut from), Some(mut to)) = (source.stdout.take(), target.stdin.take()) else {
        return Err(io::Error::other("no pipes"));
    };
    let (mut buffer, mut all) = (vec![0; COPY], 0);
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..count])?;
        all += count as u64;
        sent(all);
    }
}

/// What a call has printed, if it has succeeded.
fn printed(arguments: &[&str], output: io::Result<Output>) -> Result<String, DrainError> {
    let output = output.map_err(DrainError::NoKubectl)?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(failed(arguments, &output.stderr))
    }
}

fn failed(arguments: &[&str], stderr: &[u8]) -> DrainError {
    DrainError::Kubectl {
        // The rest is a script.
        call: arguments
            .iter()
            .take_while(|word| **word != "--")
            .copied()
            .collect::<Vec<_>>()
            .join(" "),
        message: String::from_utf8_lossy(stderr).trim().to_owned(),
    }
}
