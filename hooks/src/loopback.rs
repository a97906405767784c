//! Brings up the loopback interface of a container.
//!
//! runc brings up the loopback interface of a network namespace at create, but not at restore. CRIU then
//! cannot restore TCP connections between processes of the container. One netlink message of 32 bytes brings
//! it up; an ioctl would need unsafe code.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

/// Index of the loopback interface in every network namespace.
const LOOPBACK_INDEX: i32 = 1;
/// Bytes of nlmsghdr.
const HEADER_BYTES: usize = 16;
/// Bytes of nlmsghdr and ifinfomsg.
const REQUEST_BYTES: u32 = 32;
/// NLM_F_REQUEST and NLM_F_ACK.
const REQUEST_FLAGS: u16 = 1 | 4;

/// Brings up the loopback interface in the network namespace of this process, unless it is the caller's
/// namespace.
///
/// Moves the calling thread into that namespace.
pub fn bring_up(pid: i32) -> Result<()> {
    let path = format!("/proc/{pid}/ns/net");
    let open = |path: &str| -> Result<(File, (u64, u64))> {
        let file = File::open(path).with_context(|| format!("cannot open {path}"))?;
        let meta = file
            .metadata()
            .with_context(|| format!("cannot look at {path}"))?;
        Ok((file, (meta.dev(), meta.ino())))
    };
    let (namespace, theirs) = open(&path)?;
    let (_, ours) = open("/proc/thread-self/ns/net")?;
    if theirs == ours {
        return Ok(());
    }
    setns(&namespace, CloneFlags::CLONE_NEWNET).with_context(|| format!("cannot enter {path}"))?;
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )
    .context("cannot open a netlink socket")?;
    set_up(&socket).with_context(|| format!("cannot bring up the loopback interface of process {pid}"))
}

fn set_up(socket: &OwnedFd) -> Result<()> {
    let kernel = NetlinkAddr::new(0, 0);
    sendto(socket.as_raw_fd(), &request(), &kernel, MsgFlags::empty())?;
    let mut reply = [0; 4096];
    let length = recv(socket.as_raw_fd(), &mut reply, MsgFlags::empty())?;
    acknowledged(&reply[..length])
}

/// RTM_NEWLINK that sets IFF_UP of the loopback interface and requests an acknowledgement.
fn request() -> Vec<u8> {
    let up = libc::IFF_UP.to_ne_bytes();
    let mut message = Vec::new();
    message.extend(REQUEST_BYTES.to_ne_bytes());
    message.extend(libc::RTM_NEWLINK.to_ne_bytes());
    message.extend(REQUEST_FLAGS.to_ne_bytes());
    message.extend([0; 8]); // sequence number, port
    message.extend([0; 4]); // family, padding, type
    message.extend(LOOPBACK_INDEX.to_ne_bytes());
    message.extend(up); // flags
    message.extend(up); // which of them to change
    message
}

/// The answer: NLMSG_ERROR, whose first word is zero or a negative errno.
fn acknowledged(reply: &[u8]) -> Result<()> {
    let kind = reply.get(4..).and_then(<[u8]>::first_chunk);
    let kind = kind.map(|kind| i32::from(u16::from_ne_bytes(*kind)));
    let code = reply.get(HEADER_BYTES..).and_then(<[u8]>::first_chunk);
    match (kind, code.map(|code| i32::from_ne_bytes(*code))) {
        (Some(libc::NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(libc::NLMSG_ERROR), Some(code)) => Err(Errno::from_raw(code.saturating_neg()).into()),
        _ => bail!("the kernel's answer is not an acknowledgement"),
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
    fn the_requests_length_is_its_own() {
        assert_eq!(request().len(), 32);
        assert_eq!(request()[..4], 32u32.to_ne_bytes());
    }

    #[test]
    fn only_an_acknowledgement_is_success() {
        acknowledged(&answer(2, 0)).unwrap();
        let error = acknowledged(&answer(2, -libc::EPERM)).unwrap_err();
        assert_eq!(error.downcast_ref(), Some(&Errno::EPERM));
        assert!(acknowledged(&answer(3, 0)).is_err());
        assert!(acknowledged(&answer(2, 0)[..18]).is_err());
        assert!(acknowledged(&[]).is_err());
    }
}
