//! One process of a container: init or an exec.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use firn_host::procfs;
use firn_process::panics::lock;
use firn_process::reaper::Exit;
use tokio::sync::watch;

use crate::stdio::Copier;

/// Stdio as the client requested it: fifos or URIs, empty for none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StdioPaths {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

/// Init (with an empty exec id) or an exec'd process.
pub struct Process {
    /// Exec id; empty for init.
    pub exec_id: String,
    /// Stdio as the client requested it.
    pub stdio: StdioPaths,
    /// OCI process as JSON, for an exec.
    pub spec: Vec<u8>,
    begun: AtomicBool,
    /// With the time of its start, in clock ticks since the boot.
    pid: Mutex<(i32, Option<u64>)>,
    exit: watch::Sender<Option<Exit>>,
    copier: Mutex<Option<Copier>>,
    stdin_closed: Mutex<bool>,
}

impl Process {
    /// A process that does not run yet.
    pub fn new(exec_id: &str, stdio: StdioPaths, spec: Vec<u8>) -> Self {
        Self {
            exec_id: exec_id.to_owned(),
            stdio,
            spec,
            begun: AtomicBool::new(false),
            pid: Mutex::new((0, None)),
            exit: watch::Sender::new(None),
            copier: Mutex::new(None),
            stdin_closed: Mutex::new(false),
        }
    }

    /// Marks the process as started; returns whether it was not before. Clears an earlier failed start.
    pub fn begin(&self) -> bool {
        if self.begun.swap(true, Ordering::Relaxed) {
            return false;
        }
        self.exit.send_replace(None);
        true
    }

    /// Whether it was started, and the start did not fail.
    pub fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// Start has failed: wakes every [`Process::wait`]; the start may be tried again.
    pub fn fail(&self) {
        self.begun.store(false, Ordering::Relaxed);
        self.exit.send_replace(Some(Exit {
            pid: 0,
            code: 0,
            at: SystemTime::now(),
        }));
    }

    /// Pid on the host; 0 until it is known.
    pub fn pid(&self) -> i32 {
        lock(&self.pid).0
    }

    /// When the process of this pid was started, as it was when the pid became known. None: it has ended
    /// then.
    pub fn started(&self) -> Option<u64> {
        lock(&self.pid).1
    }

    /// Sets the pid once it is known.
    pub fn set_pid(&self, pid: i32) {
        *lock(&self.pid) = (pid, procfs::started(pid));
    }

    /// How it ended; none while it runs, and if it was never started. A process that was killed before it had
    /// a pid has ended.
    pub fn exit(&self) -> Option<Exit> {
        self.exit
            .borrow()
            .filter(|exit| exit.pid != 0 || self.has_begun())
    }

    /// Sets the exit and wakes every [`Process::wait`].
    pub fn set_exit(&self, exit: Exit) {
        self.exit.send_replace(Some(exit));
    }

    /// Waits, without a deadline, until it has ended or could not be started. The exit of a process that
    /// never ran has pid 0.
    pub async fn wait(&self) -> Option<Exit> {
        let mut exits = self.exit.subscribe();
        let exit = exits.wait_for(Option::is_some).await.ok()?;
        *exit
    }

    /// Lets stdin end once the client has closed it too; applies at once, or to a copier that is set later.
    pub fn close_stdin(&self) {
        *lock(&self.stdin_closed) = true;
        if let Some(copier) = lock(&self.copier).as_mut() {
            copier.close_stdin();
        }
    }

    /// Sets the copier of its stdio.
    pub fn set_copier(&self, mut copier: Copier) {
        if *lock(&self.stdin_closed) {
            copier.close_stdin();
        }
        *lock(&self.copier) = Some(copier);
    }

    /// Calls `act` with the copier of its stdio, if there is one.
    pub fn with_copier<T>(&self, act: impl FnOnce(&Copier) -> T) -> Option<T> {
        lock(&self.copier).as_ref().map(act)
    }

    /// Takes the copier of its stdio, to drain it.
    pub fn take_copier(&self) -> Option<Copier> {
        lock(&self.copier).take()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use firn_process::reaper::Reaper;
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;
    use tokio::time::timeout;

    use super::*;
    use crate::stdio::{Owner, Request, StdioConfig};

    const SOON: Duration = Duration::from_secs(20);

    fn ended(pid: i32, code: u32) -> Exit {
        let at = SystemTime::UNIX_EPOCH;
        Exit { pid, code, at }
    }

    #[tokio::test]
    async fn a_failed_start_is_no_exit_and_may_be_retried() {
        let exec = Process::new("exec", StdioPaths::default(), Vec::new());
        assert!(!exec.has_begun() && exec.begin() && exec.has_begun());
        assert!(!exec.begin(), "it was started twice");
        exec.fail();
        assert_eq!(exec.exit(), None, "a process that never ran has ended");
        assert_eq!(exec.wait().await.unwrap().pid, 0, "a waiter was not woken");
        assert!(!exec.has_begun() && exec.begin());
        let waiting = tokio::time::timeout(std::time::Duration::from_millis(20), exec.wait());
        assert!(
            waiting.await.is_err(),
            "the end of the start that failed is its end"
        );
        assert_eq!(exec.pid(), 0);
        exec.set_pid(7);
        exec.set_exit(ended(7, 3));
        assert_eq!((exec.pid(), exec.exit()), (7, Some(ended(7, 3))));
        assert_eq!(exec.wait().await, Some(ended(7, 3)));
    }

    #[test]
    fn a_process_killed_before_it_had_a_pid_has_ended() {
        let init = Process::new("", StdioPaths::default(), Vec::new());
        init.set_exit(ended(0, 137));
        assert_eq!(init.exit(), None, "it was deleted, and never started");
        let killed = Process::new("", StdioPaths::default(), Vec::new());
        killed.begin();
        killed.set_exit(ended(0, 137));
        assert_eq!(killed.exit(), Some(ended(0, 137)));
    }
    #[tokio::test]
    async fn stdin_ends_when_the_client_has_closed_it_even_before_the_start() {
        let reaper = Reaper::start().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let stdin = dir.path().join("stdin");
        mkfifo(&stdin, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let request = Request {
            id: "box",
            namespace: "default",
            stdin: stdin.to_str().unwrap(),
            stdout: "",
            stderr: "",
            terminal: false,
        };
        for is_early in [true, false] {
            let config = StdioConfig::parse(&request).unwrap();
            let mut stdio = config.prepare(Owner::default(), &reaper).await.unwrap();
            let mut reads = Command::new("cat");
            stdio.attach(&mut reads);
            let child = reaper.spawn(&mut reads).unwrap();
            let process = Process::new("exec", StdioPaths::default(), Vec::new());
            if is_early {
                process.close_stdin();
            }
            process.set_copier(stdio.start().await.unwrap());
            if !is_early {
                let ended = timeout(Duration::from_millis(50), child.wait()).await;
                assert!(ended.is_err(), "the client may come back");
                process.close_stdin();
            }
            timeout(SOON, child.wait()).await.expect("the end of stdin");
            let resized = process.with_copier(|copier| copier.resize(80, 25).is_ok());
            assert_eq!(resized, Some(true), "one without a terminal takes no notice");
            assert!(process.take_copier().is_some(), "nothing is drained");
            assert!(process.take_copier().is_none() && process.with_copier(|_| ()).is_none());
        }
    }
}
