//! Releases the network of a container whose CRIU was killed in a dump.
//!
//! During a dump the sockets that are dumped with their connections are in repair mode, in which they neither
//! send nor receive, and rules of the packet filter drop what arrives. CRIU ends both, also when the dump
//! fails, unless it is killed.

mod filter;
mod nftables;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use firn_host::FileId;
use firn_oci::Spec;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Both ends of a connection: its own and its peer's.
type Ends = (SocketAddr, SocketAddr);

/// Releases the network of the container in `bundle`. Its processes, init first, may have ended. `run` is how
/// CRIU has called its run.
pub fn release(bundle: &Path, pids: &[i32], run: Option<&str>) -> Result<()> {
    let mut ends = BTreeSet::new();
    each_socket(pids, |socket| {
        ends.extend(ends_of(socket));
        Ok(())
    })?;
    // Order matters: a socket that leaves the mode sends a packet to its peer.
    let unlocked = unlock(bundle, pids, &ends, run);
    each_socket(pids, leave_repair)?;
    unlocked
}

/// Visits every TCP socket that the processes have open, with a descriptor of the same socket.
fn each_socket(pids: &[i32], mut visit: impl FnMut(&TcpStream) -> Result<()>) -> Result<()> {
    let mut seen = BTreeSet::new();
    let mut result = Ok(());
    for &pid in pids {
        let Some(process) = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        else {
            continue;
        };
        for file in fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let is_socket = |to: &PathBuf| to.as_os_str().as_bytes().starts_with(b"socket:[");
            let name = file.file_name();
            let (Ok(to), Some(Ok(fd))) = (fs::read_link(file.path()), name.to_str().map(str::parse)) else {
                continue;
            };
            if !is_socket(&to) || !seen.insert(to) {
                continue;
            }
            let Ok(socket) = pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()) else {
                continue;
            };
            if getsockopt(&socket, sockopt::TcpRepair).is_ok() {
                result = result.and(visit(&TcpStream::from(socket)));
            }
        }
    }
    result
}

/// The ends of a socket that has a connection. An IPv4 address in an IPv6 one is given as IPv4, as CRIU does.
fn ends_of(socket: &TcpStream) -> Option<Ends> {
    let plain = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
    Some((plain(socket.local_addr().ok()?), plain(socket.peer_addr().ok()?)))
}

/// Takes a socket out of repair mode, in which it may not be.
fn leave_repair(socket: &TcpStream) -> Result<()> {
    let leave = || {
        if getsockopt(socket, sockopt::TcpRepair)? == 0 {
            return Ok(());
        }
        // With a probe of the peer's window, as CRIU does it: what was lost meanwhile is sent again.
        setsockopt(socket, sockopt::TcpRepair, &0)?;
        // The mode has overwritten this option, and only CRIU knew what it was. Without it a server could not
        // be started again while it has connections; with it nothing is refused.
        setsockopt(socket, sockopt::ReuseAddr, &true)
    };
    leave().with_context(|| {
        format!(
            "cannot end the repair mode of the connection {:?}",
            ends_of(socket)
        )
    })
}

/// Removes the rules with which CRIU keeps packets from the container. It enters the network namespace.
fn unlock(bundle: &Path, pids: &[i32], ends: &BTreeSet<Ends>, run: Option<&str>) -> Result<()> {
    let Some(namespace) = namespace(bundle, pids)? else {
        return Ok(());
    };
    let is_own = namespace.is_some();
    if let Some(namespace) = namespace {
        setns(&namespace, CloneFlags::CLONE_NEWNET).context("cannot enter the network namespace")?;
    }
    // CRIU 4.0 names its table by the pid of init, later ones by their run.
    let by_pid = pids.first().map(ToString::to_string);
    let tables = run.map(str::to_owned).into_iter().chain(by_pid);
    let deleted = tables.map(|id| nftables::delete_table(&format!("CRIU-{id}")));
    let deleted = deleted.collect::<nix::Result<Vec<_>>>();
    let filtered = filter::PROGRAMS.map(|program| filter::unlock(program, is_own, ends));
    filtered.into_iter().collect::<Result<()>>()?;
    deleted.map(drop).context("cannot delete a table of CRIU's")
}

/// The network namespace of the container, unless it is this process's: `Some(None)`. None if it has gone.
fn namespace(bundle: &Path, pids: &[i32]) -> Result<Option<Option<File>>> {
    let spec = Spec::load(bundle)?;
    let path = match (spec.namespace_path("network"), pids.first()) {
        _ if !spec.has_namespace("network") => return Ok(Some(None)),
        (Some(path), _) => path.to_owned(),
        (None, Some(init)) => PathBuf::from(format!("/proc/{init}/ns/net")),
        (None, None) => return Ok(None),
    };
    let file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.with_context(|| format!("cannot open {}", path.display()))?,
    };
    let of = |file: &File| file.metadata().map(|meta| FileId::of(&meta));
    let ours = File::open("/proc/thread-self/ns/net").and_then(|ours| of(&ours));
    let is_ours = of(&file).ok() == ours.ok();
    Ok(Some((!is_ours).then_some(file)))
}
