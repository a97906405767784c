//! Objects that have a descriptor, and are made without unsafe code.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, IoSlice, Read, Seek, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;

use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::pty::openpty;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::socket::sockopt::SockType;
use nix::sys::socket::{ControlMessage, MsgFlags, NetlinkAddr, bind, getsockname, getsockopt, sendmsg};
use nix::sys::stat::Mode;
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
use nix::unistd::{mkfifo, setsid};

use super::{BYTE, Look, kernel, locks, open, sent};

pub(super) fn epoll() -> io::Result<Look> {
    const DATA: u64 = 77;
    let (read, mut write) = io::pipe()?;
    write.write_all(&[BYTE])?;
    let epoll = Epoll::new(EpollCreateFlags::empty())?;
    epoll.add(&read, EpollEvent::new(EpollFlags::EPOLLIN, DATA))?;
    Ok(Box::new(move || {
        let _ends = (&read, &write);
        let mut events = [EpollEvent::empty(); 2];
        let count = epoll.wait(&mut events, EpollTimeout::ZERO)?;
        Ok(count == 1 && events[0].data() == DATA)
    }))
}

/// The descriptor by which the pipe was added is another's by now.
pub(super) fn epoll_of_other() -> io::Result<Look> {
    let (read, mut write) = io::pipe()?;
    write.write_all(&[BYTE])?;
    let epoll = Epoll::new(EpollCreateFlags::empty())?;
    epoll.add(&read, EpollEvent::new(EpollFlags::EPOLLIN, 7))?;
    let other = read.try_clone()?;
    drop(read);
    Ok(Box::new(move || {
        let _ends = (&other, &write);
        let mut events = [EpollEvent::empty(); 2];
        Ok(epoll.wait(&mut events, EpollTimeout::ZERO)? == 1)
    }))
}

pub(super) fn of_proc() -> io::Result<Look> {
    let mut file = File::open("/proc/self/status")?;
    Ok(Box::new(move || {
        let mut status = String::new();
        file.rewind()?;
        file.read_to_string(&mut status)?;
        Ok(status
            .lines()
            .any(|line| line == format!("Pid:\t{}", std::process::id())))
    }))
}

/// The connection is accepted at each look, and made again.
pub(super) fn listener(path: &Path) -> io::Result<Look> {
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    let path = path.to_owned();
    let mut waiting = Some(UnixStream::connect(&path)?);
    Ok(Box::new(move || {
        let (mut accepted, _) = listener.accept()?;
        // Its end is what is received.
        drop(waiting.replace(UnixStream::connect(&path)?));
        accepted.set_nonblocking(false)?;
        Ok(accepted.read(&mut [0])? == 0)
    }))
}

/// The connection is never accepted.
pub(super) fn never_accepted(path: &Path) -> io::Result<Look> {
    let listener = UnixListener::bind(path)?;
    let mut waiting = UnixStream::connect(path)?;
    waiting.write_all(&[BYTE])?;
    Ok(Box::new(move || {
        let _connected = &waiting;
        let mut waits = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        Ok(poll(&mut waits, PollTimeout::ZERO)? == 1)
    }))
}

/// A byte goes through it at each look.
pub(super) fn connection() -> io::Result<Look> {
    let server = TcpListener::bind("127.0.0.1:0")?;
    let client = TcpStream::connect(server.local_addr()?)?;
    let (accepted, _) = server.accept()?;
    sent(accepted, client)
}

/// The file is open by the first of its two names, which was removed.
pub(super) fn with_another_name(path: &Path) -> io::Result<Look> {
    let file = locks::open(path)?;
    fs::hard_link(path, path.with_extension("other"))?;
    fs::remove_file(path)?;
    open(file.into())
}

/// A pipe with a byte in it is sent and received at each look.
pub(super) fn passed() -> io::Result<Look> {
    let (from, to) = UnixDatagram::pair()?;
    let send = move || {
        let (read, mut write) = io::pipe()?;
        write.write_all(&[BYTE])?;
        let numbers = [read.as_raw_fd()];
        let bytes = [IoSlice::new(&[BYTE])];
        let message = [ControlMessage::ScmRights(&numbers)];
        sendmsg::<()>(from.as_raw_fd(), &bytes, &message, MsgFlags::empty(), None)?;
        Ok::<_, io::Error>(())
    };
    send()?;
    Ok(Box::new(move || {
        let mut file = kernel::receive(&to)?;
        let mut byte = [0];
        file.read_exact(&mut byte)?;
        send()?;
        Ok(byte == [BYTE])
    }))
}

/// What is written to the terminal of the session comes out of its other end.
pub(super) fn terminal() -> io::Result<Look> {
    // The first process of a container is that of a session already.
    let _own = setsid();
    let ends = openpty(None, None)?;
    let (mut master, slave) = (File::from(ends.master), File::from(ends.slave));
    kernel::take_terminal(&slave)?;
    let mut tty = File::options().read(true).write(true).open("/dev/tty")?;
    Ok(Box::new(move || {
        let _open = &slave;
        let mut byte = [0];
        tty.write_all(&[BYTE])?;
        master.read_exact(&mut byte)?;
        Ok(byte == [BYTE])
    }))
}

/// What is written is reported. CRIU leaves out events that nobody has read, so a look tries twice.
pub(super) fn fanotify(path: &Path) -> io::Result<Look> {
    locks::open(path)?;
    let group = kernel::fanotify(&CString::new(path.as_os_str().as_bytes())?)?;
    let path = path.to_owned();
    let is_reported = move || {
        fs::write(&path, [BYTE])?;
        kernel::has_event(&group)
    };
    Ok(Box::new(move || Ok(is_reported()? || is_reported()?)))
}

pub(super) fn datagrams() -> io::Result<Look> {
    let (from, to) = UnixDatagram::pair()?;
    let send = move || from.send(b"ab").and_then(|_| from.send(b"c"));
    send()?;
    Ok(Box::new(move || {
        let mut bytes = [0; 8];
        let lengths = [to.recv(&mut bytes)?, to.recv(&mut bytes)?];
        send()?;
        Ok(lengths == [2, 1])
    }))
}

pub(super) fn fifo(path: &Path) -> io::Result<Look> {
    mkfifo(path, Mode::from_bits_truncate(0o600))?;
    let file = File::options().read(true).write(true).open(path)?;
    sent(file.try_clone()?, file)
}

/// What is written into one end comes out of the other.
pub(super) fn pty() -> io::Result<Look> {
    let ends = openpty(None, None)?;
    let mut raw = tcgetattr(&ends.slave)?;
    cfmakeraw(&mut raw);
    tcsetattr(&ends.slave, SetArg::TCSANOW, &raw)?;
    let (mut master, mut slave) = (File::from(ends.master), File::from(ends.slave));
    Ok(Box::new(move || {
        let mut byte = [0];
        slave.write_all(&[BYTE])?;
        master.read_exact(&mut byte)?;
        Ok(byte == [BYTE])
    }))
}

pub(super) fn path_only(path: &Path) -> io::Result<Look> {
    locks::open(path)?;
    let file = File::options().read(true).custom_flags(libc::O_PATH).open(path)?;
    open(file.into())
}

/// It is read through the file, which the memory is of.
pub(super) fn shared() -> io::Result<Look> {
    const PATH: &str = "/dev/shm/object";
    fs::write(PATH, [0; 4096])?;
    let file = locks::open(Path::new(PATH))?;
    let memory = kernel::Memory::of(&file)?;
    memory.put(BYTE);
    Ok(Box::new(move || {
        Ok(memory.first() == BYTE && fs::read(PATH)?[0] == BYTE)
    }))
}

pub(super) fn watch_etc() -> io::Result<Look> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK)?;
    watch(inotify, Path::new("/etc"))
}

/// As [`watch_etc`], of a directory that is made, after so many directories in it.
pub(super) fn watch_made(directory: &Path, count: usize) -> io::Result<Look> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK)?;
    fs::create_dir(directory)?;
    for number in 0..count {
        let below = directory.join(number.to_string());
        fs::create_dir(&below)?;
        inotify.add_watch(&below, AddWatchFlags::IN_CREATE)?;
    }
    watch(inotify, directory)
}

/// A change is reported. CRIU leaves out events that nobody has read, so a look tries twice. A directory is
/// never open.
fn watch(inotify: Inotify, directory: &Path) -> io::Result<Look> {
    let made = directory.join("object");
    inotify.add_watch(directory, AddWatchFlags::IN_CREATE)?;
    let is_reported = move || {
        if made.exists() {
            fs::remove_dir(&made)?;
        }
        fs::create_dir(&made)?;
        let events = inotify.read_events().unwrap_or_default();
        Ok::<_, io::Error>(
            events
                .iter()
                .any(|event| event.name.as_deref() == Some("object".as_ref())),
        )
    };
    Ok(Box::new(move || Ok(is_reported()? || is_reported()?)))
}

/// Somebody has it open, so its watch lasts.
pub(super) fn watch_of_removed(directory: &Path) -> io::Result<Look> {
    fs::create_dir(directory)?;
    let opened = File::open(directory)?;
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK)?;
    inotify.add_watch(directory, AddWatchFlags::IN_ATTRIB)?;
    fs::remove_dir(directory)?;
    let info = format!("/proc/self/fdinfo/{}", inotify.as_fd().as_raw_fd());
    Ok(Box::new(move || {
        let _open = (&opened, &inotify);
        let marks = fs::read_to_string(&info)?;
        Ok(marks.lines().any(|line| line.starts_with("inotify wd:")))
    }))
}

pub(super) fn netlink() -> io::Result<Look> {
    let socket = kernel::netlink()?;
    let number = socket.as_raw_fd();
    bind(number, &NetlinkAddr::new(0, 0))?;
    let address = move || Ok::<_, io::Error>(getsockname::<NetlinkAddr>(number)?);
    let made = address()?;
    Ok(Box::new(move || {
        let _open = &socket;
        Ok(address()? == made)
    }))
}

/// A socket of the type that it was made with.
pub(super) fn socket(socket: OwnedFd) -> io::Result<Look> {
    let made = getsockopt(&socket, SockType)?;
    Ok(Box::new(move || Ok(getsockopt(&socket, SockType)? == made)))
}
