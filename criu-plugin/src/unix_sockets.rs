//! Which Unix sockets CRIU dumps without their other ends: those that firn lists next to the plugin, because
//! it closes them in the image.

use std::path::Path;

/// The list, in the directory from which CRIU has loaded the plugin.
pub(crate) const LIST: &str = "firn-unix-sockets";

/// Longest list that is read, in bytes.
const LONGEST: u64 = 8 << 20;

/// `SOCK_DGRAM`, and states.
const DATAGRAM: u8 = 2;
const ESTABLISHED: u8 = 1;
const CLOSE: u8 = 7;

/// Attributes of an answer of the kernel's unix_diag.
const NAME: u16 = 0;
const QUEUES: u16 = 4;
const SHUTDOWN: u16 = 6;

/// Both directions are shut down.
const BOTH: u8 = 3;

/// Type of such an answer.
const BY_FAMILY: u16 = 20;

/// A Unix socket that leads outside of the container, by its inode.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Socket {
    /// CRIU sees both ends.
    Seen(u32),
    /// CRIU does not see the other end, a datagram socket: it is in another network namespace.
    Hidden { inode: u32, peer: u32 },
    /// CRIU does not see the socket itself, which a server has accepted from another network namespace.
    Unseen { inode: u32, kind: u8 },
}

impl Socket {
    /// Whether CRIU asks the plugin for it. It dumps one that it does not see as the plugin shows it.
    pub(crate) fn is_taken(&self, asked: u32) -> bool {
        match self {
            Self::Seen(inode) | Self::Hidden { inode, .. } => *inode == asked,
            Self::Unseen { .. } => false,
        }
    }

    /// What the kernel would answer about a socket that CRIU does not see, as far as CRIU needs it.
    pub(crate) fn answer(&self) -> Option<Vec<u8>> {
        match self {
            Self::Seen(_) => None,
            // Of some name. CRIU writes it into the image, from which firn removes it.
            Self::Hidden { peer, .. } => {
                let attributes: [(u16, &[u8]); 2] = [(NAME, b"\0firn"), (SHUTDOWN, &[0])];
                Some(answer([DATAGRAM, CLOSE], *peer, &attributes))
            }
            // As if its client had closed the connection; there may be something to read.
            Self::Unseen { inode, kind } => {
                let attributes: [(u16, &[u8]); 2] =
                    [(QUEUES, &[1, 0, 0, 0, 0, 0, 0, 0]), (SHUTDOWN, &[BOTH])];
                Some(answer([*kind, ESTABLISHED], *inode, &attributes))
            }
        }
    }
}

/// The list in this directory; none if there is no list, or no such list.
pub(crate) fn listed(dir: &Path) -> Option<Vec<Socket>> {
    let path = dir.join(LIST);
    let is_short = std::fs::metadata(&path).ok()?.len() <= LONGEST;
    let text = is_short.then(|| std::fs::read_to_string(&path))?.ok()?;
    text.lines().map(parse).collect()
}

fn parse(line: &str) -> Option<Socket> {
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["seen", inode] => Some(Socket::Seen(inode.parse().ok()?)),
        ["hidden", inode, peer] => Some(Socket::Hidden {
            inode: inode.parse().ok()?,
            peer: peer.parse().ok()?,
        }),
        ["unseen", inode, kind] => Some(Socket::Unseen {
            inode: inode.parse().ok()?,
            kind: kind.parse().ok()?,
        }),
        _ => None,
    }
}

/// An answer of unix_diag about a socket of this type and state.
fn answer([kind, state]: [u8; 2], inode: u32, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut body = vec![1, kind, state, 0];
    body.extend(inode.to_ne_bytes());
    body.extend([0; 8]); // cookie
    for (attribute, value) in attributes {
        let length = u16::try_from(4 + value.len()).expect("all are short");
        body.extend(length.to_ne_bytes());
        body.extend(attribute.to_ne_bytes());
        body.extend(*value);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    let length = u32::try_from(16 + body.len()).expect("it is short");
    let mut answer = length.to_ne_bytes().to_vec();
    answer.extend(BY_FAMILY.to_ne_bytes());
    answer.extend([0; 10]); // flags, sequence number, port
    answer.extend(body);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_list_that_is_whole_counts() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(listed(dir.path()), None);
        let of = |text: &str| {
            std::fs::write(dir.path().join(LIST), text).unwrap();
            listed(dir.path())
        };
        let all = [
            Socket::Seen(12),
            Socket::Hidden { inode: 13, peer: 99 },
            Socket::Unseen { inode: 14, kind: 5 },
        ];
        assert_eq!(of(""), Some(vec![]));
        assert_eq!(of("seen 12\nhidden 13 99\nunseen 14 5\n"), Some(all.into()));
        for broken in [
            "seen 12\n\n",
            "12",
            "seen 12 ",
            "hidden 13",
            "seen -1",
            "seen 4294967296",
            "unseen 14 256",
            "unseen x 1",
        ] {
            assert_eq!(of(broken), None, "{broken:?}");
        }
    }

    #[test]
    fn criu_is_asked_for_what_it_sees_and_shown_what_it_does_not() {
        let hidden = Socket::Hidden { inode: 13, peer: 99 };
        let unseen = Socket::Unseen { inode: 14, kind: 5 };
        assert!(Socket::Seen(12).is_taken(12) && hidden.is_taken(13) && !hidden.is_taken(99));
        assert!(!unseen.is_taken(14));
        assert_eq!(Socket::Seen(12).answer(), None);
        for (socket, head, inode) in [(hidden, [1, 2, 7, 0], 99_u32), (unseen, [1, 5, 1, 0], 14)] {
            let answer = socket.answer().unwrap();
            assert_eq!(answer.len() % 4, 0);
            assert_eq!(answer[..4], u32::try_from(answer.len()).unwrap().to_ne_bytes());
            assert_eq!(answer[16..20], head);
            assert_eq!(answer[20..24], inode.to_ne_bytes());
        }
    }
}
