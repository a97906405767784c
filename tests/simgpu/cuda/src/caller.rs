//! The six process checkpoint calls, made by one process about another. They need no cuInit.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::Duration;

use simgpu_model::fault::{self, Action, Call, When};
use simgpu_model::{CudaProcess, paths};

use crate::error::{self, Error};
use crate::wire::{self, Request};

/// Looks at a process without disturbing it: works while it is frozen or stopped, as the driver's call does.
pub(crate) fn look(call: Call, pid: i32) -> Result<CudaProcess, Error> {
    disturbed(call, pid, |_| find(pid))
}

/// Asks a process for its state: waits until its restore thread can run, as the driver does.
pub(crate) fn state(pid: i32) -> Result<i32, Error> {
    disturbed(Call::State, pid, |_| {
        exchange(&find(pid)?, &Request::State).map_err(|_| Error::UNKNOWN)?;
        Ok(find(pid)?.state)
    })
}

/// The answers for a process without CUDA and for none at all are those that the driver gave.
fn find(pid: i32) -> Result<CudaProcess, Error> {
    CudaProcess::find(pid).ok_or_else(|| {
        if Path::new(&format!("/proc/{pid}")).exists() {
            Error::NOT_INITIALIZED
        } else {
            Error::OPERATING_SYSTEM
        }
    })
}

/// Has a request carried out by the restore thread of `pid`.
/// It is made for how many milliseconds its copy is to take.
pub(crate) fn request(call: Call, pid: i32, request: impl FnOnce(u32) -> Request) -> Result<(), Error> {
    disturbed(call, pid, |slow_ms| {
        let process = find(pid)?;
        // A process that dies meanwhile was not measured.
        match exchange(&process, &request(slow_ms)).map_err(|_| Error::UNKNOWN)? {
            0 => Ok(()),
            code => Err(Error(code)),
        }
    })
}

/// Has a request of the process's own carried out.
pub(crate) fn ask(channel: &OwnedFd, request: &Request) -> Result<(), Error> {
    match send(channel, request).map_err(|_| Error::UNKNOWN)? {
        0 => Ok(()),
        code => Err(Error(code)),
    }
}

fn exchange(process: &CudaProcess, request: &Request) -> io::Result<i32> {
    send(&channel(process)?, request)
}

fn send(channel: &OwnedFd, request: &Request) -> io::Result<i32> {
    let (mine, theirs) = wire::socket_pair()?;
    wire::send_with(channel, &request.encode(), &theirs)?;
    drop(theirs);
    let answer = wire::receive::<4>(&mine)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    // The process closes its end after the answer. Until then CRIU would find a socket of this network
    // namespace in it.
    while wire::receive::<1>(&mine)?.is_some() {}
    Ok(i32::from_le_bytes(answer))
}

/// The far end of the process's channel.
fn channel(process: &CudaProcess) -> io::Result<OwnedFd> {
    // SAFETY: no pointers are involved.
    let pidfd = take(unsafe { libc::syscall(libc::SYS_pidfd_open, process.pid, 0) })?;
    // SAFETY: no pointers are involved.
    take(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), process.channel, 0) })
}

fn take(result: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(result) {
        // SAFETY: the system call has just made this descriptor for this process.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Carries `call` out unless the node's fault script has something else in mind.
pub(crate) fn disturbed<T>(
    call: Call,
    pid: i32,
    carry_out: impl FnOnce(u32) -> Result<T, Error>,
) -> Result<T, Error> {
    let rule = fault::consult(&paths::state_dir(), call, pid).map_err(|error| {
        eprintln!("simgpu: {error}");
        Error::UNKNOWN
    })?;
    let Some(rule) = rule else { return carry_out(0) };
    if let Action::TransferMs(slow_ms) = rule.action {
        return carry_out(slow_ms);
    }
    match rule.when {
        When::Before => {
            act(&rule.action)?;
            carry_out(0)
        }
        When::After => {
            let done = carry_out(0)?;
            act(&rule.action)?;
            Ok(done)
        }
    }
}

fn act(action: &Action) -> Result<(), Error> {
    match action {
        Action::Error(name) => Err(error::by_name(name).unwrap_or_else(|| {
            eprintln!("simgpu: fault script: no CUresult is called {name:?}");
            Error::UNKNOWN
        })),
        Action::DelayMs(delay) => {
            thread::sleep(Duration::from_millis(*delay));
            Ok(())
        }
        // A part of the call itself.
        Action::TransferMs(_) => Ok(()),
        Action::Hang => loop {
            thread::park();
        },
        Action::Crash => std::process::abort(),
    }
}
