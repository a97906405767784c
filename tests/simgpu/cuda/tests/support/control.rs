//! Stopping threads of another process by ptrace, as firn does.
//!
//! A tracer is a thread: hold and release in the same one.

use std::fs;

use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use super::eventually;

/// Threads of a process.
pub fn threads(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks
        .map(|task| task.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect()
}

/// Letter of a thread's state.
pub fn thread_state(pid: i32, tid: i32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).unwrap();
    stat.rsplit_once(')')
        .unwrap()
        .1
        .trim_start()
        .chars()
        .next()
        .unwrap()
}

/// Stops the process by SIGSTOP and waits until all threads have stopped.
pub fn stop(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    eventually("the stop", || {
        threads(pid)
            .iter()
            .all(|tid| thread_state(pid, *tid) == 'T')
            .then_some(())
    });
}

/// Lets a stopped process continue.
pub fn go_on(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
}

/// Threads held by ptrace.
pub struct Held(Vec<Pid>);

impl Held {
    /// Holds all threads of `pid` but `except`.
    pub fn all_but(pid: i32, except: i32) -> Self {
        let held: Vec<Pid> = threads(pid)
            .into_iter()
            .filter(|tid| *tid != except)
            .map(Pid::from_raw)
            .collect();
        for &tid in &held {
            ptrace::seize(tid, ptrace::Options::empty()).unwrap();
            ptrace::interrupt(tid).unwrap();
            waitpid(tid, Some(WaitPidFlag::__WALL)).unwrap();
        }
        Self(held)
    }

    /// Lets them go.
    pub fn release(self) {
        for tid in self.0 {
            ptrace::detach(tid, None).unwrap();
        }
    }
}

/// One thread of a stopped process that runs all the same.
pub struct Running {
    pid: i32,
    tid: Pid,
}

impl Running {
    /// Lets `tid` of the stopped process `pid` run.
    pub fn only(pid: i32, tid: i32) -> Self {
        let this = Self {
            pid,
            tid: Pid::from_raw(tid),
        };
        ptrace::seize(this.tid, ptrace::Options::empty()).unwrap();
        ptrace::interrupt(this.tid).unwrap();
        eventually("the thread to run", || {
            // Each trap is left with a CONT; a stopped process makes two.
            let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
            if !matches!(
                waitpid(this.tid, Some(flags)).unwrap(),
                nix::sys::wait::WaitStatus::StillAlive
            ) {
                ptrace::cont(this.tid, None).unwrap();
            }
            (thread_state(pid, tid) == 'S').then_some(())
        });
        this
    }

    /// Returns it to the stop.
    pub fn release(self) {
        ptrace::interrupt(self.tid).unwrap();
        waitpid(self.tid, Some(WaitPidFlag::__WALL)).unwrap();
        ptrace::detach(self.tid, None).unwrap();
        eventually("the stop", || {
            (thread_state(self.pid, self.tid.as_raw()) == 'T').then_some(())
        });
    }
}
