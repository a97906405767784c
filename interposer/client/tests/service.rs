//! The library's own thread, asked as firn asks it.
#![allow(
    clippy::unwrap_used,
    reason = "a fixture that cannot be started is a test that fails"
)]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use firn_interposer::abi::{Answer, LEASE_SECONDS, PIECES, Request, VERSION};
use firn_interposer::facts::{ROWS, of_symbol};
use firn_interposer_client::{Lent, Library, Process};
use rustix::process::Pid;
use tempfile::TempDir;

#[path = "../../tests/common/mod.rs"]
mod common;

/// Milliseconds that a step has. A machine under load takes its time.
const WAIT: u32 = 60_000;

/// A program that calls the driver in four threads, behind the library.
struct Program {
    _fixtures: TempDir,
    library: PathBuf,
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Program {
    fn start() -> Self {
        Self::of(common::fixtures("driver", &["commanded"]), "commanded")
    }

    /// Starts a program that is among the fixtures.
    fn of(fixtures: TempDir, name: &str) -> Self {
        let library = common::library();
        let mut child = Command::new(fixtures.path().join(name))
            .env("LD_LIBRARY_PATH", fixtures.path())
            .env("LD_PRELOAD", &library)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut program = Self {
            _fixtures: fixtures,
            library,
            child,
            commands,
            answers,
        };
        assert_eq!(program.answer(), "context: 0");
        program
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn found(&self) -> Option<Process> {
        Library::read(&self.library).unwrap().process(self.pid()).unwrap()
    }

    fn process(&self) -> Process {
        let begun = Instant::now();
        loop {
            // Its thread has begun, but may not have shown itself yet.
            match self.found() {
                Some(mut process) => {
                    process.limit = Duration::from_secs(60);
                    return process;
                }
                None => assert!(begun.elapsed() < Duration::from_secs(60), "cannot be asked"),
            }
            thread::yield_now();
        }
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn command(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    fn answer_to(&mut self, command: &str) -> String {
        self.command(command);
        self.answer()
    }

    fn calls(&mut self) -> u64 {
        self.answer_to("count").parse().unwrap()
    }

    /// Waits until the threads call the driver.
    fn until_it_calls(&mut self) {
        let (begun, before) = (Instant::now(), self.calls());
        while self.calls() < before + 8 {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "its threads do not call"
            );
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn row(symbol: &str) -> u32 {
    u32::try_from(of_symbol(symbol.as_bytes()).unwrap()).unwrap()
}

#[test]
fn nobody_calls_the_driver_while_the_gate_is_shut() {
    let mut program = Program::start();
    let mut process = program.process();
    assert_eq!(process.reach.version, VERSION);
    assert_eq!(process.ask(Request::Hello).unwrap(), Answer::Done);
    for _ in 0..20 {
        program.until_it_calls();
        assert_eq!(process.ask(Request::Shut { wait: WAIT }).unwrap(), Answer::Done);
        // A thread counts after its call, whenever it gets a CPU: each of the four may do so once more.
        let before = program.calls();
        for _ in 0..4 {
            thread::sleep(Duration::from_millis(2));
            assert!(program.calls() <= before + 4);
        }
        // A child has a gate of its own.
        assert_eq!(program.answer_to("fork"), "7");
        assert_eq!(process.ask(Request::Open).unwrap(), Answer::Done);
    }
    program.until_it_calls();
}

#[test]
fn who_is_inside_is_named_until_it_has_left() {
    let mut program = Program::start();
    let mut process = program.process();
    program.command("sleep");
    let begun = Instant::now();
    let busy = loop {
        match process.ask(Request::Shut { wait: 1 }).unwrap() {
            Answer::Busy { tid, row } if ROWS[row as usize].symbol == "cuStreamSynchronize" => break tid,
            _ => process.ask(Request::Open).unwrap(),
        };
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not sleep");
    };
    assert!(Path::new(&format!("/proc/{}/task/{busy}", program.child.id())).exists());
    // Those who call all the time are outside, and stay there.
    let inside = Answer::Busy {
        tid: busy,
        row: row("cuStreamSynchronize"),
    };
    assert_eq!(process.ask(Request::Shut { wait: 100 }).unwrap(), inside);
    process.ask(Request::Open).unwrap();
    program.until_it_calls();
}

#[test]
fn a_gate_of_which_nobody_asks_opens() {
    let mut program = Program::start();
    let mut process = program.process();
    assert_eq!(process.ask(Request::Shut { wait: WAIT }).unwrap(), Answer::Done);
    drop(process);
    let (begun, before) = (Instant::now(), program.calls());
    while program.calls() < before + 8 {
        let limit = Duration::from_secs(60) + Duration::from_secs(LEASE_SECONDS.into());
        assert!(begun.elapsed() < limit, "it stays shut");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_program_that_closes_what_it_does_not_know_goes_on() {
    for commands in [&["close"][..], &["close", "reuse"]] {
        let mut program = Program::start();
        let mut process = program.process();
        assert_eq!(process.ask(Request::Shut { wait: WAIT }).unwrap(), Answer::Done);
        drop(process);
        for command in commands {
            // What the library had is closed, or something else.
            assert_ne!(program.answer_to(command), "-1");
        }
        program.until_it_calls();
        assert!(program.found().is_none());
    }
}

/// All pieces of a process, lent.
fn lent(process: &mut Process) -> Vec<Lent> {
    let mut all = Vec::new();
    loop {
        let from = u32::try_from(all.len()).unwrap();
        let pieces = process.lend(from, WAIT).unwrap().unwrap();
        let is_last = pieces.len() < PIECES as usize;
        all.extend(pieces);
        if is_last {
            return all;
        }
    }
}

#[test]
fn memory_leaves_a_process_and_comes_back() {
    let mut program = Program::of(common::fixtures("memory", &["moved"]), "moved");
    let mut process = program.process();
    for turn in 0..4 {
        program.until_it_calls();
        assert_eq!(process.ask(Request::Shut { wait: WAIT }).unwrap(), Answer::Done);
        assert_eq!(
            process.ask(Request::Rehearse { wait: WAIT }).unwrap(),
            Answer::Done
        );
        let before = program.answer_to("left");
        let pieces = lent(&mut process);
        assert!((4..=8).contains(&pieces.len()), "{}", pieces.len());
        let size = |piece: &Lent| piece.bytes >= 2 << 20 && piece.bytes.is_multiple_of(2 << 20);
        assert!(pieces.iter().all(size), "{pieces:?}");
        if turn == 3 {
            // What was lent is the process's as before.
            assert_eq!(process.ask(Request::Open).unwrap(), Answer::Done);
            continue;
        }
        assert_eq!(process.ask(Request::Detach { wait: WAIT }).unwrap(), Answer::Done);
        let ranges: usize = program.answer_to("left").parse().unwrap();
        assert_eq!(ranges, pieces.len(), "addresses alone");
        assert_eq!(process.ask(Request::Open).unwrap(), Answer::Away);
        // Again, as after an answer that was lost.
        assert_eq!(process.ask(Request::Detach { wait: WAIT }).unwrap(), Answer::Done);
        let (first, others) = pieces.split_at(2);
        assert_eq!(process.attach(0, first, WAIT).unwrap(), Answer::Done);
        assert_eq!(process.attach(0, first, WAIT).unwrap(), Answer::Done);
        assert_eq!(process.ask(Request::Open).unwrap(), Answer::Away, "a part is out");
        assert_eq!(process.attach(2, others, WAIT).unwrap(), Answer::Done);
        assert_eq!(program.answer_to("left"), before);
        assert_eq!(process.ask(Request::Open).unwrap(), Answer::Done);
    }
    program.until_it_calls();
    assert_eq!(program.answer_to("wrong"), "0");
}

/// It does not know that its memory is out.
#[test]
fn a_program_that_closes_what_it_does_not_know_gets_its_memory_back() {
    let mut program = Program::of(common::fixtures("memory", &["moved"]), "moved");
    let mut process = program.process();
    program.until_it_calls();
    for _ in 0..2 {
        demand(&mut process, Request::Shut { wait: WAIT });
        demand(&mut process, Request::Rehearse { wait: WAIT });
        let pieces = lent(&mut process);
        demand(&mut process, Request::Detach { wait: WAIT });
        assert_eq!(program.answer_to("close"), "0");
        process = program.process();
        assert_eq!(process.ask(Request::Open).unwrap(), Answer::Away);
        assert_eq!(process.attach(0, &pieces, WAIT).unwrap(), Answer::Done);
        demand(&mut process, Request::Open);
        program.until_it_calls();
    }
    assert_eq!(program.answer_to("wrong"), "0");
}

fn demand(process: &mut Process, request: Request) {
    assert_eq!(process.ask(request).unwrap(), Answer::Done, "{request:?}");
}

#[test]
fn memory_that_may_be_in_use_stays() {
    let mut program = Program::of(common::fixtures("memory", &["moved"]), "moved");
    let mut process = program.process();
    program.until_it_calls();
    let (detach, shut) = (Request::Detach { wait: WAIT }, Request::Shut { wait: WAIT });
    // The gate is open.
    assert_eq!(process.ask(detach).unwrap(), Answer::Idle);
    assert_eq!(process.lend(0, WAIT).unwrap().unwrap_err(), Answer::Idle);
    // There may be work, or nobody has asked for descriptors, or not since the gate was open.
    let (not_ready, not_lent) = (Answer::Refused { status: 600 }, Answer::Refused { status: 211 });
    let rehearse = Request::Rehearse { wait: WAIT };
    assert_eq!(process.ask(shut).unwrap(), Answer::Done);
    assert_eq!(process.ask(detach).unwrap(), not_ready);
    assert_eq!(process.ask(rehearse).unwrap(), Answer::Done);
    assert_eq!(process.ask(detach).unwrap(), not_lent);
    lent(&mut process);
    assert_eq!(process.ask(Request::Open).unwrap(), Answer::Done);
    assert_eq!(process.ask(shut).unwrap(), Answer::Done);
    assert_eq!(process.ask(detach).unwrap(), not_ready);
    assert_eq!(process.ask(rehearse).unwrap(), Answer::Done);
    assert_eq!(process.ask(detach).unwrap(), not_lent);
    // A message without the descriptors that it names.
    let pieces = lent(&mut process);
    assert_eq!(process.ask(detach).unwrap(), Answer::Done);
    let without = Request::Attach {
        wait: WAIT,
        from: 0,
        count: 2,
    };
    assert_eq!(process.ask(without).unwrap(), Answer::Refused { status: 1 });
    assert_eq!(process.ask(Request::Open).unwrap(), Answer::Away);
    assert_eq!(process.attach(0, &pieces, WAIT).unwrap(), Answer::Done);
    assert_eq!(process.ask(Request::Open).unwrap(), Answer::Done);
    // Another process may have a piece.
    assert_eq!(program.answer_to("share"), "0");
    assert_eq!(process.ask(shut).unwrap(), Answer::Done);
    let refused = Answer::Refused { status: 801 };
    assert_eq!(process.lend(0, WAIT).unwrap().unwrap_err(), refused);
    assert_eq!(process.ask(detach).unwrap(), refused);
    assert_eq!(process.ask(Request::Open).unwrap(), Answer::Done);
    program.until_it_calls();
    assert_eq!(program.answer_to("wrong"), "0");
}

#[test]
fn a_driver_that_hangs_holds_nobody() {
    let mut program = Program::of(common::fixtures("memory", &["moved"]), "moved");
    let mut process = program.process();
    let prepare = |process: &mut Process| {
        assert_eq!(process.ask(Request::Shut { wait: WAIT }).unwrap(), Answer::Done);
        process.ask(Request::Rehearse { wait: WAIT }).unwrap()
    };
    for _ in 0..3 {
        program.until_it_calls();
        assert_eq!(prepare(&mut process), Answer::Done);
        program.command("hang");
        // It has read the command once it has answered the next one.
        program.calls();
        assert_eq!(process.lend(0, 30).unwrap().unwrap_err(), Answer::Working);
        assert_eq!(process.ask(Request::Hello).unwrap(), Answer::Done);
        assert_eq!(
            process.ask(Request::Detach { wait: 30 }).unwrap(),
            Answer::Working
        );
        assert_eq!(process.ask(Request::Open).unwrap(), Answer::Done);
        program.until_it_calls();
        program.command("continue");
        program.calls();
        // What it has made for nobody is closed, and the next one is asked as before.
        let begun = Instant::now();
        while prepare(&mut process) == Answer::Working {
            assert!(begun.elapsed() < Duration::from_secs(60), "it works for ever");
            thread::sleep(Duration::from_millis(5));
        }
        assert!(!lent(&mut process).is_empty());
        assert_eq!(process.ask(Request::Open).unwrap(), Answer::Done);
        let open = std::fs::read_dir(format!("/proc/{}/fd", program.child.id()))
            .unwrap()
            .count();
        assert!(open < 12, "{open} descriptors");
    }
    assert_eq!(program.answer_to("wrong"), "0");
}

#[test]
fn a_program_changes_its_user() {
    let mut program = Program::start();
    program.process();
    assert_eq!(program.answer_to("setuid"), "0");
    assert_eq!(program.process().ask(Request::Hello).unwrap(), Answer::Done);
}

#[test]
fn processes_without_the_library_are_not_asked() {
    let program = Program::start();
    let library = Library::read(&program.library).unwrap();
    assert!(library.process(rustix::process::getpid()).unwrap().is_none());
    // The same name, another file.
    let other = tempfile::tempdir().unwrap();
    let copy = other.path().join("libfirn_cuda.so");
    std::fs::copy(&program.library, &copy).unwrap();
    assert!(
        Library::read(&copy)
            .unwrap()
            .process(program.pid())
            .unwrap()
            .is_none()
    );
    let error = Library::read(Path::new("/bin/sh")).unwrap_err();
    assert_eq!(error.to_string(), "/bin/sh: no symbol firn_cuda_area");
}
