//! CRIU's table in nftables, where CRIU is built or configured for it. The kernel is asked directly: CRIU
//! uses a library, and the program nft may not be there.

use nix::errno::Errno;
use nix::sys::socket::SockProtocol;

use crate::netlink;

const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_DELTABLE: u16 = 2;
const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
const NFPROTO_INET: u8 = 1;
const NFTA_TABLE_NAME: u16 = 1;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;

/// Deletes a table of the family `inet` in the network namespace of this thread. One that is not there, and a
/// kernel without nftables, are no errors.
pub(super) fn delete_table(name: &str) -> nix::Result<()> {
    match change(NFT_MSG_DELTABLE, name) {
        Err(Errno::ENOENT | Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP) => Ok(()),
        done => done,
    }
}

/// Makes the change of a table that the type of a message stands for.
fn change(kind: u16, name: &str) -> nix::Result<()> {
    let mut attribute = Vec::new();
    let length = u16::try_from(name.len() + 5).map_err(|_| Errno::ENAMETOOLONG)?;
    attribute.extend(length.to_ne_bytes());
    attribute.extend(NFTA_TABLE_NAME.to_ne_bytes());
    attribute.extend(name.as_bytes());
    attribute.push(0);
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    let kind = NFNL_SUBSYS_NFTABLES << 8 | kind;
    let batch = [
        message(NFNL_MSG_BATCH_BEGIN, 0, 0, NFNL_SUBSYS_NFTABLES, &[]),
        message(kind, NLM_F_ACK, NFPROTO_INET, 0, &attribute),
        message(NFNL_MSG_BATCH_END, 0, 0, NFNL_SUBSYS_NFTABLES, &[]),
    ];
    netlink::request(SockProtocol::NetlinkNetFilter, &batch.concat())
}

/// A message with the headers of netlink and of netfilter.
fn message(kind: u16, flags: u16, family: u8, resource: u16, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(20 + payload.len()).unwrap_or(u32::MAX);
    let mut message = Vec::new();
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    message.extend([0; 8]); // sequence number, port
    message.extend([family, 0]); // version
    message.extend(resource.to_be_bytes());
    message.extend(payload);
    message
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    const NFT_MSG_NEWTABLE: u16 = 0;

    #[test]
    fn a_table_is_deleted_by_its_name() {
        let thread = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            change(NFT_MSG_NEWTABLE, "CRIU-a").unwrap();
            change(NFT_MSG_NEWTABLE, "CRIU-b").unwrap();
            delete_table("CRIU-a").unwrap();
            delete_table("CRIU-a").unwrap();
            assert_eq!(change(NFT_MSG_DELTABLE, "CRIU-a"), Err(Errno::ENOENT));
            assert_eq!(change(NFT_MSG_DELTABLE, "CRIU-b"), Ok(()));
        });
        thread.join().unwrap();
    }
}
