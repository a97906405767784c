//! What `firn store gc` removes and keeps.

use super::*;

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
        owner: None,
        mount: None,
        pieces,
    };
    writer.finish(&index).expect("finished");
    assert!(gc.wait().expect("a state").success());
    assert_eq!(stored.store.missing(&index).expect("looked for"), []);
}
