//! `objects`: has an object that a process can hold, and looks at it again and again. It writes the next
//! number into a file as long as the object is as it was made, and what has become of it otherwise.

#![deny(unsafe_code)]

mod files;
mod kernel;
mod locks;
mod processes;
mod settings;
mod system_v;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use nix::sched::CloneFlags;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::AcceptConn;
use nix::sys::timer::{Expiration, TimerSetTimeFlags};
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};

use firn_workloads::habits;

/// Time between two looks.
const PACE: Duration = Duration::from_millis(50);

/// The interval of a timer: it expires between any two looks.
const INTERVAL: Duration = Duration::from_millis(20);

/// What is in a file or on its way.
const BYTE: u8 = b'x';

#[derive(Parser)]
#[command(name = "objects", version)]
struct Options {
    kind: Kind,
    /// The file that the object is about; made if it is not there
    path: PathBuf,
    /// The file to write to
    out: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A lock of a file by flock(2)
    Flock,
    /// A lock of a file by fcntl(2), of the process
    RecordLock,
    /// A lock of a file by fcntl(2), of the open file
    OpenFileLock,
    /// A periodic timerfd
    Timer,
    /// An eventfd with a number in it
    Event,
    /// A signalfd with a pending signal
    Signal,
    /// A pipe with a byte in it
    Pipe,
    /// Connected Unix sockets with a byte on its way
    Pair,
    /// A memfd
    Memfd,
    /// A file without a name
    Deleted,
    /// A UDP socket with an address
    Udp,
    /// A TCP socket that listens
    Listener,
    /// A pidfd of a child
    Pidfd,
    /// A child with a mount namespace of its own
    MountNamespace,
    /// A child with a UTS namespace of its own
    UtsNamespace,
    /// A child with an IPC namespace of its own
    IpcNamespace,
    /// A child with a user namespace of its own
    UserNamespace,
    /// A child with a PID namespace of its own
    PidNamespace,
    /// A child with a network namespace of its own
    NetworkNamespace,
    /// A child with a cgroup namespace of its own
    CgroupNamespace,
    /// A child with a time namespace of its own
    TimeNamespace,
    /// A BPF map
    Bpf,
    /// A perf event
    PerfEvent,
    /// A userfaultfd
    Userfaultfd,
    /// Secret memory
    SecretMemory,
    /// A listener of seccomp notifications
    SeccompListener,
    /// A pidfd of a thread
    ThreadPidfd,
    /// A set of Landlock rules
    LandlockRules,
    /// A vsock socket
    Vsock,
    /// A Multipath TCP socket that listens
    Mptcp,
    /// A ping socket with a peer
    Ping,
    /// An epoll with a pipe that can be read
    Epoll,
    /// Datagrams of two lengths on their way
    Datagrams,
    /// A named pipe with a byte in it
    Fifo,
    /// Both ends of a pseudoterminal
    Pty,
    /// A descriptor that only names a file
    PathOnly,
    /// A file in /dev/shm that is mapped
    SharedFile,
    /// Shared memory of System V
    SharedMemory,
    /// A semaphore of System V
    Semaphore,
    /// A message queue of System V, with a message
    MessageQueue,
    /// A timer of POSIX that sends signals
    PosixTimer,
    /// A context for asynchronous I/O
    Aio,
    /// A netlink socket with an address
    Netlink,
    /// A packet socket
    Packet,
    /// A raw IP socket
    Raw,
    /// A child that has ended and was not waited for
    Zombie,
    /// A root of its own
    Chroot,
    /// A working directory that was removed
    NoDirectory,
    /// A nice value
    Nice,
    /// A scheduling policy
    Policy,
    /// A score for the OOM killer
    OomScore,
    /// No transparent huge pages
    NoHugePages,
    /// A name that it has given itself
    Name,
    /// A signal at the end of its parent
    ParentsEnd,
    /// A process that adopts orphans
    Subreaper,
    /// No new privileges
    NoNewPrivileges,
    /// A mask for new files
    Umask,
    /// A limit of open files
    Limit,
    /// A signal that is ignored
    Ignored,
    /// A seccomp filter
    SeccompFilter,
    /// A process that dumps no core
    NotDumpable,
    /// A watch of /etc
    Watch,
    /// A watch of a directory elsewhere
    WatchElsewhere,
    /// A watch of every directory of a tree
    WatchTree,
    /// A watch of a directory that was removed
    WatchWithoutName,
    /// A watch of a file by fanotify
    Fanotify,
    /// A lease of a file
    Lease,
    /// An open directory
    Directory,
    /// A file of /proc about the process itself
    ProcFile,
    /// A Unix socket that listens, with a connection that waits
    UnixListener,
    /// The same, with a byte in the connection
    UnixWaiting,
    /// A descriptor on its way in a Unix socket
    PassedDescriptor,
    /// An epoll with a descriptor that has another number by now
    EpollOfOther,
    /// A periodic timer of setitimer(2)
    IntervalTimer,
    /// A terminal that its session has, opened as /dev/tty
    Terminal,
    /// A POSIX message queue
    PosixQueue,
    /// An io_uring
    IoUring,
    /// Memory with a protection key
    ProtectionKey,
    /// A TCP connection of the process with itself
    Connection,
    /// A file by a deleted name, which has another one
    OtherName,
    /// The same in /dev/shm
    OtherNameInMemory,
    /// A huge page of its own
    HugePage,
    /// A huge page that it may share
    SharedHugePage,
    /// The CPUs that it may use
    Affinity,
    /// An I/O priority
    IoPriority,
    /// A slack of timers
    TimerSlack,
    /// A personality
    Personality,
    /// A policy for memory
    MemoryPolicy,
}

/// Whether an object is still as it was made.
type Look = Box<dyn FnMut() -> io::Result<bool>>;

fn main() -> io::Result<()> {
    let Options { kind, path, out } = Options::parse();
    let mut out = File::options().create(true).append(true).open(out)?;
    let mut is_there = make(kind, &path)?;
    let mut number = 0_u64;
    loop {
        if is_there()? {
            number += 1;
            writeln!(out, "{number}")?;
        } else {
            writeln!(out, "it is not there any more")?;
        }
        thread::sleep(PACE);
    }
}

fn make(kind: Kind, path: &Path) -> io::Result<Look> {
    match kind {
        Kind::Flock => locks::by_flock(path),
        Kind::RecordLock => locks::of_process(path),
        Kind::OpenFileLock => locks::of_open_file(path),
        Kind::Timer => timer(),
        Kind::Event => event(),
        Kind::Signal => signal(),
        Kind::Pipe => {
            let (read, write) = io::pipe()?;
            sent(read, write)
        }
        Kind::Pair => {
            let (read, write) = UnixStream::pair()?;
            sent(read, write)
        }
        Kind::Memfd => {
            let file = memfd_create(c"object", MFdFlags::empty())?;
            kept(file.into())
        }
        Kind::Deleted => {
            let file = locks::open(path)?;
            fs::remove_file(path)?;
            kept(file)
        }
        Kind::Udp => {
            let socket = UdpSocket::bind("0.0.0.0:4000")?;
            let address = socket.local_addr()?;
            Ok(Box::new(move || Ok(socket.local_addr()? == address)))
        }
        Kind::Listener => {
            let socket = TcpListener::bind("0.0.0.0:4000")?;
            let address = socket.local_addr()?;
            Ok(Box::new(move || {
                Ok(socket.local_addr()? == address && getsockopt(&socket, AcceptConn)?)
            }))
        }
        Kind::Pidfd => pidfd(),
        Kind::MountNamespace => child("--mount"),
        Kind::UtsNamespace => child("--uts"),
        Kind::IpcNamespace => child("--ipc"),
        Kind::UserNamespace => child("--user"),
        Kind::PidNamespace => child("--pid"),
        Kind::NetworkNamespace => child("--net"),
        _ => make_other(kind, path),
    }
}

fn make_other(kind: Kind, path: &Path) -> io::Result<Look> {
    match kind {
        Kind::CgroupNamespace => apart(CloneFlags::CLONE_NEWCGROUP, "cgroup"),
        Kind::TimeNamespace => apart(kernel::NEW_TIME, "time_for_children"),
        Kind::Bpf => open(kernel::bpf_map()?),
        Kind::PerfEvent => open(kernel::perf_event()?),
        Kind::Userfaultfd => open(kernel::userfaultfd()?),
        Kind::SecretMemory => open(kernel::secret_memory()?),
        Kind::SeccompListener => open(kernel::seccomp_listener()?),
        Kind::ThreadPidfd => open(kernel::thread_pidfd()?),
        Kind::LandlockRules => open(kernel::landlock_rules()?),
        Kind::Vsock => open(kernel::vsock()?),
        Kind::Mptcp => open(kernel::mptcp()?),
        Kind::Ping => ping(),
        Kind::Epoll => files::epoll(),
        Kind::Datagrams => files::datagrams(),
        Kind::Fifo => files::fifo(path),
        Kind::Pty => files::pty(),
        Kind::PathOnly => files::path_only(path),
        Kind::SharedFile => files::shared(),
        Kind::Watch => files::watch_etc(),
        Kind::WatchElsewhere => files::watch_made(path, 0),
        Kind::WatchTree => files::watch_made(path, 2000),
        Kind::WatchWithoutName => files::watch_of_removed(path),
        Kind::Fanotify => files::fanotify(path),
        Kind::Lease => locks::lease(path),
        Kind::Directory => open(File::open("/etc")?.into()),
        Kind::ProcFile => files::of_proc(),
        Kind::UnixListener => files::listener(path),
        Kind::UnixWaiting => files::never_accepted(path),
        Kind::PassedDescriptor => files::passed(),
        Kind::EpollOfOther => files::epoll_of_other(),
        Kind::IntervalTimer => processes::interval_timer(),
        Kind::Terminal => files::terminal(),
        Kind::PosixQueue => open(kernel::message_queue()?),
        Kind::IoUring => open(habits::io_uring()?),
        Kind::HugePage => Ok(held(kernel::Memory::huge(false)?)),
        Kind::SharedHugePage => Ok(held(kernel::Memory::huge(true)?)),
        Kind::ProtectionKey => processes::protection_key(),
        Kind::Connection => files::connection(),
        Kind::OtherName => files::with_another_name(path),
        Kind::OtherNameInMemory => files::with_another_name(Path::new("/dev/shm/object")),
        Kind::SharedMemory => system_v::shared_memory(),
        Kind::Semaphore => system_v::semaphore(),
        Kind::MessageQueue => system_v::message_queue(),
        Kind::PosixTimer => processes::timer(),
        Kind::Aio => kernel::aio(),
        Kind::Netlink => files::netlink(),
        Kind::Packet => files::socket(kernel::packet()?),
        Kind::Raw => files::socket(kernel::raw()?),
        Kind::Zombie => processes::zombie(),
        Kind::Chroot => processes::chroot(path),
        Kind::NoDirectory => processes::no_directory(path),
        _ => settings::kept(kind),
    }
}

/// A timer that was read and not found expired since the last look is dead.
fn timer() -> io::Result<Look> {
    let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK)?;
    timer.set(Expiration::Interval(INTERVAL.into()), TimerSetTimeFlags::empty())?;
    thread::sleep(PACE);
    let mut file = File::from(OwnedFd::from(timer));
    Ok(Box::new(move || unless_blocked(file.read(&mut [0; 8]))))
}

fn event() -> io::Result<Look> {
    let event = EventFd::from_value_and_flags(7, EfdFlags::EFD_NONBLOCK)?;
    Ok(Box::new(move || {
        let value = event.read()?;
        event.write(value)?;
        Ok(value == 7)
    }))
}

fn signal() -> io::Result<Look> {
    let signals = SigSet::from(Signal::SIGUSR1);
    signals.thread_block()?;
    let file = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK)?;
    raise(Signal::SIGUSR1)?;
    Ok(Box::new(move || {
        let signal = file.read_signal()?;
        raise(Signal::SIGUSR1)?;
        Ok(signal.is_some())
    }))
}

/// A byte that was sent and not read.
fn sent(mut read: impl Read + 'static, mut write: impl Write + 'static) -> io::Result<Look> {
    write.write_all(&[BYTE])?;
    Ok(Box::new(move || {
        let mut byte = [0];
        read.read_exact(&mut byte)?;
        write.write_all(&byte)?;
        Ok(byte == [BYTE])
    }))
}

/// What a file holds.
fn kept(mut file: File) -> io::Result<Look> {
    use std::io::{Seek, SeekFrom};
    file.write_all(&[BYTE])?;
    Ok(Box::new(move || {
        let mut content = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut content)?;
        Ok(content == [BYTE])
    }))
}

/// What memory holds.
fn held(memory: kernel::Memory) -> Look {
    memory.put(BYTE);
    Box::new(move || Ok(memory.first() == BYTE))
}

/// A child that waits for ever. (A sleep that is in progress at a dump ends early, by CRIU.)
fn waiting(program: &mut Command) -> io::Result<Child> {
    program.arg("cat").stdin(Stdio::piped()).spawn()
}

fn pidfd() -> io::Result<Look> {
    let mut child = waiting(&mut Command::new("env"))?;
    let file = kernel::pidfd(child.id())?;
    let info = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
    let line = format!("Pid:\t{}", child.id());
    Ok(Box::new(move || {
        let _open = &file;
        let is_shown = fs::read_to_string(&info)?.lines().any(|other| other == line);
        Ok(is_shown && child.try_wait()?.is_none())
    }))
}

/// A child with a namespace of its own.
fn child(option: &'static str) -> io::Result<Look> {
    let child = waiting(Command::new("unshare").args([option, "--fork"]))?;
    let file = match option {
        "--mount" => "mnt",
        "--pid" => "pid_for_children",
        option => option.trim_start_matches('-'),
    };
    in_namespace(child, file)
}

/// The same, where busybox has no option for it.
fn apart(flag: CloneFlags, file: &'static str) -> io::Result<Look> {
    let mut program = Command::new("env");
    in_namespace(waiting(kernel::set_apart(&mut program, flag))?, file)
}

fn in_namespace(mut child: Child, file: &'static str) -> io::Result<Look> {
    let namespaces = format!("/proc/{}/ns", child.id());
    // A PID namespace is not shown before its first process is there.
    let is_own = move || {
        let of = |namespaces: &str| fs::read_link(Path::new(namespaces).join(file)).ok();
        of(&namespaces).is_some_and(|own| Some(own) != of("/proc/self/ns"))
    };
    while !is_own() {
        thread::sleep(PACE);
    }
    Ok(Box::new(move || Ok(child.try_wait()?.is_none() && is_own())))
}

/// The descriptor is open.
fn open(file: OwnedFd) -> io::Result<Look> {
    let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let made = fs::read_link(&link)?;
    Ok(Box::new(move || {
        let _open = &file;
        Ok(fs::read_link(&link)? == made)
    }))
}

/// A ping socket that may send without naming a peer.
fn ping() -> io::Result<Look> {
    /// An echo request without data; the kernel fills in its number and checksum.
    const ECHO: [u8; 8] = [8, 0, 0, 0, 0, 0, 0, 1];
    let socket = UdpSocket::from(kernel::ping()?);
    socket.connect("127.0.0.1:0")?;
    Ok(Box::new(move || Ok(socket.send(&ECHO).is_ok())))
}

/// Whether something was there to be read.
fn unless_blocked(read: io::Result<usize>) -> io::Result<bool> {
    match read {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}
