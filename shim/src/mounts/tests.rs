//! Real mounts, in a private mount namespace for each test. Needs root.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_process::testing::mounts::{private_dir, tmpfs_at};
use firn_process::unmount::unmount_below;

use super::*;
use firn_host::mountinfo::mounted;

/// As [`super::mount_all`], with the test's own reaper.
async fn mount_all(mounts: &[Mount], rootfs: &Path) -> Result<(), MountError> {
    super::mount_all(mounts, rootfs, &Reaper::start().unwrap()).await
}

fn mount_of(fs_type: &str, source: impl AsRef<Path>, target: &str, options: &[&str]) -> Mount {
    Mount {
        type_: fs_type.to_owned(),
        source: source.as_ref().to_str().unwrap().to_owned(),
        target: target.to_owned(),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
        ..Mount::default()
    }
}

fn dir(parent: &Path, name: &str) -> PathBuf {
    let path = parent.join(name);
    fs::create_dir_all(&path).unwrap();
    path
}

fn mounted_below(path: &Path) -> usize {
    mounted()
        .unwrap()
        .iter()
        .filter(|mount| mount.mount_point.starts_with(path))
        .count()
}

fn raw_mountinfo(path: &Path) -> String {
    let text = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let found = text.lines().find(|line| line.split(' ').nth(4) == path.to_str());
    found.unwrap().to_owned()
}

#[tokio::test]
async fn an_overlay_shows_its_layers_and_keeps_changes_above() {
    let Some(tmp) = private_dir() else { return };
    let [lower, upper, work, rootfs] = ["lower", "upper", "work", "rootfs"].map(|name| dir(tmp.path(), name));
    fs::write(lower.join("file"), "below").unwrap();
    let options = [
        format!("lowerdir={}", lower.display()),
        format!("upperdir={}", upper.display()),
        format!("workdir={}", work.display()),
    ];
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    mount_all(&[mount_of("overlay", "overlay", "", &options)], &rootfs)
        .await
        .unwrap();
    assert_eq!(fs::read_to_string(rootfs.join("file")).unwrap(), "below");
    fs::write(rootfs.join("file"), "above").unwrap();
    assert_eq!(fs::read_to_string(lower.join("file")).unwrap(), "below");
    unmount_recursive(&rootfs).await.unwrap();
    assert_eq!(fs::read_dir(&rootfs).unwrap().count(), 0);
}

#[tokio::test]
async fn an_overlay_with_more_layers_than_a_page_names_is_mounted() {
    let Some(tmp) = private_dir() else { return };
    let rootfs = dir(tmp.path(), "rootfs");
    let base = "snapshots/".to_owned() + &"d".repeat(80);
    let layers: Vec<_> = (0..100)
        .map(|layer| dir(tmp.path(), &format!("{base}/{layer}/fs")))
        .collect();
    for (number, layer) in layers.iter().enumerate() {
        fs::write(layer.join(format!("from-{number}")), "").unwrap();
    }
    let names: Vec<_> = layers.iter().map(|layer| layer.to_str().unwrap()).collect();
    let option = format!("lowerdir={}", names.join(":"));
    assert!(option.len() > 8192);
    let before = std::env::current_dir().unwrap();
    mount_all(&[mount_of("overlay", "overlay", "", &[&option])], &rootfs)
        .await
        .unwrap();
    assert_eq!(fs::read_dir(&rootfs).unwrap().count(), 100);
    assert_eq!(std::env::current_dir().unwrap(), before);

    // Layers without a common directory cannot be shortened.
    let option = format!("lowerdir=/proc:{}", names.join(":"));
    let error = mount_all(&[mount_of("overlay", "overlay", "", &[&option])], &rootfs)
        .await
        .unwrap_err();
    assert!(matches!(error, MountError::TooLong { .. }), "{error}");
}

#[tokio::test]
async fn a_read_only_bind_refuses_writes_and_its_source_does_not() {
    let Some(tmp) = private_dir() else { return };
    let [source, rootfs] = ["source", "rootfs"].map(|name| dir(tmp.path(), name));
    mount_all(
        &[mount_of("bind", &source, "", &["rbind", "ro", "nosuid"])],
        &rootfs,
    )
    .await
    .unwrap();
    let error = fs::write(rootfs.join("file"), "").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
    fs::write(source.join("file"), "").unwrap();
    assert!(rootfs.join("file").exists());
    assert!(
        raw_mountinfo(&rootfs).contains(" ro,nosuid"),
        "{}",
        raw_mountinfo(&rootfs)
    );
}

#[tokio::test]
async fn propagation_is_set_together_with_other_flags() {
    let Some(tmp) = private_dir() else { return };
    let [source, rootfs] = ["source", "rootfs"].map(|name| dir(tmp.path(), name));
    mount_all(
        &[mount_of("bind", &source, "", &["rbind", "rshared", "ro"])],
        &rootfs,
    )
    .await
    .unwrap();
    let line = raw_mountinfo(&rootfs);
    assert!(line.contains(" shared:") && line.contains(" ro,"), "{line}");
}

#[tokio::test]
async fn a_target_is_resolved_inside_the_rootfs_only() {
    let Some(tmp) = private_dir() else { return };
    let [source, outside, rootfs] = ["source", "outside", "rootfs"].map(|name| dir(tmp.path(), name));
    fs::write(source.join("file"), "").unwrap();
    dir(&rootfs, "inner");
    dir(&rootfs, outside.strip_prefix("/").unwrap().to_str().unwrap());
    std::os::unix::fs::symlink("/inner", rootfs.join("absolute")).unwrap();
    std::os::unix::fs::symlink(&outside, rootfs.join("escape")).unwrap();
    std::os::unix::fs::symlink("../../../../../../inner", rootfs.join("climb")).unwrap();
    for (target, expected) in [
        ("/absolute", rootfs.join("inner")),
        ("climb", rootfs.join("inner")),
    ] {
        mount_all(&[mount_of("bind", &source, target, &["bind", "ro"])], &rootfs)
            .await
            .unwrap();
        assert!(expected.join("file").exists(), "{target}");
        unmount_recursive(&rootfs).await.unwrap();
    }
    mount_all(&[mount_of("bind", &source, "escape", &["bind"])], &rootfs)
        .await
        .unwrap();
    assert!(!outside.join("file").exists());
    unmount_recursive(&rootfs).await.unwrap();
    let error = mount_all(&[mount_of("bind", &source, "missing", &["bind"])], &rootfs)
        .await
        .unwrap_err();
    assert!(matches!(error, MountError::Target { .. }), "{error}");
}

#[tokio::test]
async fn a_failed_mount_unmounts_the_earlier_ones() {
    let Some(tmp) = private_dir() else { return };
    let [source, rootfs] = ["source", "rootfs"].map(|name| dir(tmp.path(), name));
    let first = mount_of("bind", &source, "", &["rbind"]);
    for (second, expected) in [
        (
            mount_of("bind", tmp.path().join("missing"), "", &["rbind"]),
            "cannot mount ",
        ),
        (
            mount_of("bind", &source, "", &["rbind", "X-containerd.x=y"]),
            "mount option X-containerd.x=y is reserved",
        ),
        (
            mount_of("bind", &source, "", &["bind", "uidmap=0:1:1"]),
            "cannot map owners of ",
        ),
        (
            mount_of("bind", &source, "", &["bind", "uidmap=0:1:1", "gidmap=0:x:1"]),
            "cannot map owners of ",
        ),
        (
            mount_of(
                "overlay",
                "overlay",
                "",
                &["lowerdir=/missing:/proc", "uidmap=0:1:1", "gidmap=0:1:1"],
            ),
            "cannot mount, with mapped owners, overlay (overlay) on ",
        ),
        (
            mount_of("fuse3.kind", "host:", "", &["X-containerd.x=y"]),
            "mount option X-containerd.x=y is reserved",
        ),
        (
            mount_of("fuse3.no-such-helper", "host:", "", &[]),
            "cannot mount host: (fuse3.no-such-helper) on ",
        ),
    ] {
        let error = mount_all(&[first.clone(), second], &rootfs).await.unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
        assert_eq!(mounted_below(&rootfs), 0);
    }
}

fn owner(path: &Path) -> (u32, u32) {
    let metadata = fs::metadata(path).unwrap();
    (metadata.uid(), metadata.gid())
}

/// Creates a file for each of these owners.
fn expect_owners(dir: &Path, owners: &[u32]) {
    for owner in owners {
        let file = dir.join(owner.to_string());
        fs::write(&file, "").unwrap();
        std::os::unix::fs::chown(&file, Some(*owner), Some(*owner + 1)).unwrap();
    }
}

const MAPS: [&str; 2] = ["uidmap=0:1000:10,20:5000:1", "gidmap=0:2000:10,21:6000:1"];

#[tokio::test]
async fn a_bind_shows_mapped_owners_and_its_source_does_not() {
    let Some(tmp) = private_dir() else { return };
    let [source, rootfs] = ["source", "rootfs"].map(|name| dir(tmp.path(), name));
    expect_owners(&source, &[0, 7, 20, 99]);
    for (options, writable) in [(&["rbind"][..], true), (&["rbind", "ro"], false)] {
        let options = [options, &MAPS[..]].concat();
        mount_all(&[mount_of("bind", &source, "", &options)], &rootfs)
            .await
            .unwrap();
        assert_eq!(owner(&rootfs.join("0")), (1000, 2001));
        assert_eq!(owner(&rootfs.join("7")), (1007, 2008));
        assert_eq!(owner(&rootfs.join("20")), (5000, 6000));
        // An owner without a mapping is shown as nobody.
        assert_eq!(owner(&rootfs.join("99")), (65534, 65534));
        assert_eq!(owner(&source.join("7")), (7, 8));
        let chmod = fs::set_permissions(rootfs.join("7"), fs::Permissions::from_mode(0o600));
        assert_eq!(chmod.is_ok(), writable);
        // The clone without a mapping does not stay below it.
        assert_eq!(mounted_below(&rootfs), 1);
        unmount_recursive(&rootfs).await.unwrap();
    }
}

#[tokio::test]
async fn an_overlay_shows_mapped_layers() {
    let Some(tmp) = private_dir() else { return };
    let [upper, work, rootfs] = ["upper", "work", "rootfs"].map(|name| dir(tmp.path(), name));
    let base = "snapshots/".to_owned() + &"d".repeat(80);
    for layers in [1, 60] {
        let layers: Vec<_> = (0..layers)
            .map(|layer| dir(tmp.path(), &format!("{base}/{layer}/fs")))
            .collect();
        expect_owners(&layers[0], &[0, 8]);
        expect_owners(layers.last().unwrap(), &[5]);
        let names: Vec<_> = layers.iter().map(|layer| layer.to_str().unwrap()).collect();
        let mut options = [
            format!("lowerdir={}", names.join(":")),
            format!("upperdir={}", upper.display()),
            format!("workdir={}", work.display()),
        ]
        .to_vec();
        options.extend(MAPS.map(String::from));
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        let before = mounted().unwrap().len();
        mount_all(&[mount_of("overlay", "overlay", "", &options)], &rootfs)
            .await
            .unwrap();
        assert_eq!(owner(&rootfs.join("8")), (1008, 2009));
        assert_eq!(owner(&rootfs.join("5")), (1005, 2006));
        assert_eq!(owner(&layers[0].join("8")), (8, 9));
        // A file that is copied up has the mapped owner.
        fs::write(rootfs.join("5"), "more").unwrap();
        assert_eq!(owner(&upper.join("5")), (1005, 2006));
        // Only the overlay is mounted.
        assert_eq!(mounted().unwrap().len(), before + 1);
        unmount_recursive(&rootfs).await.unwrap();
        fs::remove_file(upper.join("5")).unwrap();
    }
}

#[tokio::test]
async fn a_file_is_mounted_through_a_loop_device_that_ends_with_the_mount() {
    let Some(tmp) = private_dir() else { return };
    let rootfs = dir(tmp.path(), "rootfs");
    let image = tmp.path().join("image");
    File::create(&image).unwrap().set_len(4 << 20).unwrap();
    // mkfs is run through the reaper, because other tests reap all children of this process.
    let reaper = firn_process::reaper::Reaper::start().unwrap();
    let mut mkfs = std::process::Command::new("mkfs.ext4");
    let made = reaper
        .output(
            mkfs.args(["-q", "-O", "^has_journal"]).arg(&image),
            Duration::from_secs(20),
        )
        .await;
    if !made.is_ok_and(|output| output.success()) || !Path::new("/dev/loop-control").exists() {
        return eprintln!("skipped: needs mkfs.ext4 and loop devices");
    }
    for (options, writable) in [(&["loop"][..], true), (&["loop", "ro", "direct-io"], false)] {
        let mount = mount_of("ext4", &image, "", options);
        // Files of a tmpfs have no direct I/O: the device works without it.
        match mount_all(&[mount], &rootfs).await {
            Err(MountError::Loop { source, .. }) if options.contains(&"direct-io") => {
                assert_eq!(source.kind(), ErrorKind::InvalidInput);
                continue;
            }
            mounted => mounted.unwrap(),
        }
        assert!(rootfs.join("lost+found").exists());
        assert_eq!(fs::write(rootfs.join("file"), "").is_ok(), writable);
        let device = raw_mountinfo(&rootfs)
            .split(" - ext4 ")
            .nth(1)
            .unwrap()
            .split(' ')
            .next()
            .unwrap()
            .to_owned();
        let backing = PathBuf::from(format!(
            "/sys/block/{}/loop/backing_file",
            device.trim_start_matches("/dev/")
        ));
        assert!(backing.exists());
        unmount_recursive(&rootfs).await.unwrap();
        let begun = Instant::now();
        while backing.exists() {
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "{device} was left behind"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn nested_stacked_and_oddly_named_mounts_are_unmounted() {
    let Some(tmp) = private_dir() else { return };
    let rootfs = dir(tmp.path(), "root fs");
    tmpfs_at(&rootfs);
    tmpfs_at(&rootfs);
    let inner = dir(&rootfs, "a\\b/with space");
    tmpfs_at(&inner);
    tmpfs_at(&dir(&inner, "deep"));
    let sibling = dir(tmp.path(), "root fs 2");
    tmpfs_at(&sibling);
    let link = tmp.path().join("link");
    std::os::unix::fs::symlink(&rootfs, &link).unwrap();
    for _ in 0..2 {
        unmount_recursive(&link).await.unwrap();
        assert_eq!(mounted_below(&rootfs), 0);
    }
    assert_eq!(mounted_below(&sibling), 1);
    unmount_recursive(Path::new("/no/such/path")).await.unwrap();
}

#[tokio::test]
async fn a_mount_that_is_briefly_busy_is_unmounted() {
    let Some(tmp) = private_dir() else { return };
    let rootfs = dir(tmp.path(), "rootfs");
    tmpfs_at(&rootfs);
    let user = File::create(rootfs.join("file")).unwrap();
    let release = async {
        // Meanwhile the first attempts fail.
        tokio::time::sleep(BUSY_FOR).await;
        drop(user);
    };
    let (unmounted, ()) = tokio::join!(unmount_recursive(&rootfs), release);
    unmounted.unwrap();
    assert_eq!(mounted_below(&rootfs), 0);
}

const BUSY_FOR: Duration = Duration::from_millis(150);

#[tokio::test]
async fn a_mount_that_stays_busy_is_reported_or_detached() {
    let Some(tmp) = private_dir() else { return };
    let work = dir(tmp.path(), "work");
    let leftover = dir(&work, ".criu.cgyard.X");
    tmpfs_at(&leftover);
    let free = dir(&leftover, "free");
    tmpfs_at(&free);
    let user = File::create(leftover.join("file")).unwrap();
    let error = unmount_recursive(&work).await.unwrap_err();
    assert!(
        matches!(&error, UnmountError::Unmount { path, .. } if *path == leftover),
        "{error}"
    );
    // Mounts that were not busy are unmounted.
    assert_eq!(mounted_below(&work), 1);
    unmount_below(&work).await.unwrap();
    assert_eq!(mounted_below(&work), 0);
    fs::remove_dir_all(&work).unwrap();
    drop(user);
}
