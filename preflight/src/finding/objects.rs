//! Objects of the processes that CRIU cannot dump, or that a copy would not have.
//!
//! What CRIU dumps is decided by the type of an open file (`criu/files.c`), the protocol of a socket
//! (`criu/sk-inet.c`) and the namespaces of a process (`criu/namespaces.c`). Each [`Object`] is one that it
//! refuses at the end of a dump, when GPU memory has been copied already, or drops without a word. Objects
//! that no one has tried are left to CRIU.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_host::{bounded, mountinfo, proc_maps};
use nix::fcntl::{OFlag, open};
use nix::libc::O_EXCL;
use nix::sys::stat::Mode;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::net::ipproto;
use rustix::net::sockopt::socket_protocol;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::{Unreadable, each_mapping, open_files, socket_inode};
use crate::Refusal;

/// Longest name of a protocol, and more.
const NAME: usize = 64;

/// An object that a process can have, and that keeps it from being moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Object {
    Bpf,
    Crypto,
    Fanotify,
    /// A socket of TCP, UDP, raw IP or packets, where the node's CRIU is too old for its kernel.
    Inet,
    Kvm,
    LandlockRules,
    MessageQueue,
    Mptcp,
    Namespace(&'static str),
    OtherProtocol,
    PerfEvent,
    Ping,
    Root,
    SeccompListener,
    SecretMemory,
    ThreadPidfd,
    UnixConnection,
    Userfaultfd,
    Vsock,
    Watch,
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bpf => "a BPF map, program or link",
            Self::Crypto => "a socket of the kernel's cryptography (AF_ALG)",
            Self::Fanotify => "a group of fanotify, in a container without CAP_SYS_ADMIN",
            Self::Inet => "a socket of TCP, UDP, raw IP or packets",
            Self::Kvm => "a virtual machine",
            Self::LandlockRules => "a set of Landlock rules",
            Self::MessageQueue => "a POSIX message queue",
            Self::Mptcp => "a Multipath TCP socket",
            Self::Namespace(kind) => return write!(f, "{kind} namespace of its own"),
            Self::OtherProtocol => "a socket of a protocol that CRIU does not know",
            Self::PerfEvent => "a perf event",
            Self::Ping => "a connected ping socket",
            Self::Root => "a root directory other than the container's (chroot)",
            Self::SeccompListener => "a listener of seccomp notifications",
            Self::SecretMemory => "secret memory (memfd_secret)",
            Self::ThreadPidfd => "a pidfd of a thread",
            Self::UnixConnection => {
                "a Unix socket in a connection that no server has accepted, with bytes in it or closed by \
                 its client"
            }
            Self::Userfaultfd => "a userfaultfd",
            Self::Vsock => "a vsock socket",
            Self::Watch => "a watch (inotify, fanotify) of a file that CRIU does not find",
        })
    }
}

impl Object {
    /// What becomes of it, as in "which ...".
    pub(crate) fn fate(self) -> &'static str {
        match self {
            // CRIU makes the socket and does not connect it.
            Self::Ping => "has no peer any more in a copy",
            Self::Fanotify => "firn would not restore",
            Self::Inet => "CRIU before 4.2 cannot dump on Linux 6.16 and later",
            _ => "CRIU cannot dump",
        }
    }

    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::Inet => {
                "install CRIU 4.2 or later on this node (`criu --version` shows what it has). If its \
                 distribution has repaired the older one: `repaired = true` under [criu]"
            }
            Self::Mptcp => {
                "turn it off in the program: GODEBUG=multipathtcp=0 for Go; or start the program \
                            again with net.mptcp.enabled=0"
            }
            Self::Namespace(_) => {
                "end that process before the checkpoint, or start it without namespaces of \
                                   its own (as browsers by --no-sandbox)"
            }
            Self::UnixConnection => {
                "have the server accept it (in a paused container it cannot: resume that), or end the client"
            }
            Self::Watch => {
                "end the watch before the checkpoint, or the process that has it. Of a container without a \
                 GPU, which firn leaves to CRIU: a line `irmap-scan-path DIRECTORY` in /etc/criu/runc.conf \
                 has CRIU look in that directory of the container"
            }
            Self::Root => {
                "have the container's first process start that one as a child, which may be in a chroot"
            }
            _ => {
                "close it before the checkpoint (as in a hook prepare, firn.dev/hook-prepare), or end the \
                  process that has it"
            }
        }
    }

    /// By the link of a descriptor or mapping.
    fn of_link(link: &[u8]) -> Option<Self> {
        const LINKS: [(&str, Object); 10] = [
            ("anon_inode:bpf", Object::Bpf),
            ("anon_inode:[bpf", Object::Bpf),
            ("anon_inode:kvm-", Object::Kvm),
            ("anon_inode:landlock-ruleset", Object::LandlockRules),
            ("anon_inode:[landlock-ruleset]", Object::LandlockRules),
            ("anon_inode:[perf_event]", Object::PerfEvent),
            ("anon_inode:seccomp notify", Object::SeccompListener),
            ("anon_inode:[seccomp notify]", Object::SeccompListener),
            ("anon_inode:[userfaultfd]", Object::Userfaultfd),
            ("/secretmem", Object::SecretMemory),
        ];
        let is = |(prefix, _): &&(&str, Self)| link.starts_with(prefix.as_bytes());
        let found = LINKS.iter().find(is).map(|(_, object)| *object);
        // A file may have that name, too.
        let is_name = |object| object != Self::SecretMemory || link == b"/secretmem (deleted)";
        found.filter(|object| is_name(*object))
    }

    /// By the protocol of a socket, as the kernel names it.
    fn of_protocol(name: &[u8]) -> Option<Self> {
        match name {
            b"UNIX" | b"UNIX-DGRAM" | b"UNIX-STREAM" | b"NETLINK" => None,
            b"TCP" | b"TCPv6" | b"UDP" | b"UDPv6" | b"UDP-Lite" | b"UDPLITE" | b"UDPLITEv6" | b"RAW"
            | b"RAWv6" | b"PACKET" => Some(Self::Inet),
            b"PING" | b"PINGv6" => Some(Self::Ping),
            b"AF_VSOCK" => Some(Self::Vsock),
            b"ALG" => Some(Self::Crypto),
            b"MPTCP" | b"MPTCPv6" => Some(Self::Mptcp),
            _ => Some(Self::OtherProtocol),
        }
    }
}

/// The kinds of namespaces that CRIU dumps for a whole container alone.
const NAMESPACES: [(&str, &str); 9] = [
    ("cgroup", "a cgroup"),
    ("ipc", "an IPC"),
    ("net", "a network"),
    ("pid", "a PID"),
    ("pid_for_children", "a PID"),
    ("time", "a time"),
    ("time_for_children", "a time"),
    ("user", "a user"),
    ("uts", "a UTS"),
];

/// The objects of the processes below `proc_root`, one refusal for each kind that a process has. `init` is
/// the container's first process. `no_inet`: CRIU dumps no [`Object::Inet`].
pub(super) fn inspect(
    proc_root: &Path,
    init: i32,
    dumped: &[i32],
    no_inet: bool,
) -> Result<Vec<Refusal>, Unreadable> {
    let mut refusals = Vec::new();
    for &pid in dumped {
        let Some(objects) = of_process(proc_root, init, pid)? else {
            continue;
        };
        let objects = objects.into_iter();
        let refused = objects.filter(|(object, _)| no_inet || *object != Object::Inet);
        refusals.extend(refused.map(|(object, at)| Refusal::Object {
            pid,
            comm: proc_maps::comm(proc_root, pid),
            object,
            at,
        }));
    }
    Ok(refusals)
}

/// Whether the container's processes have a user namespace of their own, whose ids are not the host's.
pub(super) fn has_user_namespace(proc_root: &Path, init: i32) -> bool {
    let of = |process: &str| fs::read_link(proc_root.join(process).join("ns/user")).ok();
    let (own, containers) = (of("self"), of(&init.to_string()));
    own.is_some() && containers.is_some() && own != containers
}

/// What a process has, and where: a descriptor or an address. One of each kind, in the order of kinds. `None`
/// if it has ended.
fn of_process(proc_root: &Path, init: i32, pid: i32) -> Result<Option<Vec<(Object, String)>>, Unreadable> {
    let process = proc_root.join(pid.to_string());
    let mut found: Vec<(Object, String)> = Vec::new();
    let mut add = |object, at: String| {
        if !found.iter().any(|(known, _)| *known == object) {
            found.push((object, at));
        }
    };
    let read = each_mapping(proc_root, pid, |mapping| {
        if let Some(object) = Object::of_link(mapping.path) {
            add(object, format!("memory at 0x{:x}", mapping.start));
        }
        ControlFlow::Continue(())
    });
    if read?.is_none() {
        return Ok(None);
    }
    let Some(files) = open_files(proc_root, pid)? else {
        return Ok(None);
    };
    let mut queues = Queues {
        processes: [proc_root.join(init.to_string()), process.clone()],
        devices: None,
    };
    for (fd, to) in files {
        let link = to.as_os_str().as_bytes();
        let object = if socket_inode(&to).is_some() {
            of_socket(&process, pid, fd, &to)
        } else if link.starts_with(b"anon_inode:[pidfd]") || link.starts_with(b"pidfd:") {
            of_pidfd(&process, fd)
        } else if queues.has(fd, link) {
            Some(Object::MessageQueue)
        } else {
            Object::of_link(link)
        };
        if let Some(object) = object {
            add(object, format!("descriptor {fd}"));
        }
    }
    if pid == init && has_other_root(&process) {
        add(Object::Root, "its root".to_owned());
    }
    let namespace = |pid: i32, file: &str| {
        let path = proc_root.join(pid.to_string()).join("ns").join(file);
        fs::read_link(path).ok()
    };
    // Of one that has ended and was not waited for, CRIU takes none, and some are shown.
    let has_ended = namespace(pid, "uts").is_none();
    for (file, kind) in NAMESPACES.into_iter().filter(|_| !has_ended) {
        if let (Some(own), Some(containers)) = (namespace(pid, file), namespace(init, file))
            && own != containers
        {
            add(Object::Namespace(kind), own.to_string_lossy().into_owned());
        }
    }
    found.sort();
    Ok(Some(found))
}

/// The process may put another file into the place of the socket at any time, whose server answers for its
/// attributes or does not: the name of the file is read again once it is held.
fn of_socket(process: &Path, pid: i32, fd: i32, link: &Path) -> Option<Object> {
    let path = process.join("fd").join(fd.to_string());
    let held = open(&path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).ok()?;
    let own = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    if fs::read_link(&own).ok()? != link {
        return None;
    }
    let mut name = [0; NAME];
    let attribute = OsStr::new("system.sockprotoname");
    let length = rustix::fs::getxattr(&own, attribute, &mut name).ok()?;
    let name = name[..length].split(|byte| *byte == 0).next().unwrap_or_default();
    let object = Object::of_protocol(name)?;
    match object {
        Object::Ping => {
            let inode = socket_inode(link)?;
            let is_there = |table: &str| is_connected(&process.join(table), inode);
            ["net/icmp", "net/icmp6"]
                .into_iter()
                .any(is_there)
                .then_some(object)
        }
        // What a Multipath TCP socket has accepted from others is one of TCP, with that name.
        Object::Mptcp => is_multipath(pid, fd).then_some(object),
        _ => Some(object),
    }
}

fn is_multipath(pid: i32, fd: i32) -> bool {
    let socket = Pid::from_raw(pid)
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        .and_then(|process| pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).ok());
    let protocol = socket.and_then(|socket| socket_protocol(&socket).ok().flatten());
    protocol == Some(ipproto::MPTCP)
}

/// Whether the socket has a peer in a table of /proc/PID/net.
fn is_connected(table: &Path, inode: u64) -> bool {
    let mut found = false;
    let read = bounded::each(table, b'\n', bounded::LINES, |line| {
        let fields: Vec<&str> = std::str::from_utf8(line)
            .unwrap_or_default()
            .split_ascii_whitespace()
            .collect();
        // Number, local and remote address, state; the inode is the tenth.
        if let (Some(remote), Some(of)) = (fields.get(2), fields.get(9))
            && of.parse() == Ok(inode)
        {
            let address = remote.split(':').next().unwrap_or_default();
            found = address.bytes().any(|digit| digit != b'0');
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    });
    read.is_ok() && found
}

/// Whether it sees no mount at its root: CRIU reads the mounts of a container from its first process.
fn has_other_root(process: &Path) -> bool {
    let mounts = mountinfo::read(&process.join("mountinfo"));
    mounts.is_ok_and(|mounts| !mountinfo::is_mount_point(&mounts, Path::new("/")))
}

/// The POSIX message queues of a process, which are on a mount of their own that nobody sees.
struct Queues {
    /// The first process, and the one that has them, which may see less.
    processes: [PathBuf; 2],
    /// The file systems that queues are on, as `major:minor`; read when it is needed.
    devices: Option<Vec<String>>,
}

impl Queues {
    /// Whether a descriptor is one. Order matters: a file server may not answer, so only a name that a queue
    /// can have is looked at, and the kernel is asked for nothing but what it knows.
    fn has(&mut self, fd: i32, link: &[u8]) -> bool {
        let is_name = link.first() == Some(&b'/') && !link[1..].contains(&b'/');
        let path = self.processes[1].join("fd").join(fd.to_string());
        let look = || statx(CWD, &path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).ok();
        let Some(file) = is_name.then(look).flatten() else {
            return false;
        };
        let device = format!("{}:{}", file.stx_dev_major, file.stx_dev_minor);
        let devices = self.devices.get_or_insert_with(|| {
            let mounts = |process: &PathBuf| mountinfo::read(&process.join("mountinfo")).unwrap_or_default();
            let mounts = self.processes.iter().flat_map(mounts);
            let queues = mounts.filter(|mount| mount.fs_type == "mqueue");
            queues.map(|mount| mount.device).collect()
        });
        devices.contains(&device)
    }
}

/// A pidfd of a thread. Whether that of a process leads outside is left to CRIU: the container runs, and may
/// have a child that was not there a moment ago.
fn of_pidfd(process: &Path, fd: i32) -> Option<Object> {
    let text = fs::read_to_string(process.join("fdinfo").join(fd.to_string())).ok()?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
    let flags = i32::from_str_radix(flags.trim(), 8).unwrap_or(0);
    (flags & O_EXCL != 0).then_some(Object::ThreadPidfd)
}

#[cfg(test)]
mod tests;
