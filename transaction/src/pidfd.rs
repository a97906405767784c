//! Signals to processes that are no children of the shim: through a descriptor, so that none reaches a
//! stranger that has got the number of a process that is gone.

use std::io;
use std::os::fd::OwnedFd;

use nix::errno::Errno;

use crate::{procfs, sys};

/// Sends a signal, if `is_meant` says so of the process that has this number when the descriptor is held.
/// Whether it was sent.
pub fn signal(pid: i32, signal: i32, is_meant: impl FnOnce() -> bool) -> io::Result<bool> {
    send(sys::pidfd_open(pid), pid, signal, is_meant)
}

fn send(
    opened: io::Result<OwnedFd>,
    pid: i32,
    signal: i32,
    is_meant: impl FnOnce() -> bool,
) -> io::Result<bool> {
    let sent = match opened {
        // Order matters: what is looked at after the descriptor is held is who gets the signal.
        Ok(process) => is_meant().then(|| sys::pidfd_signal(process, signal)),
        // Kernels before 5.3.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            is_meant().then(|| sys::kill(pid, signal.unsigned_abs()))
        }
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => None,
        Err(error) => return Err(error),
    };
    match sent {
        None | Some(Err(Errno::ESRCH)) => Ok(false),
        Some(Ok(())) => Ok(true),
        Some(Err(errno)) => Err(errno.into()),
    }
}

/// Whether a process is in the group that `leader`, started at `started`, has made.
///
/// The number of a group is not given away while somebody is in it. A process that has it and is not its
/// leader of then shows that it was, and that this group is another one.
pub fn is_in_group(pid: i32, leader: i32, started: u64) -> bool {
    procfs::group(pid) == Some(leader)
        && procfs::started(pid).is_some_and(|at| at >= started)
        && procfs::started(leader).is_none_or(|at| at == started)
}

/// Kills once whoever is alive in that group, and tells who that was.
pub fn kill_group(leader: i32, started: u64) -> Vec<i32> {
    let is_meant = |pid: i32| is_in_group(pid, leader, started) && procfs::is_alive(pid);
    let mut left = procfs::all();
    left.retain(|pid| {
        is_meant(*pid)
            && signal(*pid, libc::SIGKILL, || is_meant(*pid))
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
    fn who_is_not_meant_any_more_gets_no_signal() {
        let (mut child, pid) = sleeper("exec sleep 1000");
        assert!(!signal(pid, libc::SIGKILL, || false).unwrap());
        assert!(procfs::is_alive(pid), "a stranger was killed");
        assert!(signal(pid, libc::SIGKILL, || true).unwrap());
        until("dead", || !procfs::is_alive(pid));
        let _ = child.wait();
        assert!(
            !signal(pid, libc::SIGKILL, || true).unwrap(),
            "nobody has the number"
        );
        assert!(signal(-1, 0, || true).is_err(), "this is no number");
    }

    #[test]
    fn a_kernel_without_descriptors_of_processes_gets_the_number() {
        let none = || Err(Errno::ENOSYS.into());
        let (mut child, pid) = sleeper("exec sleep 1000");
        assert!(!send(none(), pid, libc::SIGKILL, || false).unwrap());
        assert!(procfs::is_alive(pid), "a stranger was killed");
        assert!(send(none(), pid, libc::SIGKILL, || true).unwrap());
        until("dead", || !procfs::is_alive(pid));
        let _ = child.wait();
    }

    #[test]
    fn a_group_is_killed_also_when_its_leader_is_gone_and_no_later_one() {
        // The leader ends with its standard input: when it is waited for.
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
        // Whoever leads a group of this number and was started at another time has made another group.
        assert_eq!(kill_group(group, started + 1), Vec::<i32>::new());
        assert!(procfs::is_alive(member) && is_in_group(member, group, started));
        let _ = leader.wait();
        until("all are dead", || kill_group(group, started).is_empty());
        assert!(!procfs::is_alive(member) && procfs::is_alive(stranger));
        other.kill().unwrap();
        let _ = other.wait();
    }
}
