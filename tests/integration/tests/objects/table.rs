//! The objects of the suite: the kinds that the workload `objects` makes, and what becomes of each.

use firn_node::Suite;

/// A kind of the workload `objects`, its name on the page, and options of its container.
pub(crate) type Object<'a> = (&'static str, &'static str, &'a [&'a str]);

const MOVES: [Object<'_>; 52] = [
    ("flock", "lock of a file: flock", &[]),
    ("record-lock", "lock of a file: fcntl, of the process", &[]),
    ("open-file-lock", "lock of a file: fcntl, of the open file", &[]),
    (
        "timer",
        "timerfd, periodic, whose interval is shorter than the standstill",
        &[],
    ),
    ("event", "eventfd", &[]),
    ("signal", "signalfd, with a pending signal", &[]),
    ("pipe", "pipe, with unread bytes", &[]),
    ("pair", "Unix socket, connected inside, with unread bytes", &[]),
    ("memfd", "memfd", &[]),
    ("deleted", "file without a name", &[]),
    ("udp", "UDP socket", &[]),
    ("listener", "TCP socket that listens", &[]),
    ("pidfd", "pidfd of a process of the container", &[]),
    ("mount-namespace", "mount namespace of a process", SYS_ADMIN),
    ("epoll", "epoll, with a pipe that can be read", &[]),
    ("datagrams", "Unix datagram sockets, with unread messages", &[]),
    ("fifo", "named pipe, with unread bytes", &[]),
    ("pty", "pseudoterminal, both ends", &[]),
    ("path-only", "descriptor that only names a file (O_PATH)", &[]),
    ("shared-file", "file in /dev/shm, mapped", &[]),
    ("shared-memory", "shared memory of System V", &[]),
    ("semaphore", "semaphore of System V", &[]),
    ("message-queue", "message queue of System V, with a message", &[]),
    ("posix-timer", "POSIX timer, periodic, that sends signals", &[]),
    ("aio", "context for asynchronous I/O (aio)", &[]),
    ("netlink", "netlink socket", &[]),
    ("packet", "packet socket", NET_RAW),
    ("raw", "raw IP socket", NET_RAW),
    ("zombie", "child that was not waited for", &[]),
    ("no-directory", "working directory that was removed", &[]),
    ("nice", "nice value", &[]),
    ("policy", "scheduling policy", &[]),
    ("oom-score", "score for the OOM killer", &[]),
    ("no-huge-pages", "no transparent huge pages (prctl)", &[]),
    ("name", "name of a process", &[]),
    ("parents-end", "signal at the end of its parent", &[]),
    ("subreaper", "process that adopts orphans", &[]),
    ("no-new-privileges", "no new privileges", &[]),
    ("umask", "mask for new files (umask)", &[]),
    ("limit", "limit of a process (rlimit)", &[]),
    ("ignored", "signal that is ignored", &[]),
    ("seccomp-filter", "seccomp filter", &[]),
    ("not-dumpable", "process that dumps no core", &[]),
    ("watch", "inotify of /etc", &[]),
    ("lease", "lease of a file", &[]),
    ("directory", "open directory", &[]),
    ("proc-file", "file of /proc about the process itself", &[]),
    (
        "unix-listener",
        "Unix socket that listens, with a connection that waits",
        &[],
    ),
    ("passed-descriptor", "descriptor on its way in a Unix socket", &[]),
    (
        "epoll-of-other",
        "epoll, with a descriptor that has another number by now",
        &[],
    ),
    ("interval-timer", "periodic timer of setitimer", &[]),
    ("terminal", "terminal of its session, opened as /dev/tty", &[]),
];

/// They move where firn configures CRIU: with a GPU.
pub(super) const WATCHES: [Object<'_>; 3] = [
    ("watch-elsewhere", "inotify of another directory", &[]),
    ("watch-tree", "inotify of 2,000 directories of a tree", &[]),
    ("fanotify", "fanotify of a file", SYS_ADMIN),
];

/// They move where the node has huge pages for them.
pub(super) const HUGE_PAGES: [Object<'_>; 2] = [
    ("huge-page", "memory in huge pages (hugetlbfs), private", &[]),
    (
        "shared-huge-page",
        "memory in huge pages (hugetlbfs), shared",
        &[],
    ),
];

/// A setting that no copy has, and how `firn audit` calls it; `None` if it cannot be seen.
pub(super) const LOST: [(Object<'_>, Option<&str>); 5] = [
    (("affinity", "CPU affinity", &[]), Some("CPU affinity (")),
    (
        ("io-priority", "I/O priority", &[]),
        Some("I/O priority (best-effort, 7)"),
    ),
    (
        ("timer-slack", "slack of timers", &[]),
        Some("timer slack (77000 ns)"),
    ),
    (("personality", "personality", &[]), Some("personality (0x40000)")),
    (("memory-policy", "policy for memory", SYS_NICE), None),
];

/// An object that is refused, how firn calls it, and what CRIU has in its log.
pub(super) type Refused = (Object<'static>, &'static str, &'static str);

pub(super) const REFUSED: [Refused; 19] = [
    (
        ("uts-namespace", "UTS namespace of a process", SYS_ADMIN),
        "a UTS namespace",
        "Can't dump nested uts namespace",
    ),
    (
        ("ipc-namespace", "IPC namespace of a process", SYS_ADMIN),
        "an IPC namespace",
        "Can't dump nested ipc namespace",
    ),
    (
        ("user-namespace", "user namespace of a process", SYS_ADMIN),
        "a user namespace",
        "Can't dump nested user namespace",
    ),
    (
        ("pid-namespace", "PID namespace of a process", SYS_ADMIN),
        "a PID namespace",
        "Can't dump nested pid namespace",
    ),
    (
        ("network-namespace", "network namespace of a process", SYS_ADMIN),
        "a network namespace",
        "Unable to dump more than one netns",
    ),
    (
        ("cgroup-namespace", "cgroup namespace of a process", SYS_ADMIN),
        "a cgroup namespace",
        "Can't dump nested cgroup namespace",
    ),
    (
        ("time-namespace", "time namespace of a process", SYS_ADMIN),
        "a time namespace",
        "Can't dump nested time namespace",
    ),
    (
        ("watch-without-name", "inotify of a removed directory", &[]),
        "a watch (inotify, fanotify)",
        "Can't dump that handle",
    ),
    (
        (
            "unix-waiting",
            "Unix socket that listens, with bytes in a connection that waits",
            &[],
        ),
        "a Unix socket in a connection that no server has accepted",
        "Non-empty write queue on an in-flight socket",
    ),
    (
        ("bpf", "BPF map", SYS_ADMIN),
        "a BPF map",
        "(anon anon_inode:bpf-map)",
    ),
    (
        ("perf-event", "perf event", SYS_ADMIN),
        "a perf event",
        "(anon anon_inode:[perf_event])",
    ),
    (
        ("userfaultfd", "userfaultfd", PTRACE),
        "a userfaultfd",
        "(anon anon_inode:[userfaultfd])",
    ),
    (
        ("secret-memory", "memfd_secret", &[]),
        "secret memory",
        "path=/secretmem (deleted)",
    ),
    (
        ("seccomp-listener", "listener of seccomp notifications", &[]),
        "a listener of seccomp",
        "(anon anon_inode:seccomp notify)",
    ),
    (
        ("thread-pidfd", "pidfd of a thread", &[]),
        "a pidfd of a thread",
        "PIDFD_THREAD flag is currently not supported",
    ),
    (
        ("landlock-rules", "set of Landlock rules", &[]),
        "a set of Landlock rules",
        "(anon anon_inode:[landlock-ruleset])",
    ),
    (
        ("vsock", "vsock socket", &[]),
        "a vsock socket",
        "Unknown socket collected (family 40)",
    ),
    (
        ("posix-queue", "POSIX message queue", &[]),
        "a POSIX message queue",
        "Can't lookup mount=",
    ),
    (
        ("mptcp", "Multipath TCP socket", &[]),
        "a Multipath TCP socket",
        "Unsupported proto 262",
    ),
];

/// As [`REFUSED`], with the code: objects that have a rule of their own.
pub(super) const BY_RULES: [(Refused, &str); 3] = [
    (
        (("io-uring", "io_uring", &[]), "an io_uring", "Dump files (pid"),
        "FIRN-IO-URING",
    ),
    (
        (
            ("connection", "TCP connection", &[]),
            "TCP connections are established",
            "Connected TCP socket",
        ),
        "FIRN-TCP",
    ),
    (
        (
            (
                "other-name",
                "file of the root by a deleted name, with another one",
                &[],
            ),
            "/object",
            "Can't create link remap",
        ),
        "FIRN-DELETED-NAME",
    ),
];

/// It moves with a GPU: CRIU makes links where the image has the files.
pub(super) const OTHER_NAME: Object<'_> = (
    "other-name-in-memory",
    "file of /dev/shm by a deleted name, with another one",
    &[],
);

const SYS_ADMIN: &[&str] = &["--cap-add", "CAP_SYS_ADMIN"];
const SYS_NICE: &[&str] = &["--cap-add", "CAP_SYS_NICE"];
/// podman and CRI do not give it, and ctr does.
const NET_RAW: &[&str] = &["--cap-add", "CAP_NET_RAW"];
const PTRACE: &[&str] = &["--cap-add", "CAP_SYS_PTRACE"];

/// Those of [`MOVES`] that the CRIU of a Debian suite can dump.
pub(crate) fn movable(suite: Suite) -> Vec<Object<'static>> {
    let is_fit = |object: &Object<'_>| suite == Suite::Forky || !is_inet(object);
    MOVES.into_iter().filter(is_fit).collect()
}

/// Those of [`MOVES`] that CRIU before 4.2 cannot dump on Linux 6.16 and newer.
pub(super) fn inet() -> impl Iterator<Item = Object<'static>> {
    MOVES.into_iter().filter(is_inet)
}

fn is_inet(object: &Object<'_>) -> bool {
    ["udp", "listener", "packet", "raw"].contains(&object.0)
}
