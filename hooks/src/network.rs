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
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result};
use firn_host::bounded;
use firn_oci::Spec;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// How long CRIU's log is read.
const READ: Duration = Duration::from_millis(500);

/// Both ends of a connection: its own and its peer's.
type Ends = (SocketAddr, SocketAddr);

/// Releases the network of the container in `bundle`, whose dump has the log `log`. Its processes, init
/// first, may have ended.
pub fn release(bundle: &Path, log: &Path, pids: &[&str]) -> Result<()> {
    let pids = pids.iter().map(|pid| pid.parse::<i32>());
    let pids = pids.collect::<Result<Vec<_>, _>>().context("this is no pid")?;
    let log = Log::read_in_time(log);
    if log.has_released {
        return Ok(());
    }
    let mut ends = BTreeSet::new();
    each_socket(&pids, |socket| {
        ends.extend(ends_of(socket));
        Ok(())
    })?;
    // Order matters: a socket that leaves the mode sends a packet to its peer.
    let unlocked = unlock(bundle, &pids, &ends, log.run.as_deref());
    each_socket(&pids, leave_repair)?;
    unlocked
}

/// What CRIU's log shows of a dump.
#[derive(Debug, Default, PartialEq, Eq)]
struct Log {
    /// How CRIU calls this run.
    run: Option<String>,
    /// CRIU has come to an end, and has released the network before.
    has_released: bool,
}

impl Log {
    /// What the log shows if it is read in time: its file system may be what CRIU has waited for.
    fn read_in_time(path: &Path) -> Self {
        let (send, log) = mpsc::channel();
        let path = path.to_owned();
        std::thread::spawn(move || send.send(Self::read(&path)));
        log.recv_timeout(READ).unwrap_or_default()
    }

    /// A log that is not there shows nothing.
    fn read(path: &Path) -> Self {
        let mut log = Self::default();
        let visit = |line: &[u8]| {
            let line = String::from_utf8_lossy(line);
            if let Some((_, run)) = line.split_once("CRIU run id = ") {
                log.run = Some(run.trim().to_owned());
            }
            log.has_released |= line.contains("Unfreezing tasks into");
            ControlFlow::Continue(())
        };
        drop(bounded::each(path, b'\n', bounded::LINES, visit));
        log
    }
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
    let of = |file: &File| file.metadata().map(|meta| (meta.dev(), meta.ino()));
    let ours = File::open("/proc/thread-self/ns/net").and_then(|ours| of(&ours));
    let is_ours = of(&file).ok() == ours.ok();
    Ok(Some((!is_ours).then_some(file)))
}
