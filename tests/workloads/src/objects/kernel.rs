//! Objects that are made by system calls without a safe wrapper.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;

use nix::libc::{self, c_int, c_long};
use nix::sched::CloneFlags;
use nix::sys::signal::{SigHandler, Signal};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

use super::Look;

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

/// CLONE_NEWTIME, which nix does not name.
pub(super) const NEW_TIME: CloneFlags = CloneFlags::from_bits_retain(0x80);

/// The program begins with namespaces of its own.
pub(super) fn set_apart(program: &mut Command, flags: CloneFlags) -> &mut Command {
    let unshare = move || Ok(nix::sched::unshare(flags)?);
    // SAFETY: the child makes one system call before it starts the program.
    unsafe { program.pre_exec(unshare) }
}

/// A watch of what is written to a file.
pub(super) fn fanotify(path: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: it takes numbers.
    let group = made(unsafe { libc::fanotify_init(libc::FAN_NONBLOCK, 0) }.into())?;
    let (at, number) = (libc::AT_FDCWD, group.as_raw_fd());
    // SAFETY: it reads the path, which ends with a zero.
    let marked =
        unsafe { libc::fanotify_mark(number, libc::FAN_MARK_ADD, libc::FAN_MODIFY, at, path.as_ptr()) };
    checked(marked.into())?;
    Ok(group)
}

/// Takes the events that a group of fanotify has, if there are some.
pub(super) fn has_event(group: &OwnedFd) -> io::Result<bool> {
    // Length, version, length of this, mask, descriptor of the file, pid.
    let mut event = [0; 24];
    let mut events = File::from(group.try_clone()?);
    let mut found = false;
    loop {
        match events.read(&mut event) {
            Ok(_) => {
                let number = i32::from_ne_bytes([event[16], event[17], event[18], event[19]]);
                drop(made(number.into())?);
                found = true;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(found),
            Err(error) => return Err(error),
        }
    }
}

/// A lease for reading.
pub(super) fn lease(file: &File) -> io::Result<()> {
    // SAFETY: it takes numbers.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) }.into()).map(drop)
}

pub(super) fn has_lease(file: &File) -> io::Result<bool> {
    // SAFETY: it takes numbers.
    let lease = checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) }.into())?;
    Ok(lease == c_long::from(libc::F_RDLCK))
}

/// The descriptor in the next message of a socket.
pub(super) fn receive(socket: &UnixDatagram) -> io::Result<File> {
    let (mut byte, mut space) = ([0], nix::cmsg_space!(RawFd));
    let mut bytes = [IoSliceMut::new(&mut byte)];
    let message = recvmsg::<()>(
        socket.as_raw_fd(),
        &mut bytes,
        Some(&mut space),
        MsgFlags::empty(),
    )?;
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = part
            && let [number] = numbers[..]
        {
            return made(number.into()).map(File::from);
        }
    }
    Err(io::Error::other("no descriptor"))
}

/// Makes a terminal that of the session, of which this process is the first.
pub(super) fn take_terminal(file: &File) -> io::Result<()> {
    // SAFETY: it takes numbers.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), libc::TIOCSCTTY, 0) }.into()).map(drop)
}

/// Signals in this interval, in microseconds.
pub(super) fn set_interval_timer(interval: libc::suseconds_t) -> io::Result<()> {
    let time = libc::timeval {
        tv_sec: 0,
        tv_usec: interval,
    };
    let timer = libc::itimerval {
        it_interval: time,
        it_value: time,
    };
    // SAFETY: it reads `timer`, and writes nothing.
    checked(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, ptr::null_mut()) }.into()).map(drop)
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

/// A filter that allows everything.
fn seccomp(flags: c_int) -> io::Result<c_long> {
    const SET_MODE_FILTER: c_int = 1;
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
    checked(unsafe { libc::syscall(libc::SYS_seccomp, SET_MODE_FILTER, flags, ptr::from_ref(&program)) })
}

pub(super) fn seccomp_listener() -> io::Result<OwnedFd> {
    const NEW_LISTENER: c_int = 8;
    made(seccomp(NEW_LISTENER)?)
}

pub(super) fn seccomp_filter() -> io::Result<()> {
    seccomp(0).map(drop)
}

pub(super) fn netlink() -> io::Result<OwnedFd> {
    socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE)
}

/// For packets of no protocol: it gets none.
pub(super) fn packet() -> io::Result<OwnedFd> {
    socket(libc::AF_PACKET, libc::SOCK_DGRAM, 0)
}

pub(super) fn raw() -> io::Result<OwnedFd> {
    socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_UDP)
}

pub(super) fn message_queue() -> io::Result<OwnedFd> {
    let queue = nix::mqueue::mq_open(
        c"/object",
        nix::mqueue::MQ_OFlag::O_CREAT | nix::mqueue::MQ_OFlag::O_RDWR,
        nix::sys::stat::Mode::from_bits_truncate(0o600),
        Some(&nix::mqueue::MqAttr::new(0, 8, 64, 0)),
    )?;
    // SAFETY: a queue is a descriptor, which nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(std::os::fd::IntoRawFd::into_raw_fd(queue)) })
}

/// A context that nothing is asked of.
pub(super) fn aio() -> io::Result<Look> {
    let mut context: libc::c_ulong = 0;
    // SAFETY: it writes a number, which `context` has the room for.
    checked(unsafe { libc::syscall(libc::SYS_io_setup, 8, ptr::from_mut(&mut context)) })?;
    Ok(Box::new(move || {
        let nothing = ptr::null_mut::<u8>();
        // SAFETY: none of its events are asked for, so it writes none.
        let events = unsafe { libc::syscall(libc::SYS_io_getevents, context, 0, 0, nothing, nothing) };
        Ok(events == 0)
    }))
}

/// Memory that is mapped for good.
pub(super) struct Memory(*mut u8);

impl Memory {
    /// A huge page, which is shared with children or not.
    pub(super) fn huge(is_shared: bool) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let sharing = if is_shared {
            libc::MAP_SHARED
        } else {
            libc::MAP_PRIVATE
        };
        let flags = sharing | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        // SAFETY: the kernel chooses the address, where nothing is.
        let memory = unsafe { libc::mmap(ptr::null_mut(), 2 << 20, access, flags, -1, 0) };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(memory.cast()))
    }

    pub(super) fn of(file: &File) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let (nothing, fd) = (ptr::null_mut(), file.as_raw_fd());
        // SAFETY: the kernel chooses the address, where nothing is.
        let memory = unsafe { libc::mmap(nothing, 4096, access, libc::MAP_SHARED, fd, 0) };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(memory.cast()))
    }

    pub(super) fn put(&self, byte: u8) {
        // SAFETY: it is mapped for good, and may be written.
        unsafe { self.0.write_volatile(byte) }
    }

    pub(super) fn first(&self) -> u8 {
        // SAFETY: it is mapped for good.
        unsafe { self.0.read_volatile() }
    }
}

fn checked(result: c_long) -> io::Result<c_long> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

pub(super) fn set_nice(value: c_int) -> io::Result<()> {
    // SAFETY: it takes numbers.
    checked(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, value) }.into()).map(drop)
}

pub(super) fn set_batch_policy() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: it reads `parameters`.
    checked(unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters) }.into()).map(drop)
}

pub(super) fn ignore(signal: Signal) -> io::Result<()> {
    // SAFETY: no handler is installed.
    unsafe { nix::sys::signal::signal(signal, SigHandler::SigIgn) }?;
    Ok(())
}

/// Of a process.
const WHO: c_int = 1;

pub(super) fn set_io_priority(value: c_int) -> io::Result<()> {
    // SAFETY: it takes numbers.
    checked(unsafe { libc::syscall(libc::SYS_ioprio_set, WHO, 0, value) }).map(drop)
}

pub(super) fn io_priority() -> io::Result<c_long> {
    // SAFETY: it takes numbers.
    checked(unsafe { libc::syscall(libc::SYS_ioprio_get, WHO, 0) })
}

pub(super) fn set_personality(value: u32) -> io::Result<()> {
    // SAFETY: it takes a number.
    checked(unsafe { libc::personality(value.into()) }.into()).map(drop)
}

/// Memory of the first node, if it has some.
pub(super) fn set_preferred_node() -> io::Result<()> {
    const PREFERRED: c_int = 1;
    let first: libc::c_ulong = 1;
    // SAFETY: it reads as many bits as it is given the number of.
    checked(unsafe { libc::syscall(libc::SYS_set_mempolicy, PREFERRED, ptr::from_ref(&first), 64) }).map(drop)
}

pub(super) fn memory_policy() -> io::Result<c_int> {
    let (mut policy, none) = (0, ptr::null_mut::<u8>());
    // SAFETY: it writes a number, which `policy` has the room for.
    checked(unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            ptr::from_mut(&mut policy),
            none,
            0,
            none,
            0,
        )
    })?;
    Ok(policy)
}
