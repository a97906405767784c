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
pub fn wait_for_end(pids: &[i32], limit: Duration) -> Result<(), TraceError> {
    let begun = Instant::now();
    let mut infected = Vec::new();
    for &pid in pids {
        infected.push((pid, ranges(pid)?));
    }
    infected.retain(|(_, ranges)| !ranges.is_empty());
    if !infected.is_empty() {
        std::thread::sleep(TO_ITS_END);
    }
    for (pid, ranges) in infected {
        // One that runs counts as elsewhere.
        while waits(pid).is_some_and(|at| is_in(at, &ranges)) {
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

/// Where a thread waits in a system call; none of one that runs.
fn waits(pid: i32) -> Option<u64> {
    let call = std::fs::read_to_string(format!("/proc/{pid}/syscall")).ok()?;
    let at = call.trim_end().rsplit(' ').next()?.strip_prefix("0x")?;
    u64::from_str_radix(at, 16).ok()
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
            return self.is_absent();
        };
        match (self.is_in_code(), trap) {
            (false, Trap::Tracing) => return true,
            // It has returned, by the call sigreturn, which has set the signals that it blocks.
            (false, Trap::Call | Trap::Signal(_)) => self.hold_again(),
            (true, trap) => self.resume(trap),
        }
        false
    }

    /// Whether it is stopped in CRIU's code. One that cannot be looked at is ending.
    fn is_in_code(&self) -> bool {
        sys::instruction_pointer(self.pid).is_ok_and(|at| is_in(at, &self.ranges))
    }

    /// Whether it does not trap because it has gone, is about to, or waits in a call of the application: then
    /// it traps before it runs other code.
    fn is_absent(&self) -> bool {
        let is_gone = matches!(procfs::state(self.pid), None | Some('Z' | 'X'));
        let waits_elsewhere = || !self.is_open && waits(self.pid).is_some_and(|at| !is_in(at, &self.ranges));
        is_gone || waits_elsewhere() || ranges(self.pid).is_ok_and(|ranges| ranges.is_empty())
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

    /// The signal that it is resumed with. What CRIU's code causes is not for the application: SIGTRAP, and
    /// SIGPIPE for the pages that CRIU has not read. It blocks all others but SIGSTOP.
    fn signal(&self, trap: Trap) -> i32 {
        match trap {
            Trap::Signal(libc::SIGTRAP | libc::SIGPIPE) if self.is_in_code() => 0,
            Trap::Signal(signal) => signal,
            Trap::Tracing | Trap::Call => 0,
        }
    }

    /// Lets it run until its next system call.
    fn resume(&mut self, trap: Trap) {
        let signal = self.signal(trap);
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
                Some(Trap::Tracing) => return self.block_again(),
                Some(trap) => self.resume_interrupted(self.signal(trap)),
                None => {}
            }
        }
        if procfs::is_alive(self.pid) {
            log::warn!("thread {} is not held after CRIU's code", self.pid);
        }
    }

    /// In CRIU's code it blocks what CRIU has blocked: whoever lets it run next may not trace it.
    fn block_again(&self) {
        if self.is_in_code()
            && let Err(error) = sys::block_signals(self.pid, !SIGTRAP)
        {
            log::debug!("signals of thread {} are not blocked again: {error}", self.pid);
        }
    }

    fn resume_interrupted(&self, signal: i32) {
        let resumed =
            ptrace::interrupt(Pid::from_raw(self.pid)).and_then(|()| sys::ptrace_cont(self.pid, signal));
        if let Err(error) = resumed {
            log::debug!("thread {} cannot be held after CRIU's code: {error}", self.pid);
        }
    }
}
