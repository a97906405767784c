//! What some programs do beside computing, and what keeps them from being checkpointed.

use std::ffi::c_long;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{ForkResult, Pid, fork, pause};

/// `struct io_uring_params`: 120 bytes.
#[repr(C)]
struct RingParams([u64; 15]);

/// Sets up an io_uring and leaves it unused.
pub fn io_uring() -> io::Result<OwnedFd> {
    let mut params = RingParams([0; 15]);
    let entries: c_long = 8;
    // SAFETY: io_uring_setup takes a number of entries and a pointer to a live params struct, all zero, which it fills.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, &raw mut params) };
    let ring = RawFd::try_from(ring).unwrap_or(-1);
    if ring < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us, and nothing else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(ring) })
}

/// Forks a child that waits for ever with all that it has inherited, and ends with its parent.
pub fn idle_fork() -> nix::Result<Pid> {
    // SAFETY: the child calls prctl and pause alone, both of which are safe after a fork of a program with threads.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            let _ = prctl::set_pdeathsig(Signal::SIGKILL);
            loop {
                pause();
            }
        }
    }
}
