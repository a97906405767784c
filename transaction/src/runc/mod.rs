//! Runs the OCI runtime's command line (runc, or the program that `BinaryName` names).
//!
//! One [`Runc`] per container. Every call is a child of the shim's main thread with a parent-death signal, so
//! a killed shim leaves no runtime process behind. This module keeps no state and takes no lock; `container`
//! decides who may make which call. The command lines are those of containerd's runc shim, because runtimes
//! are tested against them; only the log file differs, where calls run concurrently.

mod criu;
#[cfg(any(test, fuzzing, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
mod hooks;
mod kind;
mod verbs;
mod watchdog;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use firn_host::procfs;
use firn_process::OrWarn;
use firn_process::blocking::blocking;
use firn_process::pidfd;
use firn_process::reaper::{Child, OutputError, Reaper};
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::sync::OnceCell;
use tokio::time::{sleep, timeout};

use crate::journal::Role;
use crate::options::RuncOptions;
use firn_host::{Absent, Chain, bounded};

pub use criu::{Bounds, Checkpoint, Restore};
pub use kind::{RuntimeKind, UnfitRuntime};
pub use verbs::{Create, Exec};

/// Deadline of calls that only touch runc's state or the cgroup, and of forced deletes after a failure.
const SHORT: Duration = Duration::from_secs(60);

/// How long the killed processes of a dump or restore may take to end.
const GROUP_END: Duration = Duration::from_secs(30);

/// The same once the container is killed: a process in a system call on a hung file system ends only when
/// that answers.
const GROUP_END_KILLED: Duration = Duration::from_secs(3);

/// The OCI runtime of one container.
#[derive(Clone)]
pub struct Runc {
    id: String,
    namespace: String,
    binary: PathBuf,
    root: PathBuf,
    log: PathBuf,
    systemd_cgroup: bool,
    kind: OnceCell<RuntimeKind>,
    reaper: Reaper,
}

/// A call of the OCI runtime that failed.
#[derive(Debug, thiserror::Error)]
pub enum RuncError {
    /// The runtime could not be started or waited for.
    #[error("{verb}")]
    Call { verb: &'static str, source: OutputError },
    /// The runtime ended with an error; `message` is the last error of its log, or its stderr.
    #[error("{message}")]
    Failed {
        verb: &'static str,
        message: String,
        /// Its exit status and output.
        output: String,
    },
    /// CRIU has died and the runtime did not notice; the runtime was killed.
    #[error("CRIU died during {verb}")]
    CriuDied { verb: &'static str },
    /// The container was killed during the call, which was therefore killed too.
    #[error("the container was killed during {verb}")]
    Cancelled { verb: &'static str },
    /// The runtime's output is not what its interface specifies.
    #[error("cannot read the output of {verb}: {detail}")]
    Output { verb: &'static str, detail: String },
    /// A file that the call needs could not be created.
    #[error("cannot prepare {verb}")]
    Prepare {
        verb: &'static str,
        source: std::io::Error,
    },
}

/// A failed call by its exit status and output instead of the last error of its log: for verbs whose errors
/// clients know in this form.
#[derive(Debug, thiserror::Error)]
pub struct RuntimeMessage(RuncError);

impl From<RuncError> for RuntimeMessage {
    fn from(error: RuncError) -> Self {
        Self(error)
    }
}

impl fmt::Display for RuntimeMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            RuncError::Failed { output, .. } => f.write_str(output),
            other => write!(f, "{}", Chain(other)),
        }
    }
}

impl Absent for RuncError {
    /// Whether the runtime knows no such container. A command line reports this by text only; the wording is
    /// that of runc and crun, and containerd matches it too.
    fn is_absent(&self) -> bool {
        matches!(self, Self::Failed { message, .. } if message.contains("does not exist"))
    }
}

impl RuncError {
    /// Replaces `way`, the path that the runtime was given, by `path` in the messages.
    pub(crate) fn with_path(self, way: &Path, path: &Path) -> Self {
        let named = |text: String| text.replace(&*way.to_string_lossy(), &path.to_string_lossy());
        match self {
            Self::Failed {
                verb,
                message,
                output,
            } => Self::Failed {
                verb,
                message: named(message),
                output: named(output),
            },
            other => other,
        }
    }

    /// Whether the signalled process has ended already (same remark as for [`RuncError::is_absent`]).
    pub fn is_finished(&self) -> bool {
        matches!(self, Self::Failed { message, .. } if {
            let text = message.to_ascii_lowercase();
            let finished = ["process already finished", "container not running", "no such process"];
            finished.iter().any(|words| text.contains(words))
        })
    }
}

impl Runc {
    /// The runtime that `options` name for container `id` with `bundle`, in containerd namespace `namespace`.
    pub fn new(id: &str, namespace: &str, bundle: &Path, options: &RuncOptions, reaper: Reaper) -> Self {
        Self {
            id: id.to_owned(),
            namespace: namespace.to_owned(),
            binary: PathBuf::from(options.runtime()),
            root: options.root(namespace),
            log: bundle.join("log.json"),
            systemd_cgroup: options.systemd_cgroup,
            kind: OnceCell::new(),
            reaper,
        }
    }

    /// containerd's namespace of the container; empty without containerd.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Directory in which the runtime keeps this container's state.
    pub fn state_dir(&self) -> PathBuf {
        self.root.join(&self.id)
    }

    /// Makes a call that may run concurrently with others, with its own log: in a shared log the last error
    /// may be another call's. Calls under the container's lock share a log, to which crun's init writes the
    /// errors of `start`.
    async fn with_own_log<T>(
        &self,
        call: impl AsyncFnOnce(&Self) -> Result<T, RuncError>,
    ) -> Result<T, RuncError> {
        static CALLS: AtomicU64 = AtomicU64::new(0);
        let number = CALLS.fetch_add(1, Ordering::Relaxed);
        let own = Self {
            log: self.log.with_extension(format!("{number}.json")),
            ..self.clone()
        };
        // A full disk must not prevent a kill.
        if File::create(&own.log).is_err() {
            return call(self).await;
        }
        let done = call(&own).await;
        let moved = own.move_log(&self.log);
        moved.or_warn(format_args!("cannot keep {}", own.log.display()));
        done
    }

    /// Appends this call's log to the container's log, where users look for it, and marks the entries so that
    /// [`last_error`] skips them.
    fn move_log(&self, to: &Path) -> io::Result<()> {
        let log = std::fs::read(&self.log)?;
        std::fs::remove_file(&self.log)?;
        let mut marked = Vec::new();
        let entries = serde_json::Deserializer::from_slice(&log).into_iter::<Map<String, Value>>();
        for mut entry in entries.map_while(Result::ok) {
            entry.insert(CONCURRENT.to_owned(), Value::Bool(true));
            serde_json::to_writer(&mut marked, &entry)?;
            marked.push(b'\n');
        }
        if marked.is_empty() {
            return Ok(());
        }
        let mut log = OpenOptions::new().append(true).create(true).open(to)?;
        log.write_all(&marked)
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .arg("--root")
            .arg(&self.root)
            .arg("--log")
            .arg(&self.log)
            .args(["--log-format", "json"]);
        if self.systemd_cgroup {
            command.arg("--systemd-cgroup");
        }
        command.arg(verb).env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
        command
    }

    /// Runs a command whose stdio does not go to the container, and returns its stdout.
    async fn output(
        &self,
        verb: &'static str,
        command: &mut Command,
        deadline: Duration,
    ) -> Result<Vec<u8>, RuncError> {
        self.output_with_input(verb, command, &[], deadline).await
    }

    /// As [`Runc::output`], with `input` on the command's stdin.
    async fn output_with_input(
        &self,
        verb: &'static str,
        command: &mut Command,
        input: &[u8],
        deadline: Duration,
    ) -> Result<Vec<u8>, RuncError> {
        let from = self.logged();
        let output = self
            .reaper
            .output_with_input(command, input, deadline)
            .await
            .map_err(|source| RuncError::Call { verb, source })?;
        if output.success() {
            return Ok(output.stdout);
        }
        let (printed, code) = ([output.stdout, output.stderr].concat(), output.exit.code);
        Err(self.failure(verb, code, &printed, from))
    }

    /// Runs a command whose stdio is the container's (create, exec): none of its output is read.
    async fn run(&self, verb: &'static str, command: &mut Command) -> Result<(), RuncError> {
        let from = self.logged();
        let child = self.spawn(verb, command)?;
        match child.wait().await.code {
            0 => Ok(()),
            code => Err(self.failure(verb, code, &[], from)),
        }
    }

    /// Runs a command that starts CRIU. After a failure the command and CRIU are killed; CRIU would otherwise
    /// continue.
    ///
    /// The runtime repeats CRIU's errors on its own stdout or stderr, which `output` receives. A restore has
    /// none: its stdio is the container's.
    async fn run_criu(
        &self,
        verb: &'static str,
        command: &mut Command,
        output: Option<File>,
        bounds: Bounds<'_>,
    ) -> Result<(), RuncError> {
        let from = self.logged();
        command.process_group(0);
        let child = self.spawn(verb, command)?;
        let started = procfs::started(child.pid());
        let (cancel, limit) = (bounds.cancel, bounds.deadline.unwrap_or(Duration::MAX));
        let _at_work = cancel.criu();
        bounds.journal.child(Role::Runc, child.pid()).await;
        let exit = tokio::select! {
            exit = child.wait() => Ok(exit),
            () = sleep(limit) => {
                let (program, last) = (self.binary.display().to_string(), String::new());
                let source = OutputError::TimedOut { program, limit, last };
                Err(RuncError::Call { verb, source })
            }
            () = watchdog::criu_died(child.pid()) => Err(RuncError::CriuDied { verb }),
            () = cancel.cancelled() => Err(RuncError::Cancelled { verb }),
            () = watchdog::withdrawn(cancel, child.pid()) => Err(RuncError::Cancelled { verb }),
        };
        if exit.as_ref().is_ok_and(|exit| exit.code == 0) {
            return Ok(());
        }
        if let Some(cgroup) = bounds.freezer.filter(|_| !cancel.is_cancelled()) {
            let frozen = cgroup.begin_freeze();
            frozen.or_warn(format_args!("cannot freeze the tasks before CRIU is killed"));
        }
        end_group(&child, started, cancel.cancelled_for(GROUP_END_KILLED)).await;
        let exit = exit?;
        let stderr = output.map(read_from_start).unwrap_or_default();
        let message = match String::from_utf8_lossy(&stderr).lines().next() {
            Some(line) => self.exit_message(exit.code, line),
            None => return Err(self.failure(verb, exit.code, &[], from)),
        };
        Err(RuncError::Failed {
            verb,
            output: message.clone(),
            message,
        })
    }

    fn spawn(&self, verb: &'static str, command: &mut Command) -> Result<Child, RuncError> {
        let program = self.binary.display().to_string();
        let spawned = self.reaper.spawn(command);
        spawned.map_err(|source| {
            let source = OutputError::Spawn { program, source };
            RuncError::Call { verb, source }
        })
    }

    /// Length of the runtime's log: the entries of the next call come after it.
    fn logged(&self) -> u64 {
        std::fs::metadata(&self.log).map_or(0, |log| log.len())
    }

    /// The exit status and output in the words of containerd's own shim.
    fn exit_message(&self, code: u32, output: &str) -> String {
        format!(
            "{} did not terminate successfully: exit status {code}: {output}",
            self.binary.display()
        )
    }

    fn failure(&self, verb: &'static str, code: u32, output: &[u8], from: u64) -> RuncError {
        let output = String::from_utf8_lossy(output);
        let program = self.binary.display();
        let message =
            last_error(&self.log, from).unwrap_or_else(|| match (output.trim(), code.checked_sub(128)) {
                ("", Some(signal @ 1..)) => format!("{program} {verb} was ended by signal {signal}"),
                ("", _) => format!("{program} {verb} failed"),
                (text, _) => text.to_owned(),
            });
        let state = self.state_dir();
        // crun reports a missing container by a file that it misses.
        let absent =
            message.contains(&*state.to_string_lossy()) && message.contains("No such file or directory");
        RuncError::Failed {
            verb,
            message: if absent {
                format!("container does not exist: {message}")
            } else {
                message
            },
            output: self.exit_message(code, &output),
        }
    }
}

/// Kills the process group of a child that was started at `started`, and waits until none of its processes is
/// alive, or until `late` resolves.
async fn end_group(child: &Child, started: Option<u64>, late: impl Future<Output = ()>) {
    let leader = child.pid();
    child.kill_group();
    // Without a start time the kernel shows no processes: the child existed when it was read.
    let Some(started) = started else { return };
    let gone = async {
        while blocking(move || !pidfd::kill_group(leader, started).is_empty()).await {
            sleep(Duration::from_millis(5)).await;
        }
        child.wait().await;
    };
    tokio::select! {
        _ = timeout(GROUP_END, gone) => {}
        () = late => {}
    }
    let left = blocking(move || pidfd::kill_group(leader, started)).await;
    if !left.is_empty() {
        log::warn!("processes {left:?} of group {leader} do not end");
    }
}

fn read_from_start(mut file: File) -> Vec<u8> {
    let mut text = Vec::new();
    let read = file
        .rewind()
        .and_then(|()| file.take(64 << 10).read_to_end(&mut text));
    if let Err(error) = read {
        log::debug!("cannot read the output of the runtime: {error}");
    }
    text
}

/// A pid file without a pid.
#[derive(Debug, thiserror::Error)]
pub enum PidFileError {
    #[error("cannot read the pid file")]
    Read(#[source] std::io::Error),
    #[error("no pid in {path}")]
    Pid { path: PathBuf },
}

/// The pid that the runtime wrote to its pid file.
pub fn read_pid(path: &Path) -> Result<i32, PidFileError> {
    let text = std::fs::read_to_string(path).map_err(PidFileError::Read)?;
    let pid = text.trim().parse().ok();
    // kill(2) takes 0 and negative numbers for process groups.
    pid.filter(|pid| *pid > 0).ok_or_else(|| PidFileError::Pid {
        path: path.to_owned(),
    })
}

/// Key of log entries of concurrent calls.
const CONCURRENT: &str = "concurrent";

#[derive(Deserialize)]
struct LogLine {
    #[serde(default)]
    concurrent: bool,
    #[serde(default)]
    level: String,
    #[serde(default)]
    msg: String,
}

/// How much of the end of a log is searched for an error.
const LOG_TAIL: u64 = 64 << 10;

/// Message of the last error that the runtime wrote to its JSON log after the first `from` bytes. runc writes
/// one entry per line, crun spreads an entry over several lines.
fn last_error(log: &Path, from: u64) -> Option<String> {
    let text = bounded::tail(log, from, LOG_TAIL).ok()?;
    let mut text = text.as_slice();
    let mut last = None;
    loop {
        let mut entries = serde_json::Deserializer::from_slice(text).into_iter::<LogLine>();
        for entry in entries.by_ref().map_while(Result::ok) {
            if !entry.concurrent && entry.level.eq_ignore_ascii_case("error") {
                last = Some(entry.msg.trim().to_owned());
            }
        }
        // Text that is no entry is skipped up to the end of its line.
        let rest = &text[entries.byte_offset()..];
        match rest.iter().position(|byte| *byte == b'\n') {
            Some(end) => text = &rest[end + 1..],
            None => return last,
        }
    }
}

#[cfg(test)]
mod tests;
