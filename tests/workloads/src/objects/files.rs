//! Objects that have a descriptor, and are made without unsafe code.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use nix::libc;
use nix::pty::openpty;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::socket::sockopt::SockType;
use nix::sys::socket::{NetlinkAddr, bind, getsockname, getsockopt};
use nix::sys::stat::Mode;
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
use nix::unistd::mkfifo;

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

/// A change is reported. CRIU leaves out events that nobody has read, so a look tries twice. A directory is
/// never open.
pub(super) fn watch() -> io::Result<Look> {
    const PATH: &str = "/etc/object";
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK)?;
    inotify.add_watch("/etc", AddWatchFlags::IN_CREATE)?;
    let is_reported = move || {
        if Path::new(PATH).exists() {
            fs::remove_dir(PATH)?;
        }
        fs::create_dir(PATH)?;
        let events = inotify.read_events().unwrap_or_default();
        Ok::<_, io::Error>(
            events
                .iter()
                .any(|event| event.name.as_deref() == Some("object".as_ref())),
        )
    };
    Ok(Box::new(move || Ok(is_reported()? || is_reported()?)))
}

pub(super) fn netlink() -> io::Result<Look> {
    let socket = kernel::netlink()?;
    let number = std::os::fd::AsRawFd::as_raw_fd(&socket);
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
