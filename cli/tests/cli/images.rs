//! `firn images`, of directories. The suite `listing` has images in containerd.

use std::path::Path;

use firn_image::manifest::{Manifest, StoredMemory};
use firn_store::{Digest, Index, Noted, Packing, Pin, Store, machine};
use serde_json::{Value, json};

use crate::node::{Node, all_output, text, value};

/// A node with a checkpoint that pods of `ml` may name `warm`, and one in the store.
pub fn node() -> Node {
    let node = Node::new();
    Store::create(&node.path("store"), &Packing::default()).expect("a store");
    for dir in ["from/ml", "store/named/web"] {
        std::fs::create_dir_all(node.path(dir)).expect("a directory");
    }
    std::fs::create_dir(node.path("from/ml/warm")).expect("a directory");
    for (from, to) in [
        ("image", "from/ml/warm/checkpoint"),
        ("image", "store/named/web/server"),
    ] {
        std::fs::create_dir(node.path(to)).expect("a directory");
        for entry in std::fs::read_dir(node.path(from)).expect("a directory") {
            let name = entry.expect("an entry").file_name();
            std::fs::copy(node.path(from).join(&name), node.path(to).join(&name)).expect("copied");
        }
    }
    node.write("from/ml/warm/rootfs-diff.tar", &"x".repeat(1000));
    let (from, rescue) = (node.path("from"), node.path("rescue"));
    node.configure(&format!(
        "[restore]\nfrom-dir = {from:?}\n[checkpoint]\nrescue-dir = {rescue:?}\n[images]\nstore = {:?}",
        node.path("store")
    ));
    node
}

fn images(node: &Node, words: &[&str]) -> (Option<i32>, Value, String) {
    let state = node.path("state").display().to_string();
    let words = [
        &["images"],
        words,
        &["--no-containerd", "--state", &state, "--json"],
    ]
    .concat();
    // Images that others have left on this machine are none of the test.
    let output = node
        .command(&words)
        .env("TMPDIR", node.dir.path())
        .output()
        .expect("firn starts");
    let shown = all_output(&output);
    (
        output.status.code(),
        serde_json::from_slice(&output.stdout).unwrap_or_default(),
        shown,
    )
}

/// The checkpoints of this node alone, by their names.
fn listed(node: &Node) -> Vec<Value> {
    let (status, found, shown) = images(node, &["ls"]);
    assert_eq!(status, Some(0), "{shown}");
    let all = found["checkpoints"].as_array().expect("a list").clone();
    let own = node.dir.path().display().to_string();
    all.into_iter()
        .filter(|one| one["name"].as_str().is_some_and(|name| name.starts_with(&own)))
        .collect()
}

#[test]
fn checkpoints_that_pods_may_name_are_listed_and_measured() {
    let node = node();
    let found = listed(&node);
    assert_eq!(found.len(), 2, "{found:?}");
    let of = |kind: &str| {
        found
            .iter()
            .find(|one| one["kind"] == kind)
            .expect("a checkpoint")
    };
    let directory = of("directory");
    assert_eq!(
        (&directory["namespace"], &directory["sizes"]["files"]),
        (&json!("ml"), &json!(1000))
    );
    assert_eq!(directory["sizes"]["memory"], json!(2 << 20));
    assert_eq!(directory["gpus"].as_array().map(Vec::len), Some(1));
    assert_eq!(of("store")["namespace"], "web");
    assert!(directory["made"].as_u64() > Some(1_700_000_000), "{directory}");
    let table = node.firn(&["images", "ls", "--no-containerd"]);
    assert!(text(&table).contains("from/ml/warm"), "{}", text(&table));
    // Without its manifest it is listed still, and a broken one is named.
    node.write("store/named/web/server/firn.json", "{");
    let (_, found, _) = images(&node, &["ls"]);
    assert!(found.to_string().contains("FIRN-MANIFEST-CORRUPT"), "{found}");
}

#[test]
fn a_checkpoint_is_removed_by_its_name_and_by_nothing_else() {
    let node = node();
    let warm = node.path("from/ml/warm").display().to_string();
    let code = |words: &[&str]| {
        let (status, found, shown) = images(&node, &[&["prune"], words].concat());
        assert_eq!(status, Some(1), "{shown}");
        match &found["failure"] {
            Value::Null => shown,
            failure => failure.to_string(),
        }
    };
    assert!(code(&["/nowhere"]).contains("FIRN-PRUNE-UNKNOWN"));
    // One that cannot be removed keeps all of them.
    node.write("store/named/web/server/notes.txt", "mine");
    let server = node.path("store/named/web/server").display().to_string();
    assert!(code(&[&warm, &server]).contains("FIRN-PRUNE-FOREIGN"));
    assert_eq!(listed(&node).len(), 2);
    let (status, found, shown) = images(&node, &["prune", &warm, "--dry-run"]);
    assert_eq!((status, &found["dry_run"]), (Some(0), &json!(true)), "{shown}");
    assert_eq!(listed(&node).len(), 2);
    // It is young.
    let (status, found, _) = images(&node, &["prune", &warm, "--older-than", "1h"]);
    assert_eq!((status, &found["removed"]), (Some(0), &json!([])));
    let (status, found, shown) = images(&node, &["prune", &warm]);
    assert_eq!(status, Some(0), "{shown}");
    assert_eq!(found["removed"][0]["name"], json!(warm));
    assert!(!node.path("from/ml/warm").exists() && node.path("from/ml").is_dir());
    assert_eq!(
        std::fs::read_to_string(node.path("store/named/web/server/notes.txt")).expect("read"),
        "mine"
    );
}

#[test]
fn what_is_in_use_is_not_removed() {
    let node = node();
    let bundle = "state/io.containerd.runtime.v2.task/k8s.io/server";
    std::fs::create_dir_all(node.path(bundle)).expect("a directory");
    let image = node.path("from/ml/warm/checkpoint");
    node.write(
        &format!("{bundle}/firn-restored-from"),
        &image.display().to_string(),
    );
    let warm = node.path("from/ml/warm").display().to_string();
    let (status, found, shown) = images(&node, &["prune", &warm]);
    assert_eq!(status, Some(1), "{shown}");
    let failure = &found["failure"];
    assert_eq!(failure["code"], "FIRN-PRUNE-IN-USE");
    assert!(
        failure["message"]
            .as_str()
            .is_some_and(|text| text.contains("server")),
        "{failure}"
    );
    assert!(image.join("firn.json").exists());
    std::fs::remove_file(node.path(&format!("{bundle}/firn-restored-from"))).expect("removed");
    let (status, _, shown) = images(&node, &["prune", &warm]);
    assert_eq!(status, Some(0), "{shown}");
}

#[test]
fn a_checkpoint_without_its_memory_is_listed_as_such() {
    let node = node();
    let store = Store::open(&node.path("store"), &Packing::default()).expect("a store");
    let warm = node.path("from/ml/warm");
    let index = index_of(&store, None, &warm);
    names(&node, &warm.join("checkpoint"), index);
    let (status, _, shown) = images(&node, &["ls"]);
    assert_eq!(status, Some(0), "{shown}");
    std::fs::remove_file(store.root().join(index.image_path())).expect("removed");
    let (status, listed, shown) = images(&node, &["ls"]);
    assert_eq!(status, Some(1));
    assert!(shown.contains("memory missing"), "{shown}");
    let name = json!(warm.display().to_string());
    let all = listed["checkpoints"].as_array().expect("a list");
    let one = all.iter().find(|one| one["name"] == name).expect("it is listed");
    assert_eq!(one["failure"]["code"], json!("FIRN-STORE-MISSING"));
    assert!(one["gpus"].is_array(), "the manifest is there: {one}");
}

#[test]
fn without_containerd_nothing_is_removed() {
    let node = node();
    let warm = node.path("from/ml/warm").display().to_string();
    let output = node.firn(&["images", "prune", &warm, "--address", "/none.sock", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(value(&output)["failure"]["code"], "FIRN-CONTAINERD");
    assert_eq!(listed(&node).len(), 2);
}

/// An index in the store.
fn index_of(store: &Store, machine: Option<String>, image: &Path) -> Digest {
    let index = Index {
        checkpoint: String::new(),
        made: 1,
        container: "job".to_owned(),
        host: "node".to_owned(),
        machine,
        image: image.to_owned(),
        owner: None,
        mount: None,
        pieces: Vec::new(),
    };
    let writer = store.writer(None).expect("a writer");
    writer.finish(&index).expect("an index")
}

/// Makes a directory an image that needs this index.
fn names(node: &Node, dir: &Path, index: Digest) {
    let bulk = StoredMemory {
        store: "7c2f".to_owned(),
        index,
        bytes: 0,
        written: 0,
        reused: 0,
    };
    let manifest = Manifest {
        bulk: Some(bulk),
        ..node.manifest()
    };
    std::fs::create_dir_all(dir).expect("a directory");
    std::fs::write(dir.join("inventory.img"), "x".repeat(40)).expect("written");
    manifest.write(dir).expect("a manifest");
}

/// Whoever prunes a checkpoint states that it is gone: then its memory may go, unless another one needs it.
#[test]
fn the_memory_of_a_pruned_checkpoint_may_go() {
    let node = node();
    let store = Store::open(&node.path("store"), &Packing::default()).expect("a store");
    let [warm, server] = ["from/ml/warm", "store/named/web/server"].map(|name| node.path(name));
    let memory = |machine: Option<String>| {
        let index = index_of(&store, machine, &warm);
        for dir in [warm.join("checkpoint"), server.clone()] {
            names(&node, &dir, index);
        }
        index
    };
    let prune = |dir: &Path| images(&node, &["prune", &dir.display().to_string()]);
    let noted = |index: &Digest| store.noted(index).expect("notes");
    let index = memory(machine());
    store.pin(&index, Pin::Checkpoint).expect("pinned");
    let (status, _, shown) = images(&node, &["prune", &warm.display().to_string(), "--dry-run"]);
    assert_eq!(status, Some(0), "{shown}");
    assert_eq!(prune(&warm).0, Some(0));
    assert_eq!(
        noted(&index).pin,
        Some(Pin::Checkpoint),
        "another checkpoint needs it"
    );
    assert_eq!(prune(&server).0, Some(0));
    let released = Noted {
        is_released: true,
        ..Noted::default()
    };
    assert_eq!(noted(&index), released);

    // That of another node is not released here.
    let index = memory(Some("other".to_owned()));
    store.pin(&index, Pin::Checkpoint).expect("pinned");
    assert_eq!((prune(&warm).0, prune(&server).0), (Some(0), Some(0)));
    assert_eq!(noted(&index).pin, Some(Pin::Checkpoint));
    // The operator's pin keeps the checkpoint.
    let index = memory(machine());
    store.pin(&index, Pin::Operator).expect("pinned");
    let (status, found, _) = prune(&warm);
    assert_eq!(status, Some(1));
    assert!(
        found["failure"]["message"]
            .as_str()
            .is_some_and(|text| text.contains("pinned")),
        "{found}"
    );
    assert!(warm.exists());
}
