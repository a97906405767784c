//! What some programs do while they compute, and what keeps them from being checkpointed.

use std::ffi::{CStr, c_long};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread;
use std::time::Duration;

use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid, pause};

/// `struct io_uring_params`: 120 bytes.
#[repr(C)]
struct RingParams([u64; 15]);

/// Sets up an io_uring and leaves it unused.
pub fn io_uring() -> io::Result<OwnedFd> {
    let mut params = RingParams([0; 15]);
    let entries: c_long = 8;
    // SAFETY: io_uring_setup takes a number of entries and a pointer to a live params struct, all zero, which
    // it fills.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, &raw mut params) };
    let ring = RawFd::try_from(ring).unwrap_or(-1);
    if ring < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us, and nothing else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(ring) })
}

/// Has the driver's control node open for a while, as cuInit has before the driver knows the process.
pub fn slow_start(milliseconds: u64) -> io::Result<()> {
    if milliseconds > 0 {
        let node = File::options().read(true).write(true).open("/dev/nvidiactl")?;
        thread::sleep(Duration::from_millis(milliseconds));
        drop(node);
    }
    Ok(())
}

/// Maps a page and protects it by a key, as programs do that guard their own data.
pub fn protection_key() -> io::Result<()> {
    let (length, protection): (usize, c_long) = (4096, (libc::PROT_READ | libc::PROT_WRITE).into());
    let (prot, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: without an address and a file the call makes a mapping of its own, which nothing else uses.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), length, prot, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let none: c_long = 0;
    // SAFETY: pkey_alloc takes two numbers.
    let key = unsafe { libc::syscall(libc::SYS_pkey_alloc, none, none) };
    if key < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: pkey_mprotect takes the page from above and numbers.
    match unsafe { libc::syscall(libc::SYS_pkey_mprotect, page, length, protection, key) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A file of memfd_create(2) with so many bytes; none without any.
pub fn memory_file(bytes: usize) -> io::Result<Option<File>> {
    if bytes == 0 {
        return Ok(None);
    }
    let mut file = File::from(memfd_create(c"firn", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&vec![7; bytes])?;
    Ok(Some(file))
}

/// The memory that /proc shows of a program, as `prctl(PR_SET_MM_MAP)` takes it: `struct prctl_mm_map`.
#[repr(C)]
struct MemoryMap {
    code: [u64; 2],
    data: [u64; 2],
    brk: [u64; 2],
    stack: u64,
    arguments: [u64; 2],
    environment: [u64; 2],
    auxv: u64,
    auxv_size: u32,
    exe: u32,
}

/// Makes /proc/PID/environ as long as this, without having the memory.
pub fn long_environment(bytes: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: without an address and a file the call makes a mapping of its own, which nothing else uses.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = u64::try_from(start.addr()).map_err(io::Error::other)?;
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<u64> = stat[stat.rfind(')').unwrap_or(0) + 1..]
        .split_whitespace()
        .map(|field| field.parse().unwrap_or(0))
        .collect();
    // Numbered as in proc(5); the first behind the name is the third.
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or(0);
    let map = MemoryMap {
        code: [field(26), field(27)],
        data: [field(45), field(46)],
        brk: [field(47), field(47)],
        stack: field(28),
        arguments: [field(48), field(49)],
        environment: [start, start + u64::try_from(bytes).map_err(io::Error::other)?],
        auxv: 0,
        auxv_size: 0,
        exe: u32::MAX,
    };
    let option = libc::c_ulong::try_from(libc::PR_SET_MM_MAP).map_err(io::Error::other)?;
    let none: libc::c_ulong = 0;
    // SAFETY: the kernel reads one struct of this size at the address of a live one, and only changes what
    // /proc shows.
    let rc = unsafe {
        libc::prctl(
            libc::PR_SET_MM,
            option,
            &raw const map,
            size_of::<MemoryMap>(),
            none,
        )
    };
    match rc {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Holds the socket by which a communicator of NCCL exchanges handles of memory, while `released` does not
/// exist.
pub fn communicator(released: &Path) {
    let name = format!("tmp/nccl-socket-{}-89d2df94f9a0d073", std::process::id());
    let mut held = None;
    loop {
        if released.exists() {
            held = None;
        } else if held.is_none() {
            let address = SocketAddr::from_abstract_name(&name);
            held = address.and_then(|address| UnixDatagram::bind_addr(&address)).ok();
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// A named semaphore, as processes of a pool share it.
struct Semaphore(AtomicPtr<libc::sem_t>);

impl Semaphore {
    /// Makes it, or opens it if it is there. The C library maps the file of one that it makes by a temporary
    /// name, links that to the semaphore's own, and deletes the temporary one.
    fn open(name: &CStr) -> io::Result<Self> {
        let (mode, value): (libc::mode_t, libc::c_uint) = (0o600, 0);
        // SAFETY: the name ends with a zero byte; with O_CREAT the call takes a mode and a value.
        let opened = unsafe { libc::sem_open(name.as_ptr(), libc::O_CREAT, mode, value) };
        if opened == libc::SEM_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Self(AtomicPtr::new(opened)))
        }
    }

    fn post(&self) {
        // SAFETY: the semaphore stays open for ever, here and in forked children.
        unsafe { libc::sem_post(self.0.load(Ordering::Relaxed)) };
    }

    fn wait(&self) {
        // SAFETY: as in `post`. A signal ends the wait early.
        while unsafe { libc::sem_wait(self.0.load(Ordering::Relaxed)) } != 0 {}
    }

    fn value(&self) -> libc::c_int {
        let mut value = 0;
        // SAFETY: as in `post`; the call writes one number.
        unsafe { libc::sem_getvalue(self.0.load(Ordering::Relaxed), &raw mut value) };
        value
    }
}

/// Ends this process, a child that was forked, with its parent, also with one that has ended already.
pub fn end_with(parent: Pid) {
    let _ = prctl::set_pdeathsig(Signal::SIGKILL);
    if getppid() != parent {
        // SAFETY: ends the process without running destructors, which are the parent's.
        unsafe { libc::_exit(0) }
    }
}

/// Forks a child that answers posts of one semaphore by posts of another, and counts in a third, which it has
/// opened by its name, as workers of a fork server do. The exchange ends when the count does not grow. To be
/// called before there are threads.
pub fn semaphores() -> io::Result<()> {
    let rounds = Semaphore::open(c"/rounds")?;
    let (requests, answers) = (Semaphore::open(c"/requests")?, Semaphore::open(c"/answers")?);
    let parent = getpid();
    // SAFETY: this program has one thread yet.
    match unsafe { fork() }? {
        ForkResult::Child => {
            end_with(parent);
            // The C library returns the mapping that it has, unless that is closed.
            // SAFETY: the child uses the inherited mapping no more.
            unsafe { libc::sem_close(rounds.0.into_inner()) };
            let rounds = Semaphore::open(c"/rounds")?;
            loop {
                requests.wait();
                rounds.post();
                answers.post();
            }
        }
        ForkResult::Parent { .. } => {
            thread::spawn(move || {
                let mut before = -1;
                while rounds.value() > before {
                    before = rounds.value();
                    requests.post();
                    answers.wait();
                    thread::sleep(Duration::from_millis(10));
                }
            });
            Ok(())
        }
    }
}

/// Forks a chain of processes, each the child of the one before, that wait for ever and end with their
/// parents. To be called before there are threads.
pub fn chain(length: usize) -> nix::Result<()> {
    for at in 0..length {
        let parent = getpid();
        // SAFETY: this program has one thread yet; the child calls prctl, fork and pause alone.
        match unsafe { fork() } {
            Ok(ForkResult::Child) => end_with(parent),
            // The first is the program that continues.
            Ok(ForkResult::Parent { .. }) if at == 0 => return Ok(()),
            Err(error) if at == 0 => return Err(error),
            Ok(ForkResult::Parent { .. }) | Err(_) => break,
        }
    }
    match length {
        0 => Ok(()),
        _ => loop {
            pause();
        },
    }
}
