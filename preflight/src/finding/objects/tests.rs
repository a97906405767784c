use std::net::UdpSocket;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, bind, socket};

use super::*;

fn me() -> i32 {
    i32::try_from(std::process::id()).unwrap()
}

/// What this process has, with the descriptors of `those` alone, of objects that are looked for by
/// descriptors.
fn of_own(those: &[&OwnedFd]) -> Vec<Object> {
    let all = of_process(Path::new("/proc"), me(), me());
    let at: Vec<String> = those
        .iter()
        .map(|fd| format!("descriptor {}", fd.as_raw_fd()))
        .collect();
    let found = all.unwrap().unwrap().into_iter();
    found
        .filter(|(_, where_found)| at.contains(where_found))
        .map(|(object, _)| object)
        .collect()
}

struct Sleep(Child);

impl Drop for Sleep {
    fn drop(&mut self) {
        let _killed = self.0.kill();
        let _ended = self.0.wait();
    }
}

fn sleep(program: &str, args: &[&str]) -> (Sleep, i32) {
    let child = Command::new(program).args(args).spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    (Sleep(child), pid)
}

fn pidfd(pid: i32) -> OwnedFd {
    pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap()
}

#[test]
fn sockets_are_known_by_their_protocols() {
    let (udp, unix) = (UdpSocket::bind("127.0.0.1:0").unwrap(), SockFlag::empty());
    let udp = OwnedFd::from(udp);
    let unix = socket(AddressFamily::Unix, SockType::SeqPacket, unix, None).unwrap();
    assert_eq!(of_own(&[&unix]), []);
    assert_eq!(of_own(&[&udp, &unix]), [Object::Inet]);
    for no_inet in [false, true] {
        let found = inspect(Path::new("/proc"), me(), &[me()], no_inet).unwrap();
        let is_inet = |refusal: &Refusal| {
            matches!(
                refusal,
                Refusal::Object {
                    object: Object::Inet,
                    ..
                }
            )
        };
        assert_eq!(found.iter().any(is_inet), no_inet);
    }
    let vsock = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::empty(), None);
    // A kernel may be without it.
    if let Ok(vsock) = vsock {
        let _bound = bind(vsock.as_raw_fd(), &VsockAddr::new(u32::MAX, u32::MAX));
        assert_eq!(of_own(&[&vsock]), [Object::Vsock]);
    }
    for name in ["UNIX", "UNIX-STREAM", "NETLINK"] {
        assert_eq!(Object::of_protocol(name.as_bytes()), None, "{name}");
    }
    for (name, object) in [
        ("TCPv6", Object::Inet),
        ("UDP", Object::Inet),
        ("RAW", Object::Inet),
        ("PACKET", Object::Inet),
        ("MPTCP", Object::Mptcp),
        ("ALG", Object::Crypto),
        ("PINGv6", Object::Ping),
        ("SCTP", Object::OtherProtocol),
    ] {
        assert_eq!(Object::of_protocol(name.as_bytes()), Some(object), "{name}");
    }
}

#[test]
fn a_ping_socket_with_a_peer_is_found_in_its_table() {
    let dir = tempfile::tempdir().unwrap();
    let table = dir.path().join("icmp");
    let line = |address: &str, inode: u64| {
        format!("  1: 00000000:0007 {address} 01 00000000:00000000 00:00000000 00000000 0 0 {inode} 2 0 0\n")
    };
    let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt uid inode\n";
    let lines = [head, &line("0100007F:0000", 70), &line("00000000:0000", 71)].concat();
    fs::write(&table, lines).unwrap();
    assert!(is_connected(&table, 70));
    assert!(!is_connected(&table, 71), "it sends to whom it names each time");
    assert!(!is_connected(&table, 72) && !is_connected(&dir.path().join("none"), 70));
}

#[test]
fn a_pidfd_of_a_thread_is_found_and_others_are_left_to_criu() {
    let (_child, pid) = sleep("sleep", &["1000"]);
    let (of_child, of_self) = (pidfd(pid), pidfd(me()));
    assert_eq!(of_own(&[&of_child, &of_self]), []);
    // As a pidfd of a thread is shown: O_RDWR and O_EXCL.
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("fdinfo")).unwrap();
    for (flags, expected) in [("02000202", Some(Object::ThreadPidfd)), ("02000002", None)] {
        let text = format!("pos:\t0\nflags:\t{flags}\nPid:\t{}\n", me());
        fs::write(root.path().join("fdinfo/3"), text).unwrap();
        assert_eq!(of_pidfd(root.path(), 3), expected, "{flags}");
    }
}

/// A socket that listens for Multipath TCP and one that it has accepted from a client without that.
#[test]
fn what_a_multipath_socket_accepts_from_others_is_tcp() {
    use rustix::net::{SocketAddrV4, SocketType, accept, bind, getsockname, listen, socket};
    let made = socket(
        rustix::net::AddressFamily::INET,
        SocketType::STREAM,
        Some(ipproto::MPTCP),
    );
    // A kernel may be without it.
    let Ok(listener) = made else { return };
    bind(&listener, &SocketAddrV4::new([127, 0, 0, 1].into(), 0)).unwrap();
    listen(&listener, 1).unwrap();
    let address = SocketAddrV4::try_from(getsockname(&listener).unwrap()).unwrap();
    let _client = std::net::TcpStream::connect(address).unwrap();
    let accepted = accept(&listener).unwrap();
    assert_eq!(of_own(&[&listener]), [Object::Mptcp]);
    assert_eq!(of_own(&[&accepted]), []);
}

#[test]
fn namespaces_of_a_process_that_was_not_waited_for_do_not_count() {
    let root = tempfile::tempdir().unwrap();
    for (pid, namespaces) in [(1, &["uts", "user"][..]), (2, &["user"])] {
        let process = root.path().join(pid.to_string());
        for dir in ["fd", "ns"] {
            fs::create_dir_all(process.join(dir)).unwrap();
        }
        fs::write(process.join("maps"), "").unwrap();
        for name in namespaces {
            symlink(format!("{name}:[{pid}]"), process.join("ns").join(name)).unwrap();
        }
    }
    assert_eq!(of_process(root.path(), 1, 2).unwrap().unwrap(), []);
    symlink("uts:[1]", root.path().join("2/ns/uts")).unwrap();
    let found = of_process(root.path(), 1, 2).unwrap().unwrap();
    assert_eq!(found, [(Object::Namespace("a user"), "user:[2]".to_owned())]);
}

#[test]
fn objects_are_known_by_their_links_and_each_kind_is_named_once() {
    let root = tempfile::tempdir().unwrap();
    let process = root.path().join("7");
    fs::create_dir_all(process.join("fd")).unwrap();
    let maps = "1000-2000 rw-s 00000000 00:07 9 /secretmem (deleted)\n3000-4000 rw-p 00000000 00:00 0 \n";
    fs::write(process.join("maps"), maps).unwrap();
    fs::write(process.join("comm"), "python\n").unwrap();
    for (fd, link) in [
        "anon_inode:bpf-map",
        "anon_inode:bpf-prog",
        "anon_inode:[eventfd]",
        "anon_inode:[perf_event]",
        "anon_inode:[userfaultfd]",
        "anon_inode:seccomp notify",
        "anon_inode:kvm-vm",
        "anon_inode:landlock-ruleset",
        "/srv/secretmem",
        "/secretmem",
    ]
    .into_iter()
    .enumerate()
    {
        symlink(link, process.join("fd").join(fd.to_string())).unwrap();
    }
    let refusals = inspect(root.path(), 7, &[7, 8], false).unwrap();
    let found: Vec<Object> = (refusals.iter())
        .map(|refusal| match refusal {
            Refusal::Object { pid: 7, object, .. } => *object,
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(
        found,
        [
            Object::Bpf,
            Object::Kvm,
            Object::LandlockRules,
            Object::PerfEvent,
            Object::SeccompListener,
            Object::SecretMemory,
            Object::Userfaultfd,
        ]
    );
    let secret = refusals[5].to_string();
    assert_eq!(
        secret,
        "process 7 (python) has secret memory (memfd_secret) (memory at 0x1000), which CRIU cannot dump"
    );
}

/// As the kernel shows a queue, and the mounts of a process that is in a chroot.
#[test]
fn queues_are_known_by_their_file_system_and_a_chroot_by_its_mounts() {
    let root = tempfile::tempdir().unwrap();
    let process = root.path().join("7");
    for dir in ["fd", "ns"] {
        fs::create_dir_all(process.join(dir)).unwrap();
    }
    fs::write(process.join("maps"), "").unwrap();
    // Of the directory that /tmp is on, in the place of a queue.
    symlink("/tmp", process.join("fd/3")).unwrap();
    let own = fs::metadata("/tmp").unwrap();
    let (major, minor) = (
        rustix::fs::major(std::os::unix::fs::MetadataExt::dev(&own)),
        rustix::fs::minor(std::os::unix::fs::MetadataExt::dev(&own)),
    );
    let found = |mounts: &str, init| {
        fs::write(process.join("mountinfo"), mounts).unwrap();
        let found = of_process(root.path(), init, 7).unwrap().unwrap();
        found.into_iter().map(|(object, _)| object).collect::<Vec<_>>()
    };
    let line = |device: &str, at: &str, kind: &str| format!("9 1 {device} / {at} rw - {kind} none rw\n");
    let device = format!("{major}:{minor}");
    let container = line("0:1", "/", "overlay");
    let visible = line(&device, "/dev/mqueue", "mqueue");
    assert_eq!(found(&format!("{container}{visible}"), 7), [Object::MessageQueue]);
    let other = line("0:2", "/dev/mqueue", "mqueue");
    assert_eq!(found(&format!("{container}{other}"), 7), []);
    assert_eq!(found(&line(&device, "/", "tmpfs"), 7), []);
    assert_eq!(found(&other, 7), [Object::Root]);
    assert_eq!(found("", 7), [Object::Root]);
    assert_eq!(found(&other, 8), [], "a child of it moves");
}

#[test]
fn a_namespace_of_a_process_is_none_of_the_container() {
    let (_own, pid) = sleep("unshare", &["--uts", "--mount", "sleep", "1000"]);
    let namespace = || fs::read_link(format!("/proc/{pid}/ns/uts")).unwrap();
    let host: PathBuf = fs::read_link("/proc/self/ns/uts").unwrap();
    while namespace() == host {
        std::thread::yield_now();
    }
    let found = inspect(Path::new("/proc"), me(), &[pid], false).unwrap();
    let [Refusal::Object { object, at, .. }] = &found[..] else {
        panic!("{found:?}");
    };
    assert_eq!(*object, Object::Namespace("a UTS"), "a mount namespace moves");
    assert_eq!(*at, namespace().to_string_lossy());
    assert!(!has_user_namespace(Path::new("/proc"), pid));

    let (_other, pid) = sleep("unshare", &["--user", "sleep", "1000"]);
    while !has_user_namespace(Path::new("/proc"), pid) {
        std::thread::yield_now();
    }
    assert!(!has_user_namespace(Path::new("/proc"), i32::MAX), "it has ended");
}
