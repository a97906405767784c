//! `firn inspect`.

use std::process::Command;

use firn_image::manifest::{Manifest, Origin, StoredMemory};
use firn_store::{Digest, Index, Packing, Piece, Store};
use serde_json::{Value, json};

use crate::node::{Node, text, uuid, value};

#[test]
fn inspect_shows_what_a_checkpoint_holds() {
    let node = Node::new();
    let output = node.firn(&["inspect", "image", "-v"]);
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(0), "{shown}");
    assert!(shown.starts_with("verdict    whole\n"), "{shown}");
    for part in [
        "580.95.05 (CUDA 13.0)",
        &uuid(0),
        "8.0 GiB",
        "pid 7",
        "tcp-established",
        "3 of CRIU, 2.0 MiB",
        "size       2.0 MiB: ",
    ] {
        assert!(shown.contains(part), "{part:?} is missing in\n{shown}");
    }
    // What is no problem needs -v.
    let shown = text(&node.firn(&["inspect", "image"]));
    assert!(
        !shown.contains("tcp-established") && shown.contains("pid 7"),
        "{shown}"
    );
    let output = value(&node.firn(&["inspect", "--json", "image"]));
    assert_eq!(output["manifest"]["gpus"][0]["uuid"], json!(uuid(0)));
    assert_eq!(output["failure"], Value::Null);
}

#[test]
fn inspect_shows_memory_that_is_in_a_store() {
    let node = Node::new();
    let index = Digest::of(b"index");
    let mut manifest = node.manifest();
    manifest.bulk = Some(StoredMemory {
        store: "a-store".to_owned(),
        index,
        bytes: 2 << 30,
        written: 12 << 20,
        reused: 2000 << 20,
    });
    manifest.write(&node.path("image")).expect("a manifest");
    let shown = text(&node.firn(&["inspect", "image"]));
    for part in ["2.0 GiB in store a-store, 12.0 MiB new", &index.to_string()] {
        assert!(shown.contains(part), "{part:?} is missing in\n{shown}");
    }
    let bulk = value(&node.firn(&["inspect", "--json", "image"]))["manifest"]["bulk"].clone();
    assert_eq!(bulk["written"], json!(12 << 20));
}

/// The memory of the image in the node's store, whose index names one extent.
fn in_store(node: &Node) -> (Store, Index, Digest) {
    node.configure(&format!("[images]\nstore = {:?}", node.path("store")));
    let store = Store::create(&node.path("store"), &Packing::default()).expect("a store");
    let writer = store.writer(None).expect("a writer");
    let extent = writer.put(&[7; 8192]).expect("an extent");
    let index = Index {
        checkpoint: node.manifest().checkpoint,
        made: 1,
        container: "job".to_owned(),
        host: "node".to_owned(),
        machine: None,
        owner: None,
        image: node.path("image"),
        mount: None,
        pieces: vec![Piece {
            pid: 7,
            address: 0x1000,
            length: 8192,
            extents: vec![extent],
        }],
    };
    let id = writer.finish(&index).expect("an index");
    let bulk = Some(StoredMemory {
        store: store.id().to_owned(),
        index: id,
        bytes: 8192,
        written: 8192,
        reused: 0,
    });
    let manifest = Manifest {
        bulk,
        ..node.manifest()
    };
    manifest.write(&node.path("image")).expect("a manifest");
    (store, index, id)
}

/// Whoever looks at a checkpoint sees that the store has lost its memory.
#[test]
fn every_look_at_a_checkpoint_shows_that_its_memory_is_missing() {
    let node = Node::new();
    let (store, index, id) = in_store(&node);
    let looks: [&[&str]; 3] = [
        &["inspect", "image"],
        &["audit", "image", "--target", "inventory.json"],
        &["restore", "./image", "--dry-run", "--spec", "config.json"],
    ];
    let seen = |how: &str, is_missing: bool| {
        for look in looks {
            let output = node.firn(look);
            let shown = text(&output);
            assert_eq!(
                (output.status.code() == Some(0), shown.contains("memory missing")),
                (!is_missing, is_missing),
                "{how}, {look:?}:\n{shown}"
            );
            assert!(!is_missing || shown.contains("FIRN-STORE-MISSING"), "{shown}");
        }
        let output = node.firn(&["inspect", "image", "--json"]);
        let code = value(&output)["failure"]["code"].clone();
        assert_eq!(code == json!("FIRN-STORE-MISSING"), is_missing, "{code}");
    };
    seen("whole", false);
    let extent = index.pieces[0].extents[0].expect("it is not zero");
    let extent = store.root().join(extent.extent_path());
    let kept = std::fs::read(&extent).expect("read");
    std::fs::remove_file(&extent).expect("removed");
    seen("without an extent", true);
    std::fs::write(&extent, kept).expect("written");
    seen("whole again", false);
    std::fs::remove_file(store.root().join(id.image_path())).expect("removed");
    seen("without the index", true);
    node.configure("");
    seen("without a store", true);
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

#[test]
fn inspect_shows_where_a_checkpoint_comes_from() {
    let node = Node::new();
    let mut manifest = node.manifest();
    manifest.origin = Some(Origin {
        container: "train".to_owned(),
        image: "registry/train:1".to_owned(),
        host: "gpu-7".to_owned(),
        command: "python3 train.py".to_owned(),
        made: 1_769_904_000,
        gpu_memory: 1 << 20,
    });
    manifest.write(&node.path("image")).expect("a manifest");
    let shown = text(&node.firn(&["inspect", "image"]));
    for line in [
        "container  train on gpu-7, 2026-02-01 00:00:00",
        "image      registry/train:1",
        "command    python3 train.py",
        "size       2.0 MiB: 1.0 MiB GPU memory, 1.0 MiB memory, 48 B process state",
    ] {
        assert!(
            shown.lines().any(|shown| shown == line),
            "{line:?} is missing in\n{shown}"
        );
    }
    let shown = value(&node.firn(&["inspect", "image", "--json"]));
    assert_eq!(
        (&shown["image"], &shown["sizes"]["gpu"]),
        (&json!("registry/train:1"), &json!(1 << 20))
    );
}

/// Packs `image` as tar of this system does, with these options.
fn pack(node: &Node, file: &str, options: &[&str]) {
    let mut tar = Command::new("tar");
    tar.arg("--create")
        .arg("--file")
        .arg(node.path(file))
        .args(options);
    let packed = tar.current_dir(node.dir.path()).output().expect("tar");
    assert!(packed.status.success(), "{packed:?}");
}

#[test]
fn inspect_reads_tar_files_without_their_memory() {
    let node = Node::new();
    pack(&node, "plain.tar", &["-C", "image", "."]);
    std::fs::create_dir(node.path("archive")).expect("a directory");
    std::fs::rename(node.path("image"), node.path("archive/checkpoint")).expect("renamed");
    node.write(
        "archive/spec.dump",
        &std::fs::read_to_string(node.path("config.json")).expect("a spec"),
    );
    node.write("archive/rootfs-diff.tar", &"x".repeat(5000));
    pack(&node, "kubelet.tar", &["-C", "archive", "."]);
    for file in ["plain.tar", "kubelet.tar"] {
        let output = node.firn(&["inspect", file, "--json"]);
        let shown = value(&output);
        assert_eq!(
            (output.status.code(), &shown["unread"]),
            (Some(0), &json!(2 << 20)),
            "{file} {shown}"
        );
        assert_eq!(shown["manifest"]["gpus"][0]["uuid"], json!(uuid(0)));
    }
    let shown = value(&node.firn(&["inspect", "kubelet.tar", "--json"]));
    assert_eq!(shown["sizes"]["files"], json!(5000));
    // It has the spec of its container.
    let dry_run = |file: &str, more: [&str; 3]| {
        let words = ["restore", file, "--dry-run"];
        node.firn(&[&words[..], &more[..]].concat())
    };
    let there = ["--inventory", "inventory.json", "--json"];
    assert_eq!(value(&dry_run("kubelet.tar", there))["accepted"], json!(true));
    assert_eq!(
        value(&node.firn(&["audit", "kubelet.tar", "--json"]))["verdict"],
        "can"
    );
    let without = dry_run("plain.tar", there);
    assert!(text(&without).contains("FIRN-NO-SPEC"), "{without:?}");
    let with = dry_run("plain.tar", ["--spec", "config.json", "--json"]);
    assert_eq!(with.status.code(), Some(0), "{with:?}");
    // Who restores it by another way could find the other image.
    node.write("archive/inventory.img", "");
    pack(&node, "both.tar", &["-C", "archive", "."]);
    for both in ["both.tar", "archive"] {
        let refused = node.firn(&["inspect", both]);
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        let why = String::from_utf8_lossy(&refused.stderr);
        assert!(why.starts_with("firn: FIRN-IMAGE-CORRUPT"), "{why}");
    }
}

#[test]
fn hostile_tar_files_are_refused_and_leave_nothing() {
    let node = Node::new();
    let temporary = node.path("tmp");
    std::fs::create_dir(&temporary).expect("a directory");
    let inspect = |file: &str| {
        let output = node
            .command(&["inspect", file])
            .env("TMPDIR", &temporary)
            .output();
        let output = output.expect("firn starts");
        assert_eq!(
            std::fs::read_dir(&temporary).expect("a directory").count(),
            0,
            "{file}"
        );
        assert_eq!(output.status.code(), Some(1), "{file}: {output:?}");
        crate::node::all_output(&output)
    };
    // Memory of another size, which is not read.
    node.write("image/pages-1.img", &"x".repeat(3 << 20));
    pack(&node, "other.tar", &["-C", "image", "."]);
    assert!(inspect("other.tar").contains("FIRN-IMAGE-TRUNCATED"));
    // Memory that the manifest does not have.
    node.write("image/pages-1.img", &"x".repeat(2 << 20));
    node.write("image/pages-2.img", &"x".repeat(2 << 20));
    pack(&node, "added.tar", &["-C", "image", "."]);
    assert!(inspect("added.tar").contains("does not belong to the checkpoint"));
    std::fs::remove_file(node.path("image/pages-2.img")).expect("removed");
    // Names that lead elsewhere, and links.
    pack(
        &node,
        "climbs.tar",
        &["-C", "image", "--transform", "s,inventory,../inventory,", "."],
    );
    // By a name that tar's own readers take, and that the header of the file does not have.
    let renamed = [
        "--format=pax",
        "--pax-option=path:=../inventory.img",
        "-C",
        "image",
    ];
    pack(&node, "renamed.tar", &[&renamed[..], &["inventory.img"]].concat());
    pack(
        &node,
        "twice.tar",
        &["--hard-dereference", "-C", "image", ".", "./inventory.img"],
    );
    std::os::unix::fs::symlink("/etc/shadow", node.path("image/mm-1.img")).expect("a link");
    pack(&node, "link.tar", &["-C", "image", "."]);
    for (file, why) in [
        ("climbs.tar", "leads out of the checkpoint"),
        ("renamed.tar", "leads out of the checkpoint"),
        ("twice.tar", "it has inventory.img twice"),
        ("link.tar", "no regular file"),
    ] {
        assert!(inspect(file).contains(why), "{file}");
    }
    // What ends early, and what is no archive.
    let whole = std::fs::read(node.path("link.tar")).expect("read");
    std::fs::write(node.path("cut.tar"), &whole[..whole.len() / 2]).expect("written");
    std::fs::write(node.path("noise.tar"), vec![0xa5; 10_000]).expect("written");
    std::fs::write(node.path("empty.tar"), vec![0; 1024]).expect("written");
    for file in ["cut.tar", "noise.tar", "empty.tar"] {
        assert!(inspect(file).contains("FIRN-NO-CHECKPOINT"), "{file}");
    }
}

#[test]
fn inspect_shows_the_tree_of_the_processes() {
    let node = Node::new();
    let message = |fields: &[(u8, u8)]| {
        let bytes: Vec<u8> = fields
            .iter()
            .flat_map(|(field, number)| [field << 3, *number])
            .collect();
        let length = u32::try_from(bytes.len()).expect("short").to_le_bytes();
        [&length[..], &bytes].concat()
    };
    let file = |name: &str, magic: u32, messages: Vec<Vec<u8>>| {
        let head = [0x5456_4319_u32.to_le_bytes(), magic.to_le_bytes()].concat();
        let bytes = [head, messages.concat()].concat();
        std::fs::write(node.path(&format!("image/{name}")), bytes).expect("written");
    };
    file(
        "pstree.img",
        0x5027_3030,
        vec![
            message(&[(1, 1), (2, 0), (5, 1)]),
            message(&[(1, 7), (2, 1), (5, 7), (5, 8)]),
        ],
    );
    for (pid, comm) in [(1, "sh"), (7, "train\x1b")] {
        let task = [
            &[8, 1, 0x32][..],
            &[u8::try_from(comm.len()).expect("short")],
            comm.as_bytes(),
        ]
        .concat();
        let core = [&[0x1a, u8::try_from(task.len()).expect("short")][..], &task].concat();
        let length = u32::try_from(core.len()).expect("short").to_le_bytes();
        file(
            &format!("core-{pid}.img"),
            0x5505_3847,
            vec![[&length[..], &core].concat()],
        );
    }
    node.manifest().write(&node.path("image")).expect("a manifest");
    let shown = text(&node.firn(&["inspect", "image", "--processes"]));
    assert!(
        shown.ends_with("tree\n           1 sh\n             7 train?, 2 threads, GPU state\n"),
        "{shown}"
    );
    let shown = value(&node.firn(&["inspect", "image", "--processes", "--json"]));
    assert_eq!(shown["processes"][1]["parent"], json!(1));
    // What is no such file is an error, and not an empty tree.
    node.write("image/pstree.img", "x");
    node.manifest().write(&node.path("image")).expect("a manifest");
    let output = node.firn(&["inspect", "image", "--processes"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output).starts_with("verdict    FIRN-IMAGE-CORRUPT"),
        "{}",
        text(&output)
    );
}
