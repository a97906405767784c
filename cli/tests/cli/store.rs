//! `firn store`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use firn_image::manifest::{Manifest, StoredMemory};
use firn_image::store::{Digest, Index, Packing, Piece, Store, machine};
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
            mount: None,
            parent: None,
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
            parent: None,
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
fn a_damaged_index_is_shown_and_stops_gc_until_it_is_repaired() {
    let stored = Stored::new();
    let train = stored.checkpoint("train", &[b"one"]);
    let path = stored.node.path("store/images").join(train.to_string());
    fs::write(&path, "{}").expect("written");
    let shown = text(&stored.firn("ls"));
    assert!(
        shown.contains("damaged") && shown.contains("FIRN-STORE-DAMAGED"),
        "{shown}"
    );
    let output = stored.firn("gc --no-containerd --grace 0s");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        all_output(&output).contains("FIRN-STORE-DAMAGED"),
        "{}",
        all_output(&output)
    );
    assert!(stored.extent(b"one").exists());
    assert_eq!(stored.firn("verify --repair").status.code(), Some(1));
    assert!(!path.exists());
    assert_eq!(
        stored.firn("gc --no-containerd --grace 0s").status.code(),
        Some(0)
    );
    assert!(!stored.extent(b"one").exists());
}

#[test]
fn gc_removes_what_somebody_has_stated_to_be_gone() {
    let stored = Stored::new();
    stored.checkpoint("kept", &[b"one", b"common"]);
    stored.gone("gone", &[b"two", b"common"]);
    let moved = stored.checkpoint("moved", &[b"three"]);
    let young = stored.checkpoint_with("young", &[b"four"], |index| index.made = now() - 60);
    let elsewhere = stored.checkpoint_with("elsewhere", &[b"five"], |index| {
        index.machine = Some("other".to_owned());
    });
    let pinned = stored.checkpoint("pinned", &[b"six"]);
    let pin = stored.json(&format!("pin {}", &pinned.to_string()[..10]));
    assert_eq!(pin, json!({"id": pinned, "pinned": true}));
    for container in ["moved", "young", "elsewhere", "pinned"] {
        fs::remove_dir_all(stored.image(container)).expect("removed");
    }
    for id in [young, elsewhere] {
        stored.json(&format!("unpin {id}"));
    }
    // Stated to be gone, and there all the same.
    let kept = stored.listed("kept")["id"].as_str().expect("an id").to_owned();
    stored.json(&format!("unpin {kept}"));
    drop(stored.store.writer(None).expect("a writer").put(b"left over"));

    let all = stored.containers();
    let dry = stored.json("gc --no-containerd --dry-run");
    assert_eq!((&dry["extents"], &dry["dry_run"]), (&json!(1), &json!(true)));
    assert_eq!(dry["unreferenced"], json!([moved]));
    assert_eq!(stored.containers(), all);
    let output = stored.firn("gc --no-containerd");
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(0), "{}", all_output(&output));
    for part in [
        "1 checkpoint and 1 extent, 12 B, removed",
        "it is pinned",
        "it is of node",
        " s old",
        "nothing is seen that names 1 checkpoint: `firn store unpin ID`",
    ] {
        assert!(shown.contains(part), "no {part:?} in {shown}");
    }
    assert_eq!(
        stored.containers(),
        ["elsewhere", "kept", "moved", "pinned", "young"]
    );
    assert!(!stored.extent(b"two").exists() && stored.extent(b"common").exists());
    assert_eq!(stored.firn("verify").status.code(), Some(0));
    assert_eq!(
        fs::read_dir(stored.node.path("store/new"))
            .expect("listed")
            .count(),
        0
    );

    let unpin = stored.json(&format!("unpin {pinned}"));
    assert_eq!(unpin, json!({"id": pinned, "pinned": false}));
    stored.firn("gc --no-containerd --grace 30s --other-hosts");
    assert_eq!(stored.containers(), ["kept", "moved"]);
}

/// A checkpoint that was moved away, and one whose directory has another one by now: the first may be
/// elsewhere. So may be both.
#[test]
fn gc_removes_what_nothing_names_only_on_request() {
    let stored = Stored::new();
    stored.checkpoint("kept", &[b"one"]);
    stored.checkpoint("moved", &[b"two"]);
    stored.checkpoint("again", &[b"three"]);
    let keep = stored.node.path("archive");
    fs::rename(stored.image("moved"), &keep).expect("moved");
    stored.names(&stored.image("again"), Digest::of(b"other"));
    let all = stored.containers();
    for arguments in ["gc --no-containerd", "gc --no-containerd --unreferenced-since 7d"] {
        let found = stored.json(arguments);
        assert_eq!(found["unreferenced"].as_array().map(Vec::len), Some(2), "{found}");
        assert_eq!(stored.containers(), all, "{arguments}");
    }
    stored.firn("gc --no-containerd --unreferenced-since 0s");
    assert_eq!(stored.containers(), ["kept"]);
}

/// A checkpoint in each place keeps the memory that it names, whatever was stated.
fn names_are_seen(stored: &Stored) {
    let gone = stored.listed("gone")["id"]
        .as_str()
        .expect("an id")
        .parse()
        .expect("a digest");
    for place in [
        "from/ml/warm",
        "from/ml/warm/checkpoint",
        "store/named/ml/warm",
        "rescue/job",
    ] {
        let dir = stored.node.path(place);
        stored.names(&dir, gone);
        let shown = text(&stored.firn("gc --no-containerd --unreferenced-since 0s"));
        assert!(shown.contains(&format!("{} is there", dir.display())), "{shown}");
        fs::remove_dir_all(dir).expect("removed");
    }
}

/// A place for checkpoints that cannot be read protects all memory: what it names is not known.
#[test]
fn gc_removes_nothing_while_a_place_for_checkpoints_cannot_be_read() {
    let stored = Stored::new();
    stored.gone("gone", &[b"one"]);
    let [from, rescue, store] = ["from", "rescue", "store"].map(|name| stored.node.path(name));
    let configure = |more: &str| {
        let images = format!("[images]\nstore = {store:?}\n");
        stored.node.configure(&format!("{images}{more}"));
    };
    let fails = |what: &str, code: &str| {
        let output = stored.firn("gc --no-containerd --unreferenced-since 0s --other-hosts");
        let shown = all_output(&output);
        assert_eq!(output.status.code(), Some(1), "{what}: {shown}");
        assert!(
            shown.contains(code) && shown.contains("hint: "),
            "{what}: {shown}"
        );
        assert_eq!(stored.store.images().expect("images").len(), 1, "{what}");
        assert!(stored.extent(b"one").exists(), "{what}");
    };
    // A mistake in a key that names such a place: firn would look elsewhere.
    for key in [
        "[checkpoint]\nrescue-dir = 7\n",
        "[checkpoint]\nrescue-dirs = \"/x\"\n",
        "[restore]\nfrom-dir = 7\n",
    ] {
        configure(key);
        fails(key, "FIRN-CONFIG");
    }
    configure(&format!(
        "[restore]\nfrom-dir = {from:?}\n[checkpoint]\nrescue-dir = {rescue:?}\n"
    ));
    fails("from-dir is not there", "FIRN-STORE-UNUSABLE");
    fs::create_dir(&from).expect("a directory");
    for place in [
        "from/ml/warm",
        "from/ml/warm/checkpoint",
        "store/named/ml/warm",
        "rescue/job",
    ] {
        let dir = stored.node.path(place);
        fs::create_dir_all(&dir).expect("a directory");
        for content in ["{", "{\"format\":\"firn-checkpoint\",\"major\":9}"] {
            fs::write(dir.join("firn.json"), content).expect("written");
            fails(place, "FIRN-STORE-UNUSABLE");
        }
        fs::remove_dir_all(dir).expect("removed");
    }
    names_are_seen(&stored);
    stored.firn("gc --no-containerd");
    assert_eq!(stored.containers(), [""; 0]);
}

/// The index is there before the firn.json that names it.
#[test]
fn gc_keeps_a_checkpoint_that_is_not_complete() {
    let stored = Stored::new();
    stored.checkpoint_with("dumping", &[b"one"], |index| index.made = now());
    let image = stored.image("dumping");
    fs::remove_file(image.join("firn.json")).expect("removed");
    fs::write(image.join("pages-1.img"), "").expect("written");
    let shown = text(&stored.firn("gc --no-containerd --grace 0s"));
    assert!(
        shown.contains(&format!("{} has no firn.json yet", image.display())),
        "{shown}"
    );
    assert_eq!(stored.containers(), ["dumping"]);
    // It has failed, and its files are removed.
    fs::remove_file(image.join("pages-1.img")).expect("removed");
    stored.firn("gc --no-containerd --grace 0s --unreferenced-since 0s");
    assert_eq!(stored.containers(), [""; 0]);
}

#[test]
fn gc_removes_nothing_if_containerd_cannot_be_asked() {
    let stored = Stored::new();
    stored.gone("gone", &[b"one"]);
    let output = stored.firn("gc --address /none.sock");
    assert_eq!(output.status.code(), Some(1));
    let shown = all_output(&output);
    assert!(
        shown.contains("FIRN-CONTAINERD") && shown.contains("nothing was removed"),
        "{shown}"
    );
    assert_eq!(stored.containers(), ["gone"]);
}

#[test]
fn gc_waits_for_writers() {
    let stored = Stored::new();
    let writer = stored.store.writer(None).expect("a writer");
    let one = writer.put(b"one").expect("stored");
    let mut gc = stored.node.command(&["store", "gc", "--no-containerd"]);
    let mut gc = gc
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("firn starts");
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(gc.try_wait().expect("a state").is_none(), "gc has not waited");
    let pieces = vec![Piece {
        pid: 1,
        address: 0,
        length: 3,
        extents: vec![one],
    }];
    let index = Index {
        checkpoint: String::new(),
        made: now(),
        container: "c".to_owned(),
        host: "h".to_owned(),
        machine: None,
        image: "/none".into(),
        mount: None,
        parent: None,
        pieces,
    };
    writer.finish(&index).expect("finished");
    assert!(gc.wait().expect("a state").success());
    assert_eq!(stored.store.missing(&index).expect("looked for"), []);
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
