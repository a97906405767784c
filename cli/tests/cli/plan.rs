//! `firn plan`.

use serde_json::json;

use crate::node::{Node, inventory, text, uuid, value};

#[test]
fn plan_shows_the_map_that_a_restore_would_use() {
    let node = Node::new();
    let output = node.firn(&["plan", "image", "--spec", "config.json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(
        text(&output).contains(&format!("{} Simulated -> {}", uuid(0), uuid(0))),
        "{}",
        text(&output)
    );
    node.configure("[restore]\ngpus = [\"1\"]");
    let planned = value(&node.firn(&["plan", "image", "--spec", "config.json", "--json"]));
    assert_eq!(planned["accepted"], json!(true));
    assert_eq!(planned["map"], json!([{"old": uuid(0), "new": uuid(1)}]));
    assert_eq!(planned["basis"], "by [restore] gpus in the configuration");
}

#[test]
fn plan_names_why_a_restore_would_be_refused() {
    let node = Node::new();
    let mut other = inventory();
    other["driver_version"] = json!("580.105.08");
    node.write("other.json", &other.to_string());
    let output = node.firn(&[
        "plan",
        "image",
        "--spec",
        "config.json",
        "--inventory",
        "other.json",
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output).starts_with("verdict FIRN-DRIVER-VERSION: "),
        "{}",
        text(&output)
    );
    assert!(text(&output).contains("580.105.08") && text(&output).contains("hint: "));
    node.grant(5);
    let planned = value(&node.firn(&["plan", "image", "--spec", "config.json", "--json"]));
    assert_eq!(
        (&planned["accepted"], &planned["failure"]["code"]),
        (&json!(false), &json!("FIRN-GRANT-UNRESOLVED"))
    );
    std::fs::remove_file(node.path("image/firn.json")).expect("removed");
    let planned = value(&node.firn(&["plan", "image", "--spec", "config.json", "--json"]));
    assert_eq!(planned["failure"]["code"], "FIRN-MANIFEST-MISSING");
}

#[test]
fn plan_decides_by_the_spec_that_create_would_make_of_a_hook() {
    let node = Node::new();
    let hook = json!({"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["hook", "prestart"]});
    let spec = json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=1"]},
        "hooks": {"prestart": [hook]},
    });
    node.write("config.json", &spec.to_string());
    let planned = || value(&node.firn(&["plan", "image", "--spec", "config.json", "--json"]));
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
fn plan_for_another_node_uses_its_inventory_and_lists_what_it_has_not_seen() {
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
        let arguments = [
            "plan",
            "image",
            "--spec",
            "config.json",
            "--inventory",
            "there.json",
        ];
        let output = node.firn(&[&arguments[..], &["--json"]].concat());
        (value(&output), text(&node.firn(&arguments)))
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
            shown.contains("unseen  mounts") && shown.contains("unseen  CDI files"),
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
fn plan_reports_a_driver_that_cannot_be_read() {
    let node = Node::new();
    node.program(
        "firn-gpu",
        "echo 'firn-gpu: cannot open libnvidia-ml.so.1' >&2; exit 1",
    );
    let output = node.firn(&["plan", "image", "--spec", "config.json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot open libnvidia-ml.so.1"));
}

#[test]
fn a_program_that_hangs_is_cut_off() {
    let node = Node::new();
    node.configure("[deadlines]\ninventory = \"200ms\"");
    node.program("firn-gpu", "exec sleep 600");
    let output = node.firn(&["plan", "image", "--spec", "config.json"]);
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
    let planned = |more: &[&str]| {
        let plan = ["plan", "image", "--spec", "config.json", "--json"];
        value(&node.firn(&[&plan[..], more].concat()))
    };
    node.grant(1);
    assert_eq!(planned(&[])["device_free"], json!([uuid(1)]));
    let shown = text(&node.firn(&["plan", "image", "--spec", "config.json"]));
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
