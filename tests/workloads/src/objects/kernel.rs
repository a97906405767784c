//! Objects that are made by system calls without a safe wrapper.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr;

use nix::libc::{self, c_int, c_long};

/// The descriptor that a system call has made.
fn made(result: c_long) -> io::Result<OwnedFd> {
    let number = RawFd::try_from(result).unwrap_or(-1);
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the caller has just got it from the kernel, and has no other owner of it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A socket of this family, type and protocol.
fn socket(family: c_int, kind: c_int, protocol: c_int) -> io::Result<OwnedFd> {
    // SAFETY: it takes numbers.
    made(unsafe { libc::socket(family, kind, protocol) }.into())
}

pub(super) fn vsock() -> io::Result<OwnedFd> {
    socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0)
}

pub(super) fn mptcp() -> io::Result<OwnedFd> {
    let socket = socket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP)?;
    let backlog = nix::sys::socket::Backlog::new(1)?;
    nix::sys::socket::listen(&socket, backlog)?;
    Ok(socket)
}

pub(super) fn ping() -> io::Result<OwnedFd> {
    socket(libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_ICMP)
}

pub(super) fn secret_memory() -> io::Result<OwnedFd> {
    // SAFETY: it takes a number.
    made(unsafe { libc::syscall(libc::SYS_memfd_secret, 0) })
}

pub(super) fn userfaultfd() -> io::Result<OwnedFd> {
    // SAFETY: it takes a number.
    made(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) })
}

pub(super) fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: it takes numbers.
    made(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// Of this thread: with the flag `PIDFD_THREAD`.
pub(super) fn thread_pidfd() -> io::Result<OwnedFd> {
    // SAFETY: it takes numbers.
    made(unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), libc::O_EXCL) })
}

/// Rules about the execution of files, which nothing is restricted by yet.
pub(super) fn landlock_rules() -> io::Result<OwnedFd> {
    let handled: u64 = 1;
    // SAFETY: it reads as many bytes as it is given the length of.
    made(unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            ptr::from_ref(&handled),
            size_of_val(&handled),
            0,
        )
    })
}

/// An array of one number.
pub(super) fn bpf_map() -> io::Result<OwnedFd> {
    const MAP_CREATE: c_int = 0;
    const ARRAY: u32 = 2;
    // Type, size of a key and of a value, entries.
    let attributes: [u32; 4] = [ARRAY, 4, 4, 1];
    // SAFETY: it reads as many bytes as it is given the length of.
    made(unsafe {
        libc::syscall(
            libc::SYS_bpf,
            MAP_CREATE,
            attributes.as_ptr(),
            size_of_val(&attributes),
        )
    })
}

/// A clock of this process, counted by the kernel.
pub(super) fn perf_event() -> io::Result<OwnedFd> {
    const SOFTWARE: u32 = 1;
    const SIZE: u32 = 64;
    let mut attributes = [0_u32; 16];
    attributes[0] = SOFTWARE;
    attributes[1] = SIZE;
    // SAFETY: it reads as many bytes as its second word has, which `attributes` has.
    made(unsafe { libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), 0, -1, -1, 0) })
}

/// Of a filter that allows everything.
pub(super) fn seccomp_listener() -> io::Result<OwnedFd> {
    const SET_MODE_FILTER: c_int = 1;
    const NEW_LISTENER: c_int = 8;
    const ALLOW: u32 = 0x7fff_0000;
    nix::sys::prctl::set_no_new_privs()?;
    let mut filter = [libc::sock_filter {
        code: 6,
        jt: 0,
        jf: 0,
        k: ALLOW,
    }];
    let program = libc::sock_fprog {
        len: 1,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: it reads one instruction, which `filter` has.
    made(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            SET_MODE_FILTER,
            NEW_LISTENER,
            ptr::from_ref(&program),
        )
    })
}
