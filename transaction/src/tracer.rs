//! Holds threads by ptrace while the driver works on a process.
//!
//! Between the driver's checkpoint and its restore no thread of the application may run, but the driver's
//! restore thread must. The freezer cannot treat threads differently, ptrace can:
//!
//! - [`TracedThreads`]: seize and interrupt threads while the cgroup is frozen. After a thaw they trap before
//!   they reach user code, and all other threads run. Release them while the cgroup is frozen again.
//! - [`RunSelected`]: let single threads of a group-stopped process tree (CRIU's `leave-stopped`) run, then
//!   return them to the stop.
//!
//! Linux binds a tracee to the tracing thread, so each value owns a thread that makes all ptrace calls for
//! its tracees. That thread never waits for them with `wait*`: the shim's reaper, which waits for everything,
//! may consume the notice. When the shim dies the kernel releases its tracees.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::ptrace;
use nix::unistd::Pid;

use crate::procfs::{is_traced, state};
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
    Seize {
        tid: i32,
        #[source]
        source: Errno,
    },
    /// The threads of a process cannot be listed.
    #[error("cannot list the threads of pid {pid}")]
    Threads {
        pid: i32,
        #[source]
        source: std::io::Error,
    },
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
    /// The tracing thread could not be started or has ended.
    #[error("the tracing thread is gone")]
    Tracer,
}

/// All threads of `pids` except `except`. A process that has ended has none.
pub fn threads(pids: &[i32], except: &BTreeSet<i32>) -> Result<Vec<i32>, TraceError> {
    let mut tids = Vec::new();
    for &pid in pids {
        let entries = match std::fs::read_dir(format!("/proc/{pid}/task")) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(source) => return Err(TraceError::Threads { pid, source }),
        };
        for entry in entries {
            let entry = entry.map_err(|source| TraceError::Threads { pid, source })?;
            if let Some(tid) = entry.file_name().to_str().and_then(|name| name.parse().ok())
                && !except.contains(&tid)
            {
                tids.push(tid);
            }
        }
    }
    Ok(tids)
}

/// Threads that trap before they reach user code.
pub struct TracedThreads(Tracer);

impl TracedThreads {
    /// Seizes and interrupts `tids` within `limit`. Call it while they are frozen.
    ///
    /// A v1 freezer prevents tracing a thread that a signal has stopped, until it thaws.
    pub async fn seize(tids: Vec<i32>, limit: Duration) -> Result<Self, TraceError> {
        // They are detached from the trap of the interrupt: nothing is to be done while they are held.
        let nothing: fn(&[i32]) = |_| ();
        Tracer::start(tids, limit, |_| Ok(()), nothing, nothing)
            .await
            .map(Self)
    }

    /// Releases all. Call it while they are frozen; otherwise they run at once.
    pub async fn release(self) -> Result<(), TraceError> {
        self.0.finish().await
    }
}

/// Single running threads of a stopped process tree.
pub struct RunSelected(Tracer);

impl RunSelected {
    /// Lets `tids` run, within `limit`, although their processes are stopped.
    pub async fn start(tids: Vec<i32>, limit: Duration) -> Result<Self, TraceError> {
        Tracer::start(
            tids,
            limit,
            |tids| tids.iter().try_for_each(|tid| wake(*tid, TRAP)),
            |tids| {
                for tid in tids {
                    step(*tid);
                }
            },
            park,
        )
        .await
        .map(Self)
    }

    /// Returns them to the stop of their processes.
    pub async fn stop(self) -> Result<(), TraceError> {
        self.0.finish().await
    }
}

struct Tracer {
    /// Dropping it ends the tracing thread, which releases all.
    stop: Sender<()>,
    thread: JoinHandle<()>,
    tids: Vec<i32>,
}

impl Tracer {
    /// Traces `tids` from a new thread: `ready` brings them into the state that the caller needs, `serve`
    /// polls them from then on, and `part` brings them to a trap in which they can be detached.
    async fn start(
        tids: Vec<i32>,
        limit: Duration,
        ready: fn(&[i32]) -> Result<(), TraceError>,
        serve: fn(&[i32]),
        part: fn(&[i32]),
    ) -> Result<Self, TraceError> {
        let (stop, stopped) = channel();
        let (report, is_ready) = tokio::sync::oneshot::channel();
        let traced = tids.clone();
        let trace = move || {
            let held = seize(&traced).and_then(|()| ready(&traced));
            let is_held = held.is_ok();
            // When the receiver was dropped, the other end of `stopped` was dropped too.
            let _nobody = report.send(held);
            if is_held {
                wait_for_stop(&stopped, || serve(&traced));
            }
            part(&traced);
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
        Ok(Self { stop, thread, tids })
    }

    /// Ends the tracing thread, and waits until the kernel has detached its tracees.
    async fn finish(self) -> Result<(), TraceError> {
        let Self { stop, thread, tids } = self;
        drop(stop);
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

fn wait_for_stop(stopped: &Receiver<()>, mut serve: impl FnMut()) {
    while stopped.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
        serve();
    }
}

/// Seizes and interrupts all. After a failure the end of the thread detaches those seized before.
fn seize(tids: &[i32]) -> Result<(), TraceError> {
    for &tid in tids {
        let pid = Pid::from_raw(tid);
        match ptrace::seize(pid, ptrace::Options::empty()).and_then(|()| ptrace::interrupt(pid)) {
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
/// stop, which `serve` handles.
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

/// The trap in which a thread is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trap {
    /// A trap of the tracing itself: it was interrupted, or its process is stopped. Signals stay pending.
    Tracing,
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
        Some(Trap::Tracing) => 0,
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
                Some(Trap::Tracing) => false,
                Some(Trap::Signal(signal)) => sys::ptrace_cont(*tid, signal).is_ok(),
                None => is_there,
            }
        });
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use nix::sys::signal::{Signal, kill};

    use super::*;
    use crate::reaper::Reaper;
    use crate::sys::testing;

    struct Ticker(Child);

    impl Ticker {
        fn start() -> (Self, impl FnMut() -> String) {
            let mut child = Command::new("sh")
                .args(["-c", "while echo tick; do sleep 0.01; done"])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            (Self(child), move || lines.next().unwrap().unwrap())
        }

        fn pid(&self) -> i32 {
            self.0.id().try_into().unwrap()
        }
    }

    impl Drop for Ticker {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    }

    fn until(what: &str, mut condition: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !condition() {
            assert!(begun.elapsed() < Duration::from_secs(10), "never: {what}");
            std::thread::sleep(POLL);
        }
    }

    #[test]
    fn a_held_process_is_traced_until_released_and_then_runs_on() {
        let (ticker, mut tick) = Ticker::start();
        tick();
        runtime().block_on(async {
            let tids = threads(&[ticker.pid()], &BTreeSet::new()).unwrap();
            let hold = TracedThreads::seize(tids, TRAP).await.unwrap();
            until("trapped", || state(ticker.pid()) == Some('t'));
            hold.release().await.unwrap();
            assert!(!is_traced(ticker.pid()), "the release was not awaited");
        });
        for _ in 0..20 {
            assert_eq!(tick(), "tick");
        }
    }

    #[test]
    fn only_the_selected_thread_of_a_stopped_process_runs() {
        let (ticker, mut tick) = Ticker::start();
        tick();
        let pid = Pid::from_raw(ticker.pid());
        kill(pid, Signal::SIGSTOP).unwrap();
        until("stopped", || state(ticker.pid()) == Some('T'));
        runtime().block_on(async {
            let only = RunSelected::start(vec![ticker.pid()], TRAP).await.unwrap();
            until("running", || matches!(state(ticker.pid()), Some('S' | 'R')));
            // Its children die while it is traced: without SIGCHLD it would not tick again.
            for _ in 0..20 {
                assert_eq!(tick(), "tick");
            }
            let begun = Instant::now();
            only.stop().await.unwrap();
            assert!(begun.elapsed() < PARK, "its stop was not detected");
            assert!(!is_traced(ticker.pid()), "the stop was not awaited");
        });
        until("stopped again", || state(ticker.pid()) == Some('T'));
        kill(pid, Signal::SIGCONT).unwrap();
        for _ in 0..20 {
            assert_eq!(tick(), "tick");
        }
    }

    /// A real-time signal above those that the C library reserves.
    const REAL_TIME: i32 = 40;
    /// Delivered after all of those.
    const LAST: i32 = 41;

    /// Run in a separate process by the tests that send signals: prints the signals that it receives until
    /// its standard input ends.
    #[test]
    #[ignore = "no test: others run it"]
    fn helper_that_prints_signals() {
        testing::print_signals(&[libc::SIGTRAP, REAL_TIME, LAST]);
        println!("tid {}", nix::unistd::gettid());
        let _ = std::io::stdin().lines().next();
    }

    struct Printer {
        child: Child,
        tid: i32,
        lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    }

    impl Printer {
        fn start() -> Self {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "tracer::tests::helper_that_prints_signals",
                    "--ignored",
                    "--nocapture",
                ])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let tid = lines.find_map(|line| Some(line.unwrap().split_once("tid ")?.1.parse().unwrap()));
            let tid = tid.unwrap();
            Self { child, tid, lines }
        }

        fn pid(&self) -> i32 {
            self.child.id().try_into().unwrap()
        }

        fn queue(&self, signal: i32, value: usize) {
            testing::queue(self.pid(), self.tid, signal, value);
        }

        /// The signals that it received, ordered by number, once it has received all that were queued before.
        fn got(&mut self) -> Vec<(i32, usize)> {
            self.queue(LAST, 0);
            let mut got = Vec::new();
            loop {
                let line = self.lines.next().unwrap().unwrap();
                let Some(signal) = line.split_once("got ") else {
                    continue;
                };
                let (signal, value) = signal.1.split_once(' ').unwrap();
                let (signal, value) = (signal.parse().unwrap(), value.parse().unwrap());
                if signal == LAST {
                    got.sort_by_key(|(signal, _)| *signal);
                    return got;
                }
                got.push((signal, value));
            }
        }
    }

    impl Drop for Printer {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    /// SIGTRAP, then the real-time ones.
    fn queued(count: usize) -> Vec<(i32, usize)> {
        let mut all = vec![(libc::SIGTRAP, 7)];
        all.extend((0..count).map(|value| (REAL_TIME, value)));
        all
    }

    #[test]
    fn signals_that_come_while_threads_are_held_arrive_afterwards() {
        let mut printer = Printer::start();
        runtime().block_on(async {
            let _reaper = Reaper::start().unwrap();
            let tids = threads(&[printer.pid()], &BTreeSet::new()).unwrap();
            let hold = TracedThreads::seize(tids, TRAP).await.unwrap();
            until("trapped", || state(printer.tid) == Some('t'));
            for (signal, value) in queued(50) {
                printer.queue(signal, value);
            }
            // The reaper consumes the notices.
            tokio::time::sleep(POLL * 20).await;
            hold.release().await.unwrap();
        });
        assert_eq!(printer.got(), queued(50));
    }

    #[test]
    fn a_selected_thread_gets_every_signal_once() {
        let mut printer = Printer::start();
        let pid = Pid::from_raw(printer.pid());
        // They arrive before it runs, while it runs, and when it is released.
        for served in [0, 5, 20, 40, 200] {
            kill(pid, Signal::SIGSTOP).unwrap();
            until("stopped", || state(printer.tid) == Some('T'));
            printer.queue(REAL_TIME, 0);
            runtime().block_on(async {
                let _reaper = Reaper::start().unwrap();
                let only = RunSelected::start(vec![printer.tid], TRAP).await.unwrap();
                for (signal, value) in queued(100).into_iter().filter(|queued| *queued != (REAL_TIME, 0)) {
                    printer.queue(signal, value);
                }
                tokio::time::sleep(POLL * served).await;
                only.stop().await.unwrap();
            });
            until("stopped again", || state(printer.tid) == Some('T'));
            kill(pid, Signal::SIGCONT).unwrap();
            assert_eq!(printer.got(), queued(100), "released after {served} ms");
        }
    }

    #[test]
    fn excluded_threads_are_not_listed() {
        let printer = Printer::start();
        let pid = printer.pid();
        let all = threads(&[pid], &BTreeSet::new()).unwrap();
        assert!(all.contains(&pid) && all.contains(&printer.tid));
        let others = threads(&[pid], &BTreeSet::from([printer.tid])).unwrap();
        assert_eq!(others.len() + 1, all.len());
        assert!(others.contains(&pid) && !others.contains(&printer.tid));
        let gone = i32::MAX;
        assert_eq!(threads(&[gone, pid], &BTreeSet::new()).unwrap(), all);
    }

    /// Run in a separate process by the test below: it cannot open any file.
    #[test]
    #[ignore = "no test: others run it"]
    fn helper_that_cannot_open_files() {
        let none = nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, 0, 0);
        none.unwrap();
        let threads = threads(&[nix::unistd::getpid().as_raw()], &BTreeSet::new());
        assert!(
            matches!(threads, Err(TraceError::Threads { .. })),
            "threads would run on"
        );
    }

    #[test]
    fn threads_that_cannot_be_listed_are_not_taken_for_none() {
        let name = "tracer::tests::helper_that_cannot_open_files";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let mut child = child
            .args(["--exact", name, "--ignored", "--nocapture"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = std::io::read_to_string(child.stdout.take().unwrap()).unwrap();
        // The reaper of another test may have reaped it.
        let _ = child.wait();
        assert!(output.contains("1 passed"), "{output}");
    }

    #[test]
    fn a_thread_that_has_ended_needs_no_holding() {
        // The shell is replaced by `sleep` before its child ends, so nothing reaps the child.
        let mut child = Command::new("sh")
            .args(["-c", "sleep 0.2 & echo $!; exec sleep 1000"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let line = BufReader::new(child.stdout.take().unwrap()).lines().next();
        let zombie: i32 = line.unwrap().unwrap().parse().unwrap();
        until("dead", || state(zombie) == Some('Z'));
        runtime().block_on(async {
            let hold = TracedThreads::seize(vec![zombie], TRAP).await.unwrap();
            hold.release().await.unwrap();
        });
        child.kill().unwrap();
        let _ = child.wait();
    }

    #[test]
    fn a_thread_that_never_traps_or_is_never_detached_is_an_error() {
        let (ticker, _tick) = Ticker::start();
        let tid = ticker.pid();
        let begun = Instant::now();
        let never = wake(tid, POLL * 5);
        assert!(matches!(never, Err(TraceError::NotStopped { .. })), "{never:?}");
        assert!(begun.elapsed() > POLL * 5, "the trap was not awaited");
        runtime().block_on(async {
            let debugger = TracedThreads::seize(vec![tid], TRAP).await.unwrap();
            let mut other = TracedThreads::seize(Vec::new(), TRAP).await.unwrap();
            other.0.tids.push(tid);
            // Paused time: timers fire at once.
            tokio::time::pause();
            let stuck = tokio::time::timeout(TRAP * 4, other.release());
            let (stuck, ()) = tokio::join!(stuck, tokio::time::advance(TRAP * 2));
            tokio::time::resume();
            let stuck = stuck.expect("the wait has a deadline");
            assert!(matches!(stuck, Err(TraceError::StillTraced { .. })), "{stuck:?}");
            debugger.release().await.unwrap();
        });
    }

    #[test]
    fn a_process_that_is_traced_already_is_refused() {
        let (ticker, _tick) = Ticker::start();
        runtime().block_on(async {
            let first = TracedThreads::seize(vec![ticker.pid()], TRAP).await.unwrap();
            let second = TracedThreads::seize(vec![ticker.pid()], TRAP).await;
            assert!(
                matches!(second, Err(TraceError::Seize { .. })),
                "a debugger's tracee was taken over"
            );
            first.release().await.unwrap();
        });
    }
}
