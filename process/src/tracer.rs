//! Holds threads by ptrace while the driver works on a process.
//!
//! Between the driver's checkpoint and its restore no thread of the application may run, but the driver's
//! restore thread must. The freezer cannot treat threads differently, ptrace can:
//!
//! - [`TracedThreads::hold`]: seize and interrupt threads while the cgroup is frozen. After a thaw they trap
//!   before they reach user code, and all other threads run. Release them while the cgroup is frozen again.
//! - [`TracedThreads::run_selected`]: let single threads of a group-stopped process tree (CRIU's
//!   `leave-stopped`) run, then return them to the stop.
//!
//! - [`TracedThreads::end_criu_code`]: let held threads finish what a killed CRIU made them begin.
//!
//! Linux binds a tracee to the tracing thread, so each value owns a thread that makes all ptrace calls for
//! its tracees. That thread never waits for them with `wait*`: the shim's reaper, which waits for everything,
//! may consume the notice. When the shim dies the kernel releases its tracees.

pub mod criu_code;

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_host::UnlessAbsent;
use firn_host::procfs::{self, is_traced, state};
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::unistd::Pid;

use crate::sys;

/// Deadline of a thread for reaching or leaving its trap.
const TRAP: Duration = Duration::from_secs(10);
/// Deadline of running threads for reaching a trap in which they are detached: one in an uninterruptible
/// sleep does not reach it.
const PARK: Duration = Duration::from_secs(5);
/// Interval between two polls of the stops.
const POLL: Duration = Duration::from_millis(1);

/// A thread that cannot be traced.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The kernel refused to trace it, mostly because a debugger traces it.
    #[error("cannot trace thread {tid}")]
    Seize { tid: i32, source: Errno },
    /// The threads of a process cannot be listed.
    #[error("cannot list the threads of pid {pid}")]
    Threads { pid: i32, source: std::io::Error },
    /// The mappings of a process cannot be read.
    #[error("cannot read the mappings of process {pid}")]
    Mappings { pid: i32, source: std::io::Error },
    /// It did not stop in time.
    #[error("thread {tid} did not stop within {} s", TRAP.as_secs())]
    NotStopped { tid: i32 },
    /// The kernel did not detach it.
    #[error("thread {tid} is still traced after {} s", TRAP.as_secs())]
    StillTraced { tid: i32 },
    /// The kernel has not traced some of them yet. The tracing thread continues when they thaw, and then
    /// releases them.
    #[error("threads were not traced within {} s", limit.as_secs_f32())]
    NotTraced { limit: Duration },
    /// Code of a CRIU that was killed waits for something in this process: it has not returned from it.
    #[error("code of CRIU does not end in process {pid}")]
    CriuCode { pid: i32 },
    /// The tracing thread could not be started or has ended.
    #[error("the tracing thread is gone")]
    Tracer,
}

/// All threads of `pids` except `except`. A process that has ended has none.
pub fn threads(pids: &[i32], except: &BTreeSet<i32>) -> Result<Vec<i32>, TraceError> {
    let mut tids = Vec::new();
    for &pid in pids {
        let of_pid = procfs::threads(pid).if_present();
        let of_pid = of_pid.map_err(|source| TraceError::Threads { pid, source })?;
        tids.extend(of_pid.into_iter().flatten().filter(|tid| !except.contains(tid)));
    }
    Ok(tids)
}

/// Asks the tracing thread to let CRIU's code end in these processes.
struct Ask {
    pids: Vec<i32>,
    limit: Duration,
    reply: tokio::sync::oneshot::Sender<Result<(), TraceError>>,
}

/// Traced threads, held or selected to run.
pub struct TracedThreads {
    /// Dropping it ends the tracing thread, which releases all.
    asks: Sender<Ask>,
    thread: JoinHandle<()>,
    tids: Vec<i32>,
}

impl TracedThreads {
    /// Seizes and interrupts `tids` within `limit`: they trap before they reach user code. Call it while they
    /// are frozen.
    ///
    /// A v1 freezer prevents tracing a thread that a signal has stopped, until it thaws.
    pub async fn hold(tids: Vec<i32>, limit: Duration) -> Result<Self, TraceError> {
        Self::start(tids, false, limit).await
    }

    /// Lets `tids` run, within `limit`, although their processes are stopped.
    pub async fn run_selected(tids: Vec<i32>, limit: Duration) -> Result<Self, TraceError> {
        Self::start(tids, true, limit).await
    }

    /// Traces `tids` from a new thread, which lets them run or keeps them in the trap of their interrupt.
    async fn start(tids: Vec<i32>, run: bool, limit: Duration) -> Result<Self, TraceError> {
        let (asks, asked) = channel::<Ask>();
        let (report, is_ready) = tokio::sync::oneshot::channel();
        let traced = tids.clone();
        let trace = move || {
            let running = if run { &traced[..] } else { &[] };
            let held = seize(&traced).and_then(|()| running.iter().try_for_each(|tid| wake(*tid, TRAP)));
            let is_held = held.is_ok();
            // When the receiver was dropped, the other end of `asked` was dropped too.
            let _nobody = report.send(held);
            if is_held {
                serve(&asked, &traced, running);
            }
            park(running);
            // The kernel detaches all when this thread ends, whatever their state is: a thread that a v1
            // freezer froze before it trapped could not be detached by a call. A thread of a stopped process
            // returns to the stop.
        };
        let thread = std::thread::Builder::new()
            .name("tracer".into())
            .spawn(trace)
            .map_err(|_| TraceError::Tracer)?;
        tokio::time::timeout(limit, is_ready)
            .await
            .map_err(|_| TraceError::NotTraced { limit })?
            .map_err(|_| TraceError::Tracer)??;
        Ok(Self { asks, thread, tids })
    }

    /// Lets the first threads of `pids`, if they are held, run what a CRIU that was killed has put into their
    /// processes, until they return from it, all of them within `limit`. Call it once they are thawed, and
    /// before the driver maps memory. They are held again when it ends, also if it is dropped.
    pub fn end_criu_code(
        &self,
        pids: Vec<i32>,
        limit: Duration,
    ) -> impl Future<Output = Result<(), TraceError>> + Send + use<> {
        let (reply, ended) = tokio::sync::oneshot::channel();
        let asked = self.asks.send(Ask { pids, limit, reply });
        async move {
            asked.map_err(|_| TraceError::Tracer)?;
            // The tracing thread may wait for the kernel.
            let ended = tokio::time::timeout(limit + 2 * TRAP, ended).await;
            ended
                .map_err(|_| TraceError::NotTraced { limit })?
                .map_err(|_| TraceError::Tracer)?
        }
    }

    /// Ends the tracing thread, and waits until the kernel has detached its tracees. Held threads run at once
    /// unless they are frozen; selected ones return to the stop of their processes.
    pub async fn release(self) -> Result<(), TraceError> {
        let Self { asks, thread, tids } = self;
        drop(asks);
        let begun = tokio::time::Instant::now();
        while let Some(&tid) = tids.iter().find(|tid| is_traced(**tid)) {
            if begun.elapsed() > TRAP {
                return Err(TraceError::StillTraced { tid });
            }
            tokio::time::sleep(POLL).await;
        }
        // The join does not block: the thread has ended, since its end detaches the tracees; or all tracees
        // are dead, and it ends at once.
        thread.join().map_err(|_| TraceError::Tracer)
    }
}

/// Lets CRIU's code end when it is asked to, and resumes `running` whenever they trap, until nobody can ask.
fn serve(asked: &Receiver<Ask>, traced: &[i32], running: &[i32]) {
    loop {
        match asked.recv_timeout(POLL) {
            Ok(ask) => {
                let held: Vec<i32> = ask.pids.into_iter().filter(|pid| traced.contains(pid)).collect();
                let ended = criu_code::end(&held, ask.limit, || !ask.reply.is_closed());
                drop(ask.reply.send(ended));
            }
            Err(RecvTimeoutError::Timeout) => {
                for tid in running {
                    step(*tid);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Seizes and interrupts all. After a failure the end of the thread detaches those seized before.
fn seize(tids: &[i32]) -> Result<(), TraceError> {
    for &tid in tids {
        let pid = Pid::from_raw(tid);
        // Without this option a thread that is detached in the stop of a system call gets a SIGTRAP.
        let options = ptrace::Options::PTRACE_O_TRACESYSGOOD;
        match ptrace::seize(pid, options).and_then(|()| ptrace::interrupt(pid)) {
            Ok(()) | Err(Errno::ESRCH) => {}
            // A thread that has ended and waits for the other threads of its group to end: it runs no code
            // any more.
            Err(Errno::EPERM) if matches!(state(tid), None | Some('Z' | 'X')) => {}
            Err(source) => return Err(TraceError::Seize { tid, source }),
        }
    }
    Ok(())
}

/// Lets a group-stopped, interrupted thread run. It traps for the interrupt, and possibly again for the group
/// stop, from which the tracing thread resumes it.
fn wake(tid: i32, limit: Duration) -> Result<(), TraceError> {
    let begun = Instant::now();
    while !step(tid) {
        if begun.elapsed() > limit {
            return Err(TraceError::NotStopped { tid });
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// Code of the trap of a system call.
const CALL: i32 = libc::SIGTRAP | 0x80;

/// The trap in which a thread is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trap {
    /// A trap of the tracing itself: it was interrupted, or its process is stopped. Signals stay pending.
    Tracing,
    /// It begins or ends a system call.
    Call,
    /// A signal, of any number, is about to be delivered. It is delivered when the thread is resumed with it,
    /// and lost otherwise.
    Signal(i32),
}

impl Trap {
    /// The trap of a tracee; none when it runs or has ended.
    ///
    /// Reads the siginfo from the thread: the reaper may have consumed the notice that `waitpid` would
    /// return.
    fn of(tid: i32) -> Option<Self> {
        match ptrace::getsiginfo(Pid::from_raw(tid)) {
            Ok(info) if info.si_code >> 8 == libc::PTRACE_EVENT_STOP => Some(Self::Tracing),
            Ok(info) if info.si_code == CALL => Some(Self::Call),
            Ok(info) => Some(Self::Signal(info.si_signo)),
            // A group stop has no siginfo.
            Err(Errno::EINVAL) => Some(Self::Tracing),
            Err(_) => None,
        }
    }
}

/// Resumes a trapped thread with the signal that it trapped for. Returns whether it had trapped.
fn step(tid: i32) -> bool {
    let signal = match Trap::of(tid) {
        Some(Trap::Tracing | Trap::Call) => 0,
        Some(Trap::Signal(signal)) => signal,
        None => return false,
    };
    sys::ptrace_cont(tid, signal).is_ok()
}

/// Brings running threads to a trap of the tracing itself, in which they can be detached: a thread that is
/// detached while a signal is about to be delivered loses it if the reaper has consumed the notice.
fn park(tids: &[i32]) {
    let begun = Instant::now();
    let mut left = tids.to_vec();
    while !left.is_empty() {
        if begun.elapsed() > PARK {
            return;
        }
        left.retain(|tid| {
            let is_there = ptrace::interrupt(Pid::from_raw(*tid)).is_ok();
            match Trap::of(*tid) {
                Some(Trap::Tracing | Trap::Call) => false,
                Some(Trap::Signal(signal)) => sys::ptrace_cont(*tid, signal).is_ok(),
                None => is_there,
            }
        });
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests;
