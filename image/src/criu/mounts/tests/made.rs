//! Mounts as the kernel lists them, and flags that CRIU has lost.

use super::*;

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn mounts_that_were_made_are_held_to_the_spec() {
    const TAKEN: &[Case] = &[
        (given, &[]),
        (given, &["20 1 0:90 / /mnt rw - tmpfs tmpfs rw"]),
        (given, &["20 1 0:60 /more /mnt rw - overlay overlay rw"]),
        (given, &["20 3 0:91 /0 /dev/console rw,nosuid - devpts devpts rw"]),
        (given, &["20 3 0:76 /null /dev/full rw,nosuid - devtmpfs udev rw"]),
        // A namespace shows cgroups of a reader that lies below as what climbs.
        (
            given,
            &["5 4 0:74 /../.. /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw"],
        ),
        (
            given,
            &[
                "5 4 0:92 / /sys/fs/cgroup rw,nosuid - tmpfs tmpfs rw",
                "20 5 0:93 /c /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory",
            ],
        ),
    ];
    for (spec, edits) in TAKEN {
        assert_eq!(compare_made(*spec, edits), Ok(()), "{edits:?}");
    }
    const REFUSED: &[(&str, &str)] = &[
        (
            "/proc is less restricted",
            "2 1 0:71 / /proc rw,nosuid,nodev - proc proc rw",
        ),
        (
            "/data is where the host's later mounts appear",
            "6 1 8:75 /srv /data ro shared:4 - ext4 /dev/sda1 rw",
        ),
        (
            "/data is where the host's later mounts appear",
            "6 1 8:75 /srv /data ro master:4 - ext4 /dev/sda1 rw",
        ),
        // A tmpfs that comes from outside, once more.
        ("/dev is of the device", "6 1 0:72 / /data ro - tmpfs tmpfs rw"),
        (
            "/proc is another mount",
            "2 1 0:90 / /proc rw,nosuid,nodev,noexec - tmpfs tmpfs rw",
        ),
        (
            "/data is less restricted",
            "6 1 8:75 /srv /data rw,relatime - ext4 /dev/sda1 rw",
        ),
        // The file system's own restrictions are of no mount.
        (
            "/data is less restricted",
            "6 1 8:75 /srv /data rw,relatime - ext4 /dev/sda1 ro",
        ),
        // Another device than the root's, of the same minor number.
        (
            "/mnt is there",
            "20 1 8:60 / /mnt rw,relatime - ext4 /dev/sda2 rw",
        ),
        (
            "/dev/sda is there",
            "20 3 0:76 /sda /dev/sda rw,nosuid - devtmpfs udev rw",
        ),
        (
            "/proc/keys is what shows something",
            "8 2 0:76 /sda /proc/keys rw,nosuid - devtmpfs udev rw",
        ),
        (
            "/proc/keys is mounted over",
            "8 1 0:76 /null /proc/keys rw,nosuid - devtmpfs udev rw",
        ),
        (
            "/proc/sys is writable",
            "7 2 0:71 /sys /proc/sys rw - proc proc rw",
        ),
        ("/sys/firmware is open", "gone - - - /sys/firmware"),
    ];
    for (what, line) in REFUSED {
        let fault = compare_made(given, &[line]).expect_err(what);
        assert!(
            fault.contains(&format!("the mount {what}")),
            "{what}, {line}: {fault}"
        );
    }
    assert!(compare_made(given_read_only, &[]).is_err(), "a writable root");
}

/// As `mount(2)` has the flags.
#[test]
fn bind_mounts_get_back_the_restrictions_that_they_have_lost() {
    const NOATIME: u32 = 1024;
    const NODIRATIME: u32 = 2048;
    const RELATIME: u32 = 1 << 21;
    const ALL: u32 = 0xf;
    let bind = |destination: &str, options: &[&str]| {
        let kind = "bind";
        json!({"destination": destination, "type": kind, "source": "/srv", "options": options})
    };
    let spec = json!({"mounts": [
        {"destination": "/proc", "type": "proc", "options": ["nosuid"]},
        bind("/as-is", &["bind", "ro", "nosuid"]),
        bind("/open", &["bind", "rw"]),
        bind("/less", &["rbind", "ro", "nosuid"]),
        bind("/none", &["rbind", "ro", "nosuid", "nodev", "noexec"]),
        bind("/twice", &["bind", "ro"]),
        bind("/twice", &["bind", "rw", "noexec"]),
    ]});
    let entries = mountinfo::parse(
        b"1 0 0:60 / / rw - overlay overlay rw\n\
        2 1 0:71 / /proc rw - proc proc rw\n\
        3 1 8:1 /srv /as-is ro,nosuid,relatime - ext4 /dev/sda1 rw\n\
        4 1 8:1 /srv /open rw,relatime - ext4 /dev/sda1 rw\n\
        5 1 8:1 /srv /less ro,noatime,nodiratime - ext4 /dev/sda1 rw\n\
        6 1 8:1 /srv /none rw,relatime - ext4 /dev/sda1 rw\n\
        7 1 8:1 /srv /twice rw,noexec - ext4 /dev/sda1 rw\n\
        8 1 8:1 /srv /other rw - ext4 /dev/sda1 rw\n",
    );
    assert_eq!(entries.len(), 8);
    assert_eq!(
        loosened(&Spec::from(spec), &entries, &host()).unwrap(),
        [
            ("/less".into(), 3 | NOATIME | NODIRATIME),
            ("/none".into(), ALL | RELATIME),
        ]
    );
}

#[test]
fn a_root_that_has_become_writable_is_made_read_only_again() {
    const RELATIME: u32 = 1 << 21;
    let of = |spec: Value, options: &str| {
        let root = format!("1 0 0:60 / / {options},relatime - overlay overlay rw\n");
        loosened(&Spec::from(spec), &mountinfo::parse(root.as_bytes()), &host()).unwrap()
    };
    let read_only = || json!({"root": {"path": "rootfs", "readonly": true}});
    assert_eq!(of(read_only(), "rw"), [("/".into(), READ_ONLY | RELATIME)]);
    assert_eq!(of(read_only(), "ro"), []);
    assert_eq!(of(json!({"root": {"path": "rootfs"}}), "rw"), []);
    let mut may_mount = read_only();
    may_mount["process"] = json!({"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}});
    assert_eq!(of(may_mount, "rw"), [], "it may have been made writable");
}

#[test]
fn groups_and_masters_are_read_of_an_image() {
    let mount = [8, 5, 16, 1, 24, 2, 32, 0, 40, 0, 0x32, 1, b'/', 0x3a, 1, b'/'];
    // Group and master are numbers, and 0 where there is none.
    let cases: [(&[u8], bool); 4] = [
        (&[], false),
        (&[80, 0, 88, 0], false),
        (&[80, 7, 88, 0], true),
        (&[80, 0, 88, 7], true),
    ];
    for (fields, expected) in cases {
        let bytes = [&mount[..], fields].concat();
        let found = read(&Message::parse(&bytes).unwrap()).unwrap().unwrap();
        assert_eq!(found.propagates, expected, "{fields:?}");
    }
}
