use super::*;
use serde_json::json;

const VERSION: &str = "580.95.05";

/// A node with libraries of a driver: their directory, and a bundle.
struct Node {
    dir: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["lib", "bundle"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let node = Self { dir };
        std::fs::write(node.library(), "").unwrap();
        std::os::unix::fs::symlink("libcuda.so.580.95.05", node.path("lib/libcuda.so.1")).unwrap();
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn library(&self) -> PathBuf {
        self.path("lib/libcuda.so.580.95.05")
    }

    fn empty(&self) -> PathBuf {
        self.path("bundle/empty")
    }

    fn apply(&self, spec: &mut Spec, required: &[RequiredMount]) -> Result<ResolvedMounts, MountError> {
        let needs = Needs {
            mounts: required,
            device_free: false,
        };
        self.apply_for(spec, needs)
    }

    fn apply_for(&self, spec: &mut Spec, needs: Needs<'_>) -> Result<ResolvedMounts, MountError> {
        let dir = self.path("lib");
        let dirs = [dir.to_str().unwrap()];
        let driver = Driver {
            version: VERSION,
            dirs: &dirs,
        };
        let mut resolved = resolve(spec, &self.path("bundle"), needs, driver, &self.empty())?;
        resolved.apply(spec)?;
        Ok(resolved)
    }
}

fn spec(source: &Path, destination: &str) -> Spec {
    Spec::from(json!({"mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": destination, "source": source, "options": ["ro", "rbind"]},
    ]}))
}

fn needed(destination: impl Into<PathBuf>, in_use: bool) -> RequiredMount {
    RequiredMount {
        destination: destination.into(),
        source_name: "source".into(),
        in_use,
    }
}

fn source_at(spec: &Spec, destination: &Path) -> PathBuf {
    let mounts = spec.mounts().unwrap();
    let mount = mounts.into_iter().find(|mount| mount.destination == destination);
    mount.unwrap().source
}

#[test]
fn bind_mounts_are_required_others_are_not() {
    let required = required(&spec(
        Path::new("/usr/lib/libcuda.so.580.95.05"),
        "/lib/libcuda.so",
    ))
    .unwrap();
    assert_eq!(required.len(), 1);
    assert_eq!(required[0].destination, Path::new("/lib/libcuda.so"));
    assert_eq!(required[0].source_name, "libcuda.so.580.95.05");
    assert!(required[0].in_use);
}

#[test]
fn a_spec_with_all_mounts_stays_wherever_they_come_from() {
    let node = Node::new();
    std::fs::write(node.path("bundle/hosts"), "").unwrap();
    for mut spec in [spec(node.dir.path(), "/data/"), spec(Path::new("hosts"), "/data")] {
        let before = spec.clone();
        let resolved = node.apply(&mut spec, &[needed("/data", true)]).unwrap();
        assert_eq!((resolved, spec), (ResolvedMounts::default(), before));
    }
}

#[test]
fn a_missing_mount_is_named() {
    let node = Node::new();
    let error = node
        .apply(&mut spec(node.dir.path(), "/other"), &[needed("/data", false)])
        .unwrap_err();
    assert_eq!(error.code(), "FIRN-MOUNT-NOT-IN-SPEC");
    let message = error.to_string();
    assert!(
        message.contains("/data") && message.contains("source"),
        "{message}"
    );
}

#[test]
fn a_missing_source_is_named() {
    let error = Node::new()
        .apply(
            &mut spec(Path::new("/nonexistent/file"), "/data"),
            &[needed("/data", true)],
        )
        .unwrap_err();
    assert_eq!(error.code(), "FIRN-MOUNT-SOURCE-MISSING");
    assert!(error.to_string().contains("/nonexistent/file"), "{error}");
}

#[test]
fn a_library_of_the_driver_is_found_where_this_node_has_it() {
    let node = Node::new();
    for name in ["libcuda.so.580.95.05", "libcuda.so.1"] {
        let mut spec = spec(&Path::new("/usr/lib64").join(name), "/usr/lib64/libcuda.so.1");
        let resolved = node
            .apply(&mut spec, &[needed("/usr/lib64/libcuda.so.1", true)])
            .unwrap();
        let library = node.library().canonicalize().unwrap();
        assert_eq!(
            resolved.from_driver,
            [("/usr/lib64/libcuda.so.1".into(), library.clone())]
        );
        assert_eq!(source_at(&spec, Path::new("/usr/lib64/libcuda.so.1")), library);
    }
}

#[test]
fn a_library_that_the_spec_lacks_is_added_at_its_own_place_only() {
    let node = Node::new();
    let mut given = Spec::from(json!({}));
    let resolved = node.apply(&mut given, &[needed(node.library(), true)]).unwrap();
    assert_eq!(
        resolved.from_driver,
        [(node.library(), node.library().canonicalize().unwrap())]
    );
    let mount = &given.mounts().unwrap()[0];
    assert!(
        mount.is_bind() && mount.options.contains(&"ro".to_owned()),
        "{mount:?}"
    );
    for elsewhere in ["/etc/libcuda.so.580.95.05", "/usr/lib/../etc/libcuda.so.1"] {
        let mut given = Spec::from(json!({}));
        let error = node.apply(&mut given, &[needed(elsewhere, false)]).unwrap_err();
        assert_eq!(error.code(), "FIRN-MOUNT-NOT-IN-SPEC", "{elsewhere}");
        assert_eq!(given, Spec::from(json!({})));
    }
}

#[test]
fn only_files_of_the_running_driver_are_taken() {
    let node = Node::new();
    std::fs::write(node.path("lib/libother.so.570.1"), "").unwrap();
    std::fs::write(node.path("lib/shadow.so.580.95.05"), "").unwrap();
    std::fs::create_dir(node.path("lib/libdir.so.580.95.05")).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", node.path("lib/libevil.so.1")).unwrap();
    for name in [
        "libother.so.570.1",
        "shadow.so.580.95.05",
        "libdir.so.580.95.05",
        "libevil.so.1",
        "..",
    ] {
        let destination = node.path("lib").join(name);
        assert!(
            node.apply(&mut Spec::from(json!({})), &[needed(&destination, false)])
                .is_err(),
            "{name}"
        );
        let source = Path::new("/nonexistent").join(name);
        let wanted = [needed("/x", true)];
        assert!(node.apply(&mut spec(&source, "/x"), &wanted).is_err(), "{name}");
        let mut given = spec(&node.path("lib").join(name), "/elsewhere/lib.so");
        let wanted = [needed(Path::new("/usr/lib64").join(name), true)];
        assert!(node.apply(&mut given, &wanted).is_err(), "{name}");
    }
}

#[test]
fn sockets_firmware_and_unused_tools_may_be_absent() {
    let node = Node::new();
    for (destination, in_use, absent) in [
        ("/run/nvidia-persistenced/socket", true, true),
        ("/var/run/nvidia-fabricmanager/socket", false, true),
        ("/lib/firmware/nvidia/580.95.05/gsp_ga10x.bin", true, true),
        ("/usr/bin/nvidia-smi", false, true),
        ("/usr/bin/nvidia-smi", true, false),
        ("/usr/bin/python3", false, false),
        ("/run/nvidia-persistenced", false, false),
        ("/lib/firmware/nvidia/gsp_ga10x.bin", false, false),
        ("/lib/firmware/nvidia/../gsp_ga10x.bin", false, false),
        ("/tmp/nvidia-mps", false, false),
    ] {
        let required = [needed(destination, in_use)];
        for mut given in [
            spec(Path::new("/nonexistent/x"), destination),
            Spec::from(json!({})),
        ] {
            let resolved = node.apply(&mut given, &required);
            assert_eq!(resolved.is_ok(), absent, "{destination} {in_use} {resolved:?}");
            if let Ok(resolved) = resolved {
                assert_eq!(resolved.empty, [PathBuf::from(destination)]);
                assert_eq!(source_at(&given, Path::new(destination)), node.empty());
            }
        }
    }
}

#[test]
fn mounts_that_the_checkpoint_did_not_have_are_reported_and_left_out() {
    let node = Node::new();
    for source in [node.dir.path(), Path::new("/nonexistent")] {
        let mut given = spec(source, "/new");
        let resolved = node.apply(&mut given, &[]).unwrap();
        assert_eq!(resolved.extra, [PathBuf::from("/new")]);
        let left = given.mounts().unwrap();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].destination, Path::new("/proc"));
    }
}

/// The spec is of another distribution than the checkpoint: it has the same library elsewhere.
#[test]
fn a_library_that_the_spec_has_elsewhere_is_where_the_checkpoint_needs_it() {
    let node = Node::new();
    let library = node.library().canonicalize().unwrap();
    for name in ["libcuda.so.580.95.05", "libcuda.so.1"] {
        let needs = Path::new("/usr/lib64").join(name);
        let mut given = spec(&node.library(), &format!("/usr/lib/x86_64-linux-gnu/{name}"));
        let resolved = node.apply(&mut given, &[needed(&needs, true)]).unwrap();
        assert_eq!(resolved.from_driver, [(needs.clone(), library.clone())]);
        assert_eq!(resolved.extra.len(), 1);
        assert_eq!(source_at(&given, &needs), library);
        assert_eq!(given.mounts().unwrap().len(), 2);

        let mut given = spec(&node.library(), &format!("/usr/lib/x86_64-linux-gnu/{name}"));
        let up = Path::new("/usr/../etc").join(name);
        assert!(node.apply(&mut given, &[needed(up, true)]).is_err());
    }
}

#[test]
fn links_are_followed_for_criu_which_does_not() {
    let node = Node::new();
    let mut spec = spec(&node.path("lib/libcuda.so.1"), "/usr/lib/libcuda.so.1");
    let resolved = node
        .apply(&mut spec, &[needed("/usr/lib/libcuda.so.1", true)])
        .unwrap();
    assert_eq!(resolved, ResolvedMounts::default());
    let file = node.library().canonicalize().unwrap();
    assert_eq!(spec.array("/mounts")[1]["source"], json!(file));
}

/// The source had another driver, or the target has none.
#[test]
fn a_checkpoint_without_devices_gets_the_targets_driver_late_and_the_sources_as_empty_files() {
    let node = Node::new();
    let old = "/usr/lib/x86_64-linux-gnu/libcuda.so.570.1";
    let here = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05";
    let required = [needed(old, false)];
    let needs = |device_free| Needs {
        mounts: &required,
        device_free,
    };
    let mut given = spec(&node.library(), here);
    let before = given.clone();
    let refused = node.apply_for(&mut given, needs(false)).unwrap_err();
    assert_eq!(refused.code(), "FIRN-MOUNT-NOT-IN-SPEC");

    let resolved = node.apply_for(&mut given, needs(true)).unwrap();
    assert_eq!(resolved.empty, [Path::new(old)]);
    assert_eq!(resolved.late, [Path::new(here)]);
    assert!(resolved.extra.is_empty());
    assert_eq!(source_at(&given, Path::new(old)), node.empty());
    assert_eq!(source_at(&given, Path::new(here)), node.library());
    let mounted = |path: &Path| path == Path::new(old);
    let late = late(&given, mounted).unwrap();
    assert_eq!(late.len(), 1, "{late:?}");
    assert_eq!(late[0].destination, Path::new(here));

    for (name, in_use) in [(old, true), ("/usr/lib/libmine.so.1", false), ("/data", false)] {
        let (mut given, required) = (before.clone(), [needed(name, in_use)]);
        let needs = Needs {
            mounts: &required,
            device_free: true,
        };
        let refused = node.apply_for(&mut given, needs).unwrap_err();
        assert_eq!(refused.code(), "FIRN-MOUNT-NOT-IN-SPEC", "{name}");
    }
}
