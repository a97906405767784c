//! Brings up the loopback interface of a container.
//!
//! runc brings up the loopback interface of a network namespace at create, but not at restore. CRIU then
//! cannot restore TCP connections between processes of the container. One netlink message of 32 bytes brings
//! it up; an ioctl would need unsafe code.

use std::fs::File;

use anyhow::{Context, Result};
use firn_host::FileId;
use nix::libc;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::SockProtocol;

use crate::netlink;

/// Index of the loopback interface in every network namespace.
const LOOPBACK_INDEX: i32 = 1;
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
    let open = |path: &str| -> Result<(File, FileId)> {
        let file = File::open(path).with_context(|| format!("cannot open {path}"))?;
        let meta = file
            .metadata()
            .with_context(|| format!("cannot look at {path}"))?;
        Ok((file, FileId::of(&meta)))
    };
    let (namespace, theirs) = open(&path)?;
    let (_, ours) = open("/proc/thread-self/ns/net")?;
    if theirs == ours {
        return Ok(());
    }
    setns(&namespace, CloneFlags::CLONE_NEWNET).with_context(|| format!("cannot enter {path}"))?;
    let set_up = netlink::request(SockProtocol::NetlinkRoute, &request());
    set_up.with_context(|| format!("cannot bring up the loopback interface of process {pid}"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requests_length_is_its_own() {
        assert_eq!(request().len(), 32);
        assert_eq!(request()[..4], 32u32.to_ne_bytes());
    }
}
