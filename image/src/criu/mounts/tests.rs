//! Mounts as lines of words: those of a container that fits its spec, and what is done to them.

use serde_json::{Value, json};

mod links;
mod made;

use super::*;
use firn_host::mountinfo;

fn given() -> Value {
    json!({
        "mounts": [
            {"destination": "/proc", "type": "proc", "options": ["nosuid", "nodev", "noexec"]},
            {"destination": "/dev", "type": "tmpfs", "options": ["nosuid"]},
            {"destination": "/sys", "type": "sysfs", "options": ["nosuid", "nodev", "noexec", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "options": ["nosuid", "ro"]},
            {
                "destination": "/data",
                "type": "bind",
                "source": "/srv",
                "options": ["rbind", "rprivate", "ro"]
            },
        ],
        "linux": {
            "devices": [{"path": "/dev/gpu", "type": "c", "major": 195, "minor": 0}],
            "maskedPaths": ["/proc/keys", "/proc/acpi", "/sys/firmware"],
            "readonlyPaths": ["/proc/sys"],
        },
    })
}

/// The same with a root that is read-only.
fn given_read_only() -> Value {
    let mut spec = given();
    spec["root"] = json!({"readonly": true});
    spec
}

/// The same with a bind mount in which mounts of the host appear.
fn given_slave() -> Value {
    let mut spec = given();
    spec["mounts"][4]["options"] = json!(["rbind", "private", "rslave", "ro"]);
    spec
}

/// The same with cgroups that are not.
fn given_writable_cgroups() -> Value {
    let mut spec = given();
    spec["mounts"][3]["options"] = json!(["nosuid"]);
    spec
}

fn host() -> Host {
    Host {
        cgroups: [String::new()].into(),
        oom_score_adj: 0,
        exists: |_| true,
        namespace: |_| None,
        root: None,
        mounted: [].into(),
    }
}

/// Kind, id, parent, device, flags, root, mount point, and CRIU's name for what comes from outside.
const OF_IMAGE: &str = "
    overlay 1 0 60 rw / /
    proc 2 1 71 nosuid,nodev,noexec / /proc
    tmpfs 3 1 72 nosuid / /dev
    sysfs 4 1 73 ro,nosuid,nodev,noexec / /sys
    cgroup2 5 4 74 ro,nosuid / /sys/fs/cgroup
    ext4 6 1 75 ro /srv /data /data
    proc 7 2 71 ro,nosuid,nodev,noexec /sys /proc/sys
    devtmpfs 8 2 76 nosuid /null /proc/keys /dev/null
    tmpfs 9 2 77 ro / /proc/acpi
    tmpfs 10 4 78 ro / /sys/firmware
    devtmpfs 11 3 76 nosuid /gpu /dev/gpu /dev/gpu";

/// As the kernel lists them.
const MADE: &str = "
1 0 0:60 / / rw,relatime - overlay overlay rw
2 1 0:71 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
3 1 0:72 / /dev rw,nosuid - tmpfs tmpfs rw,mode=755
4 1 0:73 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs rw
5 4 0:74 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw
6 1 8:75 /srv /data ro,relatime - ext4 /dev/sda1 rw
7 2 0:71 /sys /proc/sys ro,nosuid,nodev,noexec,relatime - proc proc rw
8 2 0:76 /null /proc/keys rw,nosuid - devtmpfs udev rw
9 2 0:77 / /proc/acpi ro,relatime - tmpfs tmpfs ro
10 4 0:78 / /sys/firmware ro,relatime - tmpfs tmpfs ro
11 3 0:76 /gpu /dev/gpu rw,nosuid - devtmpfs udev rw";

/// The lines, those that are for the same mount point replaced: `point` is its place among the words.
fn edited(base: &str, edits: &[&str], point: usize) -> String {
    let of = |line: &str| line.split_whitespace().nth(point).map(str::to_owned);
    let same = |line: &str, other: &&&str| of(line) == of(other);
    let lines = base.lines().map(|line| {
        edits
            .iter()
            .find(|edit| same(line, edit))
            .copied()
            .unwrap_or(line)
    });
    let added = edits
        .iter()
        .copied()
        .filter(|edit| !base.lines().any(|line| same(line, &edit)));
    lines
        .chain(added)
        .fold(String::new(), |all, line| all + line + "\n")
}

fn mount(line: &str) -> Option<Mount> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (&[kind, id, parent, device, flags, root, point], external) = words.split_first_chunk()?;
    if kind == "gone" {
        return None;
    }
    let kind = KINDS.iter().find(|(name, _)| *name == kind);
    let flags = flags.split(',').map(|word| match word {
        "ro" => 1,
        "nosuid" => 2,
        "nodev" => 4,
        "noexec" => 8,
        "relatime" => 1 << 21,
        _ => 0,
    });
    let propagates = words[4].contains("slave");
    Some(Mount {
        kind: kind.map_or(OTHER, |(_, kind)| *kind),
        id: id.parse().unwrap(),
        device: device.parse().unwrap(),
        parent: parent.parse().unwrap(),
        flags: flags.sum(),
        propagates,
        root: root.into(),
        point: point.into(),
        external: external.first().map(|key| (*key).to_owned()),
    })
}

fn compare_spec(spec: fn() -> Value, edits: &[&str]) -> Result<(), String> {
    let mounts = edited(OF_IMAGE, edits, 6).lines().filter_map(mount).collect();
    let known = Known::of(&Spec::from(spec()), &host()).unwrap();
    compare("mountpoints-1.img", known, mounts, &host()).map_err(|fault| fault.to_string())
}

fn compare_made(spec: fn() -> Value, edits: &[&str]) -> Result<(), String> {
    let entries = mountinfo::parse(edited(MADE, edits, 4).as_bytes());
    let made = check_made(&Spec::from(spec()), "mountinfo", &entries, &host());
    made.map_err(|fault| fault.to_string())
}

/// A spec, and mounts that differ.
type Case = (fn() -> Value, &'static [&'static str]);

#[test]
fn mounts_that_show_no_more_than_the_spec_are_taken() {
    const CASES: &[Case] = &[
        (given, &[]),
        // What is empty, in the place of what the spec binds.
        (given, &["tmpfs 6 1 90 ro / /data"]),
        (given, &["tmpfs 20 1 90 rw / /mnt"]),
        (given, &["tmpfs 20 3 72 rw /more /dev/more"]),
        // A part of the root.
        (given, &["overlay 20 1 60 rw /more /mnt"]),
        (
            given_read_only,
            &["overlay 1 0 60 ro / /", "overlay 20 1 60 ro /more /mnt"],
        ),
        // Devices: those of the spec and of every container, or what is mounted in their places.
        (given, &["devtmpfs 20 3 76 rw /zero /dev/zero /dev/zero"]),
        (given, &["devtmpfs 20 3 76 rw /null /dev/full /dev/null"]),
        (given, &["devpts 20 3 91 nosuid,noexec /0 /dev/console"]),
        // Cgroups v1: the tmpfs may be writable, the hierarchies may not.
        (
            given,
            &[
                "tmpfs 5 4 92 rw / /sys/fs/cgroup",
                "cgroup 20 5 93 ro / /sys/fs/cgroup/memory",
                "cgroup 21 5 94 ro /c /sys/fs/cgroup/cpu /sys/fs/cgroup/cpu",
            ],
        ),
        (
            given_writable_cgroups,
            &[
                "cgroup 5 4 92 rw,nosuid / /sys/fs/cgroup",
                "cgroup 20 5 93 rw / /sys/fs/cgroup/memory",
            ],
        ),
        (given_slave, &["ext4 6 1 75 ro,slave /srv /data /data"]),
        // The spec does not set this.
        (given, &["proc 2 1 71 nosuid,nodev,noexec,slave / /proc"]),
        // What the kernel has once may be bound as well, if that is no less restricted.
        (given, &["sysfs 6 1 73 ro,relatime / /data /data"]),
        (given, &["cgroup2 6 1 74 ro,nosuid / /data /data"]),
        (
            given,
            &["ext4 6 1 60 ro /srv /data /data", "overlay 20 1 60 ro /more /mnt"],
        ),
        // Two bind mounts of one device: each is bound by its own name.
        (
            given,
            &["cgroup2 5 4 75 ro,nosuid / /sys/fs/cgroup /sys/fs/cgroup"],
        ),
        // Masks out of the container's own /dev.
        (
            given,
            &[
                "tmpfs 8 2 72 nosuid /null /proc/keys /dev/null",
                "tmpfs 20 3 72 rw /more /dev/more",
            ],
        ),
        (given, &["tmpfs 20 3 72 ro,nosuid /null /dev/full /dev/null"]),
        (given, &["tmpfs 9 2 72 ro,nosuid /null /proc/acpi /proc/acpi"]),
        // What masks a path may be the runtime's own by its place.
        (given, &["ext4 9 2 95 rw /empty /proc/acpi /proc/acpi"]),
    ];
    for (spec, edits) in CASES {
        assert_eq!(compare_spec(*spec, edits), Ok(()), "{edits:?}");
    }
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn mounts_that_show_more_are_refused() {
    const CASES: &[(&str, Case)] = &[
        // Restrictions that are lost.
        (
            "/proc is less restricted",
            (given, &["proc 2 1 71 nosuid,nodev / /proc"]),
        ),
        (
            "/proc is less restricted",
            (given, &["proc 2 1 71 nosuid,noexec / /proc"]),
        ),
        (
            "/proc is less restricted",
            (given, &["proc 2 1 71 nodev,noexec / /proc"]),
        ),
        (
            "/data is less restricted",
            (given, &["ext4 6 1 75 nosuid /srv /data /data"]),
        ),
        ("/data is less restricted", (given, &["tmpfs 6 1 90 rw / /data"])),
        (
            "/sys/fs/cgroup is less restricted",
            (given, &["cgroup2 5 4 74 nosuid / /sys/fs/cgroup"]),
        ),
        (
            "/data is where the host's later mounts appear",
            (given, &["ext4 6 1 75 ro,slave /srv /data /data"]),
        ),
        // Others in the places of those of the spec.
        (
            "/proc is another mount",
            (given, &["tmpfs 2 1 90 nosuid,nodev,noexec / /proc"]),
        ),
        (
            "/proc is another mount",
            (given, &["cgroup 2 1 90 nosuid,nodev,noexec / /proc"]),
        ),
        (
            "/proc is another mount",
            (given, &["proc 2 1 71 nosuid,nodev,noexec /1 /proc"]),
        ),
        ("/data is another mount", (given, &["ext4 6 1 75 ro /srv /data"])),
        (
            "/data is another mount",
            (given, &["ext4 6 1 75 ro /srv /data /dev/null"]),
        ),
        (
            "/sys/fs/cgroup is another mount",
            (given, &["proc 5 4 71 ro,nosuid / /sys/fs/cgroup"]),
        ),
        // CRIU would bind them from the other mount of the device, which is from outside and more restricted.
        (
            "/dev is of the device",
            (given, &["ext4 6 1 72 ro / /data /data"]),
        ),
        (
            "/proc is of the device",
            (given, &["ext4 6 1 71 ro / /data /data"]),
        ),
        (
            "/sys/fs/cgroup is of the device",
            (
                given_writable_cgroups,
                &[
                    "cgroup2 5 4 74 nosuid / /sys/fs/cgroup",
                    "ext4 6 1 74 ro / /data /data",
                ],
            ),
        ),
        (
            "/sys/fs/cgroup/x is of the device",
            (given_writable_cgroups, &["cgroup 20 5 75 rw / /sys/fs/cgroup/x"]),
        ),
        (
            "/mnt is of the device",
            (
                given,
                &["ext4 6 1 60 ro / /data /data", "overlay 20 1 60 rw /more /mnt"],
            ),
        ),
        (
            "/mnt is of the device",
            (
                given,
                &[
                    "ext4 6 1 60 ro,noexec / /data /data",
                    "overlay 20 1 60 ro /more /mnt",
                ],
            ),
        ),
        (
            "/dev/console is of the device",
            (given, &["devpts 20 3 75 nosuid /x /dev/console"]),
        ),
        (
            "/mnt is there",
            (
                given,
                &["overlay 1 0 60 rw /rootfs /", "overlay 20 1 60 rw / /mnt"],
            ),
        ),
        // Devices that the container has not, or that are something else.
        (
            "/dev/sda is there",
            (given, &["devtmpfs 20 3 76 rw /sda /dev/sda /dev/sda"]),
        ),
        ("/dev/sda is there", (given, &["devpts 20 3 91 rw /0 /dev/sda"])),
        (
            "/dev/gpu is there",
            (given, &["devtmpfs 11 3 76 rw /sda /dev/gpu"]),
        ),
        (
            "/dev/gpu is there",
            (given, &["devtmpfs 11 3 76 rw /sda /dev/gpu /data"]),
        ),
        ("/mnt is there", (given, &["tmpfs 20 1 90 rw / /mnt /dev/null"])),
        // A tmpfs that another mount has from outside.
        (
            "/mnt is there",
            (
                given,
                &["tmpfs 6 1 75 ro /srv /data /data", "tmpfs 20 1 75 rw / /mnt"],
            ),
        ),
        // Cgroups that are writable, elsewhere, or none.
        (
            "/sys/fs/cgroup/memory is there",
            (given, &["cgroup 20 5 93 rw / /sys/fs/cgroup/memory"]),
        ),
        (
            "/sys/fs/cgroup/memory is there",
            (given, &["cgroup 20 5 93 nosuid / /sys/fs/cgroup/memory"]),
        ),
        (
            "/sys/fs/cgroup/x is there",
            (given, &["ext4 20 5 93 ro / /sys/fs/cgroup/x"]),
        ),
        (
            "/sys/fs/cgroup/x is there",
            (given, &["cgroup 20 5 93 ro / /sys/fs/cgroup/x /data"]),
        ),
        ("/mnt is there", (given, &["cgroup 20 1 93 ro / /mnt"])),
        // A root that is read-only, and a part of it that is not.
        ("/ is writable", (given_read_only, &[])),
        (
            "/mnt is there",
            (
                given_read_only,
                &["overlay 1 0 60 ro / /", "overlay 20 1 60 rw / /mnt"],
            ),
        ),
        (
            "/mnt is there",
            (
                given_read_only,
                &["overlay 1 0 60 ro / /", "overlay 20 1 60 nosuid / /mnt"],
            ),
        ),
        // Masked paths: something that is writable, of outside or of the root, or nothing.
        (
            "/proc/acpi is what shows something",
            (given, &["tmpfs 9 2 77 rw / /proc/acpi"]),
        ),
        (
            "/proc/acpi is what shows something",
            (given, &["overlay 9 2 60 ro /x /proc/acpi"]),
        ),
        (
            "/proc/acpi is what shows something",
            (given, &["proc 9 2 71 ro /acpi /proc/acpi"]),
        ),
        (
            "/proc/acpi is what shows something",
            (given, &["tmpfs 9 2 77 ro / /proc/acpi /data"]),
        ),
        (
            "/sys/firmware is open",
            (given, &["gone - - - - - /sys/firmware"]),
        ),
        (
            "/sys/firmware is mounted over",
            (given, &["tmpfs 10 1 78 ro / /sys/firmware"]),
        ),
        // Paths that are read-only, and so of their own file system.
        (
            "/proc/sys is writable",
            (given, &["proc 7 2 71 nosuid /sys /proc/sys"]),
        ),
        (
            "/proc/sys is writable, or of another place",
            (given, &["tmpfs 7 2 90 ro / /proc/sys"]),
        ),
        (
            "/proc/sys is writable, or of another place",
            (
                given,
                &[
                    "proc 2 1 71 ro,nosuid,nodev,noexec / /proc",
                    "proc 7 2 71 ro /sys /proc/sys /data",
                ],
            ),
        ),
        (
            "/proc/sys is of the device",
            (
                given,
                &[
                    "proc 2 1 71 ro,nosuid,nodev,noexec / /proc",
                    "proc 7 2 71 ro /sys /proc/sys",
                    "ext4 6 1 71 ro,nosuid / /data /data",
                ],
            ),
        ),
    ];
    for (what, (spec, edits)) in CASES {
        let fault = compare_spec(*spec, edits).expect_err(what);
        assert!(
            fault.contains(&format!("the mount {what}")),
            "{what}, {edits:?}: {fault}"
        );
    }
}
