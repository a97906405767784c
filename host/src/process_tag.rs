//! A process of this machine by more than its pid, which may be given again.

use std::fmt;
use std::str::FromStr;

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;

use crate::procfs;

/// A process: its pid, and when it was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessTag {
    pid: i32,
    /// In clock ticks since the boot.
    started: u64,
}

/// A text that is no tag.
#[derive(Debug, thiserror::Error)]
#[error("a process is written as its pid and when it was started")]
pub struct NoTag;

impl ProcessTag {
    /// None if there is no such process.
    pub fn of(pid: i32) -> Option<Self> {
        let started = procfs::started(pid)?;
        Some(Self { pid, started })
    }

    /// This program. None without /proc.
    pub fn own() -> Option<Self> {
        Self::of(i32::try_from(std::process::id()).ok()?)
    }

    /// Whether it runs. One that has ended does not, also before somebody has waited for it. One that cannot
    /// be looked at, for want of memory or descriptors, does.
    pub fn is_alive(&self) -> bool {
        if kill(Pid::from_raw(self.pid), None) == Err(Errno::ESRCH) {
            return false;
        }
        let has_ended = procfs::state(self.pid).is_some_and(|state| matches!(state, 'Z' | 'X'));
        let is_other = procfs::started(self.pid).is_some_and(|started| started != self.started);
        !has_ended && !is_other
    }
}

impl fmt::Display for ProcessTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.pid, self.started)
    }
}

impl FromStr for ProcessTag {
    type Err = NoTag;

    fn from_str(text: &str) -> Result<Self, NoTag> {
        let (pid, started) = text.split_once(' ').ok_or(NoTag)?;
        match (pid.parse(), started.parse()) {
            (Ok(pid), Ok(started)) if pid > 0 => Ok(Self { pid, started }),
            _ => Err(NoTag),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_alive_until_it_ends() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let tag = ProcessTag::of(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(tag.is_alive() && ProcessTag::own().unwrap().is_alive());
        let again: ProcessTag = tag.to_string().parse().unwrap();
        assert_eq!(again, tag);
        let other = ProcessTag {
            started: tag.started + 1,
            ..tag
        };
        assert!(!other.is_alive(), "its pid was given again");
        child.kill().unwrap();
        // Nobody has waited for it.
        while tag.is_alive() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!tag.is_alive() && ProcessTag::of(i32::MAX).is_none());
        for text in ["0 7", "-1 7", "", "7", "7 x", "x 7", "7  7", "7 7 7"] {
            assert!(text.parse::<ProcessTag>().is_err(), "{text}");
        }
    }
}
