//! Places of the spec behind links of the container, and file systems of the node.

use super::*;

/// A container whose /var/run is a link to /run, as in Debian's images. Its spec mounts a secret there.
fn behind_a_link() -> (tempfile::TempDir, Host, Spec) {
    let root = tempfile::tempdir().unwrap();
    for dir in ["run/secrets", "var", "data"] {
        std::fs::create_dir_all(root.path().join(dir)).unwrap();
    }
    std::os::unix::fs::symlink("/run", root.path().join("var/run")).unwrap();
    let host = Host {
        root: Host::before(root.path()).unwrap().root,
        ..host()
    };
    let mut spec = given();
    let secret = json!({"destination": "/var/run/secrets/token", "type": "bind", "source": "/srv/token",
        "options": ["rbind", "rprivate", "ro", "nosuid", "nodev", "noexec"]});
    spec["mounts"].as_array_mut().unwrap().push(secret);
    (root, host, Spec::from(spec))
}

#[test]
fn a_mount_behind_a_link_is_the_specs_and_as_restricted() {
    let (_root, host, spec) = behind_a_link();
    let strict = "ro,nosuid,nodev,noexec";
    for (line, is_taken) in [
        (
            format!("tmpfs 20 1 90 {strict} /token /run/secrets/token /var/run/secrets/token"),
            true,
        ),
        (
            format!("tmpfs 20 1 90 {strict} /token /run/secrets/token /run/secrets/token"),
            true,
        ),
        (
            "tmpfs 20 1 90 ro,nosuid,nodev /token /run/secrets/token /var/run/secrets/token".to_owned(),
            false,
        ),
        (
            format!("tmpfs 20 1 90 {strict} /token /run/secrets/token /data"),
            false,
        ),
        (
            format!("tmpfs 20 1 90 {strict} /token /run/secrets/other /var/run/secrets/token"),
            false,
        ),
        // An empty one of its own shows less, and is as restricted.
        (format!("tmpfs 20 1 90 {strict} / /run/secrets/token"), true),
        ("tmpfs 20 1 90 rw / /run/secrets/token".to_owned(), false),
    ] {
        let mounts = edited(OF_IMAGE, &[&line], 6).lines().filter_map(mount).collect();
        let known = Known::of(&spec, &host).unwrap();
        let compared = compare("mountpoints-1.img", known, mounts, &host);
        assert_eq!(compared.is_ok(), is_taken, "{line}: {compared:?}");
    }
    for (line, is_taken) in [
        (
            format!("20 1 0:90 /token /run/secrets/token {strict} - tmpfs tmpfs rw"),
            true,
        ),
        (
            "20 1 0:90 /token /run/secrets/token rw,relatime - tmpfs tmpfs rw".to_owned(),
            false,
        ),
        (
            "20 1 0:90 / /run/secrets/other rw - tmpfs tmpfs rw".to_owned(),
            true,
        ),
    ] {
        let entries = mountinfo::parse(edited(MADE, &[&line], 4).as_bytes());
        let made = check_made(&spec, "mountinfo", &entries, &host);
        assert_eq!(made.is_ok(), is_taken, "{line}: {made:?}");
    }
    let lost = "20 1 0:90 /token /run/secrets/token ro,relatime - tmpfs tmpfs rw";
    let entries = mountinfo::parse(edited(MADE, &[lost], 4).as_bytes());
    let again = loosened(&spec, &entries, &host).unwrap();
    assert_eq!(again, [(PathBuf::from("/run/secrets/token"), 0xf + (1 << 21))]);
}

#[test]
fn a_tmpfs_of_the_node_is_not_the_containers_own() {
    let host = Host {
        mounted: [90].into(),
        ..host()
    };
    for (device, is_taken) in [("0:91", true), ("0:90", false)] {
        for root in ["/", "/part"] {
            let line = format!("20 1 {device} {root} /run/other rw - tmpfs tmpfs rw");
            let entries = mountinfo::parse(edited(MADE, &[&line], 4).as_bytes());
            let made = check_made(&Spec::from(given()), "mountinfo", &entries, &host);
            assert_eq!(made.is_ok(), is_taken, "{line}: {made:?}");
        }
    }
}
