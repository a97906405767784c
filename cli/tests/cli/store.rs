//! `firn store`.

mod gc;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use firn_image::manifest::{Manifest, StoredMemory};
use firn_store::{Digest, Index, Packing, Piece, Store, machine};
use serde_json::{Value, json};

use crate::node::{Node, all_output, text, value};

/// A node with a store.
struct Stored {
    node: Node,
    store: Store,
}

impl Stored {
    fn new() -> Self {
        let node = Node::empty();
        fs::create_dir(node.path("image")).expect("a directory");
        for name in ["inventory.img", "pstree.img", "pages-1.img"] {
            node.write(&format!("image/{name}"), "x");
        }
        let store = Store::create(&node.path("store"), &Packing::default()).expect("a store");
        node.configure(&format!("[images]\nstore = {:?}", node.path("store")));
        Self { node, store }
    }

    /// A checkpoint with these extents, made two hours ago; its image directory is there and names it.
    fn checkpoint(&self, container: &str, contents: &[&[u8]]) -> Digest {
        self.checkpoint_with(container, contents, |_| {})
    }

    fn checkpoint_with(&self, container: &str, contents: &[&[u8]], change: impl Fn(&mut Index)) -> Digest {
        let writer = self.store.writer(None).expect("a writer");
        let piece = |content: &&[u8]| Piece {
            pid: 1,
            address: 0x1000,
            length: content.len() as u64,
            extents: vec![writer.put(content).expect("stored")],
        };
        let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
        let mut index = Index {
            checkpoint: "5b0f".to_owned(),
            made: now() - 7200,
            container: container.to_owned(),
            host: host.trim().to_owned(),
            machine: Some(machine().expect("this machine has a machine-id")),
            image: self.image(container),
            owner: None,
            mount: None,
            pieces: contents.iter().map(piece).collect(),
        };
        change(&mut index);
        let id = writer.finish(&index).expect("an index");
        fs::create_dir_all(self.image(container)).expect("a directory");
        self.names(&self.image(container), id);
        id
    }

    /// Puts a firn.json there that names this index.
    fn names(&self, dir: &Path, index: Digest) {
        fs::create_dir_all(dir).expect("a directory");
        let bulk = Some(StoredMemory {
            store: self.store.id().to_owned(),
            index,
            bytes: 1,
            written: 1,
            reused: 0,
        });
        let manifest = Manifest {
            bulk,
            ..self.node.manifest()
        };
        manifest.write(dir).expect("a manifest");
    }

    /// A checkpoint of which the directory is gone, and somebody has stated so.
    fn gone(&self, container: &str, contents: &[&[u8]]) -> Digest {
        let id = self.checkpoint(container, contents);
        fs::remove_dir_all(self.image(container)).expect("removed");
        assert_eq!(
            self.json(&format!("unpin {id}")),
            json!({"id": id, "pinned": false})
        );
        id
    }

    fn image(&self, container: &str) -> PathBuf {
        self.node.path(&format!("images-of-{container}"))
    }

    fn extent(&self, content: &[u8]) -> PathBuf {
        let name = Digest::of(content).to_string();
        self.node.path("store/extents").join(&name[..2]).join(&name)
    }

    fn firn(&self, arguments: &str) -> std::process::Output {
        let words: Vec<&str> = ["store"].into_iter().chain(arguments.split(' ')).collect();
        self.node.firn(&words)
    }

    fn json(&self, arguments: &str) -> Value {
        value(&self.firn(&format!("{arguments} --json")))
    }

    /// What `ls` shows of a container's checkpoint.
    fn listed(&self, container: &str) -> Value {
        let listed = self.json("ls");
        let mut images = listed["images"].as_array().expect("a list").iter();
        images
            .find(|image| image["container"] == container)
            .expect("listed")
            .clone()
    }

    /// Containers whose memory is in the store.
    fn containers(&self) -> Vec<String> {
        let images = self.json("ls")["images"].as_array().expect("a list").clone();
        let name = |image: &Value| image["container"].as_str().expect("a name").to_owned();
        let mut names: Vec<String> = images.iter().map(name).collect();
        names.sort();
        names
    }
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("a clock").as_secs()
}

#[test]
fn ls_shows_what_each_checkpoint_takes() {
    let stored = Stored::new();
    let train = stored.checkpoint("train", &[&[1; 5000], b"common", &[0; 4096]]);
    stored.checkpoint("other", &[b"common"]);
    let output = stored.firn("ls");
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(0), "{shown}");
    let line = shown.lines().find(|line| line.contains("train")).expect("a line");
    for part in [&train.to_string()[..16], "4.9 KiB", "6 B", "4.0 KiB", "complete"] {
        assert!(line.contains(part), "{part:?} is missing in\n{shown}");
    }
    let image = stored.listed("train");
    for (key, expected) in [
        ("id", json!(train)),
        ("own", json!(5000)),
        ("shared", json!(6)),
        ("zero", json!(4096)),
        ("memory", json!(9102)),
        ("missing", json!(0)),
        ("state", json!("complete")),
        ("pinned", json!(false)),
    ] {
        assert_eq!(image[key], expected, "{key}");
    }
    fs::remove_file(stored.extent(b"common")).expect("removed");
    let output = stored.firn("ls");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output).contains("incomplete, lacks 1 extent"),
        "{}",
        text(&output)
    );
}

#[test]
fn du_adds_up() {
    let stored = Stored::new();
    stored.checkpoint("train", &[&[1; 5000], b"common", &[0; 4096]]);
    stored.checkpoint("other", &[b"common"]);
    let writer = stored.store.writer(None).expect("a writer");
    writer.put(b"unfinished").expect("stored");
    let usage = stored.json("du");
    for (key, expected) in [
        ("images", 2),
        ("memory", 9108),
        ("zero", 4096),
        ("extents", 2),
        ("stored", 5006),
        ("unused", 0),
        ("unfinished", 10),
    ] {
        assert_eq!(usage[key], json!(expected), "{key}");
    }
    assert!(text(&stored.firn("du")).contains("8.9 KiB in 2 checkpoints"));
}

#[test]
fn verify_finds_damage_and_repair_removes_it() {
    let stored = Stored::new();
    let train = stored.checkpoint("train", &[b"one", b"two"]);
    stored.checkpoint("other", &[b"three"]);
    assert!(text(&stored.firn("verify")).ends_with("whole\n"));
    fs::write(stored.extent(b"one"), b"onf").expect("written");
    let output = stored.firn("verify");
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    assert!(
        shown.contains(&format!("extent {}\n", Digest::of(b"one"))),
        "{shown}"
    );
    assert!(shown.contains("lacks 1 extent"), "{shown}");
    assert!(stored.extent(b"one").exists());
    // Another checkpoint does not need it.
    let other = stored.listed("other");
    let id = other["id"].as_str().expect("an id");
    assert_eq!(
        stored.firn(&format!("verify {}", &id[..12])).status.code(),
        Some(0)
    );
    let repaired = stored.json("verify --repair");
    assert_eq!(repaired["damaged"], json!([Digest::of(b"one")]));
    assert!(!stored.extent(b"one").exists() && stored.extent(b"two").exists());
    let left = stored.json("verify");
    assert_eq!(
        (&left["damaged"], &left["incomplete"][train.to_string()]),
        (&json!([]), &json!(1))
    );
    // The next checkpoint with this memory makes it complete.
    stored.checkpoint("again", &[b"one"]);
    assert_eq!(stored.firn("verify").status.code(), Some(0));
}

#[test]
fn memory_goes_to_another_store_and_comes_back() {
    let stored = Stored::new();
    let train = stored.checkpoint("train", &[&[1; 5000], b"common", &[0; 4096]]);
    stored.checkpoint("other", &[b"common", b"own"]);
    let there = format!("file://{}", stored.node.path("there").display());
    let is_copied = |copied: &Value, written: u64, reused: u64| {
        let [copied] = &copied["copied"].as_array().expect("a list")[..] else {
            panic!("{copied}");
        };
        for (key, expected) in [
            ("id", json!(train)),
            ("written", json!(written)),
            ("reused", json!(reused)),
        ] {
            assert_eq!(copied[key], expected, "{key}");
        }
        assert!(copied["seconds"].as_f64() > Some(0.0), "{copied}");
    };
    is_copied(&stored.json(&format!("push {there} {train}")), 5006, 0);
    let output = stored.firn(&format!("push {there}"));
    assert_eq!(output.status.code(), Some(0), "{}", all_output(&output));
    let other = Store::open(&stored.node.path("there"), &Packing::default()).expect("a store");
    assert_eq!(
        (
            other.images().expect("images").len(),
            other.extents().expect("extents").len()
        ),
        (2, 3)
    );

    let path = "store/images";
    fs::remove_file(stored.node.path(path).join(train.to_string())).expect("removed");
    fs::write(stored.extent(&[1; 5000]), "cut off").expect("written");
    let short = &train.to_string()[..12];
    is_copied(&stored.json(&format!("pull {there} {short}")), 5000, 6);
    assert_eq!(stored.firn("verify").status.code(), Some(0));
    assert_eq!(stored.firn("verify --store there").status.code(), Some(0));
}

#[test]
fn what_is_damaged_or_too_large_is_not_pulled() {
    let stored = Stored::new();
    let train = stored.checkpoint("train", &[b"one", b"two"]);
    assert_eq!(stored.firn("push there").status.code(), Some(0));
    fs::remove_dir_all(stored.node.path("store")).expect("removed");
    stored.node.configure(&format!(
        "[images]\nstore = {:?}\nstore-cap = \"1MiB\"",
        stored.node.path("store")
    ));
    let name = Digest::of(b"one").to_string();
    let extent = stored.node.path("there/extents").join(&name[..2]).join(&name);
    fs::write(&extent, "onf").expect("written");
    let output = stored.firn(&format!("pull there {train}"));
    assert_eq!(output.status.code(), Some(1));
    let shown = all_output(&output);
    assert!(
        shown.contains("FIRN-STORE-DAMAGED") && shown.contains(&name),
        "{shown}"
    );
    assert_eq!(stored.containers(), [""; 0]);
    fs::write(&extent, "one").expect("written");
    assert_eq!(stored.firn(&format!("pull there {train}")).status.code(), Some(0));
    assert_eq!(stored.containers(), ["train"]);

    let there = Store::open(&stored.node.path("there"), &Packing::default()).expect("a store");
    let writer = there.writer(None).expect("a writer");
    let extent = writer.put(&vec![7; 2 << 20]).expect("stored");
    let index = there.index(&train).expect("an index");
    let pieces = vec![Piece {
        pid: 1,
        address: 0,
        length: 2 << 20,
        extents: vec![extent],
    }];
    let large = writer.finish(&Index { pieces, ..index }).expect("finished");
    let output = stored.firn(&format!("pull there {large}"));
    assert!(
        all_output(&output).contains("FIRN-STORE-FULL"),
        "{}",
        all_output(&output)
    );
}

#[test]
fn what_is_named_wrongly_is_reported() {
    let stored = Stored::new();
    stored.checkpoint("a", &[b"one"]);
    stored.checkpoint("b", &[b"two"]);
    for (arguments, code) in [
        ("pin 0123456789abcdef", "FIRN-STORE-MISSING"),
        ("verify zzz", "FIRN-STORE-MISSING"),
        ("ls --store /none", "FIRN-STORE-UNUSABLE"),
        ("push gs://bucket/x", "FIRN-STORE-UNUSABLE"),
        ("push s3://", "FIRN-STORE-UNUSABLE"),
        ("pull s3:///x 01", "FIRN-STORE-UNUSABLE"),
        ("gc --store s3://bucket", "FIRN-STORE-UNUSABLE"),
        ("verify --repair --store s3://bucket", "FIRN-STORE-UNUSABLE"),
        ("pull /none 01", "FIRN-STORE-UNUSABLE"),
    ] {
        let output = stored.firn(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments}");
        let shown = all_output(&output);
        assert!(
            shown.contains(code) && shown.contains("hint: "),
            "{arguments}: {shown}"
        );
    }
    // Every id begins so.
    let output = stored.node.firn(&["store", "unpin", ""]);
    assert!(
        all_output(&output).contains("write more digits"),
        "{}",
        all_output(&output)
    );
    let node = Node::empty();
    node.configure("");
    let output = node.firn(&["store", "ls"]);
    assert!(
        all_output(&output).contains("FIRN-STORE-UNUSABLE: neither --store nor"),
        "{}",
        all_output(&output)
    );
}

#[test]
fn an_image_that_is_what_it_would_become_is_not_copied() {
    let node = Node::new();
    fs::create_dir(node.path("none")).expect("a directory");
    // The image is inline, and has no process with large memory.
    let codes = [("none", "FIRN-MANIFEST-MISSING"), ("image", "FIRN-IMAGE-COPY")];
    let all = ["export", "import"].map(|command| codes.map(|(image, code)| (command, image, code)));
    for (command, image, code) in all.into_iter().flatten() {
        let output = node.firn(&["store", command, image, "out", "--store", "store"]);
        let shown = all_output(&output);
        assert_eq!(output.status.code(), Some(1), "{shown}");
        assert!(shown.contains(code) && shown.contains("hint: "), "{shown}");
        assert!(!node.path("out").exists() && !node.path("store").exists());
    }
}
