//! Lets code of a CRIU that was killed come to its end.
//!
//! CRIU dumps a process by code that it puts into it, its parasite, which runs in the first thread. When CRIU
//! dies, this code sets back what it has changed and returns to where the thread was. In a container that was
//! frozen before, it has not done so yet, and it must before the driver restores GPU state: it makes memory
//! inaccessible again that nobody could read, and the driver maps GPU memory there.
//!
//! The code is recognised by the file behind it. A container that makes a file of this name lets its own code
//! run for a moment, which waits in its calls of the driver.

use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::time::{Duration, Instant};

use firn_host::{proc_maps, procfs};
use nix::sys::ptrace;
use nix::unistd::Pid;

use super::{POLL, TRAP, TraceError, Trap};
use crate::sys;

/// The file behind CRIU's code. It stays mapped when CRIU was killed.
const FILE: &[u8] = b"/memfd:CRIUMFD (deleted)";

/// Signals by their bits in a mask.
const SIGTRAP: u64 = 1 << (libc::SIGTRAP - 1);
const SIGPIPE: u64 = 1 << (libc::SIGPIPE - 1);

/// How long a thread that was resumed is expected to stop again at once: most system calls of CRIU's code
/// take a microsecond, and there is one for each mapping.
const SOON: Duration = Duration::from_micros(200);

/// How long CRIU's code may take to its end, once CRIU is gone.
const TO_ITS_END: Duration = Duration::from_millis(100);

/// Lets the first threads of these processes, which are held, run until they return from CRIU's code. They
/// are held again before they run other code, and also after an error: not all have returned within `limit`,
/// or nobody is to wait for them any more.
pub(super) fn end(pids: &[i32], limit: Duration, is_awaited: impl Fn() -> bool) -> Result<(), TraceError> {
    let begun = Instant::now();
    for &pid in pids {
        let ranges = ranges(pid)?;
        if ranges.is_empty() {
            continue;
        }
        let mut thread = First {
            pid,
            ranges,
            is_open: false,
        };
        while !thread.has_returned() {
            if begun.elapsed() > limit || !is_awaited() {
                thread.hold_again();
                return Err(TraceError::CriuCode { pid });
            }
        }
    }
    Ok(())
}

/// Waits until the first threads of these processes, which run, are not in CRIU's code, at most for `limit`.
pub fn ended(pids: &[i32], limit: Duration) -> Result<(), TraceError> {
    let begun = Instant::now();
    for &pid in pids {
        let ranges = ranges(pid)?;
        if !ranges.is_empty() {
            std::thread::sleep(TO_ITS_END);
        }
        while !ranges.is_empty() && waits_in(pid, &ranges) {
            if begun.elapsed() > limit {
                return Err(TraceError::CriuCode { pid });
            }
            std::thread::sleep(POLL);
        }
    }
    Ok(())
}

/// Where CRIU's code may lie in a process; nowhere in one that has ended.
fn ranges(pid: i32) -> Result<Vec<Range<u64>>, TraceError> {
    let mut ranges = Vec::new();
    let read = proc_maps::each(Path::new("/proc"), pid, |mapping| {
        if mapping.path == FILE {
            ranges.push(mapping.start..mapping.end);
        }
        ControlFlow::Continue(())
    });
    read.map_err(|source| TraceError::Mappings { pid, source })?;
    Ok(ranges)
}

fn is_in(at: u64, ranges: &[Range<u64>]) -> bool {
    ranges.iter().any(|range| range.contains(&at))
}

/// Whether a thread waits in a system call of `ranges`. One that runs counts as elsewhere.
fn waits_in(pid: i32, ranges: &[Range<u64>]) -> bool {
    let call = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    let at = call
        .trim_end()
        .rsplit(' ')
        .next()
        .and_then(|at| at.strip_prefix("0x"));
    let at = at.and_then(|at| u64::from_str_radix(at, 16).ok());
    at.is_some_and(|at| is_in(at, ranges))
}

/// The first thread of a process that may be in CRIU's code.
struct First {
    pid: i32,
    ranges: Vec<Range<u64>>,
    /// It takes the signal of a pipe that nobody reads any more.
    is_open: bool,
}

impl First {
    /// Resumes it if it is in CRIU's code. Returns whether it is held elsewhere, or has gone.
    fn has_returned(&mut self) -> bool {
        let Some(trap) = self.trap_soon() else {
            return matches!(procfs::state(self.pid), None | Some('Z' | 'X'));
        };
        let Ok(at) = sys::instruction_pointer(self.pid) else {
            return false;
        };
        match (is_in(at, &self.ranges), trap) {
            (false, Trap::Tracing) => return true,
            // It has returned, by the call sigreturn, which has set the signals that it blocks.
            (false, Trap::Call | Trap::Signal(_)) => self.hold_again(),
            (true, trap) => self.resume(trap),
        }
        false
    }

    /// Its trap, awaited for a moment.
    fn trap_soon(&self) -> Option<Trap> {
        let begun = Instant::now();
        while begun.elapsed() < SOON {
            if let Some(trap) = Trap::of(self.pid) {
                return Some(trap);
            }
            std::thread::yield_now();
        }
        std::thread::sleep(POLL);
        Trap::of(self.pid)
    }

    /// Lets it run until its next system call. What CRIU's code causes is not for the application: SIGTRAP,
    /// and SIGPIPE for the pages that CRIU has not read. It blocks all others but SIGSTOP.
    fn resume(&mut self, trap: Trap) {
        let own = [libc::SIGTRAP, libc::SIGPIPE];
        let signal = match trap {
            Trap::Signal(signal) if !own.contains(&signal) => signal,
            _ => 0,
        };
        if !self.is_open {
            self.is_open = sys::block_signals(self.pid, !(SIGTRAP | SIGPIPE)).is_ok();
        }
        if let Err(error) = sys::ptrace_syscall(self.pid, signal) {
            log::debug!("thread {} cannot run CRIU's code: {error}", self.pid);
        }
    }

    /// Brings it to a trap of the tracing itself, before it runs code of the application.
    fn hold_again(&self) {
        let begun = Instant::now();
        // Again before each resume: any other trap takes the place of this one.
        while begun.elapsed() < TRAP && ptrace::interrupt(Pid::from_raw(self.pid)).is_ok() {
            match self.trap_soon() {
                Some(Trap::Tracing) => return,
                Some(Trap::Call) => self.resume_interrupted(0),
                Some(Trap::Signal(signal)) => self.resume_interrupted(signal),
                None => {}
            }
        }
        log::warn!("thread {} is not held after CRIU's code", self.pid);
    }

    fn resume_interrupted(&self, signal: i32) {
        let resumed =
            ptrace::interrupt(Pid::from_raw(self.pid)).and_then(|()| sys::ptrace_cont(self.pid, signal));
        if let Err(error) = resumed {
            log::debug!("thread {} cannot be held after CRIU's code: {error}", self.pid);
        }
    }
}
