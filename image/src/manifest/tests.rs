mod compatibility;

use super::*;
use crate::fixtures::{sealed, spec, with_checksum};
use firn_host::Problem;
use firn_oci::Spec;
use firn_store::block_hash::sha256;
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;

fn manifest() -> Manifest {
    crate::fixtures::manifest(&[0, 1])
}

/// An image directory as CRIU and runc leave it, described.
fn image() -> (tempfile::TempDir, Manifest) {
    let dir = tempfile::tempdir().unwrap();
    for (name, size) in [
        ("inventory.img", 40),
        ("pstree.img", 30),
        ("descriptors.json", 20),
        ("pages-1.img", 2 << 20),
    ] {
        std::fs::write(dir.path().join(name), vec![7; size]).unwrap();
    }
    let manifest = Manifest {
        images: describe_images(dir.path(), &AtomicBool::new(false)).unwrap(),
        ..manifest()
    };
    (dir, manifest)
}

/// The code with which a manifest of this content is refused.
fn refusal(content: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("firn.json"), content).unwrap();
    Manifest::read(dir.path()).unwrap_err().code().to_owned()
}

#[test]
fn what_is_written_is_read() {
    let (dir, manifest) = image();
    manifest.write(dir.path()).unwrap();
    assert_eq!(Manifest::read(dir.path()).unwrap(), Some(manifest.clone()));
    manifest.verify_images(dir.path()).unwrap();
    assert!(manifest.has_gpu_state());
    assert_eq!(
        describe_images(dir.path(), &AtomicBool::new(false)).unwrap(),
        manifest.images,
        "the manifest does not describe itself"
    );
}

#[test]
fn the_topology_is_of_the_gpus_of_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = [0, 1].map(|i| manifest().gpus[i].uuid.clone());
    let mut linked = manifest();
    linked.topology.links = vec![firn_gpu::Link {
        nvlinks: Some(18),
        ..firn_gpu::Link::between(a.clone(), b.clone())
    }];
    linked.topology.numa = [(b.clone(), 1)].into();
    linked.write(dir.path()).unwrap();
    assert_eq!(Manifest::read(dir.path()).unwrap(), Some(linked.clone()));

    let stranger = firn_gpu::GpuUuid::from_bytes([9; 16]);
    for topology in [
        firn_gpu::Topology {
            links: vec![linked.topology.links[0].clone(); 2],
            ..Default::default()
        },
        firn_gpu::Topology {
            links: vec![firn_gpu::Link::between(a.clone(), stranger.clone())],
            ..Default::default()
        },
        firn_gpu::Topology {
            links: vec![firn_gpu::Link::between(a.clone(), a.clone())],
            ..Default::default()
        },
        firn_gpu::Topology {
            numa: [(stranger.clone(), 0)].into(),
            ..Default::default()
        },
    ] {
        let bad = Manifest {
            topology,
            ..manifest()
        };
        let body = serde_json::to_string(&bad).unwrap();
        assert_eq!(refusal(&sealed(&body)), "FIRN-MANIFEST-CORRUPT");
        assert!(bad.write(dir.path()).is_err());
    }
}

#[test]
fn every_truncation_is_refused() {
    let (dir, manifest) = image();
    manifest.write(dir.path()).unwrap();
    let whole = std::fs::read(dir.path().join("firn.json")).unwrap();
    for length in 0..whole.len() {
        assert_eq!(
            refusal(&whole[..length]),
            "FIRN-MANIFEST-CORRUPT",
            "{length} bytes"
        );
    }
}

#[test]
fn every_changed_byte_of_the_body_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    manifest().write(dir.path()).unwrap();
    let whole = std::fs::read(dir.path().join("firn.json")).unwrap();
    let body = whole.windows(7).position(|w| w == b"\"body\":").unwrap() + 7;
    for at in body..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        assert_eq!(refusal(&changed), "FIRN-MANIFEST-CORRUPT", "byte {at}");
    }
}

#[test]
fn giants_and_deep_nesting_are_refused() {
    let giant = usize::try_from(MAX_BYTES).unwrap() + 1;
    assert_eq!(refusal(&vec![b' '; giant]), "FIRN-MANIFEST-TOO-LARGE");
    let deep = |open: &str| open.repeat(500_000);
    assert_eq!(refusal(deep("[").as_bytes()), "FIRN-MANIFEST-CORRUPT");
    assert_eq!(refusal(deep("{\"a\":").as_bytes()), "FIRN-MANIFEST-CORRUPT");
    let nested = format!("{}1{}", "[".repeat(200_000), "]".repeat(200_000));
    assert_eq!(
        refusal(format!(r#"{{"format":{nested},"major":1}}"#).as_bytes()),
        "FIRN-MANIFEST-CORRUPT"
    );
    let body = nested.as_bytes();
    let head = format!(
        r#"{{"format":"firn-checkpoint","major":1,"minor":0,"needs":[],"sha256":"{}","body":{nested}}}"#,
        sha256(body)
    );
    assert_eq!(refusal(head.as_bytes()), "FIRN-MANIFEST-CORRUPT");
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn impossible_values_are_refused_at_both_ends() {
    let twice = |key: &'static str| {
        move |body: &mut Value| {
            let first = body[key][0].clone();
            body[key].as_array_mut().unwrap().push(first);
        }
    };
    let put = |pointer: &'static str, value: Value| {
        move |body: &mut Value| *body.pointer_mut(pointer).unwrap() = value.clone()
    };
    let (sum, long) = ("ab".repeat(32), "ab".repeat(33));
    let image = |name: &str| put("/images", json!([{"name": name, "size": 1, "sha256": sum}]));
    let images = |image: Value| put("/images", json!([image]));
    type Case = Box<dyn Fn(&mut Value)>;
    let cases: Vec<Case> = vec![
        Box::new(twice("gpus")),
        Box::new(twice("processes")),
        Box::new(put("/processes/0/pid", json!(0))),
        Box::new(put("/processes/0/restore_tid", json!(-4))),
        Box::new(put("/processes/0/restore_tid", json!(0))),
        Box::new(put("/gpus", json!([]))),
        Box::new(put("/driver", json!(null))),
        Box::new(put("/backend", json!("none"))),
        Box::new(put("/backend", json!("criu-plugin"))),
        Box::new(put("/driver/driver", json!("580\u{1b}[2J"))),
        Box::new(put("/gpus/0/name", json!("x".repeat(300)))),
        Box::new(put("/gpus/0/node/path", json!("/dev/../etc/passwd"))),
        Box::new(put("/mounts/0/destination", json!("/data/../../etc"))),
        Box::new(put("/mounts/0/destination", json!("data"))),
        Box::new(put("/mounts/0/destination", json!("/data\u{1b}[2J"))),
        Box::new(put("/mounts/0/destination", json!("/data".repeat(1000)))),
        Box::new(image("../inventory.img")),
        Box::new(image("..")),
        Box::new(image("")),
        Box::new(image("a/b.img")),
        Box::new(image("a\0b")),
        Box::new(put(
            "/images",
            json!(vec![json!({"name": "a", "size": 1, "sha256": sum}); 2]),
        )),
        Box::new(images(json!({"name": "a", "size": 1}))),
        Box::new(images(json!({"name": "a", "size": 1, "sha256": long}))),
        Box::new(images(
            json!({"name": "a", "size": 1, "sha256": "\u{1b}".repeat(64)}),
        )),
        Box::new(images(
            json!({"name": "a", "size": 1, "sha256": sum, "sha256_of_blocks": sum}),
        )),
    ];
    for (i, case) in cases.iter().enumerate() {
        let mut body = serde_json::to_value(manifest()).unwrap();
        case(&mut body);
        assert_eq!(
            refusal(&sealed(&body.to_string())),
            "FIRN-MANIFEST-CORRUPT",
            "case {i}"
        );
        let bad: Manifest = serde_json::from_value(body).unwrap();
        let dir = tempfile::tempdir().unwrap();
        assert!(
            matches!(bad.write(dir.path()), Err(ManifestError::Value { .. })),
            "case {i}"
        );
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn values_of_the_wrong_type_are_refused() {
    for body in [json!(null), json!([]), json!({}), json!("x")] {
        assert_eq!(
            refusal(&sealed(&body.to_string())),
            "FIRN-MANIFEST-CORRUPT",
            "{body}"
        );
    }
    let mut body = serde_json::to_value(manifest()).unwrap();
    body["gpus"][0]["uuid"] = json!("GPU-0");
    assert_eq!(refusal(&sealed(&body.to_string())), "FIRN-MANIFEST-CORRUPT");
}

#[test]
fn a_manifest_that_is_no_regular_file_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("firn.json");
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    assert_eq!(
        Manifest::read(dir.path()).unwrap_err().code(),
        "FIRN-MANIFEST-UNREADABLE"
    );
    std::fs::remove_file(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(
        Manifest::read(dir.path()).unwrap_err().code(),
        "FIRN-MANIFEST-UNREADABLE"
    );
}

#[test]
fn a_missing_manifest_is_refused_only_if_a_gpu_is_requested() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(
        Manifest::read_for(&spec(195, &[0]), dir.path())
            .unwrap_err()
            .code(),
        "FIRN-MANIFEST-MISSING"
    );
    assert_eq!(
        Manifest::read_for(&Spec::from(json!({})), dir.path()).unwrap(),
        None
    );
}

#[test]
fn changed_images_are_refused_by_name() {
    let (dir, manifest) = image();
    let check = |name: &str, content: Option<&[u8]>| {
        let path = dir.path().join(name);
        let kept = std::fs::read(&path).unwrap();
        match content {
            Some(content) => std::fs::write(&path, content).unwrap(),
            None => std::fs::remove_file(&path).unwrap(),
        }
        let error = manifest.verify_images(dir.path()).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        std::fs::write(&path, kept).unwrap();
        error.code().to_owned()
    };
    assert_eq!(check("inventory.img", None), "FIRN-IMAGE-TRUNCATED");
    assert_eq!(check("pstree.img", Some(&[7; 29])), "FIRN-IMAGE-TRUNCATED");
    assert_eq!(check("pages-1.img", Some(&[7; 1 << 20])), "FIRN-IMAGE-TRUNCATED");
    assert_eq!(check("pstree.img", Some(&[8; 30])), "FIRN-IMAGE-CORRUPT");
    assert_eq!(check("descriptors.json", Some(&[8; 20])), "FIRN-IMAGE-CORRUPT");
    let mut pages = vec![7; 2 << 20];
    pages[(2 << 20) - 1] = 8;
    assert_eq!(check("pages-1.img", Some(&pages)), "FIRN-IMAGE-CORRUPT");
    manifest.verify_images(dir.path()).unwrap();
}

#[test]
fn an_unfinished_dump_cannot_be_described_and_no_list_passes_for_a_dump() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("pages-1.img"), "x").unwrap();
    assert_eq!(
        describe_images(dir.path(), &AtomicBool::new(false))
            .unwrap_err()
            .code(),
        "FIRN-IMAGE-TRUNCATED"
    );
    assert_eq!(
        manifest().verify_images(dir.path()).unwrap_err().code(),
        "FIRN-IMAGE-TRUNCATED"
    );
}

#[test]
fn an_image_file_that_is_a_link_is_not_followed() {
    let (dir, manifest) = image();
    let path = dir.path().join("pstree.img");
    let elsewhere = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(elsewhere.path(), [7; 30]).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), &path).unwrap();
    assert_eq!(
        manifest.verify_images(dir.path()).unwrap_err().code(),
        "FIRN-IMAGE-UNREADABLE"
    );
}

#[test]
fn a_file_that_criu_would_read_and_no_dump_has_is_refused() {
    let (dir, manifest) = image();
    let added = |name: &str| {
        let code = manifest.verify_images(dir.path()).unwrap_err().code().to_owned();
        std::fs::remove_file(dir.path().join(name)).unwrap();
        code
    };
    std::fs::write(dir.path().join("core-9.img"), "x").unwrap();
    assert_eq!(added("core-9.img"), "FIRN-IMAGE-CORRUPT");
    std::os::unix::fs::symlink("/etc", dir.path().join("parent")).unwrap();
    assert!(
        describe_images(dir.path(), &AtomicBool::new(false)).is_err(),
        "memory in another directory"
    );
    assert_eq!(added("parent"), "FIRN-IMAGE-CORRUPT");
    std::fs::write(dir.path().join("dump.log"), "x").unwrap();
    manifest.verify_images(dir.path()).unwrap();
}

#[test]
fn a_write_to_an_image_after_its_check_is_found() {
    let (dir, manifest) = image();
    let verified = manifest.verify_images(dir.path()).unwrap();
    verified.expect_unchanged().unwrap();
    let path = dir.path().join("pages-1.img");
    let content = std::fs::read(&path).unwrap();
    std::fs::rename(&path, dir.path().join("moved")).unwrap();
    assert_eq!(
        verified.expect_unchanged().unwrap_err().code(),
        "FIRN-IMAGE-CHANGED"
    );
    // The same content, in another file.
    std::fs::write(&path, content).unwrap();
    assert_eq!(
        verified.expect_unchanged().unwrap_err().code(),
        "FIRN-IMAGE-CHANGED"
    );
    manifest
        .verify_images(dir.path())
        .unwrap()
        .expect_unchanged()
        .unwrap();
}

#[test]
fn what_is_no_regular_file_of_the_directory_is_not_even_opened() {
    use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let outside = tempfile::NamedTempFile::new().unwrap();
    let watch = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
    nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::fs::create_dir(path("directory")).unwrap();
    std::os::unix::fs::symlink(outside.path(), path("link")).unwrap();
    for watched in [outside.path(), &path("fifo"), &path("directory")] {
        watch.add_watch(watched, AddWatchFlags::IN_OPEN).unwrap();
    }
    let image = UntrustedDir::open(dir.path()).unwrap();
    let above = format!("../{}", outside.path().file_name().unwrap().display());
    let absolute = outside.path().to_str().unwrap();
    for name in [
        "fifo",
        "directory",
        "link",
        &above,
        absolute,
        "..",
        ".",
        "",
        "a\0",
    ] {
        assert!(image.file(name).is_err(), "{name:?}");
    }
    assert_eq!(watch.read_events().err(), Some(nix::errno::Errno::EAGAIN));
    std::fs::File::open(outside.path()).unwrap();
    assert_eq!(watch.read_events().unwrap().len(), 1);
}

#[test]
fn a_manifest_that_cannot_be_written_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join(".firn.json.tmp")).unwrap();
    let error = manifest().write(dir.path()).unwrap_err();
    assert_eq!(error.code(), "FIRN-MANIFEST-UNWRITABLE");
    assert_eq!(Manifest::read(dir.path()).unwrap(), None);
}
