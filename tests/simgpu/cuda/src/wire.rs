//! Requests of other processes to the restore thread.
//!
//! A caller finds the far end of the process's channel by the restore thread's name, takes it with
//! `pidfd_getfd` and sends one message: the request, and with it one end of a socket pair of its own on which
//! it waits for the answer. When that end hangs up, the caller is gone and the request is void.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use simgpu_model::Uuid;

/// What a caller asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Lock {
        timeout_ms: u32,
    },
    Checkpoint {
        /// How long the copy takes.
        slow_ms: u32,
    },
    Restore {
        slow_ms: u32,
        pairs: Vec<(Uuid, Uuid)>,
    },
    Unlock,
    State,
    /// Made by the process itself.
    Init,
}

const MAX_MESSAGE: usize = 16 << 10;
const PAIR: usize = 32;

impl Request {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Lock { timeout_ms } => [&[1][..], &timeout_ms.to_le_bytes()].concat(),
            Self::Checkpoint { slow_ms } => [&[2][..], &slow_ms.to_le_bytes()].concat(),
            Self::Restore { slow_ms, pairs } => {
                let mut bytes = [&[3][..], &slow_ms.to_le_bytes()].concat();
                pairs
                    .iter()
                    .for_each(|(old, new)| bytes.extend([old.0, new.0].concat()));
                bytes
            }
            Self::Unlock => vec![4],
            Self::State => vec![5],
            Self::Init => vec![6],
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first()? {
            (1, rest) => Some(Self::Lock {
                timeout_ms: u32::from_le_bytes(rest.try_into().ok()?),
            }),
            (2, rest) => Some(Self::Checkpoint {
                slow_ms: u32::from_le_bytes(rest.try_into().ok()?),
            }),
            (3, rest) => {
                let (slow_ms, rest) = rest.split_first_chunk()?;
                if rest.len() % PAIR != 0 {
                    return None;
                }
                let pair = |pair: &[u8]| {
                    let (old, new) = pair.split_at(PAIR / 2);
                    Some((Uuid(old.try_into().ok()?), Uuid(new.try_into().ok()?)))
                };
                Some(Self::Restore {
                    slow_ms: u32::from_le_bytes(*slow_ms),
                    pairs: rest.chunks_exact(PAIR).map(pair).collect::<Option<_>>()?,
                })
            }
            (4, []) => Some(Self::Unlock),
            (5, []) => Some(Self::State),
            (6, []) => Some(Self::Init),
            _ => None,
        }
    }
}

/// A pair of connected sockets that keep message boundaries.
pub(crate) fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds: [RawFd; 2] = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the array has room for the two descriptors that the call writes.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) })?;
    // SAFETY: socketpair has just made this descriptor.
    let near = unsafe { OwnedFd::from_raw_fd(fds[0]) };
    // SAFETY: as above.
    let far = unsafe { OwnedFd::from_raw_fd(fds[1]) };
    Ok((near, far))
}

const CONTROL_WORDS: usize = 8;

fn message_header(part: &mut libc::iovec, control: &mut [u64; CONTROL_WORDS]) -> libc::msghdr {
    // SAFETY: a msghdr of zeroes is valid: no name, no parts, no control data.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_iov = part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of::<[u64; CONTROL_WORDS]>();
    header
}

/// Sends `bytes` and a copy of the descriptor `passed`.
pub(crate) fn send_with(socket: &OwnedFd, bytes: &[u8], passed: &OwnedFd) -> io::Result<()> {
    let mut control = [0; CONTROL_WORDS];
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut header = message_header(&mut part, &mut control);
    let payload = u32::try_from(size_of::<RawFd>()).map_err(io::Error::other)?;
    // SAFETY: a pure computation.
    header.msg_controllen = unsafe { libc::CMSG_SPACE(payload) } as usize;
    // SAFETY: the header's control buffer is set and larger than one control message.
    let first = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: a pure computation.
    let len = unsafe { libc::CMSG_LEN(payload) } as usize;
    let head = libc::cmsghdr {
        cmsg_len: len,
        cmsg_level: libc::SOL_SOCKET,
        cmsg_type: libc::SCM_RIGHTS,
    };
    // SAFETY: `first` points into the control buffer, which is aligned for a cmsghdr.
    unsafe { ptr::write(first, head) };
    // SAFETY: `first` is a control message in the buffer; its data follow.
    let data = unsafe { libc::CMSG_DATA(first) };
    // SAFETY: the control buffer has room for one descriptor after the head.
    unsafe { ptr::write_unaligned(data.cast::<RawFd>(), passed.as_raw_fd()) };
    // SAFETY: the header points to buffers that live through the call.
    check(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) }).map(drop)
}

/// Waits for a message with a descriptor; a message without one is given without.
pub(crate) fn receive_with(socket: &OwnedFd) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut control = [0; CONTROL_WORDS];
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut header = message_header(&mut part, &mut control);
    // SAFETY: the header points to buffers that live through the call and whose sizes it gives.
    let got = check(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) })?;
    bytes.truncate(got);
    // SAFETY: the kernel has filled the header's control buffer.
    let first = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: `first` is null or points to a control message in the buffer.
    let Some(head) = (unsafe { first.as_ref() }) else {
        return Ok((bytes, None));
    };
    if head.cmsg_level != libc::SOL_SOCKET || head.cmsg_type != libc::SCM_RIGHTS {
        return Ok((bytes, None));
    }
    // SAFETY: `first` is a control message in the buffer; its data follow.
    let data = unsafe { libc::CMSG_DATA(first) };
    // SAFETY: a message of this type holds at least one descriptor.
    let fd = unsafe { ptr::read_unaligned(data.cast::<RawFd>()) };
    // SAFETY: the kernel has just installed this descriptor for this process.
    Ok((bytes, Some(unsafe { OwnedFd::from_raw_fd(fd) })))
}

/// Sends a short message; a peer that is gone is no error to act on.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    let (at, len) = (bytes.as_ptr().cast(), bytes.len());
    // SAFETY: the buffer lives through the call.
    check(unsafe { libc::send(socket.as_raw_fd(), at, len, libc::MSG_NOSIGNAL) }).map(drop)
}

/// Waits for a message of `N` bytes; nothing when the peer hung up instead.
pub(crate) fn receive<const N: usize>(socket: &OwnedFd) -> io::Result<Option<[u8; N]>> {
    let mut bytes = [0; N];
    loop {
        // SAFETY: the buffer lives through the call and has N bytes.
        let got = check(unsafe { libc::recv(socket.as_raw_fd(), bytes.as_mut_ptr().cast(), N, 0) });
        match got {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
            Ok(got) => return Ok((got == N).then_some(bytes)),
        }
    }
}

/// Waits until one of the sockets can be read or hangs up, without end when `timeout_ms` is negative.
pub(crate) fn wait_any(sockets: &[&OwnedFd], timeout_ms: i32) -> io::Result<Vec<i16>> {
    let polled = |socket: &&OwnedFd| libc::pollfd {
        fd: socket.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut list: Vec<libc::pollfd> = sockets.iter().map(polled).collect();
    loop {
        // SAFETY: the list lives through the call and has the length given.
        match check(unsafe { libc::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, timeout_ms) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
            Ok(_) => return Ok(list.iter().map(|polled| polled.revents).collect()),
        }
    }
}

/// Whether the caller at the other end is gone.
pub(crate) fn hung_up(socket: &OwnedFd) -> bool {
    wait_any(&[socket], 0).is_ok_and(|events| events[0] & libc::POLLHUP != 0)
}

fn check<T: TryInto<usize>>(result: T) -> io::Result<usize> {
    result.try_into().map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use simgpu_model::Uuid;

    use super::{Request, hung_up, receive_with, send_with, socket_pair};

    #[test]
    fn requests_survive_the_wire() {
        let pairs = vec![(Uuid([1; 16]), Uuid([2; 16])), (Uuid([3; 16]), Uuid([4; 16]))];
        let requests = [
            Request::Lock { timeout_ms: 70_000 },
            Request::Checkpoint { slow_ms: 5 },
            Request::Restore { slow_ms: 0, pairs },
            Request::Unlock,
        ];
        for request in requests {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        for bad in [&[][..], &[1, 2], &[2], &[3, 1], &[3, 0, 0, 0, 0, 1], &[9]] {
            assert_eq!(Request::decode(bad), None);
        }
    }

    #[test]
    fn a_descriptor_travels_and_its_caller_can_be_seen_to_go() {
        let (near, far) = socket_pair().unwrap();
        let (mine, theirs) = socket_pair().unwrap();
        send_with(&far, b"x", &theirs).unwrap();
        drop(theirs);
        let (bytes, connection) = receive_with(&near).unwrap();
        let connection = connection.unwrap();
        assert_eq!(bytes, b"x");
        assert!(!hung_up(&connection));
        drop(mine);
        assert!(hung_up(&connection));
    }
}
