//! Unix sockets of the processes that CRIU dumps which are connected to a process outside.
//!
//! A socket belongs to the network namespace of the process that made it, an accepted one to that of its
//! client. CRIU sees the sockets of the namespaces that the dumped processes have. firn's plugin lets it dump
//! a socket whose other end no dumped process has, a datagram socket whose other end it does not see, and an
//! accepted socket that it does not see itself. The container runs meanwhile: a socket counts that several
//! looks show alike.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::Duration;

use firn_config::{Tcp, text};
use firn_host::ordered::{map_of, set_of};
use firn_host::proc_maps;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};

use super::objects::Object;
use super::{Unreadable, open_files, socket_inode};
use crate::{Assertions, Refusal};

mod diag;

use diag::Diag;

/// How often processes are looked at until a socket counts.
const LOOKS: usize = 3;

/// How often, and how far apart, a connection that no server has accepted is looked at.
const WAITS: usize = 10;
const WAIT: Duration = Duration::from_millis(100);

const ESTABLISHED: u8 = 1;
const LISTEN: u8 = 10;
const STREAM: u8 = 1;
const DATAGRAM: u8 = 2;
const SEQPACKET: u8 = 5;
const SHUTDOWN_BOTH: u8 = 3;

/// A connected socket whose other end no dumped process has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixSocket {
    /// One of the processes that have it.
    pub pid: i32,
    pub comm: String,
    pub fd: i32,
    pub inode: u32,
    pub kind: Kind,
    /// Its own address and that of the other end; empty without one.
    pub local: String,
    pub remote: String,
    pub other_end: OtherEnd,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    #[default]
    Stream,
    Datagram,
    Seqpacket,
}

impl Kind {
    /// As the kernel numbers types of sockets.
    fn of(number: u8) -> Self {
        match number {
            DATAGRAM => Self::Datagram,
            SEQPACKET => Self::Seqpacket,
            _ => Self::Stream,
        }
    }

    /// As the kernel numbers it.
    pub fn number(self) -> u8 {
        match self {
            Self::Stream => STREAM,
            Self::Datagram => DATAGRAM,
            Self::Seqpacket => SEQPACKET,
        }
    }
}

/// Where the other end of a socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OtherEnd {
    /// Another process has it.
    Outside,
    /// In another network namespace; its inode.
    Hidden(u32),
    /// No process has accepted the connection, and the listening socket is outside.
    Pending,
    /// In another network namespace, as the socket itself, which a server inside has accepted.
    Client,
    /// Unknown: the socket was made in another network namespace.
    Unseen,
}

impl UnixSocket {
    /// Whether CRIU can dump it with firn's plugin.
    fn can_be_closed(&self) -> bool {
        match self.other_end {
            OtherEnd::Outside | OtherEnd::Client => true,
            OtherEnd::Hidden(_) => self.kind == Kind::Datagram,
            OtherEnd::Pending | OtherEnd::Unseen => false,
        }
    }

    /// Whether CRIU connects it again by its peer's name, with the option `ext-unix-sk`.
    pub(super) fn is_connected_again(&self) -> bool {
        self.kind == Kind::Datagram && self.other_end == OtherEnd::Outside && !self.remote.is_empty()
    }
}

impl fmt::Display for UnixSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, comm, fd, .. } = self;
        let kind = match self.kind {
            Kind::Stream => "stream",
            Kind::Datagram => "datagram",
            Kind::Seqpacket => "seqpacket",
        };
        let named = |name: &str| match name {
            "" => "an unnamed socket".to_owned(),
            name => name.to_owned(),
        };
        write!(f, "process {pid} ({comm}), descriptor {fd}: {kind} from ")?;
        write!(f, "{} to {}", named(&self.local), named(&self.remote))?;
        f.write_str(match self.other_end {
            OtherEnd::Outside => "",
            OtherEnd::Hidden(_) | OtherEnd::Client => " of another network namespace",
            OtherEnd::Pending => ", not accepted yet",
            OtherEnd::Unseen => ", made in another network namespace",
        })
    }
}

/// A socket's inode, and a process and descriptor that have it.
type Holders = BTreeMap<u32, (i32, i32)>;

/// The sockets of `dumped` that lead outside.
pub(super) fn inspect(proc_root: &Path, dumped: &[i32]) -> Result<Vec<UnixSocket>, Unreadable> {
    let mut found = look(proc_root, dumped)?;
    for _ in 1..LOOKS {
        if found.is_empty() {
            break;
        }
        let again = look(proc_root, dumped)?;
        found.retain(|socket| again.contains(socket));
    }
    Ok(found)
}

/// The sockets that the processes have, and all of their network namespaces.
fn held_sockets(proc_root: &Path, dumped: &[i32]) -> Result<(Holders, Vec<Diag>), Unreadable> {
    let (mut held, mut members) = (Holders::new(), Vec::new());
    for &pid in dumped {
        let Some(files) = open_files(proc_root, pid)? else {
            continue;
        };
        let before = held.len();
        for (fd, to) in files {
            let inode = socket_inode(&to).and_then(|inode| u32::try_from(inode).ok());
            if let Some(inode) = inode.filter(|_| is_unix(proc_root, pid, fd)) {
                held.entry(inode).or_insert((pid, fd));
            }
        }
        if held.len() > before {
            members.push(pid);
        }
    }
    let sockets = sockets(proc_root, &members)?;
    Ok((held, sockets))
}

fn look(proc_root: &Path, dumped: &[i32]) -> Result<Vec<UnixSocket>, Unreadable> {
    let (held, sockets) = held_sockets(proc_root, dumped)?;
    let found = judge(&held, &sockets);
    Ok(found
        .into_iter()
        .map(|(inode, kind, other_end)| described(proc_root, &held, inode, kind, other_end))
        .collect())
}

/// Connections that servers among the processes have not accepted, and that CRIU does not dump: with bytes in
/// them, or closed by the client. One that a server accepts meanwhile does not count.
pub(super) fn waiting(proc_root: &Path, dumped: &[i32]) -> Result<Vec<Refusal>, Unreadable> {
    let mut found = waiting_now(proc_root, dumped)?;
    for _ in 0..WAITS {
        if found.is_empty() {
            break;
        }
        thread::sleep(WAIT);
        let again = waiting_now(proc_root, dumped)?;
        found.retain(|inode, _| again.contains_key(inode));
    }
    let refusal = |(pid, fd): (i32, i32)| Refusal::Object {
        pid,
        comm: proc_maps::comm(proc_root, pid),
        object: Object::UnixConnection,
        at: format!("descriptor {fd}"),
    };
    Ok(found.into_values().map(refusal).collect())
}

fn waiting_now(proc_root: &Path, dumped: &[i32]) -> Result<Holders, Unreadable> {
    let (mut held, sockets) = held_sockets(proc_root, dumped)?;
    let pending = pending(&held, &sockets);
    let has_bytes = |socket: &&Diag| pending.contains(&socket.inode) && socket.unread > 0;
    // In the place of a client that has closed its end there is no inode.
    let has_closed = |socket: &&Diag| socket.state == LISTEN && socket.pending.contains(&0);
    let waits = sockets
        .iter()
        .filter(|socket| has_bytes(socket) || has_closed(socket));
    let waits = set_of(waits.map(|socket| socket.inode));
    held.retain(|inode, _| waits.contains(inode));
    Ok(held)
}

/// Whether a socket is a Unix socket. The kernel names the protocol of every socket so.
fn is_unix(proc_root: &Path, pid: i32, fd: i32) -> bool {
    let path = proc_root.join(format!("{pid}/fd/{fd}"));
    let mut name = [0; 16];
    rustix::fs::getxattr(path, "system.sockprotoname", &mut name).is_ok() && name.starts_with(b"UNIX")
}

/// The sockets of all network namespaces of these processes.
fn sockets(proc_root: &Path, pids: &[i32]) -> Result<Vec<Diag>, Unreadable> {
    let (mut seen, mut sockets) = (BTreeSet::new(), Vec::new());
    for &pid in pids {
        let what = "ns/net";
        let path = proc_root.join(pid.to_string()).join(what);
        let unreadable = |source| Unreadable { pid, what, source };
        let Some(name) = proc_maps::unless_gone(std::fs::read_link(&path)).map_err(unreadable)? else {
            continue;
        };
        if !seen.insert(name) {
            continue;
        }
        let namespace = proc_maps::unless_gone(File::open(&path)).map_err(unreadable)?;
        if let Some(namespace) = namespace {
            sockets.extend(diag::of_namespace(&namespace).map_err(unreadable)?);
        }
    }
    Ok(sockets)
}

/// The clients that wait for a server among the processes.
fn pending(held: &Holders, sockets: &[Diag]) -> BTreeSet<u32> {
    let listening = sockets.iter().filter(|socket| {
        let is_held = held.contains_key(&socket.inode);
        is_held && socket.state == LISTEN
    });
    set_of(listening.flat_map(|socket| socket.pending.iter().copied()))
}

/// Which of the sockets that dumped processes have lead outside.
fn judge(held: &Holders, sockets: &[Diag]) -> Vec<(u32, Kind, OtherEnd)> {
    let known = map_of(sockets.iter().map(|socket| (socket.inode, socket)));
    let pending = pending(held, sockets);
    let judge_one = |&inode: &u32| {
        let Some(socket) = known.get(&inode) else {
            return Some((inode, Kind::Stream, OtherEnd::Unseen));
        };
        let kind = Kind::of(socket.kind);
        let other_end = match socket.peer {
            0 => {
                let waits = socket.state == ESTABLISHED && socket.shutdown != SHUTDOWN_BOTH;
                let is_outside = waits && kind != Kind::Datagram && !pending.contains(&inode);
                is_outside.then_some(OtherEnd::Pending)
            }
            peer if held.contains_key(&peer) => None,
            peer if known.contains_key(&peer) => Some(OtherEnd::Outside),
            peer => Some(OtherEnd::Hidden(peer)),
        };
        Some((inode, kind, other_end?))
    };
    held.keys().filter_map(judge_one).collect()
}

/// The socket with its addresses.
fn described(proc_root: &Path, held: &Holders, inode: u32, kind: Kind, other_end: OtherEnd) -> UnixSocket {
    let (pid, fd) = held.get(&inode).copied().unwrap_or_default();
    let shown = shown(pid, fd).unwrap_or_default();
    let (kind, other_end) = match other_end {
        OtherEnd::Unseen => (
            shown.kind,
            if shown.is_accepted() {
                OtherEnd::Client
            } else {
                OtherEnd::Unseen
            },
        ),
        _ => (kind, other_end),
    };
    UnixSocket {
        pid,
        comm: proc_maps::comm(proc_root, pid),
        fd,
        inode,
        kind,
        local: shown.local,
        remote: shown.remote.unwrap_or_default(),
        other_end,
    }
}

/// What a socket of another process shows of itself.
#[derive(Default)]
struct SocketState {
    kind: Kind,
    local: String,
    /// None without a peer.
    remote: Option<String>,
}

impl SocketState {
    /// Whether a server has accepted it: it has the server's address. One of a pair has none.
    fn is_accepted(&self) -> bool {
        self.kind != Kind::Datagram && self.remote.is_some() && !self.local.is_empty()
    }
}

fn shown(pid: i32, fd: i32) -> Option<SocketState> {
    let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    let socket = pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).ok()?;
    let kind = rustix::net::sockopt::socket_type(&socket).ok()?;
    let remote = rustix::net::getpeername(&socket).ok();
    Some(SocketState {
        kind: Kind::of(u8::try_from(kind.as_raw()).ok()?),
        local: rustix::net::getsockname(&socket).map(named).unwrap_or_default(),
        remote: remote.map(|remote| remote.map(named).unwrap_or_default()),
    })
}

/// An address as the process has given it; empty without a name.
fn named(address: rustix::net::SocketAddrAny) -> String {
    let Ok(address) = rustix::net::SocketAddrUnix::try_from(address) else {
        return String::new();
    };
    let (prefix, name) = match address.abstract_name().filter(|name| !name.is_empty()) {
        Some(name) => ("@", name),
        None => ("", address.path_bytes().unwrap_or_default()),
    };
    let name = String::from_utf8_lossy(name);
    text::one_line(&format!("{prefix}{}", name.trim_end_matches('\0')))
}

/// Why these sockets refuse a checkpoint. Leaves those that the copy finds closed.
pub(super) fn evaluate(
    found: &mut Vec<UnixSocket>,
    assertions: &Assertions,
    criu_plugin: bool,
) -> Option<Refusal> {
    let closes = matches!(assertions.tcp, Tcp::Close | Tcp::Auto);
    if assertions.external_unix && !closes {
        found.retain(|socket| !socket.is_connected_again());
    }
    if found.is_empty() {
        return None;
    }
    let lasting: Vec<UnixSocket> = found.iter().filter(|one| !one.can_be_closed()).cloned().collect();
    let sockets = found.clone();
    match assertions.tcp {
        _ if !lasting.is_empty() => Some(Refusal::UnixSocketsUnseen { sockets: lasting }),
        Tcp::Refuse => Some(Refusal::UnixSockets { sockets }),
        Tcp::Keep => Some(Refusal::UnixSocketsKept { sockets }),
        Tcp::Close | Tcp::Auto if !criu_plugin => Some(Refusal::UnixSocketsPlugin { sockets }),
        Tcp::Close | Tcp::Auto => None,
    }
}

#[cfg(test)]
mod tests;
