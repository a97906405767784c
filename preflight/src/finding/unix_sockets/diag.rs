//! The Unix sockets of a network namespace, by the kernel's socket diagnosis (sock_diag(7)).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use firn_host::FileId;
use nix::libc;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

/// `SOCK_DIAG_BY_FAMILY`, which is also the type of each answer.
const BY_FAMILY: u16 = 20;

/// Bytes of `nlmsghdr`, of `unix_diag_req`, and of `unix_diag_msg`, which is followed by attributes.
const HEADER: usize = 16;
const REQUEST: u32 = 24;
const MESSAGE: usize = 16;

/// `UDIAG_SHOW_PEER`, `UDIAG_SHOW_ICONS` and `UDIAG_SHOW_RQLEN`. What is shut down is always shown.
const SHOWN: u32 = 4 | 8 | 16;

/// Attributes.
const PEER: u16 = 2;
const ICONS: u16 = 3;
const LENGTHS: u16 = 4;
const SHUTDOWN: u16 = 6;

/// More than the kernel puts into one answer.
const ANSWER: usize = 64 << 10;

/// A Unix socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Diag {
    pub inode: u32,
    /// As in [`SockType`].
    pub kind: u8,
    /// As of a TCP socket.
    pub state: u8,
    /// The other end; 0 if there is none, or if no process has accepted it.
    pub peer: u32,
    /// 1: what it receives, 2: what it sends.
    pub shutdown: u8,
    /// Of a listening socket: the clients that it has not accepted.
    pub pending: Vec<u32>,
    /// Bytes that it has sent and that nobody has read, with what the kernel needs for them; of a listening
    /// socket the most clients that may wait.
    pub unread: u32,
}

/// The sockets of a network namespace. One that is not the caller's is entered by a thread that ends.
pub(super) fn of_namespace(namespace: &File) -> io::Result<Vec<Diag>> {
    let ours = std::fs::metadata("/proc/thread-self/ns/net")?;
    if FileId::of(&namespace.metadata()?) == FileId::of(&ours) {
        return query();
    }
    let entered = || {
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        query()
    };
    let joined = std::thread::scope(|scope| scope.spawn(entered).join());
    joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn query() -> io::Result<Vec<Diag>> {
    let (kind, flags) = (SockType::Raw, SockFlag::SOCK_CLOEXEC);
    let diag: OwnedFd = socket(AddressFamily::Netlink, kind, flags, SockProtocol::NetlinkSockDiag)?;
    let fd = diag.as_fd().as_raw_fd();
    sendto(fd, &request(), &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let (mut sockets, mut answer) = (Vec::new(), vec![0; ANSWER]);
    loop {
        let length = recv(fd, &mut answer, MsgFlags::empty())?;
        if parse(&answer[..length], &mut sockets)? {
            return Ok(sockets);
        }
    }
}

/// For all Unix sockets in every state.
fn request() -> Vec<u8> {
    let length = u32::try_from(HEADER).unwrap_or_default() + REQUEST;
    let flags = u16::try_from(libc::NLM_F_REQUEST | libc::NLM_F_DUMP).unwrap_or_default();
    let mut request = Vec::new();
    request.extend(length.to_ne_bytes());
    request.extend(BY_FAMILY.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    request.extend([0; 8]); // sequence number, port
    request.extend([1, 0, 0, 0]); // AF_UNIX, protocol, padding
    request.extend(u32::MAX.to_ne_bytes()); // states
    request.extend([0; 4]); // inode
    request.extend(SHOWN.to_ne_bytes());
    request.extend([0xff; 8]); // cookie
    request
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "not an answer of unix_diag")
}

/// Adds the sockets of an answer. Returns whether it was the last.
fn parse(mut answer: &[u8], sockets: &mut Vec<Diag>) -> io::Result<bool> {
    while !answer.is_empty() {
        let length = usize::try_from(word(answer, 0)?).map_err(|_| malformed())?;
        let message = answer.get(HEADER..length).ok_or_else(malformed)?;
        match i32::from(half(answer, 4)?) {
            libc::NLMSG_DONE => return Ok(true),
            libc::NLMSG_ERROR => {
                let code = word(message, 0)?.cast_signed();
                return Err(io::Error::from_raw_os_error(code.saturating_neg()));
            }
            kind if kind == i32::from(BY_FAMILY) => sockets.push(parse_one(message)?),
            _ => {}
        }
        answer = answer.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

fn parse_one(message: &[u8]) -> io::Result<Diag> {
    let mut attributes = message.get(MESSAGE..).ok_or_else(malformed)?;
    let mut socket = Diag {
        kind: message[1],
        state: message[2],
        inode: word(message, 4)?,
        ..Diag::default()
    };
    while !attributes.is_empty() {
        let length = usize::from(half(attributes, 0)?);
        let value = attributes.get(4..length).ok_or_else(malformed)?;
        match half(attributes, 2)? {
            PEER => socket.peer = word(value, 0)?,
            ICONS => {
                let each = value.chunks(4).map(|one| word(one, 0));
                socket.pending = each.collect::<io::Result<_>>()?;
            }
            // Those that it has not read come first.
            LENGTHS => socket.unread = word(value, 4)?,
            SHUTDOWN => socket.shutdown = *value.first().ok_or_else(malformed)?,
            _ => {}
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(socket)
}

fn word(bytes: &[u8], at: usize) -> io::Result<u32> {
    let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
    word.map(|word| u32::from_ne_bytes(*word)).ok_or_else(malformed)
}

fn half(bytes: &[u8], at: usize) -> io::Result<u16> {
    let half = bytes.get(at..).and_then(<[u8]>::first_chunk);
    half.map(|half| u16::from_ne_bytes(*half)).ok_or_else(malformed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[expect(clippy::disallowed_methods, reason = "all sockets are on one device")]
    fn inode(fd: impl AsFd) -> u32 {
        let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
        u32::try_from(std::fs::metadata(path).unwrap().ino()).unwrap()
    }

    fn of(all: &[Diag], fd: impl AsFd) -> Diag {
        let inode = inode(fd);
        all.iter().find(|one| one.inode == inode).unwrap().clone()
    }

    #[test]
    fn the_kernel_shows_both_ends_of_a_connection_and_who_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let first = UnixStream::connect(&path).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let waiting = UnixStream::connect(&path).unwrap();
        first.shutdown(std::net::Shutdown::Write).unwrap();
        let namespace = File::open("/proc/thread-self/ns/net").unwrap();
        let all = of_namespace(&namespace).unwrap();
        let client = of(&all, &first);
        assert_eq!((client.kind, client.state, client.shutdown), (1, 1, 2));
        assert_eq!(client.peer, inode(&accepted));
        assert_eq!(of(&all, &accepted).peer, client.inode);
        let listening = of(&all, &listener);
        assert_eq!((listening.state, listening.pending), (10, vec![inode(&waiting)]));
        assert_eq!(of(&all, &waiting).peer, 0);
    }

    /// An answer with one message of this type.
    fn answer(kind: u16, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEADER + body.len()).unwrap();
        let mut answer = length.to_ne_bytes().to_vec();
        answer.extend(kind.to_ne_bytes());
        answer.extend([0; 10]);
        answer.extend(body);
        answer
    }

    fn body(attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![1, 5, 1, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        for (kind, value) in attributes {
            body.extend(u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
            body.extend(kind.to_ne_bytes());
            body.extend(*value);
            body.resize(body.len().next_multiple_of(4), 0);
        }
        body
    }

    #[test]
    fn what_is_cut_off_anywhere_is_an_error_and_no_panic() {
        let all = body(&[
            (0, b"/run/x"),
            (PEER, &[9, 0, 0, 0]),
            (ICONS, &[1, 0, 0, 0, 2, 0, 0, 0]),
        ]);
        let whole = answer(BY_FAMILY, &all);
        let mut sockets = Vec::new();
        assert!(!parse(&whole, &mut sockets).unwrap());
        let expected = Diag {
            inode: 7,
            kind: 5,
            state: 1,
            peer: 9,
            shutdown: 0,
            pending: vec![1, 2],
            unread: 0,
        };
        assert_eq!(sockets, [expected]);
        for end in 1..whole.len() {
            assert!(parse(&whole[..end], &mut Vec::new()).is_err(), "{end}");
        }
        for broken in [
            body(&[(PEER, &[9])]),
            body(&[(ICONS, &[1, 0, 0, 0, 2])]),
            body(&[(SHUTDOWN, &[])]),
            body(&[])[..15].to_vec(),
            [body(&[]), vec![0; 4]].concat(),
        ] {
            assert!(
                parse(&answer(BY_FAMILY, &broken), &mut Vec::new()).is_err(),
                "{broken:?}"
            );
        }
        assert!(
            parse(&[0; 16], &mut Vec::new()).is_err(),
            "a message without length"
        );
    }

    #[test]
    fn the_end_differs_from_an_error() {
        assert!(parse(&answer(3, &[0; 4]), &mut Vec::new()).unwrap());
        let denied = answer(2, &(-libc::ENOENT).to_ne_bytes());
        let error = parse(&denied, &mut Vec::new()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }
}
