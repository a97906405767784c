//! `firn restore --dry-run`, without containerd.

use std::process::Output;

use serde_json::{Value, json};

use crate::node::{Node, all_output, inventory, text, uuid, value};

/// For the checkpoint in `image` and the container of config.json.
fn dry_run(node: &Node, more: &[&str]) -> Output {
    let restore = ["restore", "./image", "--dry-run", "--spec", "config.json"];
    node.firn(&[&restore[..], more].concat())
}

fn planned(node: &Node) -> Value {
    value(&dry_run(node, &["--json"]))
}

#[test]
fn a_dry_run_shows_the_map_that_a_restore_would_use() {
    let node = Node::new();
    let output = dry_run(&node, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let shown = text(&output);
    for part in [
        "verdict can be restored here, as far as can be seen\n",
        "grant   by the device nodes of the spec\n",
        &format!("{} Simulated -> {} (minor 0, 00000000:00:00.0)", uuid(0), uuid(0)),
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    node.configure("[restore]\ngpus = [\"1\"]");
    let planned = planned(&node);
    assert_eq!(
        (&planned["accepted"], &planned["dry_run"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(planned["map"], json!([{"old": uuid(0), "new": uuid(1)}]));
    assert_eq!(planned["basis"], "by [restore] gpus in the configuration");
    assert_eq!(planned["warnings"][0]["warning"], "bus_id", "{planned:#}");
}

#[test]
fn a_dry_run_names_why_a_restore_would_be_refused() {
    let node = Node::new();
    let mut other = inventory();
    other["driver_version"] = json!("580.105.08");
    node.write("other.json", &other.to_string());
    let output = dry_run(&node, &["--inventory", "other.json"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(
        text(&output).starts_with("verdict FIRN-DRIVER-VERSION: "),
        "{}",
        text(&output)
    );
    assert!(text(&output).contains("580.105.08") && text(&output).contains("hint: "));
    node.grant(5);
    let refused = planned(&node);
    assert_eq!(
        (&refused["accepted"], &refused["failure"]["code"]),
        (&json!(false), &json!("FIRN-GRANT-UNRESOLVED"))
    );
    std::fs::remove_file(node.path("image/firn.json")).expect("removed");
    assert_eq!(planned(&node)["failure"]["code"], "FIRN-MANIFEST-MISSING");
}

#[test]
fn a_dry_run_decides_by_the_spec_that_create_would_make_of_a_hook() {
    let node = Node::new();
    let hook = json!({"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["hook", "prestart"]});
    let spec = json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=1"]},
        "hooks": {"prestart": [hook]},
    });
    node.write("config.json", &spec.to_string());
    let planned = || planned(&node);
    let configure =
        |more: &str| node.configure(&format!("[create]\ncdi-dirs = [{:?}]\n{more}", node.dir.path()));
    configure("");
    assert_eq!(planned()["failure"]["code"], "FIRN-NO-CDI-SPEC");

    let nodes = json!([{"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}]);
    let devices = [json!({"name": "1", "containerEdits": {"deviceNodes": nodes}})];
    let file = json!({"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices});
    node.write("nvidia.json", &file.to_string());
    let found = planned();
    assert_eq!(found["accepted"], json!(true), "{found:#}");
    assert_eq!(found["map"], json!([{"old": uuid(0), "new": uuid(1)}]));
    let after = std::fs::read_to_string(node.path("config.json")).expect("read");
    assert_eq!(after, spec.to_string(), "the file is only read");

    configure("hooks = \"keep\"");
    let found = planned();
    assert_eq!(found["accepted"], json!(false), "{found:#}");
}

/// Nothing of this node is taken for something of the other.
#[test]
fn a_dry_run_for_another_node_uses_its_inventory_and_lists_what_it_has_not_seen() {
    let node = Node::new();
    let hook = json!({"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["hook", "prestart"]});
    let asking = |what: &str| {
        let env = format!("NVIDIA_VISIBLE_DEVICES={what}");
        let spec = json!({"process": {"env": [env]}, "hooks": {"prestart": [hook]}});
        node.write("config.json", &spec.to_string());
    };
    let nodes = json!([{"path": "/dev/null", "type": "c", "major": 1, "minor": 3}]);
    let devices = [json!({"name": "1", "containerEdits": {"deviceNodes": nodes}})];
    let file = json!({"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices});
    node.write("nvidia.json", &file.to_string());
    node.configure(&format!("[create]\ncdi-dirs = [{:?}]", node.dir.path()));
    let mut there = inventory();
    for (i, gpu) in (0..).zip(there["gpus"].as_array_mut().expect("a list")) {
        gpu["uuid"] = json!(uuid(i + 5));
        gpu["node"]["major"] = json!(240);
    }
    node.write("there.json", &there.to_string());
    let planned = || {
        let there = ["--inventory", "there.json"];
        let output = dry_run(&node, &[&there[..], &["--json"]].concat());
        (value(&output), text(&dry_run(&node, &there)))
    };
    for what in ["1", &uuid(6)] {
        asking(what);
        let (found, shown) = planned();
        assert_eq!(
            found["map"],
            json!([{"old": uuid(0), "new": uuid(6)}]),
            "{what}: {found:#}"
        );
        assert_eq!(found["unseen"].as_array().map(Vec::len), Some(2));
        assert!(
            shown.starts_with("verdict can be restored there")
                && shown.contains("unseen  mounts")
                && shown.contains("unseen  CDI files"),
            "{shown}"
        );
    }
    asking("7");
    assert_eq!(planned().0["failure"]["code"], "FIRN-CDI-DEVICE");
    node.grant(0);
    let (found, _) = planned();
    assert_eq!(found["unseen"].as_array().map(Vec::len), Some(1), "{found:#}");
}

#[test]
fn a_dry_run_reports_a_driver_that_cannot_be_read() {
    let node = Node::new();
    node.program(
        "firn-gpu",
        "echo 'firn-gpu: cannot open libnvidia-ml.so.1' >&2; exit 1",
    );
    let output = dry_run(&node, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot open libnvidia-ml.so.1"));
}

#[test]
fn a_program_that_hangs_is_cut_off() {
    let node = Node::new();
    node.configure("[deadlines]\ninventory = \"200ms\"");
    node.program("firn-gpu", "exec sleep 600");
    let output = dry_run(&node, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("did not finish"),
        "{output:?}"
    );
}

#[test]
fn a_checkpoint_without_devices_gets_what_the_spec_grants() {
    let node = Node::new();
    node.let_go();
    let planned = |more: &[&str]| value(&dry_run(&node, &[&["--json"], more].concat()));
    node.grant(1);
    assert_eq!(planned(&[])["device_free"], json!([uuid(1)]));
    let shown = text(&dry_run(&node, &[]));
    assert!(
        shown.contains("device-free") && shown.contains(&uuid(1)),
        "{shown}"
    );
    // Another driver, GPUs that the node does not have, a spec without any.
    let mut other = inventory();
    other["driver_version"] = json!("580.105.08");
    node.write("other.json", &other.to_string());
    assert_eq!(
        planned(&["--inventory", "other.json"])["device_free"],
        json!([uuid(1)])
    );
    node.grant(5);
    assert_eq!(planned(&[])["device_free"], json!([]));
    node.write("config.json", "{}");
    let without = planned(&[]);
    assert_eq!(
        (&without["accepted"], &without["device_free"]),
        (&json!(true), &json!([]))
    );
    node.program("firn-gpu", "echo no driver >&2; exit 1");
    node.grant(0);
    assert_eq!(planned(&[])["device_free"], json!([]));
}

#[test]
fn gpus_are_chosen_among_those_of_the_node_that_is_asked_about() {
    let node = Node::new();
    let chosen = |more: &[&str]| {
        let json = ["--json", "--gpus", "1"];
        value(&dry_run(&node, &[&json[..], more].concat()))["map"].clone()
    };
    assert_eq!(chosen(&[]), json!([{"old": uuid(0), "new": uuid(1)}]));
    let mut there = inventory();
    there["gpus"][1]["uuid"] = json!(uuid(7));
    node.write("there.json", &there.to_string());
    let found = chosen(&["--inventory", "there.json"]);
    assert_eq!(found, json!([{"old": uuid(0), "new": uuid(7)}]));
    let refused = value(&dry_run(&node, &["--json", "--gpus", "0,1"]));
    assert_eq!(refused["failure"]["code"], "FIRN-GPU-COUNT", "{refused:#}");
    let map = format!("{}={}", uuid(0), uuid(1));
    let shown = value(&dry_run(&node, &["--json", "--gpu-map", &map]));
    assert_eq!(
        shown["map"],
        json!([{"old": uuid(0), "new": uuid(1)}]),
        "{shown:#}"
    );
}

/// As if a checkpoint were made now.
#[test]
fn a_running_container_is_planned_for_by_its_bundle() {
    let node = Node::new();
    let bundle = "state/io.containerd.runtime.v2.task/default/job";
    std::fs::create_dir_all(node.path(bundle)).expect("a directory");
    let spec = std::fs::read_to_string(node.path("config.json")).expect("a spec");
    node.write(&format!("{bundle}/config.json"), &spec);
    node.configure("[restore]\ngpus = [\"1\"]");
    let socket = node.path("state/containerd.sock").display().to_string();
    for (option, file) in [("--inventory", "inventory.json"), ("--spec", "config.json")] {
        let words = [
            "restore",
            "job",
            "--dry-run",
            option,
            file,
            "--address",
            &socket,
            "--json",
        ];
        let found = value(&node.firn(&words));
        assert_eq!(
            (&found["accepted"], &found["map"]),
            (&json!(true), &json!([{"old": uuid(0), "new": uuid(1)}])),
            "{option}: {found:#}"
        );
    }
}

#[test]
fn a_spec_or_an_inventory_is_given_for_a_dry_run_alone() {
    let node = Node::new();
    for given in [["--spec", "config.json"], ["--inventory", "inventory.json"]] {
        for more in [
            &[][..],
            &["--dry-run", "--name", "job"],
            &["--dry-run", "--into", "job"],
            &["--dry-run", "--explain"],
            &["--dry-run", "--dir", "./image"],
        ] {
            let output = node.firn(&[&["restore", "./image"], &given[..], more].concat());
            assert_eq!(output.status.code(), Some(2), "{given:?} {more:?}: {output:?}");
        }
        let stream = node.firn(&[&["restore", "-", "--dry-run"], &given[..]].concat());
        assert_eq!(stream.status.code(), Some(1));
        assert!(
            all_output(&stream).contains("do not go with a stream"),
            "{stream:?}"
        );
        // As a restore of it: the name may be an image.
        let bare = node.firn(&[&["restore", "image", "--dry-run"], &given[..]].concat());
        assert!(all_output(&bare).contains("FIRN-PLACE"), "{bare:?}");
    }
    // Without both it is about a container that containerd knows.
    let output = node.firn(&["restore", "./image", "--dry-run", "--json"]);
    let found = value(&output);
    assert_eq!(
        (
            output.status.code(),
            &found["accepted"],
            &found["failure"]["code"]
        ),
        (Some(3), &json!(false), &json!("FIRN-RESTORE-NAME")),
        "{found:#}"
    );
}
