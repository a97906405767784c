//! System calls that have no safe wrapper: one function each, one call per `unsafe` block.
//!
//! No other module of this crate may be `unsafe`. The functions contain no policy; that is up to their
//! callers.
#![allow(unsafe_code)]

pub(crate) mod bpf;
#[cfg(test)]
#[cfg(target_arch = "x86_64")]
pub(crate) mod criu_code;

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Pid, getpid, getppid};
use rustix::process::{self, WaitId, WaitIdOptions, WaitOptions};

/// Reaps one exited child of any kind; `None` when no child has exited or none is left. Returns its pid, and
/// the code that containerd reports (128 + signal for a killed one).
///
/// The kernel reports stops of this process's tracees, too, whatever the options are; these notices are
/// consumed and skipped: the tracing thread polls its tracees itself. The signal is a number, because nix's
/// `WaitStatus` returns `EINVAL`, and loses the exit, for a process killed by a real-time signal.
pub(crate) fn reap_any() -> io::Result<Option<(i32, u32)>> {
    loop {
        let (pid, status) = match process::wait(WaitOptions::NOHANG) {
            Ok(Some(reaped)) => reaped,
            Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let killed = status.terminating_signal().map(|signal| 128 + signal);
        if let Some(code) = status.exit_status().or(killed) {
            return Ok(Some((pid.as_raw_pid(), code.unsigned_abs())));
        }
    }
}

/// The kernel sends the child SIGKILL when the thread that spawned it ends.
///
/// It is the thread, not the process: spawn from the thread that lives as long as the shim.
pub fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let arm = move || arm_parent_death(parent);
    // SAFETY: between fork and exec the closure makes two system calls through nix, allocates nothing, takes
    // no lock and touches no memory of the parent but the copied `parent`.
    unsafe { command.pre_exec(arm) };
}

/// The child and its descendants create files that only root can read.
pub fn make_private_files(command: &mut Command) {
    let cancel = || {
        umask(Mode::from_bits_truncate(0o077));
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes one system call that cannot fail, allocates nothing,
    // takes no lock and touches no memory of the parent.
    unsafe { command.pre_exec(cancel) };
}

fn arm_parent_death(parent: Pid) -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    // Order matters: a parent that died before the prctl causes no signal.
    if getppid() != parent {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// Takes ownership of a descriptor that the parent left open for this process, and sets close-on-exec.
///
/// Call it once per descriptor, before any other code of the process may open files.
pub fn take_inherited(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the caller's contract: no other code in this process owns `fd`. A closed `fd` is detected by
    // the fcntl below; the invalid handle is then released without being closed.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    if let Err(errno) = fcntl(&owned, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
        std::mem::forget(owned);
        return Err(errno.into());
    }
    Ok(owned)
}

/// Sends a signal given as a number, which may be a real-time one, which nix's `Signal` lacks.
///
/// Only a single process is signalled: 0 and negative ids, which mean groups, are refused.
pub fn kill(pid: i32, signal: u32) -> Result<(), Errno> {
    let signal = i32::try_from(signal).map_err(|_| Errno::EINVAL)?;
    if pid <= 0 {
        return Err(Errno::ESRCH);
    }
    // SAFETY: kill takes two numbers and no memory; a signal that does not exist is refused by the kernel.
    Errno::result(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Resumes a stopped tracee with a signal, given as a number (nix's `Signal` has no real-time ones), or with
/// none: 0.
pub(crate) fn ptrace_cont(tid: i32, signal: i32) -> Result<(), Errno> {
    resume(tid, signal, false)
}

/// The same until it begins or ends a system call.
pub(crate) fn ptrace_syscall(tid: i32, signal: i32) -> Result<(), Errno> {
    resume(tid, signal, true)
}

fn resume(tid: i32, signal: i32, until_call: bool) -> Result<(), Errno> {
    let request = if until_call {
        libc::PTRACE_SYSCALL
    } else {
        libc::PTRACE_CONT
    };
    let nowhere = std::ptr::null_mut::<libc::c_void>();
    let signal =
        std::ptr::without_provenance_mut::<libc::c_void>(usize::try_from(signal).unwrap_or_default());
    // SAFETY: both requests ignore the address and take the signal by its number: no memory is touched. A
    // thread that is no tracee of the caller, and a number that is no signal, are refused.
    Errno::result(unsafe { libc::ptrace(request, tid, nowhere, signal) }).map(drop)
}

/// `PTRACE_SETSIGMASK`, which libc lacks.
const SET_SIGMASK: u16 = 0x420b;

/// Sets which signals a stopped tracee blocks: a bit for each, of number 1 first.
pub(crate) fn block_signals(tid: i32, mut blocked: u64) -> Result<(), Errno> {
    let size = std::ptr::without_provenance_mut::<libc::c_void>(size_of_val(&blocked));
    // SAFETY: the request reads as many bytes of the mask as the address argument states, which is its size.
    let set = unsafe {
        let from = std::ptr::from_mut(&mut blocked).cast::<libc::c_void>();
        libc::ptrace(SET_SIGMASK.into(), tid, size, from)
    };
    Errno::result(set).map(drop)
}

/// `PTRACE_GET_SYSCALL_INFO`, which libc has for glibc alone.
const GET_SYSCALL_INFO: u16 = 0x420e;

/// The beginning of the kernel's `ptrace_syscall_info`, the same on every processor.
#[derive(Default)]
#[repr(C)]
struct CallInfo {
    _op_and_arch: u64,
    instruction_pointer: u64,
}

/// Where a stopped tracee continues.
pub(crate) fn instruction_pointer(tid: i32) -> Result<u64, Errno> {
    let mut info = CallInfo::default();
    let size = std::ptr::without_provenance_mut::<libc::c_void>(size_of::<CallInfo>());
    // SAFETY: the request writes at most as many bytes to `info` as the address argument states, which is its
    // size; any bytes are a valid `CallInfo`.
    let written = unsafe {
        let into = std::ptr::from_mut(&mut info).cast::<libc::c_void>();
        libc::ptrace(GET_SYSCALL_INFO.into(), tid, size, into)
    };
    Errno::result(written)?;
    Ok(info.instruction_pointer)
}

/// Whether `pid` is a child of this process that was not reaped: alive, or a zombie. Until it is reaped its
/// pid is not reused.
pub fn is_unreaped_child(pid: i32) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    process::Pid::from_raw(pid.max(0)).is_some_and(|pid| process::waitid(WaitId::Pid(pid), options).is_ok())
}

/// `LOOP_CTL_GET_FREE` of linux/loop.h.
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;

/// `LOOP_CONFIGURE` of linux/loop.h.
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;

/// `struct loop_config` of linux/loop.h with its `struct loop_info64` in place.
#[repr(C)]
#[derive(Default)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    /// lo_device, lo_inode, lo_rdevice, lo_offset, lo_sizelimit.
    numbers: [u64; 5],
    /// lo_number, lo_encrypt_type, lo_encrypt_key_size.
    kinds: [u32; 3],
    flags: u32,
    /// lo_file_name, lo_crypt_name, lo_encrypt_key, lo_init.
    names: [u64; 22],
    reserved: [u64; 8],
}

/// How a loop device treats its file.
#[derive(Clone, Copy, Debug)]
pub struct LoopFlags {
    /// Nothing is written to the file.
    pub read_only: bool,
    /// The file is read and written without the page cache.
    pub direct_io: bool,
}

/// Number of a loop device that is free now. Another program may take it before it is configured.
pub fn loop_get_free(control: impl AsFd) -> io::Result<u32> {
    // SAFETY: the request takes no argument and touches no memory of ours; a wrong descriptor is refused.
    let number = Errno::result(unsafe { libc::ioctl(control.as_fd().as_raw_fd(), LOOP_CTL_GET_FREE) })?;
    u32::try_from(number).map_err(io::Error::other)
}

/// Attaches `backing` to the loop device, until its last user closes it.
pub fn loop_configure(device: impl AsFd, backing: impl AsFd, flags: LoopFlags) -> io::Result<()> {
    const READ_ONLY: u32 = 1;
    const AUTOCLEAR: u32 = 4;
    const DIRECT_IO: u32 = 16;
    let mut config = LoopConfig {
        flags: AUTOCLEAR,
        ..LoopConfig::default()
    };
    config.fd = u32::try_from(backing.as_fd().as_raw_fd()).map_err(io::Error::other)?;
    config.flags |= if flags.read_only { READ_ONLY } else { 0 };
    config.flags |= if flags.direct_io { DIRECT_IO } else { 0 };
    // SAFETY: the request reads one loop_config, which `config` is by layout (see the test) and which
    // outlives the call; the kernel takes its own reference to `backing`. Descriptors of another kind are
    // refused.
    let rc = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
    Errno::result(rc)?;
    Ok(())
}

/// A child in a new user namespace without any mapping. It sleeps until it is killed or this thread ends.
///
/// It ends without SIGCHLD, so the reaper does not see it: its creator waits for it with `__WCLONE`.
pub fn child_in_user_namespace() -> io::Result<Pid> {
    let parent = getpid();
    // SAFETY: without a stack and without shared memory clone is a fork: the child continues here in its own
    // copy. Below it makes system calls only, allocates nothing and takes no lock.
    let pid = Errno::result(unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_NEWUSER, 0, 0, 0, 0) })?;
    if pid != 0 {
        return i32::try_from(pid).map(Pid::from_raw).map_err(io::Error::other);
    }
    while arm_parent_death(parent).is_ok() {
        // SAFETY: pause takes no argument and touches no memory.
        unsafe { libc::pause() };
    }
    // SAFETY: _exit takes a number and does not return; no code of the copied process runs.
    unsafe { libc::_exit(1) }
}

/// Maps the owners of a detached mount as the user namespace does.
pub fn map_owners(tree: impl AsFd, namespace: impl AsFd) -> io::Result<()> {
    let userns_fd = u64::try_from(namespace.as_fd().as_raw_fd()).map_err(io::Error::other)?;
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd,
    };
    // SAFETY: the path is a string that ends with a zero, and the size is that of the struct, which outlives
    // the call; descriptors of another kind are refused.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    Errno::result(rc)?;
    Ok(())
}

/// Queued signals with a value, for tests that no signal is lost.
#[cfg(test)]
pub mod testing {
    use std::io::Write;
    use std::mem::MaybeUninit;

    use super::*;

    /// `siginfo_t` of a queued signal, in the kernel's layout.
    #[repr(C)]
    struct Queued {
        signal: i32,
        errno: i32,
        code: i32,
        pad: i32,
        pid: i32,
        uid: u32,
        value: usize,
        rest: [u64; 12],
    }

    /// Queues a signal with a value to one thread.
    pub fn queue(pid: i32, tid: i32, signal: i32, value: usize) {
        assert_eq!(size_of::<Queued>(), size_of::<libc::siginfo_t>());
        let info = Queued {
            signal,
            errno: 0,
            code: libc::SI_QUEUE,
            pad: 0,
            pid: getpid().as_raw(),
            uid: 0,
            value,
            rest: [0; 12],
        };
        // SAFETY: the call reads one siginfo_t, of which `info` has the size and the layout, and which
        // outlives the call.
        let rc = unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, tid, signal, &raw const info) };
        Errno::result(rc).unwrap();
    }

    extern "C" fn print(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the kernel passes a siginfo_t to a handler that was set with SA_SIGINFO.
        let info = unsafe { &*info };
        // SAFETY: the senders queue the signal with a value.
        let value = unsafe { info.si_value() }.sival_ptr.addr();
        let mut line = [0; 32];
        let mut room = &mut line[..];
        let _ = writeln!(room, "got {signal} {value}");
        let (left, whole) = (room.len(), line.len());
        // SAFETY: write may be called in a handler; the bytes are those of `line`, which outlives the call.
        unsafe { libc::write(1, line.as_ptr().cast(), whole - left) };
    }

    /// From now on prints each of these signals with its value.
    pub(crate) fn print_signals(signals: &[i32]) {
        for signal in signals {
            let mut action = MaybeUninit::<libc::sigaction>::zeroed();
            // SAFETY: all bits zero are an action: the default one with an empty mask and no flags.
            let action = unsafe { action.assume_init_mut() };
            action.sa_sigaction = print as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            // One after the other, in the order of their numbers.
            // SAFETY: the mask is that of the action, which outlives the call.
            Errno::result(unsafe { libc::sigfillset(&raw mut action.sa_mask) }).unwrap();
            // SAFETY: the action outlives the call, and its handler calls nothing that a handler may not
            // call.
            let rc = unsafe { libc::sigaction(*signal, &raw const *action, std::ptr::null_mut()) };
            Errno::result(rc).unwrap();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    #[test]
    fn loop_config_has_the_kernels_layout() {
        assert_eq!(size_of::<LoopConfig>(), 304);
        assert_eq!(offset_of!(LoopConfig, numbers), 8);
        assert_eq!(offset_of!(LoopConfig, flags), 60);
        assert_eq!(offset_of!(LoopConfig, names), 64);
        assert_eq!(offset_of!(LoopConfig, reserved), 240);
    }
}
