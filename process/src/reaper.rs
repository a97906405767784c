//! Owns SIGCHLD and every wait of the process: no other module may call `wait*`, `std::process::Child::wait`,
//! `Command::output` or `Command::status`. (A child that ends without SIGCHLD is not seen here; its creator
//! waits for it: see `mounts::idmap`.)
//!
//! There are two kinds of exits. Those of processes spawned through [`Reaper::spawn`] go to their [`Child`];
//! all others, those of the container processes whose subreaper this process is, go to every subscriber in
//! the order in which they were reaped.
//!
//! Invariants:
//! - No exit is missed: spawning and registering happen under the lock that reaping takes, and a subscriber
//!   that exists before `runc create` is forked receives the exits of all processes that the call leaves
//!   behind.
//! - A pid is signalled only while it is not yet reaped, so never an unrelated process that reuses the pid.
//! - Dropping a [`Child`] neither kills it nor leaves a zombie.
//!
//! The table is process-wide because waiting is: any number of handles, also in several async runtimes
//! (tests), share it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use crate::panics::lock;
use crate::sys;

/// How much of a command's stdout, and of its stderr, [`Reaper::output`] keeps; the rest is read and dropped.
pub(crate) const OUTPUT_LIMIT: usize = 4 << 20;

/// Largest pipe that the kernel creates for this process. The commands' pipes have the default size, which is
/// smaller.
const MAX_PIPE: usize = 1 << 20;

/// How long a killed command may take to end before it is left to the reaper.
const KILL_GRACE: Duration = Duration::from_secs(2);

/// The exit of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The process.
    pub pid: i32,
    /// Exit status, or 128 + signal number.
    pub code: u32,
    /// When it was reaped.
    pub at: SystemTime,
}

struct Table {
    children: BTreeMap<i32, watch::Sender<Option<Exit>>>,
    subscribers: Vec<UnboundedSender<Exit>>,
}

static TABLE: Mutex<Table> = Mutex::new(Table {
    children: BTreeMap::new(),
    subscribers: Vec::new(),
});

/// Handle to the process's reaper; cheap to clone.
#[derive(Clone, Debug)]
pub struct Reaper(());

impl Reaper {
    /// Starts reaping on the current tokio runtime, for as long as that runs.
    pub fn start() -> io::Result<Self> {
        let mut sigchld = signal(SignalKind::child())?;
        tokio::spawn(async move {
            loop {
                // Before the first wait too: a child may have ended before the handler was installed.
                reap_all();
                if sigchld.recv().await.is_none() {
                    return;
                }
            }
        });
        Ok(Self(()))
    }

    /// Spawns a helper process that the kernel kills if the shim dies.
    ///
    /// The parent-death signal is bound to the calling *thread*: call this on the thread that runs the async
    /// runtime, never on a thread of the blocking pool, which ends when idle.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        sys::die_with_parent(command);
        self.spawn_surviving(command)
    }

    /// Spawns a process that outlives the shim (a log binary that must drain its pipes).
    pub fn spawn_surviving(&self, command: &mut Command) -> io::Result<Child> {
        let mut table = lock(&TABLE);
        let mut child = command.spawn()?;
        let pid = i32::try_from(child.id()).expect("a pid fits pid_t");
        let (exited, exit) = watch::channel(None);
        table.children.insert(pid, exited);
        Ok(Child {
            pid,
            stdin: child.stdin.take(),
            stdout: child.stdout.take(),
            stderr: child.stderr.take(),
            exit,
        })
    }

    /// Sends a signal, given as a number, to a child of this process that is no [`Child`]: a container
    /// process that was reparented to the shim.
    ///
    /// `ESRCH` for a process that was reaped, even if its pid is reused.
    pub fn signal(&self, pid: i32, signal: u32) -> Result<(), Errno> {
        // No process is reaped while the lock is held.
        let table = lock(&TABLE);
        if table.children.contains_key(&pid) || !sys::is_unreaped_child(pid) {
            return Err(Errno::ESRCH);
        }
        sys::kill(pid, signal)
    }

    /// All exits from now on of processes that are no [`Child`], in order, without loss.
    pub fn subscribe(&self) -> UnboundedReceiver<Exit> {
        let (sender, receiver) = unbounded_channel();
        lock(&TABLE).subscribers.push(sender);
        receiver
    }

    /// Runs a command until it ends and collects its output, up to [`OUTPUT_LIMIT`] for each stream.
    ///
    /// A non-zero exit is not an error. When `limit` passes, the command is killed. Descendants that keep the
    /// pipes open do not delay the result.
    pub async fn output(&self, command: &mut Command, limit: Duration) -> Result<Output, OutputError> {
        self.output_with_input(command.stdin(Stdio::null()), &[], limit)
            .await
    }

    /// As [`Reaper::output`], with `input` on the command's stdin. The command is also killed when the future
    /// is dropped.
    ///
    /// With empty `input` the command's stdin is left as the caller set it.
    pub async fn output_with_input(
        &self,
        command: &mut Command,
        input: &[u8],
        limit: Duration,
    ) -> Result<Output, OutputError> {
        let program = command.get_program().to_string_lossy().into_owned();
        if !input.is_empty() {
            command.stdin(Stdio::piped());
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let spawned = self.spawn(command);
        let mut child = spawned.map_err(|source| OutputError::Spawn {
            program: program.clone(),
            source,
        })?;
        let pipes = Pipes::take(&mut child);
        let child = Killed(child);
        let mut pipes = pipes.map_err(|source| OutputError::Pipe {
            program: program.clone(),
            source,
        })?;
        let ended = tokio::time::timeout(limit, async {
            tokio::select! {
                exit = child.0.wait() => exit,
                () = pipes.pump(input) => child.0.wait().await,
            }
        });
        let Ok(exit) = ended.await else {
            child.0.kill();
            // A process in an uninterruptible sleep does not end by SIGKILL yet; the reaper reaps it later.
            let _gone = tokio::time::timeout(KILL_GRACE, child.0.wait()).await;
            pipes.stderr.drain();
            let stderr = String::from_utf8_lossy(&pipes.stderr.bytes);
            let last = stderr.trim_end().lines().last().unwrap_or_default().to_owned();
            return Err(OutputError::TimedOut { program, limit, last });
        };
        // Everything that the command itself wrote is in the pipes by now.
        pipes.stdout.drain();
        pipes.stderr.drain();
        Ok(Output {
            exit,
            is_cut: pipes.stdout.is_cut,
            stdout: pipes.stdout.bytes,
            stderr: pipes.stderr.bytes,
        })
    }
}

/// Kills the command when dropped; a command that has ended is not signalled.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill();
    }
}

fn reap_all() {
    let mut table = lock(&TABLE);
    loop {
        let (pid, code) = match sys::reap_any() {
            Ok(Some(reaped)) => reaped,
            Ok(None) => return,
            Err(error) => {
                log::error!("cannot wait for children: {error}");
                return;
            }
        };
        let exit = Exit {
            pid,
            code,
            at: SystemTime::now(),
        };
        match table.children.remove(&exit.pid) {
            Some(child) => drop(child.send_replace(Some(exit))),
            None => table
                .subscribers
                .retain(|subscriber| subscriber.send(exit).is_ok()),
        }
    }
}

/// A process spawned through the [`Reaper`].
#[derive(Debug)]
pub struct Child {
    pid: i32,
    /// Write end of its stdin, if the command set it to a pipe.
    pub stdin: Option<ChildStdin>,
    /// Read end of its stdout, if the command set it to a pipe.
    pub stdout: Option<ChildStdout>,
    /// Read end of its stderr, if the command set it to a pipe.
    pub stderr: Option<ChildStderr>,
    exit: watch::Receiver<Option<Exit>>,
}

impl Child {
    /// The pid, for files of /proc and for messages. To signal the process use [`Child::signal`].
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits until the process has ended; may be called again, from several tasks, and dropped at any time.
    pub async fn wait(&self) -> Exit {
        let mut exit = self.exit.clone();
        let ended = exit.wait_for(Option::is_some).await;
        ended
            .ok()
            .and_then(|exit| *exit)
            .expect("the table keeps the sender until it has sent the exit")
    }

    /// Sends a signal; returns false when the process has ended.
    pub fn signal(&self, signal: Signal) -> bool {
        let table = lock(&TABLE);
        table.children.contains_key(&self.pid()) && kill(Pid::from_raw(self.pid()), signal).is_ok()
    }

    /// Sends SIGKILL to the process group that it leads, unless it was reaped: until then the pid is not
    /// reused.
    pub fn kill_group(&self) {
        let table = lock(&TABLE);
        if table.children.contains_key(&self.pid()) {
            // ESRCH: it created no group, or all its processes have ended.
            let _none = killpg(Pid::from_raw(self.pid()), Signal::SIGKILL);
        }
    }

    /// Sends SIGKILL, if the process was not reaped.
    pub fn kill(&self) {
        self.signal(Signal::SIGKILL);
    }
}

/// Result of a command.
#[derive(Debug)]
pub struct Output {
    /// Its exit.
    pub exit: Exit,
    /// The beginning of its stdout.
    pub stdout: Vec<u8>,
    /// The beginning of its stderr.
    pub stderr: Vec<u8>,
    /// There was more on its stdout.
    pub is_cut: bool,
}

impl Output {
    /// Whether the exit status was 0.
    pub fn success(&self) -> bool {
        self.exit.code == 0
    }

    /// What a helper prints that has succeeded; else its complaint, or how it ended if it has none.
    pub fn printed(self) -> Result<Vec<u8>, String> {
        if self.success() && self.is_cut {
            return Err(format!("it has printed more than {} MiB", OUTPUT_LIMIT >> 20));
        }
        if self.success() {
            return Ok(self.stdout);
        }
        match String::from_utf8_lossy(&self.stderr).trim() {
            "" => Err(format!("it ended with exit status {}", self.exit.code)),
            complaint => Err(complaint.to_owned()),
        }
    }
}

/// Why a command has no output.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// It did not start.
    #[error("cannot run {program:?}")]
    Spawn { program: String, source: io::Error },
    /// Its pipes could not be read by the runtime.
    #[error("cannot read the output of {program}")]
    Pipe { program: String, source: io::Error },
    /// It was killed because it took too long.
    #[error("{program} did not end within {limit:?} and was killed")]
    TimedOut {
        program: String,
        limit: Duration,
        /// The last line of its stderr.
        last: String,
    },
}

/// The shim's ends of a command's pipes.
struct Pipes {
    stdin: Option<pipe::Sender>,
    stdout: Capture,
    stderr: Capture,
}

impl Pipes {
    fn take(child: &mut Child) -> io::Result<Self> {
        let stdin = child.stdin.take().map(OwnedFd::from);
        Ok(Self {
            stdin: stdin.map(pipe::Sender::from_owned_fd).transpose()?,
            stdout: Capture::new(child.stdout.take().map(OwnedFd::from))?,
            stderr: Capture::new(child.stderr.take().map(OwnedFd::from))?,
        })
    }

    /// Copies data until all pipes are at their end. May be dropped: data that was read is kept.
    async fn pump(&mut self, input: &[u8]) {
        let stdin = self.stdin.take();
        tokio::join!(feed(stdin, input), self.stdout.fill(), self.stderr.fill());
    }
}

/// Writes all of `input` and closes the pipe. Write errors are ignored: a command that needs its input fails
/// by its exit status.
async fn feed(stdin: Option<pipe::Sender>, input: &[u8]) {
    if let Some(mut stdin) = stdin {
        let _unread = stdin.write_all(input).await;
    }
}

/// The read end of a pipe and the data that was read from it.
struct Capture {
    pipe: Option<pipe::Receiver>,
    bytes: Vec<u8>,
    is_cut: bool,
}

impl Capture {
    fn new(pipe: Option<OwnedFd>) -> io::Result<Self> {
        Ok(Self {
            pipe: pipe.map(pipe::Receiver::from_owned_fd).transpose()?,
            bytes: Vec::new(),
            is_cut: false,
        })
    }

    async fn fill(&mut self) {
        if self.pipe.is_none() {
            return;
        }
        // On the heap: an array would be a part of every future that calls the OCI runtime.
        let mut chunk = vec![0; 16 << 10];
        while let Some(pipe) = &mut self.pipe {
            match pipe.read(&mut chunk).await {
                Ok(0) | Err(_) => self.pipe = None,
                Ok(count) => self.keep(&chunk[..count]),
            }
        }
    }

    /// Reads pending data without waiting. It reads the pipe itself, because tokio's readiness may be out of
    /// date.
    fn drain(&mut self) {
        if let Some(pipe) = self.pipe.take() {
            self.read_pending(&pipe);
        }
    }

    fn read_pending(&mut self, pipe: impl AsFd) {
        let (mut room, mut chunk) = (MAX_PIPE, [0; 16 << 10]);
        // A descendant may write faster than this reads: take no more than a pipe can hold.
        while room > 0
            && let Ok(count @ 1..) = nix::unistd::read(&pipe, &mut chunk)
        {
            room = room.saturating_sub(count);
            self.keep(&chunk[..count]);
        }
    }

    fn keep(&mut self, chunk: &[u8]) {
        let room = OUTPUT_LIMIT - self.bytes.len();
        self.is_cut |= chunk.len() > room;
        self.bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
    }
}

#[cfg(test)]
mod tests;
