//! Images that ask for more than the spec allows.

use super::*;

/// What is refused with FIRN-IMAGE-PRIVILEGE, and what the message contains.
pub(super) type Hostile = (&'static str, fn(&mut Given));

pub(super) const HOSTILE: &[Hostile] = &[
    ("the inheritable capabilities of thread 8", |image| {
        image.capabilities[0] = 2
    }),
    ("the permitted capabilities of thread 8", |image| {
        image.capabilities[1] = 1
    }),
    ("the effective capabilities of thread 8", |image| {
        image.capabilities[2] = 1 << 40
    }),
    ("the bounding capabilities of thread 8", |image| {
        image.capabilities[3] = 1 << 21
    }),
    ("the ambient capabilities of thread 8", |image| {
        image.capabilities[4] = 1
    }),
    ("no_new_privs of thread 1 is unset", |image| {
        image.no_new_privs = 0
    }),
    ("seccomp of thread 1 is mode 0", |image| image.seccomp = 0),
    ("seccomp of thread 1 is mode 1", |image| image.seccomp = 1),
    ("seccomp of thread 1 is mode 2, filter Some(1)", |image| {
        image.filter = 1
    }),
    ("seccomp of thread 8 is mode 0", |image| image.second_seccomp = 0),
    (
        "seccomp of thread 1 is a filter that permits read (SCMP_ARCH_",
        |image| image.answer = 0x7fff_0000,
    ),
    ("the security label of thread 1 is unconfined", |image| {
        image.label = "unconfined"
    }),
    (
        "the security label of thread 1 is none, and the spec has confined",
        |image| image.label = "",
    ),
    ("a user id of thread 1 is 0", |image| image.user = 0),
    ("a group id of thread 1 is 0", |image| image.group = 0),
    ("a user id of thread 1 is 65536", |image| {
        image.spec["process"]["noNewPrivileges"] = json!(false);
        image.user = 65_536;
    }),
    ("the scheduling policy of thread 1 is 1", |image| image.policy = 1),
    ("RLIMIT_NOFILE of process 1 is 4096", |image| image.nofile = 4096),
    ("oom_score_adj of process 1 is -11", |image| {
        image.oom_score_adj = (-11_i64).cast_unsigned()
    }),
    ("the pid namespace of process 1 is the host's", |image| {
        image.namespaces[0] = 1
    }),
    ("the network namespace of process 1", |image| {
        image.namespaces[1] = 2
    }),
    ("the ipc namespace of process 1", |image| image.namespaces[2] = 3),
    ("the uts namespace of process 1", |image| image.namespaces[3] = 4),
    ("the mount namespace of process 1", |image| {
        image.namespaces[4] = 5
    }),
    ("the user namespace of process 1", |image| image.namespaces[5] = 6),
    ("the cgroup namespace of process 1", |image| {
        image.namespaces[6] = 7
    }),
    ("the time namespace of process 1", |image| image.namespaces[7] = 8),
    ("the network namespace of process 1", |image| {
        image.namespaces[1] = 0
    }),
    ("the uid map is 0 0 65536", |image| image.user_map = [0, 0, 65536]),
    ("the uid map is 0 100000 65537", |image| image.user_map[2] = 65537),
    ("a cgroup is /other", |image| image.cgroup = "/other"),
    ("a cgroup is /default/cother", |image| {
        image.cgroup = "/default/cother"
    }),
    ("a cgroup is /default/c/../../other", |image| {
        image.cgroup = "/default/c/../../other"
    }),
    ("the cgroups is [\"../other\"]", |image| {
        (image.dir, image.cgroup) = ("../other", "/../other");
    }),
    ("a cgroup is /x", |image| {
        (image.dir, image.cgroup, image.prefix) = ("", "/x", 1)
    }),
    ("a cgroup is /default/c", |image| image.controller = "unknown"),
    ("a cgroup is /default/c", |image| image.prefix = 4000),
    ("the cgroup namespace is the host's", |image| image.prefix = 0),
    ("a cgroup is one below default/c", |image| image.below = "x"),
    ("a name below the container's cgroup is ../x", |image| {
        image.below = "../x"
    }),
    ("a name below the container's cgroup is ../../x", |image| {
        image.property = "../../x"
    }),
    ("the mount / is writable", |image| {
        image.spec["root"]["readonly"] = json!(true)
    }),
    ("the mount /data is less restricted", |image| {
        image.mounts[4].4 = 0
    }),
    ("the mount /data is another mount", |image| {
        image.mounts[4].7 = "/proc"
    }),
    ("the mount /sys is less restricted", |image| {
        image.mounts[3].4 = WRITABLE
    }),
    ("the mount /proc is another mount", |image| image.mounts[1].0 = 20),
    ("the mount /proc/sys is writable", |image| {
        image.mounts[5].4 = WRITABLE
    }),
    ("the mount /proc/sys is writable, or of another place", |image| {
        image.mounts[5].5 = "/"
    }),
    ("the mount /proc/keys is what shows something", |image| {
        image.mounts[6].7 = "/data"
    }),
    ("the mount /proc/keys is mounted over", |image| {
        image.mounts[6].3 = 1
    }),
    ("the mount /proc/keys is open", |image| {
        let _ = image.mounts.remove(6);
    }),
    ("the mount /proc/sys is open", |image| {
        let _ = image.mounts.remove(5);
    }),
    ("the mount /proc is mounted more than once", |image| {
        image.mounts.push((1, 20, 71, 2, WRITABLE, "/", "/proc", ""));
    }),
    ("the mount /mnt is there", |image| {
        image.mounts.push((1, 20, 71, 1, 0, "/", "/mnt", ""))
    }),
    ("the mount /mnt is there", |image| {
        image.mounts.push((16, 20, 80, 1, 0, "/", "/mnt", ""))
    }),
    // Its type is tmpfs, and CRIU would bind the other mount of the same device.
    ("the mount /mnt is there", |image| {
        image.mounts.push((5, 20, 74, 1, 0, "/", "/mnt", ""))
    }),
    ("the mount /mnt is there", |image| {
        image.mounts.push((5, 20, 80, 1, 0, "/", "/mnt", "/data"))
    }),
    (
        "an open file is a packet socket, and the spec has no CAP_NET_RAW",
        |image| image.file.0 = 6,
    ),
    ("an open file is a raw socket", |image| {
        image.file = (4, Out::new().number(4, 3))
    }),
    ("the number of streams is 5", |image| {
        image.streams = r#"["a","b","c","pipe:[3]","d"]"#
    }),
];
