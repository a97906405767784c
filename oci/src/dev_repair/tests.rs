//! These make device nodes (with the numbers of /dev/null and the like), so they need root with CAP_MKNOD.

use std::fs::Permissions;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

use super::*;
use nix::fcntl::AT_FDCWD;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{SFlag, makedev, mknodat};
use nix::unistd::Pid;
use serde_json::json;

/// A container root with a /dev of its own, and a stand-in for the host's /dev, on another file system.
struct Container {
    root: tempfile::TempDir,
}

impl Container {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("dev")).unwrap();
        Self { root }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path.strip_prefix('/').unwrap())
    }

    fn node(&self, path: &str, kind: SFlag, minor: u64) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        mknodat(
            AT_FDCWD,
            &path,
            kind,
            Mode::from_bits_truncate(0o600),
            makedev(1, minor),
        )
        .unwrap();
    }

    fn repair(&self, devices: serde_json::Value) -> Result<DevRepair, DevError> {
        self.repair_unless(false, devices)
    }

    fn repair_unless(&self, stop: bool, devices: serde_json::Value) -> Result<DevRepair, DevError> {
        let spec = Spec::from(json!({"linux": {"devices": devices}}));
        let stop = AtomicBool::new(stop);
        repair_below(self.root.path(), Path::new("/proc"), &spec, &stop)
    }

    /// Type, minor number and mode of a node.
    fn stat(&self, path: &str) -> Option<(bool, u64, u32)> {
        let meta = self.path(path).symlink_metadata().ok()?;
        Some((
            meta.file_type().is_char_device(),
            minor(meta.rdev()),
            meta.mode() & 0o777,
        ))
    }
}

fn paths(list: &[PathBuf]) -> Vec<&str> {
    list.iter().map(|p| p.to_str().unwrap()).collect()
}

#[test]
fn nodes_of_the_source_make_room_for_those_of_the_spec() {
    let container = Container::new();
    container.node("/dev/nvidia0", SFlag::S_IFCHR, 3);
    container.node("/dev/nvidia1", SFlag::S_IFCHR, 5);
    container.node("/dev/nvidia-uvm", SFlag::S_IFCHR, 7);
    container.node("/dev/kfd", SFlag::S_IFCHR, 7);
    container.node("/dev/null", SFlag::S_IFCHR, 3);
    container.node("/dev/nvidia-caps/nvidia-cap1", SFlag::S_IFCHR, 3);
    let wanted = json!([
        {"path": "/dev/nvidia1", "type": "c", "major": 1, "minor": 5},
        {"path": "/dev/nvidia2", "type": "c", "major": 1, "minor": 8,
         "fileMode": 0o660, "uid": 12, "gid": 34},
        {"path": "/dev/nvidia-uvm", "type": "c", "major": 1, "minor": 9},
        {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229},
    ]);
    // Nobody waits for it any more.
    let late = container.repair_unless(true, wanted.clone()).unwrap();
    assert_eq!(late, DevRepair::default());
    assert_eq!(container.stat("/dev/nvidia2"), None);
    let done = container.repair(wanted.clone()).unwrap();
    let mut removed = paths(&done.removed);
    removed.sort_unstable();
    assert_eq!(
        removed,
        ["/dev/kfd", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia0"]
    );
    assert_eq!(paths(&done.made), ["/dev/nvidia2", "/dev/nvidia-uvm"]);
    assert_eq!(container.stat("/dev/nvidia0"), None);
    assert_eq!(
        container.stat("/dev/nvidia1"),
        Some((true, 5, 0o600)),
        "a right node is left as it is"
    );
    assert_eq!(container.stat("/dev/nvidia2"), Some((true, 8, 0o660)));
    assert_eq!(container.stat("/dev/nvidia-uvm"), Some((true, 9, 0o666)));
    assert_eq!(container.stat("/dev/null"), Some((true, 3, 0o600)));
    assert_eq!(container.stat("/dev/fuse"), None, "not about a GPU");
    let meta = container.path("/dev/nvidia2").metadata().unwrap();
    assert_eq!((meta.uid(), meta.gid()), (12, 34));

    assert_eq!(
        container.repair(wanted).unwrap(),
        DevRepair::default(),
        "repeating it does nothing"
    );
}

#[test]
fn directories_are_made_as_needed_and_block_nodes_are_known() {
    let container = Container::new();
    container.node("/dev/nvidia0", SFlag::S_IFCHR, 3);
    let done = container
        .repair(json!([
            {"path": "/dev/nvidia0", "type": "b", "major": 1, "minor": 3},
            {"path": "/dev/nvidia-caps/nvidia-cap2", "type": "c", "major": 1, "minor": 3},
        ]))
        .unwrap();
    assert_eq!(
        paths(&done.made),
        ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap2"]
    );
    assert_eq!(container.stat("/dev/nvidia0"), Some((false, 3, 0o666)));
    assert_eq!(
        container.stat("/dev/nvidia-caps/nvidia-cap2"),
        Some((true, 3, 0o666))
    );
}

#[test]
fn links_and_files_in_place_of_a_node_are_replaced_not_followed() {
    let container = Container::new();
    let outside = tempfile::NamedTempFile::new().unwrap();
    std::fs::set_permissions(outside.path(), Permissions::from_mode(0o600)).unwrap();
    symlink(outside.path(), container.path("/dev/nvidia0")).unwrap();
    std::fs::write(container.path("/dev/nvidia1"), "file").unwrap();
    symlink(outside.path(), container.path("/dev/nvidia7")).unwrap();
    container
        .repair(json!([
            {"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3, "uid": 12},
            {"path": "/dev/nvidia1", "type": "c", "major": 1, "minor": 5},
        ]))
        .unwrap();
    assert_eq!(container.stat("/dev/nvidia0"), Some((true, 3, 0o666)));
    assert_eq!(container.stat("/dev/nvidia1"), Some((true, 5, 0o666)));
    let meta = outside.path().metadata().unwrap();
    assert_eq!(
        (meta.mode() & 0o777, meta.is_file()),
        (0o600, true),
        "the link's target is untouched"
    );
    assert!(
        container.path("/dev/nvidia7").symlink_metadata().is_ok(),
        "what is no device is left"
    );
}

#[test]
fn a_dev_that_is_a_link_is_refused() {
    let container = Container::new();
    let outside = tempfile::tempdir().unwrap();
    std::fs::remove_dir(container.path("/dev")).unwrap();
    symlink(outside.path(), container.path("/dev")).unwrap();
    let wanted = json!([{"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3}]);
    assert_eq!(container.repair(wanted).unwrap_err().code(), "FIRN-DEV-REPAIR");
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
}

#[test]
fn a_directory_of_nodes_that_is_a_link_is_refused() {
    let container = Container::new();
    let outside = tempfile::tempdir().unwrap();
    symlink(outside.path(), container.path("/dev/nvidia-caps")).unwrap();
    let wanted = json!([{"path": "/dev/nvidia-caps/nvidia-cap1", "type": "c", "major": 1, "minor": 3}]);
    let error = container.repair(wanted).unwrap_err();
    assert!(
        matches!(&error, DevError::Step { path, .. } if path.ends_with("nvidia-caps")),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
}

/// Files of the host that a volume shows below /dev are none of the container's nodes.
#[test]
fn what_is_mounted_below_dev_is_not_touched() {
    let hosts = tempfile::tempdir().unwrap();
    let node = |name: &str| {
        mknodat(
            AT_FDCWD,
            &hosts.path().join(name),
            SFlag::S_IFCHR,
            Mode::S_IRUSR,
            makedev(1, 3),
        )
    };
    node("nvidia-cap7").unwrap();
    node("renderD129").unwrap();
    let mounts = format!(
        "mount -t tmpfs tmpfs /dev && mkdir /dev/nvidia-caps /dev/dri && mknod /dev/nvidia77 c 1 3 && \
         mount --bind {0} /dev/nvidia-caps && mount --bind {0} /dev/dri",
        hosts.path().display()
    );
    let process = Process::start(&mounts);
    let done = process.repair(json!([]));
    assert_eq!(paths(&done.removed), ["/dev/nvidia77"]);
    let left = || std::fs::read_dir(hosts.path()).unwrap().count();
    assert_eq!(left(), 2, "nodes of the host are gone");

    // If the spec has a node there, that is an error; for graphics nodes it is only reported.
    let repair = |path: &str| {
        let devices = json!([{"path": path, "type": "c", "major": 1, "minor": 5}]);
        let spec = Spec::from(json!({"linux": {"devices": devices}}));
        repair(process.0.id().cast_signed(), &spec)
    };
    let error = repair("/dev/nvidia-caps/nvidia-cap1").unwrap_err();
    assert_eq!(error.code(), "FIRN-DEV-REPAIR");
    assert!(
        error.to_string().contains("cannot open /dev/nvidia-caps"),
        "{error}"
    );
    assert!(error.hint().contains("no mounts"));
    let done = repair("/dev/dri/renderD128").unwrap();
    assert!(done.left.unwrap().contains("cannot open /dev/dri"));
    assert_eq!(left(), 2, "nodes were made on the host");
}

#[test]
fn a_directory_in_place_of_a_node_is_an_error_that_names_it() {
    let container = Container::new();
    std::fs::create_dir(container.path("/dev/nvidia0")).unwrap();
    let error = container
        .repair(json!([{"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3}]))
        .unwrap_err();
    assert!(error.to_string().contains("remove /dev/nvidia0"), "{error}");
}

#[test]
fn the_hosts_own_dev_is_left_alone() {
    let container = Container::new();
    container.node("/dev/nvidia0", SFlag::S_IFCHR, 3);
    let spec = Spec::from(json!({"linux": {"devices": []}}));
    let same_file_system = container.root.path();
    let done = repair_below(
        container.root.path(),
        same_file_system,
        &spec,
        &AtomicBool::default(),
    )
    .unwrap();
    assert_eq!(done, DevRepair::default());
    assert!(container.stat("/dev/nvidia0").is_some());
}

#[test]
fn in_a_user_namespace_only_a_right_node_will_do() {
    let container = Container::new();
    container.node("/dev/nvidia0", SFlag::S_IFCHR, 3);
    let repair = |minor: u64| {
        let devices = json!([{"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": minor}]);
        let spec = Spec::from(json!({"linux": {"devices": devices, "namespaces": [{"type": "user"}]}}));
        repair_below(
            container.root.path(),
            Path::new("/proc"),
            &spec,
            &AtomicBool::default(),
        )
    };
    assert_eq!(repair(3).unwrap(), DevRepair::default());
    container.node("/dev/nvidia1", SFlag::S_IFCHR, 7);
    assert_eq!(repair(5).unwrap_err().code(), "FIRN-DEV-USERNS");
    assert_eq!(container.stat("/dev/nvidia0"), Some((true, 3, 0o600)));
    assert!(
        container.stat("/dev/nvidia1").is_some(),
        "removed although it fails"
    );
}

/// The spec of a container that has one GPU: `/dev/nvidia0` opens what null does, `/dev/nvidia1` zero.
fn one_gpu(number: u64) -> Spec {
    let path = format!("/dev/nvidia{number}");
    let minor = [3, 5][usize::try_from(number).unwrap()];
    Spec::from(json!({"linux": {"devices": [{"path": path, "type": "c", "major": 1, "minor": minor}]}}))
}

#[test]
fn the_nodes_of_a_stopped_process_are_replaced_there_and_back() {
    let process = Process::start("mount -t tmpfs tmpfs /dev && mknod /dev/nvidia0 c 1 3");
    let pid = process.0.id().cast_signed();
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    let dev = PathBuf::from(format!("/proc/{pid}/root/dev"));
    for number in [1, 0, 1, 0] {
        can_repair(pid, &one_gpu(number)).unwrap();
        let done = repair(pid, &one_gpu(number)).unwrap();
        let [here, gone] = [number, 1 - number].map(|number| format!("/dev/nvidia{number}"));
        assert_eq!(
            (paths(&done.made), paths(&done.removed)),
            (vec![&*here], vec![&*gone])
        );
        let open = || std::fs::File::open(dev.join(here.strip_prefix("/dev/").unwrap()));
        let read = io::Read::read(&mut open().unwrap(), &mut [0]).unwrap();
        assert_eq!(
            read,
            usize::try_from(number).unwrap(),
            "another device was opened"
        );
        assert!(!dev.join(gone.strip_prefix("/dev/").unwrap()).exists());
    }
}

#[test]
fn whether_nodes_can_be_replaced_is_known_before_any_is() {
    let tmpfs = "mount -t tmpfs tmpfs /dev && mknod /dev/null c 1 3";
    for (more, code, message) in [
        ("mknod /dev/nvidia0 c 1 3", None, ""),
        (
            "mknod /dev/nvidia1 c 1 5 && touch /dev/tty && mount --bind /dev/null /dev/tty",
            None,
            "",
        ),
        (
            "touch /dev/nvidia0 && mount --bind /dev/null /dev/nvidia0",
            Some("FIRN-DEV-REPAIR"),
            "cannot replace /dev/nvidia0 of the container",
        ),
        (
            "touch /dev/nvidia1 && mount --bind /dev/null /dev/nvidia1",
            Some("FIRN-DEV-REPAIR"),
            "cannot replace /dev/nvidia1 of the container",
        ),
        (
            "mknod /dev/nvidia0 c 1 3 && mkdir /dev/nvidia1",
            Some("FIRN-DEV-REPAIR"),
            "cannot remove /dev/nvidia1 of the container",
        ),
    ] {
        let process = Process::start(&format!("{tmpfs} && {more}"));
        let pid = process.0.id().cast_signed();
        let dev = PathBuf::from(format!("/proc/{pid}/root/dev"));
        let listed = || std::fs::read_dir(&dev).unwrap().count();
        let before = listed();
        let error = can_repair(pid, &one_gpu(1)).err();
        assert_eq!(error.as_ref().map(DevError::code), code, "{more}");
        assert!(error.is_none_or(|error| error.to_string() == message), "{more}");
        assert_eq!(listed(), before, "{more}");
    }
}

/// A process in a mount namespace of its own; ended when dropped.
struct Process(std::process::Child);

impl Process {
    /// Runs the script and waits until it has printed its line.
    fn start(script: &str) -> Self {
        let script = format!("{script} && echo ready && exec sleep 600");
        let child = std::process::Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &script])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut process = Self(child);
        let mut line = String::new();
        let stdout = process.0.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
        assert_eq!(line, "ready\n", "a mount namespace needs root");
        process
    }

    fn repair(&self, devices: serde_json::Value) -> DevRepair {
        repair(
            self.0.id().cast_signed(),
            &Spec::from(json!({"linux": {"devices": devices}})),
        )
        .unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_directory_of_graphics_that_is_none_keeps_no_node_of_computing_from_being_made() {
    let container = Container::new();
    container.node("/dev/other/renderD128", SFlag::S_IFCHR, 3);
    symlink("other", container.path("/dev/dri")).unwrap();
    let wanted = json!([
        {"path": "/dev/kfd", "type": "c", "major": 1, "minor": 5},
        {"path": "/dev/dri/renderD128", "type": "c", "major": 1, "minor": 5},
    ]);
    let done = container.repair(wanted).unwrap();
    assert_eq!(paths(&done.made), ["/dev/kfd"]);
    let left = done.left.unwrap();
    assert!(
        left.contains("cannot open /dev/dri") && left.contains("symbolic"),
        "{left}"
    );
    assert_eq!(container.stat("/dev/other/renderD128"), Some((true, 3, 0o600)));
}

#[test]
fn the_dev_of_another_mount_namespace_is_repaired_and_the_hosts_is_not() {
    let process = Process::start("mount -t tmpfs tmpfs /dev && mknod /dev/nvidia77 c 1 3");
    let done = process.repair(json!([{"path": "/dev/nvidia78", "type": "c", "major": 1, "minor": 5}]));
    assert_eq!(
        (paths(&done.removed), paths(&done.made)),
        (vec!["/dev/nvidia77"], vec!["/dev/nvidia78"])
    );
    let dev = PathBuf::from(format!("/proc/{}/root/dev", process.0.id()));
    assert!(dev.join("nvidia78").exists() && !dev.join("nvidia77").exists());
    assert!(!Path::new("/dev/nvidia78").exists());
}

#[test]
fn the_dev_of_a_container_that_is_not_put_together_is_found_by_what_it_is() {
    let mounts = "mount -t tmpfs none /tmp && cd /tmp && mkdir mnt-7 mnt-8 && \
        mount -t tmpfs tmpfs mnt-7 && mount -t tmpfs tmpfs mnt-8 && \
        mkdir mnt-7/dri && mknod mnt-7/dri/renderD128 c 1 3 && mknod mnt-8/null c 1 3";
    let process = Process::start(mounts);
    let spec = Spec::from(json!({"linux": {"devices": [
        {"path": "/dev/dri/renderD129", "type": "c", "major": 1, "minor": 5},
        {"path": "/dev/kfd", "type": "c", "major": 1, "minor": 7},
    ]}}));
    let pid = process.0.id().cast_signed();
    let done = repair_unassembled(pid, &spec).unwrap();
    assert_eq!(paths(&done.removed), ["/dev/dri/renderD128"]);
    assert_eq!(paths(&done.made), ["/dev/kfd", "/dev/dri/renderD129"]);
    let yard = PathBuf::from(format!("/proc/{pid}/root/tmp"));
    assert!(yard.join("mnt-7/dri/renderD129").exists() && !yard.join("mnt-8/kfd").exists());
    assert_eq!(repair_unassembled(pid, &spec).unwrap(), DevRepair::default());
    assert!(!Path::new("/dev/kfd").exists());
}

#[test]
fn a_process_with_the_hosts_dev_changes_nothing_there() {
    let process = Process::start("true");
    let done = process.repair(json!([{"path": "/dev/nvidia78", "type": "c", "major": 1, "minor": 5}]));
    assert_eq!(done, DevRepair::default());
    assert!(!Path::new("/dev/nvidia78").exists());
}

#[test]
fn accelerators_are_repaired_only_in_a_container_that_holds_no_device() {
    let accel = "/dev/accel/accel1";
    let devices = json!([{"path": accel, "type": "c", "major": 1, "minor": 5}]);
    for released in [false, true] {
        let container = Container::new();
        container.node("/dev/accel/accel0", SFlag::S_IFCHR, 3);
        container.node("/dev/hl0", SFlag::S_IFCHR, 3);
        container.node("/dev/nvidia0", SFlag::S_IFCHR, 3);
        let annotations = if released {
            json!({"firn.dev/gpu": "released-by-hook", "firn.dev/hook-prepare": "exec: /x"})
        } else {
            json!({"firn.dev/gpu": "released-by-hook"})
        };
        let spec = Spec::from(json!({"annotations": annotations, "linux": {"devices": devices}}));
        let done = repair_below(
            container.root.path(),
            Path::new("/proc"),
            &spec,
            &AtomicBool::default(),
        )
        .unwrap();
        assert!(paths(&done.removed).contains(&"/dev/nvidia0"));
        assert_eq!(done.removed.len(), if released { 3 } else { 1 }, "{done:?}");
        assert_eq!(paths(&done.made), if released { vec![accel] } else { vec![] });
        assert_eq!(container.stat("/dev/hl0").is_none(), released);
    }
}
