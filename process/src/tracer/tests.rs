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
        let hold = TracedThreads::hold(tids, TRAP).await.unwrap();
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
        let only = TracedThreads::run_selected(vec![ticker.pid()], TRAP)
            .await
            .unwrap();
        until("running", || matches!(state(ticker.pid()), Some('S' | 'R')));
        // Its children die while it is traced: without SIGCHLD it would not tick again.
        for _ in 0..20 {
            assert_eq!(tick(), "tick");
        }
        let begun = Instant::now();
        only.release().await.unwrap();
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

type Lines = std::io::Lines<BufReader<std::process::ChildStdout>>;

/// Runs a helper in a process of its own, whose standard input is a pipe: with the thread that it names and
/// what it prints afterwards.
fn run_helper(name: &str, environment: &[(&str, &str)]) -> (Child, i32, Lines) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let tid = lines.find_map(|line| Some(line.unwrap().split_once("tid ")?.1.parse().unwrap()));
    (child, tid.unwrap(), lines)
}

struct Printer {
    child: Child,
    tid: i32,
    lines: Lines,
}

impl Printer {
    fn start() -> Self {
        let name = "tracer::tests::helper_that_prints_signals";
        let (child, tid, lines) = run_helper(name, &[]);
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
        let hold = TracedThreads::hold(tids, TRAP).await.unwrap();
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
            let only = TracedThreads::run_selected(vec![printer.tid], TRAP)
                .await
                .unwrap();
            for (signal, value) in queued(100).into_iter().filter(|queued| *queued != (REAL_TIME, 0)) {
                printer.queue(signal, value);
            }
            tokio::time::sleep(POLL * served).await;
            only.release().await.unwrap();
        });
        until("stopped again", || state(printer.tid) == Some('T'));
        kill(pid, Signal::SIGCONT).unwrap();
        assert_eq!(printer.got(), queued(100), "released after {served} ms");
    }
}

/// Code of CRIU in a process, in the process's first thread: it waits until CRIU is gone, protects memory as
/// it was before, and returns by sigreturn.
#[cfg(target_arch = "x86_64")]
mod in_criu_code {
    use std::path::PathBuf;
    use std::process::ChildStdin;

    use super::*;
    use crate::sys::criu_code::InCriuCode;

    /// Run in a separate process. Its other thread maps memory once a file exists, as the driver does in a
    /// restore, and uses it before it prints what the file has in it.
    #[test]
    #[ignore = "no test: others run it"]
    fn helper_whose_first_thread_is_in_criu_code() {
        let asked = PathBuf::from(std::env::var_os("ASKED").unwrap());
        let memory = InCriuCode::enter();
        println!("tid {}", nix::unistd::gettid());
        until("restore", || asked.exists());
        memory.map();
        let mut printed = String::new();
        loop {
            memory.write();
            let now = std::fs::read_to_string(&asked).unwrap();
            if now.ends_with('.') && now != printed {
                println!("{now}");
                if std::env::var_os("SPIN").is_some() && printed.is_empty() {
                    InCriuCode::spin();
                }
                printed = now;
            }
            std::thread::sleep(POLL);
        }
    }

    struct Helper {
        child: Child,
        /// Until it is dropped CRIU is there.
        criu: Option<ChildStdin>,
        tid: i32,
        lines: Lines,
        directory: tempfile::TempDir,
        asked: usize,
    }

    impl Helper {
        fn start(options: &[(&str, &str)]) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let name = "tracer::tests::in_criu_code::helper_whose_first_thread_is_in_criu_code";
            let asked = directory.path().join("asked").display().to_string();
            let environment = [&[("ASKED", &*asked)], options].concat();
            let (mut child, tid, lines) = run_helper(name, &environment);
            let criu = child.stdin.take();
            Self {
                child,
                criu,
                tid,
                lines,
                directory,
                asked: 0,
            }
        }

        fn pid(&self) -> i32 {
            self.child.id().try_into().unwrap()
        }

        async fn hold(&self) -> TracedThreads {
            let tids = threads(&[self.pid()], &BTreeSet::from([self.tid])).unwrap();
            TracedThreads::hold(tids, TRAP).await.unwrap()
        }

        /// It uses the memory from now on, and answers.
        fn uses_memory(&mut self) {
            self.asked += 1;
            let number = format!("{}.", self.asked);
            std::fs::write(self.directory.path().join("asked"), &number).unwrap();
            assert_eq!(self.lines.next().expect("it has ended").unwrap(), number);
        }
    }

    impl Drop for Helper {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    #[test]
    fn it_ends_before_memory_is_mapped_and_its_thread_is_still_held() {
        let mut helper = Helper::start(&[]);
        runtime().block_on(async {
            let hold = helper.hold().await;
            until("trapped", || state(helper.pid()) == Some('t'));
            drop(helper.criu.take());
            hold.end_criu_code(vec![helper.pid()], TRAP).await.unwrap();
            assert_eq!(state(helper.pid()), Some('t'));
            helper.uses_memory();
            hold.release().await.unwrap();
            criu_code::wait_for_end(&[helper.pid()], TRAP).unwrap();
        });
        helper.uses_memory();
    }

    #[test]
    fn a_thread_that_has_left_it_and_runs_for_ever_delays_nobody() {
        let mut helper = Helper::start(&[("SPIN", "yes")]);
        let pid = helper.pid();
        runtime().block_on(async {
            let hold = helper.hold().await;
            drop(helper.criu.take());
            hold.end_criu_code(vec![pid], TRAP).await.unwrap();
            hold.release().await.unwrap();
        });
        helper.uses_memory();
        helper.uses_memory();
        let begun = Instant::now();
        criu_code::wait_for_end(&[pid], TRAP).unwrap();
        runtime().block_on(async {
            let hold = helper.hold().await;
            hold.end_criu_code(vec![pid], TRAP).await.unwrap();
            hold.release().await.unwrap();
        });
        assert!(begun.elapsed() < TRAP / 2, "{:?}", begun.elapsed());
        helper.uses_memory();
    }

    /// Whether the first thread blocks SIGPIPE.
    fn blocks_sigpipe(pid: i32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let blocked = status
            .lines()
            .find_map(|line| line.strip_prefix("SigBlk:"))
            .unwrap();
        u64::from_str_radix(blocked.trim(), 16).unwrap() & 1 << (libc::SIGPIPE - 1) != 0
    }

    #[test]
    fn one_whose_criu_is_there_does_not_end() {
        let mut helper = Helper::start(&[]);
        let limit = Duration::from_millis(100);
        runtime().block_on(async {
            let hold = helper.hold().await;
            let pid = helper.pid();
            let late = hold.end_criu_code(vec![pid], limit).await;
            assert!(matches!(late, Err(TraceError::CriuCode { pid: at }) if at == pid));
            assert_eq!(state(pid), Some('t'), "it is not held any more");
            assert!(blocks_sigpipe(pid), "it would end once nobody traces it");
            let late = criu_code::wait_for_end(&[pid], limit);
            assert!(matches!(late, Err(TraceError::CriuCode { pid: at }) if at == pid));
            drop(helper.criu.take());
            hold.end_criu_code(vec![pid], TRAP).await.unwrap();
            hold.release().await.unwrap();
        });
        assert!(!blocks_sigpipe(helper.pid()), "CRIU's mask is left");
        helper.uses_memory();
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
        let hold = TracedThreads::hold(vec![zombie], TRAP).await.unwrap();
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
        let debugger = TracedThreads::hold(vec![tid], TRAP).await.unwrap();
        let mut other = TracedThreads::hold(Vec::new(), TRAP).await.unwrap();
        other.tids.push(tid);
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
        let first = TracedThreads::hold(vec![ticker.pid()], TRAP).await.unwrap();
        let second = TracedThreads::hold(vec![ticker.pid()], TRAP).await;
        assert!(
            matches!(second, Err(TraceError::Seize { .. })),
            "a debugger's tracee was taken over"
        );
        first.release().await.unwrap();
    });
}
