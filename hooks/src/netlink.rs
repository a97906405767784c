//! One request to the kernel by netlink, and its acknowledgement.

use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

/// Bytes of nlmsghdr.
const HEADER_BYTES: usize = 16;

/// Sends a message, one of which is to be acknowledged, and waits for that.
pub(crate) fn request(protocol: SockProtocol, message: &[u8]) -> nix::Result<()> {
    let (family, kind) = (AddressFamily::Netlink, SockType::Raw);
    let socket = socket(family, kind, SockFlag::SOCK_CLOEXEC, protocol)?;
    let kernel = NetlinkAddr::new(0, 0);
    sendto(socket.as_raw_fd(), message, &kernel, MsgFlags::empty())?;
    let mut reply = [0; 4096];
    let length = recv(socket.as_raw_fd(), &mut reply, MsgFlags::empty())?;
    expect_acknowledged(&reply[..length])
}

/// The answer: NLMSG_ERROR, whose first word is zero or a negative errno.
fn expect_acknowledged(reply: &[u8]) -> nix::Result<()> {
    let kind = reply.get(4..).and_then(<[u8]>::first_chunk);
    let kind = kind.map(|kind| i32::from(u16::from_ne_bytes(*kind)));
    let code = reply.get(HEADER_BYTES..).and_then(<[u8]>::first_chunk);
    match (kind, code.map(|code| i32::from_ne_bytes(*code))) {
        (Some(libc::NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(libc::NLMSG_ERROR), Some(code)) => Err(Errno::from_raw(code.saturating_neg())),
        _ => Err(Errno::EBADMSG),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: u16, code: i32) -> Vec<u8> {
        let mut reply = vec![0; 36];
        reply[4..6].copy_from_slice(&kind.to_ne_bytes());
        reply[16..20].copy_from_slice(&code.to_ne_bytes());
        reply
    }

    #[test]
    fn only_an_acknowledgement_is_success() {
        assert_eq!(expect_acknowledged(&answer(2, 0)), Ok(()));
        assert_eq!(expect_acknowledged(&answer(2, -libc::EPERM)), Err(Errno::EPERM));
        for other in [&answer(3, 0)[..], &answer(2, 0)[..18], &[]] {
            assert_eq!(expect_acknowledged(other), Err(Errno::EBADMSG));
        }
    }
}
