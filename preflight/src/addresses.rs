//! Addresses of the node that a container has bound: one that has the node's own network needs the same on
//! the node that restores it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::ops::ControlFlow;
use std::path::Path;

use firn_host::bounded;
use serde::{Deserialize, Serialize};

use crate::finding::{SocketLine, open_files, socket_inode};

/// Files of sockets with a local address, and whether they are TCP's.
const TABLES: [(&str, bool); 4] = [
    ("net/tcp", true),
    ("net/tcp6", true),
    ("net/udp", false),
    ("net/udp6", false),
];

/// The state of a TCP socket that listens.
const LISTEN: u8 = 10;

/// firn has the network of its node.
const NODE: &str = "self";

/// An address to which a socket is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Address {
    pub at: SocketAddr,
    /// A TCP socket listens there. Otherwise it is one of UDP, which several sockets may have.
    pub listens: bool,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = if self.listens { "TCP" } else { "UDP" };
        write!(f, "{protocol} {}", self.at)
    }
}

impl Address {
    /// Those of processes that have the node's own network. What cannot be read has none.
    pub fn of(pids: &[i32]) -> BTreeSet<Self> {
        Self::below(Path::new("/proc"), pids)
    }

    fn below(proc_root: &Path, pids: &[i32]) -> BTreeSet<Self> {
        let network = |process: &str| fs::read_link(proc_root.join(process).join("ns/net")).ok();
        let (node, mut inodes) = (network(NODE), BTreeSet::new());
        let is_of_node = |pid: &&i32| node.is_some() && network(&pid.to_string()) == node;
        for &pid in pids.iter().filter(is_of_node) {
            let files = open_files(proc_root, pid).ok().flatten().into_iter().flatten();
            inodes.extend(files.filter_map(|(_, to)| socket_inode(&to)));
        }
        let mut found = bound(proc_root);
        found.retain(|(_, inode)| inodes.contains(inode));
        found.into_iter().map(|(address, _)| address).collect()
    }

    /// Those at which sockets of this node listen.
    pub(crate) fn taken() -> BTreeSet<Self> {
        let found = bound(Path::new("/proc")).into_iter();
        found
            .map(|(address, _)| address)
            .filter(|address| address.listens)
            .collect()
    }

    /// Whether no socket can listen here while one listens at `other`. One of IPv6 without an address takes
    /// the port for IPv4, too, unless its program has set IPV6_V6ONLY, which nothing shows.
    pub(crate) fn collides(self, other: Self) -> bool {
        let (own, others) = (self.at.ip(), other.at.ip());
        let is_for_all = |ip: IpAddr, of: IpAddr| ip.is_unspecified() && (ip.is_ipv6() || of.is_ipv4());
        self.listens
            && other.listens
            && self.at.port() == other.at.port()
            && (own == others || is_for_all(own, others) || is_for_all(others, own))
    }

    /// Whether the node lacks it for sure.
    pub(crate) fn is_lacking(self) -> bool {
        let bound = UdpSocket::bind((self.at.ip(), 0));
        bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
    }
}

/// The addresses of the node's sockets, with their inodes.
fn bound(proc_root: &Path) -> Vec<(Address, u64)> {
    let mut found = Vec::new();
    for (table, is_tcp) in TABLES {
        let visit = |line: &[u8]| {
            let line = std::str::from_utf8(line).ok().and_then(SocketLine::parse);
            // A socket of UDP with a peer may have got its address for the time of a question.
            let is_bound = |line: &SocketLine| {
                let is_server = if is_tcp {
                    line.state == LISTEN
                } else {
                    line.remote.port() == 0
                };
                is_server && line.local.port() != 0
            };
            found.extend(line.filter(is_bound).map(|line| {
                let (at, listens) = (line.local, is_tcp);
                (Address { at, listens }, line.inode)
            }));
            ControlFlow::Continue(())
        };
        let table = proc_root.join(NODE).join(table);
        // A kernel without IPv6 has no such file.
        let _read = bounded::each(&table, b'\n', bounded::LINES, visit);
    }
    found
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::fs::symlink;

    use super::*;

    fn tcp(at: &str) -> Address {
        Address {
            at: at.parse().unwrap(),
            listens: true,
        }
    }

    fn udp(at: &str) -> Address {
        Address {
            listens: false,
            ..tcp(at)
        }
    }

    /// This process and process 2 have the node's network. Process 3 has one of its own.
    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (process, network) in [(NODE, "net:[7]"), ("2", "net:[7]"), ("3", "net:[8]")] {
            let process = root.path().join(process);
            for dir in ["fd", "net", "ns"] {
                fs::create_dir_all(process.join(dir)).unwrap();
            }
            symlink(network, process.join("ns/net")).unwrap();
            for inode in [10, 11, 13, 14] {
                symlink(format!("socket:[{inode}]"), process.join(format!("fd/{inode}"))).unwrap();
            }
        }
        let line = |local: &str, state: &str, inode: u64| {
            format!("0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1\n")
        };
        // 8080 listens; a connection; somebody else listens on 8081.
        let tables = [
            line("0100007F:1F90", "0A", 10),
            line("0100007F:1F92", "01", 11),
            line("00000000:1F91", "0A", 12),
        ];
        fs::write(root.path().join("self/net/tcp"), tables.concat()).unwrap();
        // A socket without a port is not bound, and one with a peer serves nobody.
        let with_peer = line("0100007F:1F94", "01", 11).replacen("00000000:0000", "0200007F:0035", 1);
        let udp = [
            line("00000000:1F93", "07", 13),
            line("00000000:0000", "07", 14),
            with_peer,
        ];
        fs::write(root.path().join("self/net/udp"), udp.concat()).unwrap();
        root
    }

    #[test]
    fn what_a_process_of_the_nodes_network_has_bound_is_found() {
        let root = root();
        let of = |pid| Address::below(root.path(), &[pid]);
        assert_eq!(of(2), [tcp("127.0.0.1:8080"), udp("0.0.0.0:8083")].into());
        assert_eq!(of(3), [].into(), "its addresses are its own");
        assert_eq!(of(4), [].into());
    }

    #[test]
    fn sockets_collide_at_one_port_of_one_address() {
        let pairs = [
            ("0.0.0.0:80", "127.0.0.1:80", true),
            ("127.0.0.1:80", "127.0.0.1:80", true),
            ("127.0.0.1:80", "127.0.0.2:80", false),
            ("127.0.0.1:80", "127.0.0.1:81", false),
            ("[::]:80", "127.0.0.1:80", true),
            ("[::1]:80", "0.0.0.0:80", false),
        ];
        for (one, other, expected) in pairs {
            let (one, other) = (tcp(one), tcp(other));
            assert_eq!(one.collides(other), expected, "{one} {other}");
            assert_eq!(other.collides(one), expected, "{other} {one}");
        }
        assert!(!udp("127.0.0.1:80").collides(udp("127.0.0.1:80")));
        assert!(!tcp("127.0.0.1:80").collides(udp("127.0.0.1:80")));
    }

    #[test]
    fn this_process_listens_and_this_node_has_some_addresses() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = Address {
            at: listener.local_addr().unwrap(),
            listens: true,
        };
        assert!(Address::taken().contains(&own));
        let pid = std::process::id().try_into().unwrap();
        assert!(Address::of(&[pid]).contains(&own));
        assert!(!own.is_lacking());
        assert!(!tcp("0.0.0.0:80").is_lacking());
        // Without its interface nobody knows.
        assert!(!tcp("[ff02::fb]:5353").is_lacking());
        let is_any_bound =
            fs::read_to_string("/proc/sys/net/ipv4/ip_nonlocal_bind").is_ok_and(|set| set.trim() == "1");
        assert_eq!(tcp("192.0.2.7:80").is_lacking(), !is_any_bound);
    }
}
