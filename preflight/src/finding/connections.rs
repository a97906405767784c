//! TCP connections of the processes that CRIU dumps, as /proc shows them (Linux,
//! Documentation/networking/proc_net_tcp.rst).

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use firn_config::Tcp;
use firn_host::ordered::{map_of, set_of};
use firn_host::{bounded, proc_maps};
use serde::Serialize;

use super::{Unreadable, open_files};

/// A connection that is established, about to be, or half closed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Connection {
    /// One of the processes that have it.
    pub pid: i32,
    pub comm: String,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// Whether the other end is a socket of the container, too.
    pub inside: bool,
    /// Whether its other end has ended it, after bytes that no process has read.
    pub unread: bool,
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            pid,
            comm,
            local,
            remote,
            ..
        } = self;
        write!(f, "process {pid} ({comm}): {local} to {remote}")
    }
}

impl Connection {
    /// Whether a restored container continues it.
    pub fn continues(&self, tcp: Tcp) -> bool {
        match tcp {
            Tcp::Keep => true,
            Tcp::Auto => self.inside,
            Tcp::Refuse | Tcp::Close => false,
        }
    }

    /// Whether a copy lacks bytes of it that had arrived.
    pub fn loses_bytes(&self, tcp: Tcp) -> bool {
        self.unread && !self.continues(tcp)
    }
}

/// States of sockets without a connection: TIME_WAIT and CLOSE, which CRIU dumps, SYN_RECV and LISTEN.
const UNCONNECTED: [u8; 4] = [3, 6, 7, 10];

/// States of a connection whose other side has sent its end: CLOSE_WAIT, LAST_ACK and CLOSING.
const ENDED: [u8; 3] = [8, 9, 11];

/// A socket of a process: network namespace, inode, and a process that has it.
type Socket = (PathBuf, u64, i32);

/// The connections of `dumped`.
pub(super) fn inspect(proc_root: &Path, dumped: &[i32]) -> Result<Vec<Connection>, Unreadable> {
    let mut sockets: Vec<Socket> = Vec::new();
    for &pid in dumped {
        let Some(files) = open_files(proc_root, pid)? else {
            continue;
        };
        let Ok(namespace) = std::fs::read_link(proc_root.join(format!("{pid}/ns/net"))) else {
            continue;
        };
        let inodes = files.filter_map(|(_, to)| socket(&to));
        sockets.extend(inodes.map(|inode| (namespace.clone(), inode, pid)));
    }
    let mut found = Vec::new();
    while let Some((namespace, ..)) = sockets.first() {
        let namespace = namespace.clone();
        let (inside, others): (Vec<_>, Vec<_>) = sockets.into_iter().partition(|(of, ..)| *of == namespace);
        found.extend(of_namespace(proc_root, &inside)?);
        sockets = others;
    }
    Ok(found)
}

/// Inodes of the TCP connections in the network namespace of a process, but of those whose other end has
/// ended them after bytes that nobody has read.
pub(super) fn all_read(proc_root: &Path, pid: i32) -> Result<BTreeSet<u64>, Unreadable> {
    let mut found = BTreeSet::new();
    each_line(proc_root, pid, |line| {
        if !line.has_unread_bytes() {
            found.insert(line.inode);
        }
    })?;
    Ok(found)
}

/// Visits the connections in the network namespace of a process, which may be the host's.
fn each_line(proc_root: &Path, pid: i32, mut visit: impl FnMut(Line)) -> Result<(), Unreadable> {
    for what in ["net/tcp", "net/tcp6"] {
        let path = proc_root.join(pid.to_string()).join(what);
        let read = bounded::each(&path, b'\n', bounded::LINES, |line| {
            if let Some(line) = std::str::from_utf8(line).ok().and_then(parse) {
                visit(line);
            }
            ControlFlow::Continue(())
        });
        proc_maps::unless_gone(read).map_err(|source| Unreadable { pid, what, source })?;
    }
    Ok(())
}

/// The connections of these sockets of one network namespace.
fn of_namespace(proc_root: &Path, sockets: &[Socket]) -> Result<Vec<Connection>, Unreadable> {
    let mut found: Vec<Connection> = Vec::new();
    let Some(&(_, _, pid)) = sockets.first() else {
        return Ok(found);
    };
    let holders = map_of(sockets.iter().rev().map(|(_, inode, pid)| (*inode, *pid)));
    each_line(proc_root, pid, |line| {
        if let Some(&pid) = holders.get(&line.inode) {
            found.push(Connection {
                pid,
                comm: proc_maps::comm(proc_root, pid),
                local: line.local,
                remote: line.remote,
                inside: false,
                unread: line.has_unread_bytes(),
            });
        }
    })?;
    let ends = set_of(found.iter().map(|end| (end.local, end.remote)));
    for connection in &mut found {
        connection.inside = ends.contains(&(connection.remote, connection.local));
    }
    Ok(found)
}

/// The inode of `socket:[1234]`.
pub(crate) fn socket(file: &Path) -> Option<u64> {
    let name = file.to_str()?.strip_prefix("socket:[")?;
    name.strip_suffix(']')?.parse().ok()
}

/// A line of `net/tcp`, if it is a connection.
fn parse(line: &str) -> Option<Line> {
    Line::parse(line).filter(|line| !UNCONNECTED.contains(&line.state))
}

/// A socket in `net/tcp`, `net/udp` and those of IPv6.
pub(crate) struct Line {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub state: u8,
    /// Bytes that were received and not read. Of TCP an end that was not read counts as one.
    pub unread: u64,
    pub inode: u64,
}

impl Line {
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace().skip(1);
        Some(Self {
            local: address(fields.next()?)?,
            remote: address(fields.next()?)?,
            state: u8::from_str_radix(fields.next()?, 16).ok()?,
            unread: u64::from_str_radix(fields.next()?.split_once(':')?.1, 16).ok()?,
            inode: fields.nth(4)?.parse().ok()?,
        })
    }

    /// Of TCP: whether bytes and the other side's end wait to be read.
    fn has_unread_bytes(&self) -> bool {
        ENDED.contains(&self.state) && self.unread > 1
    }
}

/// An address in hexadecimal: words in the byte order of the host, and the port. An IPv4 address in an IPv6
/// one is given as IPv4: its other end may be a socket of IPv4.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let words = address.as_bytes().chunks(8).map(|word| {
        let word = std::str::from_utf8(word).ok()?;
        Some(u32::from_str_radix(word, 16).ok()?.to_ne_bytes())
    });
    let bytes: Vec<u8> = words.collect::<Option<Vec<_>>>()?.concat();
    let address = match <[u8; 4]>::try_from(&bytes[..]) {
        Ok(bytes) => IpAddr::from(Ipv4Addr::from(bytes)),
        Err(_) => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[..]).ok()?)).to_canonical(),
    };
    Some(SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn bytes_that_were_not_read_are_no_end_of_a_connection() {
        let line = |state: &str, unread: &str| {
            format!(
                "0: 0200000A:1F90 0900000A:0050 {state} 00000000:{unread} 00:00000000 00000000 0 0 13 1 0"
            )
        };
        for (state, unread, expected) in [
            ("01", "00000000", false),
            ("01", "00000001", false),
            ("08", "00000000", false),
            ("08", "00000001", false),
            ("08", "00000002", true),
            ("09", "00000001", false),
            ("0B", "00000002", true),
            ("05", "00000001", false),
        ] {
            let found = parse(&line(state, unread)).unwrap();
            assert_eq!(found.inode, 13);
            assert_eq!(found.has_unread_bytes(), expected, "{state} {unread}");
        }
        let unread = Connection {
            unread: true,
            ..one()
        };
        for (tcp, inside, expected) in [
            (Tcp::Keep, false, false),
            (Tcp::Auto, true, false),
            (Tcp::Auto, false, true),
            (Tcp::Close, true, true),
        ] {
            let connection = Connection {
                inside,
                ..unread.clone()
            };
            assert_eq!(connection.loses_bytes(tcp), expected, "{tcp:?} {inside}");
            assert!(!one().loses_bytes(tcp));
        }
    }

    fn one() -> Connection {
        Connection {
            pid: 7,
            comm: "python".to_owned(),
            local: ([10, 0, 0, 2], 80).into(),
            remote: ([10, 0, 0, 9], 4000).into(),
            inside: false,
            unread: false,
        }
    }

    /// Addresses, state and inode of sockets. The second and the third are the ends of a connection.
    const TCP: [(&str, &str, &str, u64); 6] = [
        ("00000000:1F90", "00000000:0000", "0A", 10),
        ("0100007F:1F90", "0100007F:D431", "01", 11),
        ("0100007F:D431", "0100007F:1F90", "01", 12),
        ("0200000A:1F90", "0900000A:0050", "08", 13),
        ("0200000A:1F90", "0900000A:0051", "06", 0),
        ("0200000A:1F90", "0900000A:0052", "01", 99),
    ];

    const TCP6: [(&str, &str, &str, u64); 1] = [(
        "0000000000000000FFFF00000100007F:1F91",
        "0000000000000000FFFF00000100007F:D432",
        "01",
        14,
    )];

    fn table(sockets: &[(&str, &str, &str, u64)]) -> String {
        let line = |(local, remote, state, inode): &(&str, &str, &str, u64)| {
            format!("0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1 0 20\n")
        };
        let head =
            "sl local_address rem_address st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode\n";
        sockets
            .iter()
            .map(line)
            .fold(head.to_owned(), |table, line| table + &line)
    }

    /// Processes 1 and 2 with these sockets in one network namespace.
    fn root(sockets: [&[u64]; 2]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (pid, sockets) in [1, 2].into_iter().zip(sockets) {
            let process = root.path().join(pid.to_string());
            for dir in ["fd", "net", "ns"] {
                std::fs::create_dir_all(process.join(dir)).unwrap();
            }
            symlink("net:[7]", process.join("ns/net")).unwrap();
            symlink("/dev/null", process.join("fd/0")).unwrap();
            for (number, inode) in sockets.iter().enumerate() {
                symlink(
                    format!("socket:[{inode}]"),
                    process.join(format!("fd/{}", number + 3)),
                )
                .unwrap();
            }
            std::fs::write(process.join("comm"), "server\n").unwrap();
            std::fs::write(process.join("net/tcp"), table(&TCP)).unwrap();
            std::fs::write(process.join("net/tcp6"), table(&TCP6)).unwrap();
        }
        root
    }

    fn found(sockets: [&[u64]; 2]) -> Vec<(String, bool)> {
        let found = inspect(root(sockets).path(), &[1, 2, 3]).unwrap();
        found.iter().map(|one| (one.to_string(), one.inside)).collect()
    }

    #[test]
    fn connections_are_named_with_their_process_and_both_addresses() {
        let expected = [
            ("process 1 (server): 127.0.0.1:8080 to 127.0.0.1:54321", true),
            ("process 2 (server): 127.0.0.1:54321 to 127.0.0.1:8080", true),
            ("process 1 (server): 10.0.0.2:8080 to 10.0.0.9:80", false),
        ];
        let expected = expected.map(|(text, inside)| (text.to_owned(), inside));
        assert_eq!(found([&[10, 11, 13], &[12, 13]]), expected);
    }

    #[test]
    fn the_other_end_of_a_connection_inside_is_in_a_process_that_is_dumped() {
        let expected = [(
            "process 2 (server): 127.0.0.1:54321 to 127.0.0.1:8080".to_owned(),
            false,
        )];
        assert_eq!(found([&[], &[12]]), expected);
    }

    #[test]
    fn an_ipv4_address_in_an_ipv6_one_is_an_ipv4_address() {
        let expected = [(
            "process 1 (server): 127.0.0.1:8081 to 127.0.0.1:54322".to_owned(),
            false,
        )];
        assert_eq!(found([&[14], &[]]), expected);
    }

    #[test]
    fn sockets_that_listen_or_are_not_of_the_container_are_no_connections() {
        assert_eq!(found([&[10, 77], &[]]), []);
    }
}
