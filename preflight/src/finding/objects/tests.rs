use std::net::UdpSocket;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, bind, socket};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::*;

fn me() -> i32 {
    i32::try_from(std::process::id()).unwrap()
}

/// What this process has, with the descriptors of `those` alone, of objects that are looked for by
/// descriptors.
fn of_own(those: &[&OwnedFd], dumped: &[i32]) -> Vec<Object> {
    let all = of_process(Path::new("/proc"), me(), me(), &set_of(dumped.iter().copied()));
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
    assert_eq!(of_own(&[&udp, &unix], &[me()]), []);
    let vsock = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::empty(), None);
    // A kernel may be without it.
    if let Ok(vsock) = vsock {
        let _bound = bind(vsock.as_raw_fd(), &VsockAddr::new(u32::MAX, u32::MAX));
        assert_eq!(of_own(&[&udp, &vsock], &[me()]), [Object::Vsock]);
    }
    for name in ["UNIX", "TCP", "TCPv6", "UDP", "UDPv6", "RAW", "PACKET", "NETLINK"] {
        assert_eq!(Object::of_protocol(name.as_bytes()), None, "{name}");
    }
    for (name, object) in [
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
fn pidfds_of_others_are_found_and_those_of_the_container_are_not() {
    let (mut child, pid) = sleep("sleep", &["1000"]);
    let (of_child, of_self) = (pidfd(pid), pidfd(me()));
    assert_eq!(of_own(&[&of_child, &of_self], &[me(), pid]), []);
    assert_eq!(of_own(&[&of_child, &of_self], &[me()]), [Object::OutsidePidfd]);
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    assert_eq!(of_own(&[&of_child], &[me()]), [], "it has ended");

    // As a pidfd of a thread is shown: O_RDWR and O_EXCL.
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("fdinfo")).unwrap();
    for (flags, expected) in [("02000202", Some(Object::ThreadPidfd)), ("02000002", None)] {
        fs::write(
            root.path().join("fdinfo/3"),
            format!("pos:\t0\nflags:\t{flags}\nPid:\t{}\n", me()),
        )
        .unwrap();
        assert_eq!(of_pidfd(root.path(), 3, &set_of([me()])), expected, "{flags}");
    }
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
    let refusals = inspect(root.path(), 7, &[7, 8]).unwrap();
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

#[test]
fn a_namespace_of_a_process_is_none_of_the_container() {
    let (_own, pid) = sleep("unshare", &["--uts", "--mount", "sleep", "1000"]);
    let namespace = || fs::read_link(format!("/proc/{pid}/ns/uts")).unwrap();
    let host: PathBuf = fs::read_link("/proc/self/ns/uts").unwrap();
    while namespace() == host {
        std::thread::yield_now();
    }
    let found = inspect(Path::new("/proc"), me(), &[pid]).unwrap();
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
