//! Programs inside a node.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::host;
use crate::node::Node;

/// Search path of everything in a node, containerd included: a shim in `/usr/local/bin` is found.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How long [`Node::run`] lets a program run.
const LIMIT: Duration = Duration::from_secs(120);
/// Joins the cgroups that the first arguments name, after their count, and becomes the rest.
const JOIN: &str = r#"n=$1; shift
while [ "$n" -gt 0 ]; do echo 0 >"$1/cgroup.procs"; shift; n=$((n - 1)); done
exec "$@""#;
/// What `timeout` exits with when it had to end the program.
const TIMED_OUT: i32 = 124;

/// What a program printed.
#[derive(Clone, Debug)]
pub struct Output {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Node {
    /// A program in the node's namespaces and cgroups, with an environment of its own; add arguments and run
    /// it.
    ///
    /// It dies with the `Child`; what it forks does not, but nothing outlives the node. Its signals are the
    /// default ones: whoever started this program may ignore some (nohup, CI runners), and a shell in between
    /// cannot change that.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("sh");
        let cgroups = self.record().cgroups.to_join();
        command
            .args(["-euc", JOIN, "join", &cgroups.len().to_string()])
            .args(cgroups);
        command.arg("nsenter").arg(format!("--target={}", self.pid()));
        command.args([
            "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--",
        ]);
        command
            .args(["setpriv", "--pdeathsig", "KILL", "--"])
            .args(["env", "--default-signal"])
            .arg(program);
        command.env_clear().envs([
            ("PATH", PATH),
            ("HOME", "/root"),
            ("LANG", "C.UTF-8"),
            ("TERM", "xterm"),
        ]);
        command
    }

    /// Runs a program to its end within two minutes; anything but success is an error with all that it
    /// printed.
    pub fn run<S: AsRef<OsStr>>(&self, argv: &[S]) -> Result<Output> {
        self.run_within(LIMIT, argv)
    }

    /// As [`Self::run`], with a limit of its own.
    pub fn run_within<S: AsRef<OsStr>>(&self, limit: Duration, argv: &[S]) -> Result<Output> {
        let mut command = self.command("timeout");
        command
            .args(["--kill-after=5", &limit.as_secs_f64().to_string()])
            .args(argv);
        let words: Vec<_> = argv.iter().map(|word| word.as_ref().to_string_lossy()).collect();
        let shown = || format!("`{}` in node {}", first_line(&words.join(" ")), self.name());
        let output = command.stdin(Stdio::null()).output().with_context(shown)?;
        let text = Output {
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        match output.status.code() {
            Some(0) => Ok(text),
            Some(TIMED_OUT) => bail!("{} ran longer than {limit:?}\n{}", shown(), text.both()),
            _ => bail!("{} failed ({})\n{}", shown(), output.status, text.both()),
        }
    }

    /// Starts a program with its output in pipes.
    pub fn spawn<S: AsRef<OsStr>>(&self, argv: &[S]) -> Result<Child> {
        let (program, args) = argv.split_first().context("start a program: none given")?;
        let mut command = self.command(program);
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
            .spawn()
            .with_context(|| format!("start {}", host::show(&command)))
    }
}

/// The first line of a call, and whether there are more: a summary has room for what a script has printed,
/// and not for the script.
fn first_line(call: &str) -> String {
    match call.split_once('\n') {
        Some((first, _)) => format!("{first} ..."),
        None => call.to_owned(),
    }
}

impl Output {
    /// Both streams, for error messages.
    fn both(&self) -> String {
        format!("{}{}", self.stdout, self.stderr).trim_end().to_string()
    }
}
