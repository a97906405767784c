//! The container's init. Its pid is another process's once it has ended and its parent has reaped it: the
//! shim does that itself, conmon does it whenever it likes. So the process is held, and whatever was opened
//! by its pid counts only if it has not ended since.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, bail, ensure};
use firn_host::procfs;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};

/// A process that is known by more than its pid.
pub struct Init {
    pid: i32,
    process: OwnedFd,
}

impl Init {
    /// Holds the process of this pid, if it was started then, in clock ticks since the boot; none if that
    /// is not known.
    pub fn open(pid: i32, started: Option<u64>) -> Result<Self> {
        let found = Pid::from_raw(pid).context("no pid")?;
        let ended = || format!("process {pid} has ended");
        // Order matters: the time is that of the process that is held, or it has ended.
        let process = pidfd_open(found, PidfdFlags::empty()).with_context(ended)?;
        let init = Self { pid, process };
        let found = init.look(|| Ok(procfs::started(pid)))?;
        ensure!(
            found.is_some() && (started.is_none() || found == started),
            "{}",
            ended()
        );
        Ok(init)
    }

    /// For messages, and for [`Init::look`].
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// What was found by the pid: it is this process's.
    pub fn look<T>(&self, look: impl FnOnce() -> Result<T>) -> Result<T> {
        let found = look();
        if self.has_ended()? {
            bail!("process {} has ended", self.pid)
        } else {
            found
        }
    }

    pub fn has_ended(&self) -> Result<bool> {
        let mut process = [PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        Ok(poll(&mut process, PollTimeout::ZERO).context("cannot look at the process")? > 0)
    }

    /// Sends a signal to this process, and never to another.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let number = rustix::process::Signal::from_named_raw(signal as i32);
        let number = number.with_context(|| format!("{signal} cannot be sent"))?;
        let sent = pidfd_send_signal(&self.process, number);
        sent.with_context(|| format!("cannot send {signal} to process {}", self.pid))
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn child() -> (Child, i32) {
        let child = Command::new("sleep")
            .arg("100")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        (child, pid)
    }

    #[test]
    fn a_process_that_was_started_at_another_time_is_another() {
        let (mut child, pid) = child();
        let started = procfs::started(pid);
        let opened = [started, started.map(|at| at - 1), None].map(|at| Init::open(pid, at).is_ok());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(opened, [true, false, true]);
        assert!(Init::open(pid, started).is_err());
    }

    #[test]
    fn what_was_found_of_a_process_that_has_ended_does_not_count() {
        let (mut child, pid) = child();
        let init = Init::open(pid, procfs::started(pid)).unwrap();
        assert_eq!(init.look(|| Ok(7)).unwrap(), 7);
        let found = init.look(|| {
            init.signal(Signal::SIGKILL)?;
            child.wait()?;
            Ok(7)
        });
        assert!(found.unwrap_err().to_string().contains("has ended"));
        assert!(init.signal(Signal::SIGTERM).is_err());
    }
}
