//! `firn inspect`.

use firn_image::manifest::StoredMemory;
use firn_image::store::Digest;
use serde_json::{Value, json};

use crate::node::{Node, text, uuid, value};

#[test]
fn inspect_shows_what_a_checkpoint_holds() {
    let node = Node::new();
    let output = node.firn(&["inspect", "image"]);
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(0), "{shown}");
    for part in [
        "580.95.05 (CUDA 13.0)",
        &uuid(0),
        "8.0 GiB",
        "pid 7",
        "tcp-established",
        "3 files, 2.0 MiB",
        "whole",
    ] {
        assert!(shown.contains(part), "{part:?} is missing in\n{shown}");
    }
    let output = value(&node.firn(&["inspect", "--json", "image"]));
    assert_eq!(output["manifest"]["gpus"][0]["uuid"], json!(uuid(0)));
    assert_eq!(output["failure"], Value::Null);
}

#[test]
fn inspect_shows_memory_that_is_in_a_store() {
    let node = Node::new();
    let (index, parent) = (Digest::of(b"index"), Digest::of(b"parent"));
    let mut manifest = node.manifest();
    manifest.bulk = Some(StoredMemory {
        store: "a-store".to_owned(),
        index,
        bytes: 2 << 30,
        written: 12 << 20,
        reused: 2000 << 20,
        parent: Some(parent),
    });
    manifest.write(&node.path("image")).expect("a manifest");
    let shown = text(&node.firn(&["inspect", "image"]));
    for part in [
        "2.0 GiB in store a-store, 12.0 MiB new",
        &index.to_string(),
        &parent.to_string(),
    ] {
        assert!(shown.contains(part), "{part:?} is missing in\n{shown}");
    }
    let bulk = value(&node.firn(&["inspect", "--json", "image"]))["manifest"]["bulk"].clone();
    assert_eq!(
        (&bulk["written"], &bulk["parent"]),
        (&json!(12 << 20), &json!(parent))
    );
}

#[test]
fn inspect_names_what_is_damaged() {
    let node = Node::new();
    let code = || value(&node.firn(&["inspect", "--json", "image"]))["failure"]["code"].clone();
    node.write("image/pages-1.img", "short");
    assert_eq!(code(), "FIRN-IMAGE-TRUNCATED");
    let output = node.firn(&["inspect", "image"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output).contains("pages-1.img") && text(&output).contains("hint: "),
        "{}",
        text(&output)
    );
    node.write("image/firn.json", "{");
    assert_eq!(code(), "FIRN-MANIFEST-CORRUPT");
}

#[test]
fn inspect_distinguishes_finished_and_unfinished_images_without_manifest() {
    let node = Node::new();
    std::fs::remove_file(node.path("image/firn.json")).expect("removed");
    let output = node.firn(&["inspect", "image"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output).contains("not made by firn"));

    // firn writes its manifest last: what has NVIDIA's driver among its files was not finished.
    for (name, content) in [
        ("files.img", "\0/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05\0"),
        ("mountpoints-12.img", "x/dev/nvidia0x"),
    ] {
        node.write(&format!("image/{name}"), content);
        let output = node.firn(&["inspect", "image"]);
        assert_eq!(output.status.code(), Some(1), "{name}");
        let shown = text(&output);
        assert!(
            shown.contains("FIRN-MANIFEST-MISSING") && shown.contains("not finished"),
            "{shown}"
        );
        let shown = value(&node.firn(&["inspect", "image", "--json"]));
        assert_eq!(shown["failure"]["code"], "FIRN-MANIFEST-MISSING");
        let shown = value(&node.firn(&["audit", "image", "--json"]));
        assert_eq!(shown["verdict"], "cannot");
        node.write(&format!("image/{name}"), "/usr/lib/libc.so.6 /dev/null");
        assert_eq!(node.firn(&["inspect", "image"]).status.code(), Some(0), "{name}");
        std::fs::remove_file(node.path("image").join(name)).expect("removed");
    }
    std::fs::remove_file(node.path("image/pstree.img")).expect("removed");
    assert_eq!(node.firn(&["inspect", "image"]).status.code(), Some(1));
    assert_eq!(node.firn(&["inspect", "nowhere"]).status.code(), Some(1));
}

#[test]
fn a_checkpoint_without_devices_is_shown_as_such() {
    let node = Node::new();
    node.let_go();
    let shown = text(&node.firn(&["inspect", "image"]));
    for part in [
        "device-free: it restores with any device or without one",
        &uuid(0),
        "none with GPU state",
    ] {
        assert!(shown.contains(part), "{part:?} is missing in\n{shown}");
    }
}
