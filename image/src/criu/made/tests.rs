//! Processes that are there, compared with specs that allow what they have, and with specs that allow less.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use firn_host::Problem;
use serde_json::{Value, json};

use super::super::namespaces::{check_made, check_made_map};
use super::*;

/// A process that ends with this value.
struct Process {
    child: Child,
    /// Its first line of output.
    output: String,
}

impl Process {
    /// Waits until the process, or one below it, prints that it is ready.
    fn start(program: &str, args: &[&str]) -> Self {
        let mut command = Command::new(program);
        let mut child = command.args(args).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = String::new();
        let stdout = child.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut output).unwrap();
        let process = Self { child, output };
        assert!(process.output.starts_with("ready"), "{program} {args:?}");
        process
    }

    fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// What a process does that is as it should be.
const READY: &str = "echo ready && exec sleep 600";

/// A process like a container's, with namespaces of its own of every kind.
struct Container {
    init: i32,
    /// Whose child init is.
    _parent: Process,
    /// Who has made the user namespace.
    _maker: Process,
    _dir: tempfile::TempDir,
}

impl Container {
    fn start() -> Self {
        let maker = Process::start("unshare", &["--user", "sh", "-c", READY]);
        for map in ["uid_map", "gid_map"] {
            fs::write(format!("/proc/{}/{map}", maker.pid()), "0 100000 65536").unwrap();
        }
        // The root is a part of the host's in which programs run, without the mounts below it. The shell
        // comes first: of what follows, only the last process knows when it is ready.
        let script = format!(
            "mount --bind /usr \"$0\" && cd \"$0\" && ulimit -n 1024 && \
             echo 100 > /proc/self/oom_score_adj && \
             exec nsenter --user=/proc/{}/ns/user --setuid 0 --setgid 0 \
             unshare --mount --net --uts --ipc --cgroup --pid --time --fork chroot . \
             /bin/setpriv --pdeathsig KILL --reuid 1000 --regid 1000 --groups 5 --no-new-privs \
             --inh-caps -all,+kill --ambient-caps -all,+kill --bounding-set -all,+chown,+kill \
             /bin/sh -c '{READY}'",
            maker.pid()
        );
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_str().unwrap();
        let parent = Process::start("unshare", &["--mount", "sh", "-c", &script, root]);
        let children = format!("/proc/{0}/task/{0}/children", parent.pid());
        Self {
            init: fs::read_to_string(children).unwrap().trim().parse().unwrap(),
            _parent: parent,
            _maker: maker,
            _dir: dir,
        }
    }

    /// Compares it with the spec that allows what it has, edited.
    fn check(&self, edit: impl Fn(&mut Value)) -> Result<(), ImageFault> {
        let own = |(kind, _): &(&str, &str)| json!({ "type": kind });
        let mut spec = json!({
            "process": {
                "user": {"uid": 1000, "gid": 1000, "additionalGids": [5]},
                "noNewPrivileges": true,
                "oomScoreAdj": 100,
                "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
                "capabilities": {"bounding": ["CAP_CHOWN", "CAP_KILL"], "permitted": ["CAP_KILL"]},
            },
            "root": {"path": "rootfs"},
            "linux": {
                "namespaces": NAMESPACES.iter().map(own).collect::<Vec<_>>(),
                "uidMappings": [{"containerID": 0, "hostID": 100_000, "size": 65536}],
                "gidMappings": [{"containerID": 0, "hostID": 100_000, "size": 65536}],
            },
        });
        edit(&mut spec);
        check(&Spec::from(spec), self.init, &[self.init], &Host::this())
    }
}

/// Kinds, as a spec names them and as /proc does.
const NAMESPACES: [(&str, &str); 8] = [
    ("pid", "pid"),
    ("network", "net"),
    ("ipc", "ipc"),
    ("uts", "uts"),
    ("mount", "mnt"),
    ("user", "user"),
    ("cgroup", "cgroup"),
    ("time", "time"),
];

/// Every capability: such a container may mount what it likes.
fn privileged() -> Value {
    let names: Vec<String> = caps::all().iter().map(ToString::to_string).collect();
    json!({"process": {"capabilities": {"bounding": names, "permitted": names}}, "linux": {}})
}

/// What a thread that is too privileged is refused with.
fn fault(file: &str, what: &str, found: &str, allowed: &str) -> Result<(), ImageFault> {
    Err(ImageFault::exceeds(file, what, found, allowed))
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What the spec does not allow any more, which of the process exceeds it, what it has, and what it may have.
type Tightened = (fn(&mut Value), &'static str, &'static str, &'static str);

const TIGHTENED: [Tightened; 14] = [
    (
        |spec| spec["process"]["user"]["uid"] = json!(1001),
        "a user id of thread PID",
        "1000",
        "1001",
    ),
    (
        |spec| spec["process"]["user"]["gid"] = json!(1001),
        "a group id of thread PID",
        "1000",
        "[5, 1001]",
    ),
    (
        |spec| spec["process"]["user"]["additionalGids"] = json!([]),
        "a group id of thread PID",
        "5",
        "[1000]",
    ),
    (
        |spec| spec["process"]["capabilities"]["bounding"] = json!(["CAP_CHOWN"]),
        "the inheritable capabilities of thread PID",
        "0000000000000020",
        "0000000000000001",
    ),
    (
        |spec| spec["process"]["capabilities"]["permitted"] = json!([]),
        "the permitted capabilities of thread PID",
        "0000000000000020",
        "0000000000000000",
    ),
    (
        |spec| spec["process"]["capabilities"]["bounding"] = json!(["CAP_KILL"]),
        "the bounding capabilities of thread PID",
        "0000000000000021",
        "0000000000000020",
    ),
    (
        |spec| spec["process"]["rlimits"][0]["hard"] = json!(1023),
        "RLIMIT_NOFILE of process PID",
        "1024, at most 1024",
        "1023",
    ),
    (
        |spec| spec["process"]["oomScoreAdj"] = json!(101),
        "oom_score_adj of process PID",
        "100",
        "101",
    ),
    (
        |spec| spec["process"]["apparmorProfile"] = json!("confined"),
        "the security label of thread PID",
        "LABEL",
        "confined",
    ),
    (
        |spec| spec["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_ERRNO"}),
        "seccomp of thread PID",
        "mode 0, filter Some(0)",
        "a filter",
    ),
    (
        |spec| spec["linux"]["uidMappings"][0]["size"] = json!(65535),
        "the uid map",
        "0 100000 65536",
        "[[0, 100000, 65535]]",
    ),
    (
        |spec| spec["linux"]["gidMappings"][0]["hostID"] = json!(100_001),
        "the gid map",
        "0 100000 65536",
        "[[0, 100001, 65536]]",
    ),
    (
        |spec| spec["linux"]["namespaces"][1]["path"] = json!("/proc/self/ns/net"),
        "the network namespace",
        "another",
        "one that is joined",
    ),
    (
        |spec| spec["root"]["readonly"] = json!(true),
        "the mount /",
        "writable",
        "a root that is read-only",
    ),
];

#[test]
fn a_container_is_taken_by_its_spec_and_by_none_that_allows_less() {
    let container = Container::start();
    let init = container.init;
    assert_eq!(container.check(|_| {}), Ok(()));
    let joined = container
        .check(|spec| spec["linux"]["namespaces"][1]["path"] = json!(format!("/proc/{init}/ns/net")));
    assert_eq!(joined, Ok(()));
    let label = label_of(&fs::read("/proc/self/attr/current").unwrap_or_default());
    let label = if label.is_empty() { "none" } else { &label };
    for (edit, what, found, allowed) in TIGHTENED {
        let file = match what {
            "the mount /" => format!("/proc/{init}/mountinfo"),
            _ => format!("process {init}"),
        };
        let what = what.replace("PID", &init.to_string());
        let expected = fault(&file, &what, &found.replace("LABEL", label), allowed);
        assert_eq!(container.check(edit), expected);
    }
}

#[test]
fn a_process_in_a_namespace_of_the_hosts_is_taken_where_the_spec_makes_none() {
    let process = Process::start("sh", &["-c", READY]);
    let pid = process.pid();
    let checked = |spec: Value| check(&Spec::from(spec), pid, &[pid], &Host::this());
    assert_eq!(checked(privileged()), Ok(()));
    for (kind, file) in NAMESPACES {
        let mut spec = privileged();
        for map in ["uidMappings", "gidMappings"] {
            spec["linux"][map] = json!([{"containerID": 0, "hostID": 0, "size": u32::MAX}]);
        }
        spec["linux"]["namespaces"] = json!([{ "type": kind }]);
        let name = format!("process {pid}");
        let what = format!("the {kind} namespace");
        assert_eq!(
            checked(spec.clone()),
            fault(&name, &what, "the host's", "one of the container's own")
        );
        spec["linux"]["namespaces"][0]["path"] = json!(format!("/proc/self/ns/{file}"));
        let joined = check_made(&Spec::from(spec), pid, pid, &Host::this());
        assert_eq!(joined, Ok(()), "{kind}");
    }
}

#[test]
fn every_process_is_in_the_containers_mount_namespace() {
    let start = || Process::start("unshare", &["--mount", "sh", "-c", READY]);
    let [init, other] = [start(), start()].map(|process| (process.pid(), process));
    let checked = |pid, bounding: &[&str]| {
        let spec = json!({
            "process": {"capabilities": {"bounding": bounding}},
            "linux": {"namespaces": [{"type": "mount"}]},
        });
        check_made(&Spec::from(spec), init.0, pid, &Host::this())
    };
    assert_eq!(checked(init.0, &[]), Ok(()));
    let name = format!("process {}", other.0);
    let expected = fault(
        &name,
        "the mount namespace",
        "one of its own",
        "that of the container",
    );
    assert_eq!(checked(other.0, &[]), expected);
    assert_eq!(checked(other.0, &["CAP_SYS_ADMIN"]), Ok(()));
    let gone = checked(i32::MAX, &[]).unwrap_err();
    assert_eq!(gone.code(), "FIRN-IMAGE-UNREADABLE");
    assert!(
        gone.to_string()
            .ends_with("its mount namespace cannot be looked at")
    );
}

#[test]
fn the_map_of_a_user_namespace_that_is_joined_or_not_asked_for_is_not_the_specs() {
    let me = std::process::id().cast_signed();
    for namespaces in [json!([]), json!([{"type": "user", "path": "/proc/self/ns/user"}])] {
        let spec = Spec::from(json!({"linux": {"namespaces": namespaces}}));
        assert_eq!(check_made_map(&spec, me), Ok(()));
    }
}

#[test]
fn a_process_has_the_filter_and_the_promise_that_the_spec_asks_for() {
    // Number of prctl(2), which loads a filter that allows everything.
    const PRCTL: u32 = if cfg!(target_arch = "x86_64") { 157 } else { 167 };
    let filtered = format!(
        "my $filter = pack('SCCL', 6, 0, 0, 0x7fff0000); my $program = pack('S x6 P', 1, $filter); \
         syscall({PRCTL}, 22, 2, $program) == 0 or die $!; exec 'sh', '-c', '{READY}'"
    );
    let filtered = Process::start("perl", &["-e", &filtered]);
    let promised = Process::start("setpriv", &["--no-new-privs", "sh", "-c", READY]);
    let checked = |process: &Process, edit: fn(&mut Value)| {
        let mut spec = privileged();
        edit(&mut spec);
        check(&Spec::from(spec), process.pid(), &[process.pid()], &Host::this())
    };
    let filter = |spec: &mut Value| spec["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_ERRNO"});
    let promise = |spec: &mut Value| spec["process"]["noNewPrivileges"] = json!(true);
    assert_eq!(checked(&filtered, filter), Ok(()));
    assert_eq!(checked(&promised, promise), Ok(()));
    let pid = filtered.pid();
    let what = format!("no_new_privs of thread {pid}");
    let expected = fault(&format!("process {pid}"), &what, "unset", "set");
    assert_eq!(checked(&filtered, promise), expected);
    assert!(checked(&promised, filter).is_err());
}

#[test]
fn a_child_in_another_cgroup_is_refused_and_one_that_has_ended_is_not() {
    let script = "setpriv --pdeathsig KILL sleep 600 & echo ready $! && exec sleep 600";
    let parent = Process::start("sh", &["-c", script]);
    let child: i32 = parent.output.trim_start_matches("ready").trim().parse().unwrap();
    let spec = Spec::from(privileged());
    let checked = |pids: &[i32]| check(&spec, parent.pid(), pids, &Host::this());
    let name = format!("process {child}");
    let expected = fault(&name, "its cgroup", "another", "the container's own");
    assert_eq!(checked(&[parent.pid()]), expected);
    assert_eq!(checked(&[parent.pid(), child]), Ok(()));
    // The shell waits for its children, what it is replaced by does not.
    until("the shell is replaced", || procfs::comm(parent.pid()) == "sleep");
    let killed = Command::new("kill").args(["-9", &child.to_string()]).status();
    assert!(killed.unwrap().success());
    until("it has ended", || procfs::state(child) == Some('Z'));
    assert_eq!(checked(&[parent.pid()]), Ok(()));
    assert_eq!(checked(&[parent.pid(), child]), Ok(()));
}

#[test]
fn a_process_that_is_not_there_cannot_be_compared() {
    let mut spec = privileged();
    let fault = |spec: &Value| {
        let fault = check(&Spec::from(spec.clone()), i32::MAX, &[i32::MAX], &Host::this()).unwrap_err();
        assert_eq!(fault.code(), "FIRN-IMAGE-UNREADABLE");
        fault.to_string()
    };
    assert!(fault(&spec).contains("process 2147483647"));
    spec["linux"]["namespaces"] = json!([{"type": "user"}]);
    assert!(fault(&spec).contains("/proc/2147483647/uid_map"));
    assert!(loosened(&Spec::from(spec), i32::MAX).is_err());
}

#[test]
fn every_thread_is_compared() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let (leave, left) = std::sync::mpsc::channel::<()>();
    // The kernel has this id for each thread.
    let thread = std::thread::spawn(move || {
        nix::unistd::setfsuid(12345.into());
        sender.send(nix::unistd::gettid().as_raw()).unwrap();
        left.recv().unwrap();
    });
    let tid = receiver.recv().unwrap();
    let mut spec = privileged();
    spec["linux"]["namespaces"] = json!([{"type": "user"}]);
    spec["linux"]["uidMappings"] = json!([{"containerID": 0, "hostID": 0, "size": 1}]);
    spec["linux"]["gidMappings"] = json!([{"containerID": 0, "hostID": 0, "size": u32::MAX}]);
    let host = Host {
        namespace: |path| Some(u64::from(path.starts_with("/proc/self/ns"))),
        ..Host::this()
    };
    let spec = Spec::from(spec);
    let allowed = Allowed::by(&spec, &host).unwrap();
    let me = std::process::id().cast_signed();
    let mut found = Ok(());
    // Threads of other tests end meanwhile.
    until("all threads are there", || {
        found = process(&spec, &allowed, me, me, &host);
        !matches!(found, Err(ImageFault::Unreadable { .. }))
    });
    leave.send(()).unwrap();
    thread.join().unwrap();
    let what = format!("a user id of thread {tid}");
    let outside = u32::MAX.to_string();
    let expected = fault(
        &format!("process {me}"),
        &what,
        &outside,
        "one of the user namespace",
    );
    assert_eq!(found, expected);
}

#[test]
fn what_proc_shows_of_a_process_is_read() {
    let container = Container::start();
    let spec = json!({"linux": {"namespaces": []}});
    let thread = thread_of(&Spec::from(spec), container.init, container.init);
    let (core, thread) = (core(container.init).unwrap(), thread.unwrap().unwrap());
    assert_eq!(thread.creds.users, [101_000; 4]);
    assert_eq!(thread.creds.groups, [101_000, 101_000, 101_000, 101_000, 100_005]);
    let sets = [0x20, 0x20, 0x20, 0x21, 0x20];
    assert_eq!(thread.creds.capabilities.map(|(_, set)| set), sets);
    assert!(thread.creds.no_new_privs);
    let limits = core.rlimits.unwrap();
    assert_eq!((limits.len(), limits[7]), (16, [1024; 2]));
    assert_eq!(limits[0], [u64::MAX; 2], "no limit");
    assert_eq!(core.oom_score_adj, Some(100));
}

#[test]
fn a_label_is_the_name_without_its_mode() {
    let labels: [(&[u8], &str); 5] = [
        (b"confined (enforce)\n", "confined"),
        (b"unconfined\n", ""),
        (b"other (complain)\n", "other"),
        (
            b"system_u:system_r:container_t:s0:c1,c2\0",
            "system_u:system_r:container_t:s0:c1,c2",
        ),
        (b"", ""),
    ];
    for (text, label) in labels {
        assert_eq!(label_of(text), label);
    }
}

/// By them [`check`] sees that a mount shows what the node has mounted.
#[test]
fn the_nodes_mounts_are_known() {
    let me = i32::try_from(std::process::id()).unwrap();
    let mounted = Host::of(me).unwrap().mounted;
    let root = mountinfo::of_process(me).unwrap().remove(0);
    assert!(mounted.contains(&mounts::device(&root).unwrap()), "{mounted:?}");
}

#[test]
fn ids_are_those_of_a_user_namespace_that_the_spec_makes() {
    let mut spec = json!({"linux": {
        "namespaces": [],
        "uidMappings": [
            {"containerID": 0, "hostID": 100_000, "size": 10},
            {"containerID": 10, "hostID": 5000, "size": 1},
        ],
        "gidMappings": [{"containerID": 7, "hostID": 0, "size": 1}],
    }});
    let of = |spec: &Value, kind, id| inner(&Spec::from(spec.clone()), kind, id);
    assert_eq!(of(&spec, "uid", 100_003), 100_003, "there is none");
    spec["linux"]["namespaces"] = json!([{"type": "user", "path": "/run/userns/pod"}]);
    assert_eq!(of(&spec, "uid", 100_003), 100_003, "it is joined");
    spec["linux"]["namespaces"] = json!([{"type": "user"}]);
    for (kind, outside, inside) in [
        ("uid", 100_000, 0),
        ("uid", 100_009, 9),
        ("uid", 100_010, u32::MAX),
        ("uid", 99_999, u32::MAX),
        ("uid", 5000, 10),
        ("uid", 0, u32::MAX),
        ("gid", 0, 7),
        ("gid", 1, u32::MAX),
    ] {
        assert_eq!(of(&spec, kind, outside), inside, "{kind} {outside}");
    }
}

#[test]
fn a_mount_that_has_lost_flags_of_the_spec_is_found_with_them() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("mount -t tmpfs -o nosuid,relatime none \"$0\" && {READY}");
    let point = dir.path().to_str().unwrap();
    let process = Process::start("unshare", &["--mount", "sh", "-c", &script, point]);
    let loosened = |options: Value| {
        let mount = json!({"destination": point, "type": "bind", "source": "/srv", "options": options});
        loosened(&Spec::from(json!({ "mounts": [mount] })), process.pid())
    };
    assert_eq!(loosened(json!(["rbind", "nosuid"])), Ok(Vec::new()));
    let (read_only, no_suid, relatime) = (1, 2, 1 << 21);
    assert_eq!(
        loosened(json!(["rbind", "ro"])),
        Ok(vec![(
            Path::new(point).to_owned(),
            read_only | no_suid | relatime
        )])
    );
}
