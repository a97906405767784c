use firn_gpu::NodeType;

use super::*;
use serde_json::json;

#[test]
fn what_firn_does_not_know_survives_load_and_save() {
    let bundle = tempfile::tempdir().unwrap();
    let file = bundle.path().join("config.json");
    let written = json!({"ociVersion": "9.9", "future": {"a": [1, 2.5,
                          18446744073709551615u64]}, "annotations": {"k": "v"}});
    std::fs::write(&file, written.to_string()).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    Spec::load(bundle.path()).unwrap().save(bundle.path()).unwrap();
    let read: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(read, written);
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o640);
}

#[test]
fn a_spec_that_cannot_be_written_leaves_the_old_one() {
    let bundle = tempfile::tempdir().unwrap();
    let old = Spec::from(json!({"old": true}));
    old.save(bundle.path()).unwrap();
    // Root writes where it may not; a directory in the way of the temporary file stops it, too.
    std::fs::create_dir(bundle.path().join(".config.json.tmp")).unwrap();
    let error = Spec::from(json!({})).save(bundle.path()).unwrap_err();
    assert_eq!(error.code(), "FIRN-SPEC-UNWRITABLE");
    assert_eq!(Spec::load(bundle.path()).unwrap(), old);
}

#[test]
fn what_is_no_spec_is_refused() {
    let bundle = tempfile::tempdir().unwrap();
    assert_eq!(
        Spec::load(bundle.path()).unwrap_err().code(),
        "FIRN-SPEC-UNREADABLE"
    );
    let deep = "[".repeat(100_000);
    for text in ["", "{", "[]", "\"x\"", "{\"a\":1} trailing", deep.as_str()] {
        std::fs::write(bundle.path().join("config.json"), text).unwrap();
        let error = Spec::load(bundle.path()).unwrap_err();
        assert_eq!(error.code(), "FIRN-SPEC-INVALID", "{:.20}", text);
    }
}

#[test]
fn rules_that_open_everything_are_those_of_privileged_containers() {
    let opens =
        |rules: Value| Spec::from(json!({"linux": {"resources": {"devices": rules}}})).opens_all_devices();
    let all = json!({"allow": true, "type": "a", "access": "rwm"});
    let none = json!({"allow": false, "access": "rwm"});
    let one = json!({"allow": false, "type": "c", "major": 1, "minor": 3, "access": "rwm"});
    assert!(opens(json!([none, all])) && opens(json!([all, one])));
    assert!(!opens(json!([all, none])) && !opens(json!([])) && !opens(json!([one])));
    for (key, value) in [
        ("type", json!("c")),
        ("major", json!(195)),
        ("access", json!("rm")),
        ("access", json!("wm")),
        ("minor", json!(0)),
    ] {
        let mut less = all.clone();
        less[key] = value;
        assert!(!opens(json!([less])), "{less}");
    }
    assert!(!opens(json!([3])));
}

#[test]
fn only_nvidia_nodes_and_hooks_request_a_gpu() {
    let requests = |value: Value| Spec::from(value).requests_gpu();
    assert!(!requests(json!({})));
    assert!(!requests(
        json!({"linux": {"devices": [{"path": "/dev/fuse"}, {"path": "/dev/dri/card0"}]}})
    ));
    assert!(!requests(
        json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}})
    ));
    assert!(requests(
        json!({"linux": {"devices": [{"path": "/dev/fuse"}, {"path": "/dev/nvidia0"}]}})
    ));
    assert!(requests(
        json!({"linux": {"devices": [{"path": "/dev/nvidiactl"}]}})
    ));
    let hook =
        |args: Value| json!({"hooks": {"createRuntime": [{"path": "/usr/bin/containerd", "args": args}]}});
    assert!(requests(hook(json!([
        "containerd",
        "oci-hook",
        "--",
        "nvidia-container-cli",
        "--load-kmods"
    ]))));
    assert!(!requests(hook(json!([
        "containerd",
        "oci-hook",
        "--",
        "cni-thing"
    ]))));
}

#[test]
fn a_gpu_by_hook_is_one_without_nodes() {
    let hooks = json!({"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]});
    let devices = json!({"devices": [{"path": "/dev/nvidia0"}]});
    assert!(Spec::from(json!({"hooks": hooks})).gpu_by_hook());
    assert!(!Spec::from(json!({"hooks": hooks, "linux": devices})).gpu_by_hook());
    assert!(!Spec::from(json!({})).gpu_by_hook());
}

#[test]
fn devices_are_read_with_their_defaults() {
    let spec = Spec::from(json!({"linux": {"devices": [
        {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 432, "uid": 1, "gid": 44},
        {"path": "/dev/pipe", "type": "p"},
        {"path": "/dev/b", "type": "b", "major": 8, "minor": 1},
    ]}}));
    let devices = spec.devices().unwrap();
    assert_eq!(devices.len(), 2);
    assert_eq!((devices[0].mode, devices[0].uid, devices[0].gid), (0o660, 1, 44));
    assert_eq!((devices[1].mode, devices[1].node.kind), (0o666, NodeType::Block));
}

#[test]
fn rules_that_runc_accepts_are_read() {
    let null = |rule: Value| {
        let spec = Spec::from(json!({"linux": {"resources": {"devices": [rule]}}}));
        DeviceRule::open(&spec.device_rules().unwrap(), &null_device())
    };
    assert!(null(json!({"allow": true, "type": "", "access": "rwm"})));
    assert!(null(
        json!({"allow": true, "type": "c", "major": 1, "minor": 3, "access": "r"})
    ));
    assert!(null(
        json!({"allow": true, "type": "c", "major": 1, "minor": null, "access": "w"})
    ));
    assert!(!null(
        json!({"allow": true, "type": "c", "major": 1, "access": null})
    ));
    assert!(!null(json!({"type": "a", "access": "rwm"})));
}

fn null_device() -> firn_gpu::DeviceNode {
    firn_gpu::DeviceNode {
        path: "/dev/null".into(),
        kind: NodeType::Char,
        major: 1,
        minor: 3,
    }
}

#[test]
fn a_malformed_rule_is_an_error() {
    for rule in [
        json!({"allow": "yes"}),
        json!({"allow": true, "type": "q"}),
        json!({"allow": true, "major": "1"}),
        json!("rwm"),
    ] {
        let spec = Spec::from(json!({"linux": {"resources": {"devices": [rule]}}}));
        assert_eq!(spec.device_rules().unwrap_err().code(), "FIRN-SPEC-INVALID");
    }
}

#[test]
fn mounts_are_read_with_their_defaults() {
    let mount = json!({"destination": "/a", "options": null, "future": {"x": 1}});
    let mounts = Spec::from(json!({ "mounts": [mount] })).mounts().unwrap();
    assert_eq!(mounts[0].destination, Path::new("/a"));
    assert!(mounts[0].kind.is_empty() && mounts[0].options.is_empty() && !mounts[0].is_bind());
    for mount in [json!({"source": "/a"}), json!({"destination": 3}), json!(null)] {
        let spec = Spec::from(json!({ "mounts": [mount] }));
        assert_eq!(spec.mounts().unwrap_err().code(), "FIRN-SPEC-INVALID");
    }
}

#[test]
fn malformed_devices_are_errors_not_skipped() {
    for entry in [
        json!({"type": "c"}),
        json!({"path": "/dev/x", "type": "q"}),
        json!({"path": "/dev/x", "type": "a"}),
        json!({"path": "/dev/x", "type": "c", "major": -1}),
        json!(3),
    ] {
        let spec = Spec::from(json!({"linux": {"devices": [entry]}}));
        assert_eq!(spec.devices().unwrap_err().code(), "FIRN-SPEC-INVALID");
    }
}

#[test]
fn namespaces_and_terminal() {
    let spec = Spec::from(json!({
        "process": {"terminal": true}, "root": {"path": "rootfs"},
        "linux": {"cgroupsPath": "/a/b", "namespaces":
         [{"type": "pid"}, {"type": "network", "path": "/run/netns/x"}]},
    }));
    assert!(spec.terminal() && spec.has_namespace("pid") && !spec.has_namespace("user"));
    assert_eq!(spec.namespace_path("network"), Some(Path::new("/run/netns/x")));
    assert_eq!(spec.namespace_path("pid"), None);
    assert_eq!(
        (spec.cgroups_path(), spec.root_path()),
        (Some("/a/b"), Some(Path::new("rootfs")))
    );
}

#[test]
fn a_tmpfs_is_the_containers_own_unless_a_later_mount_covers_it() {
    let spec: Spec = json!({"mounts": [
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"},
        {"destination": "/run/", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/cache", "type": "tmpfs", "source": "/srv", "options": ["rbind"]},
        {"destination": "/dev/shm", "type": "bind", "source": "/run/pod/shm", "options": ["rbind"]},
    ]})
    .into();
    assert_eq!(spec.kept_tmpfs().unwrap(), [Path::new("/dev"), Path::new("/run")]);
}

#[test]
fn the_shared_memory_of_a_pod_is_what_containerd_or_the_kubelet_made_for_it() {
    const SANDBOX: &str = "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/7f/shm";
    const VOLUME: &str = "/var/lib/kubelet/pods/a-b/volumes/kubernetes.io~empty-dir/memory";
    let spec = |source: &str, options: &[&str]| {
        Spec::from(json!({
            "annotations": {"io.kubernetes.cri.sandbox-id": "7f", "io.kubernetes.cri.sandbox-uid": "a-b"},
            "mounts": [
                {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"},
                {"destination": "/dev/shm/", "type": "bind", "source": source, "options": options},
                {"destination": "/dev/mqueue", "type": "bind", "source": "/mqueue", "options": ["bind"]},
            ],
        }))
    };
    for (source, options, is_of_pod) in [
        (SANDBOX, &["rbind"][..], true),
        (VOLUME, &["bind"], true),
        (VOLUME, &["bind", "ro"], false),
        ("/dev/shm", &["rbind"], false),
        (
            "/var/lib/kubelet/pods/a-b/volumes/kubernetes.io~empty-dir",
            &["bind"],
            false,
        ),
        (
            "/var/lib/kubelet/pods/x/volumes/kubernetes.io~empty-dir/memory",
            &["bind"],
            false,
        ),
        (
            "/data/io.containerd.grpc.v1.cri/sandboxes/8/shm",
            &["bind"],
            false,
        ),
        ("/data/io.containerd.grpc.v1.cri/sandboxes//shm", &["bind"], false),
    ] {
        let spec = spec(source, options);
        let found = spec.pod_shm().unwrap();
        assert_eq!(
            found.as_deref(),
            is_of_pod.then_some(Path::new(source)),
            "{source}"
        );
        let is_kept = spec.kept_tmpfs().unwrap() == [Path::new("/dev/shm")];
        assert_eq!(is_kept, is_of_pod, "{source}");
    }
    let mut own = spec(SANDBOX, &[]);
    own.list_mut("mounts").unwrap().truncate(1);
    assert_eq!(own.pod_shm().unwrap(), None);
    let mut without = spec("/data/io.containerd.grpc.v1.cri/sandboxes/shm", &["bind"]);
    let annotations = without.object_mut("annotations").unwrap();
    annotations.clear();
    annotations.insert("io.kubernetes.cri.sandbox-id".into(), json!(""));
    assert_eq!(without.pod_shm().unwrap(), None);
}
