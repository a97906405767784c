use containerd_shim_protos::shim::oci;
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageFull};

use std::path::Path;

use firn_transaction::options::*;

use super::*;

fn any(type_url: &str, value: Vec<u8>) -> Any {
    Any {
        type_url: type_url.to_owned(),
        value,
        ..Any::default()
    }
}

/// The published messages have been generated from containerd's own files.
fn sent() -> oci::Options {
    oci::Options {
        no_pivot_root: true,
        io_uid: 1000,
        binary_name: "crun".into(),
        root: "/run/other".into(),
        systemd_cgroup: true,
        criu_work_path: "/work".into(),
        ..oci::Options::default()
    }
}

/// Fields 2 (path) and 3 (body) of runtimeoptions.v1.Options, after a field 1 and an unknown one.
fn runtime_options(path: &str, body: &str) -> Any {
    let mut value = b"\x0a\x03url\xf8\x01\x05".to_vec();
    for (tag, text) in [(0x12, path), (0x1a, body)] {
        value.extend([tag, u8::try_from(text.len()).unwrap()]);
        value.extend(text.as_bytes());
    }
    any("runtimeoptions.v1.Options", value)
}

#[test]
fn runc_options_are_decoded_with_any_prefix_of_the_type_name() {
    for url in [
        "containerd.runc.v1.Options",
        "type.googleapis.com/containerd.runc.v1.Options",
    ] {
        let options = runc_options(Some(&any(url, sent().write_to_bytes().unwrap()))).unwrap();
        assert_eq!(options.runtime(), "crun");
        assert_eq!(options.root("k8s.io"), Path::new("/run/other/k8s.io"));
        assert!(options.no_pivot_root && options.systemd_cgroup && !options.no_new_keyring);
        assert_eq!((options.io_uid, options.criu_work_path.as_str()), (1000, "/work"));
    }
    assert_eq!(
        oci::Options::descriptor().full_name(),
        "containerd.runc.v1.Options"
    );
}

#[test]
fn without_options_runc_is_called_with_its_usual_root() {
    for none in [None, Some(&Any::default())] {
        let options = runc_options(none).unwrap();
        assert_eq!(options, RuncOptions::default());
        assert_eq!(options.runtime(), "runc");
        assert_eq!(options.root("default"), Path::new("/run/containerd/runc/default"));
    }
}

/// As ctr 1.7 sends `--no-pivot` and `--uidmap 0:1000:1` to a runtime that is not called after runc: fields
/// 1, 10 and 11, and 12 and 13 of its restores, with fields of dumps in between.
#[test]
fn options_of_older_clients_are_decoded() {
    let value = b"\x08\x01\x28\x01\x32\x03pid\x50\xe8\x07\x58\xe9\x07\x62\x05/work\x6a\x06/image";
    let sent = any("containerd.linux.runc.CreateOptions", value.to_vec());
    let options = runc_options(Some(&sent)).unwrap();
    assert!(options.no_pivot_root && !options.no_new_keyring && !options.systemd_cgroup);
    assert_eq!((options.io_uid, options.io_gid), (1000, 1001));
    assert_eq!(options.criu_work_path, "/work");
    assert_eq!(options.criu_image_path, "/image");
    assert!(is_sent_as(&sent));
    let malformed = any("containerd.linux.runc.CreateOptions", b"\x0a".to_vec());
    assert!(matches!(
        runc_options(Some(&malformed)),
        Err(DecodeError::Malformed { .. })
    ));
}

#[test]
fn criu_path_of_older_daemons_is_kept() {
    let mut value = sent().write_to_bytes().unwrap();
    value.extend(b"\x42\x05/criu");
    let options = runc_options(Some(&any("containerd.runc.v1.Options", value))).unwrap();
    assert_eq!(options.criu_path, "/criu");
}

#[test]
fn toml_of_cri_is_decoded() {
    let body =
        "BinaryName = \"/usr/bin/crun\"\nSystemdCgroup = true\nIoUid = 7\nTypeUrl = \"x\"\nroot = \"/r\"";
    let options = runc_options(Some(&runtime_options("", body))).unwrap();
    assert_eq!(options.runtime(), "/usr/bin/crun");
    assert!(options.systemd_cgroup);
    assert_eq!((options.io_uid, options.root.as_str()), (7, "/r"));
}

#[test]
fn config_path_wins_over_the_body() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("runtime.toml");
    std::fs::write(&file, "BinaryName = \"from-file\"").unwrap();
    let sent = runtime_options(file.to_str().unwrap(), "BinaryName = \"from-body\"");
    assert_eq!(runc_options(Some(&sent)).unwrap().runtime(), "from-file");
    let missing = runtime_options("/nonexistent.toml", "");
    let error = runc_options(Some(&missing)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot read the runtime options in /nonexistent.toml"
    );
}

#[test]
fn malformed_options_are_refused() {
    let refused = [
        (
            any("containerd.other.Options", vec![]),
            "unsupported options type \"containerd.other.Options\"",
        ),
        (
            any("containerd.runc.v1.Options", b"\x32\x7f".to_vec()),
            "malformed containerd.runc.v1.Options",
        ),
        (
            any("runtimeoptions.v1.Options", b"\x12\x7f".to_vec()),
            "malformed runtimeoptions.v1.Options",
        ),
        (runtime_options("", "= ="), "the runtime options are not TOML"),
        (
            runtime_options("", "SystemdCgroup = \"yes\""),
            "runtime option SystemdCgroup is string, expected boolean",
        ),
        (
            runtime_options("", "IoUid = -1"),
            "runtime option IoUid is integer, expected a number from 0 to 4294967295",
        ),
    ];
    for (sent, message) in refused {
        assert_eq!(runc_options(Some(&sent)).unwrap_err().to_string(), message);
    }
}

#[test]
fn options_file_has_the_stock_form() {
    let bundle = tempfile::tempdir().unwrap();
    RuncOptions::default().save(bundle.path()).unwrap();
    assert_eq!(std::fs::read(bundle.path().join("options.json")).unwrap(), b"{}");
    assert_eq!(std::fs::read(bundle.path().join("runtime")).unwrap(), b"");

    let options = RuncOptions {
        binary_name: "crun".into(),
        systemd_cgroup: true,
        io_gid: 5,
        ..RuncOptions::default()
    };
    options.save(bundle.path()).unwrap();
    let json = std::fs::read_to_string(bundle.path().join("options.json")).unwrap();
    assert_eq!(json, r#"{"binary_name":"crun","io_gid":5,"systemd_cgroup":true}"#);
    assert_eq!(std::fs::read(bundle.path().join("runtime")).unwrap(), b"crun");
    let mode = std::fs::metadata(bundle.path().join("options.json")).unwrap();
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777,
        0o600
    );
    assert_eq!(RuncOptions::load(bundle.path()).unwrap(), options);
}

#[test]
fn files_of_another_shim_are_read() {
    let bundle = tempfile::tempdir().unwrap();
    assert_eq!(
        RuncOptions::load(bundle.path()).unwrap(),
        RuncOptions::default(),
        "nothing there"
    );

    let go = r#"{"binary_name":"runc","root":"/run/x","criu_path":"/c","a_later_field":{"x":[1]}}"#;
    std::fs::write(bundle.path().join("options.json"), go).unwrap();
    let options = RuncOptions::load(bundle.path()).unwrap();
    assert_eq!(
        (options.root.as_str(), options.criu_path.as_str()),
        ("/run/x", "/c")
    );

    std::fs::remove_file(bundle.path().join("options.json")).unwrap();
    std::fs::write(bundle.path().join("runtime"), "/opt/crun\n").unwrap();
    assert_eq!(RuncOptions::load(bundle.path()).unwrap().runtime(), "/opt/crun");

    for damaged in ["{", "7", "{\"io_uid\":\"x\"}"] {
        std::fs::write(bundle.path().join("options.json"), damaged).unwrap();
        assert!(
            matches!(RuncOptions::load(bundle.path()), Err(FileError::Parse { .. })),
            "{damaged}"
        );
    }
}

#[test]
fn checkpoint_options_with_a_parent() {
    let message = oci::CheckpointOptions {
        exit: true,
        open_tcp: true,
        empty_namespaces: vec!["network".into()],
        work_path: "/w".into(),
        ..oci::CheckpointOptions::default()
    };
    let mut value = message.write_to_bytes().unwrap();
    value.extend(b"\x52\x04/pre");
    let options = checkpoint_options(Some(&any("containerd.runc.v1.CheckpointOptions", value))).unwrap();
    let expected = CheckpointOptions {
        exit: true,
        open_tcp: true,
        empty_namespaces: vec!["network".to_owned()],
        work_path: "/w".to_owned(),
        parent_path: "/pre".to_owned(),
        ..CheckpointOptions::default()
    };
    assert_eq!(options, expected);
    assert_eq!(checkpoint_options(None).unwrap(), CheckpointOptions::default());
    let wrong = checkpoint_options(Some(&any("containerd.runc.v1.Options", vec![])));
    assert!(matches!(wrong, Err(DecodeError::UnknownType(_))));
}

#[test]
fn the_image_directory_of_firn_restore_is_read_from_runcs_options_only() {
    let mut options = containerd_shim_protos::shim::oci::Options::new();
    options.criu_image_path = "/srv/containerds".to_owned();
    let named = |options: &containerd_shim_protos::shim::oci::Options, type_url: &str| {
        let any = Any {
            type_url: type_url.to_owned(),
            value: options.write_to_bytes().unwrap(),
            ..Any::default()
        };
        restore_dir(Some(&any)).unwrap()
    };
    assert_eq!(named(&options, "containerd.runc.v1.Options"), None);
    let fields = options.special_fields.mut_unknown_fields();
    fields.add_length_delimited(15_001, b"/srv/image".to_vec());
    assert_eq!(
        named(&options, "containerd.runc.v1.Options"),
        Some("/srv/image".into())
    );
    assert_eq!(named(&options, "runtimeoptions.v1.Options"), None);
    assert_eq!(restore_dir(None).unwrap(), None);
}
