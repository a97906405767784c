//! Signals to processes that are no children of the shim. They are sent through a descriptor, so that none
//! reaches an unrelated process that reuses the pid of one that has ended.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, kill_process, pidfd_open, pidfd_send_signal};

pub use rustix::process::Signal;

use firn_host::procfs;

/// Sends a signal to the process with this pid if `is_meant` confirms, while the descriptor is open, that it
/// is the intended process. Returns whether the signal was sent.
pub fn signal(pid: i32, signal: Signal, is_meant: impl FnOnce() -> bool) -> io::Result<bool> {
    let pid = Pid::from_raw(pid.max(0)).ok_or(Errno::INVAL)?;
    send(pidfd_open(pid, PidfdFlags::empty()), pid, signal, is_meant)
}

fn send(
    opened: rustix::io::Result<OwnedFd>,
    pid: Pid,
    signal: Signal,
    is_meant: impl FnOnce() -> bool,
) -> io::Result<bool> {
    let sent = match opened {
        // Order matters: a check that follows the opening of the descriptor applies to the process that gets
        // the signal.
        Ok(process) => is_meant().then(|| pidfd_send_signal(process, signal)),
        // Kernels before 5.3.
        Err(Errno::NOSYS) => is_meant().then(|| kill_process(pid, signal)),
        Err(errno) => Some(Err(errno)),
    };
    match sent {
        None | Some(Err(Errno::SRCH)) => Ok(false),
        Some(sent) => Ok(sent.map(|()| true)?),
    }
}

/// The life of a process, which no other process continues under its pid.
#[derive(Debug)]
pub struct Life(OwnedFd);

impl Life {
    /// That of the process with this pid now.
    ///
    /// # Errors
    /// It has ended, or this process has no descriptor free.
    pub fn of(pid: i32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid.max(0)).ok_or(Errno::INVAL)?;
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Whether all of its threads have ended. False if that cannot be seen.
    pub fn is_over(&self) -> bool {
        let mut ends = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut ends, Some(&Timespec::default())) == Ok(1)
    }
}

/// Whether a process is in the group that `leader`, started at `started`, created.
///
/// The kernel does not reuse the id of a group while it has members. If the process with that pid is not the
/// leader of then, the original group has ended, and this is another one.
pub fn is_in_group(pid: i32, leader: i32, started: u64) -> bool {
    procfs::group(pid) == Some(leader)
        && procfs::started(pid).is_some_and(|at| at >= started)
        && procfs::started(leader).is_none_or(|at| at == started)
}

/// Sends SIGKILL once to the living processes of that group, and returns their pids.
pub fn kill_group(leader: i32, started: u64) -> Vec<i32> {
    kill_all(|pid| is_in_group(pid, leader, started))
}

/// Sends SIGKILL once to the living processes of the host that are meant, and returns their pids.
pub fn kill_all(is_meant: impl Fn(i32) -> bool) -> Vec<i32> {
    let is_meant = |pid: i32| is_meant(pid) && procfs::is_alive(pid);
    let mut left = procfs::all();
    left.retain(|pid| {
        is_meant(*pid)
            && signal(*pid, Signal::KILL, || is_meant(*pid))
                .inspect_err(|error| log::debug!("cannot kill {pid}: {error}"))
                .unwrap_or(true)
    });
    left
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    fn sleeper(script: &str) -> (Child, i32) {
        let child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        (child, pid)
    }

    fn until(what: &str, mut condition: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !condition() {
            assert!(begun.elapsed() < Duration::from_secs(10), "never: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_process_that_is_not_the_intended_one_gets_no_signal() {
        let (mut child, pid) = sleeper("exec sleep 1000");
        assert!(!signal(pid, Signal::KILL, || false).unwrap());
        assert!(procfs::is_alive(pid), "an unrelated process was killed");
        assert!(signal(pid, Signal::KILL, || true).unwrap());
        until("dead", || !procfs::is_alive(pid));
        let _ = child.wait();
        assert!(
            !signal(pid, Signal::KILL, || true).unwrap(),
            "nobody has the number"
        );
        assert!(signal(-1, Signal::KILL, || true).is_err(), "this is no pid");
    }

    #[test]
    fn a_kernel_without_pidfds_is_given_the_pid() {
        let none = || Err(Errno::NOSYS);
        let (mut child, pid) = sleeper("exec sleep 1000");
        let raw = Pid::from_raw(pid).unwrap();
        assert!(!send(none(), raw, Signal::KILL, || false).unwrap());
        assert!(procfs::is_alive(pid), "an unrelated process was killed");
        assert!(send(none(), raw, Signal::KILL, || true).unwrap());
        until("dead", || !procfs::is_alive(pid));
        let _ = child.wait();
    }

    #[test]
    fn a_group_is_killed_after_its_leader_has_ended_and_a_later_one_is_not() {
        // The leader ends when its standard input is closed, which `wait` does.
        let (mut leader, group) = sleeper("sleep 1000 & read gone");
        let started = procfs::started(group).unwrap();
        let (mut other, stranger) = sleeper("exec sleep 1000");
        let member = || {
            procfs::all()
                .into_iter()
                .find(|pid| *pid != group && procfs::group(*pid) == Some(group))
        };
        until("the member", || member().is_some());
        let member = member().unwrap();
        // A group whose leader has this pid and another start time is another group.
        assert_eq!(kill_group(group, started + 1), Vec::<i32>::new());
        assert!(procfs::is_alive(member) && is_in_group(member, group, started));
        let _ = leader.wait();
        until("all are dead", || kill_group(group, started).is_empty());
        assert!(!procfs::is_alive(member) && procfs::is_alive(stranger));
        other.kill().unwrap();
        let _ = other.wait();
    }
}
