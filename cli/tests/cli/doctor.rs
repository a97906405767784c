//! `firn doctor`.

use serde_json::Value;

use crate::node::{Node, text, value};

/// Checks of what these tests make; the others depend on the machine.
const MADE: [&str; 14] = [
    "config",
    "cgroups",
    "huge pages",
    "runc",
    "criu",
    "criu libs",
    "criu plugin",
    "cuda library",
    "iptables",
    "firn-gpu",
    "firn-hook",
    "driver",
    "gpu",
    "named gpus",
];

/// Status of each of these checks, by name.
fn checks(node: &Node) -> (Option<i32>, Vec<(String, String)>) {
    let output = node.firn(&["doctor", "--json"]);
    let all = value(&output);
    let part = |check: &Value, key: &str| check[key].as_str().expect("a text").to_owned();
    let list = all["checks"]
        .as_array()
        .expect("a list")
        .iter()
        .filter(|check| check["name"].as_str().is_some_and(|name| MADE.contains(&name)));
    (
        output.status.code(),
        list.map(|check| (part(check, "name"), part(check, "status")))
            .collect(),
    )
}

fn status<'a>(checks: &'a [(String, String)], name: &str) -> &'a str {
    checks
        .iter()
        .find(|(n, _)| n == name)
        .map_or("absent", |(_, status)| status)
}

#[test]
fn doctor_passes_a_node_that_has_everything() {
    let node = Node::new();
    let (code, all) = checks(&node);
    assert!(all.iter().all(|(_, status)| status == "ok"), "{all:?}");
    assert!(code.is_some());
    assert_eq!(all.iter().filter(|(name, _)| name == "gpu").count(), 2);
    assert!(text(&node.firn(&["doctor"])).contains(" failed, "));
}

#[test]
fn doctor_finds_each_thing_that_is_missing() {
    let node = Node::new();
    node.program(
        "criu",
        "[ \"$1\" = --version ] && echo Version: 4.2.1 || { echo 'no timens' >&2; exit 1; }",
    );
    std::fs::remove_file(node.path("bin/firn-hook")).expect("removed");
    node.program("runc", "exit 1");
    let (code, all) = checks(&node);
    assert_eq!(code, Some(1));
    assert_eq!(
        (
            status(&all, "criu"),
            status(&all, "firn-hook"),
            status(&all, "runc")
        ),
        ("warn", "fail", "fail")
    );

    node.program(
        "firn-gpu",
        "[ \"$1\" = --version ] && echo firn-gpu 9.9.9 || { echo 'no driver' >&2; exit 1; }",
    );
    node.configure("[criu]\nlibs-dir = \"/nonexistent\"");
    let (_, all) = checks(&node);
    assert_eq!(
        (status(&all, "firn-gpu"), status(&all, "driver")),
        ("fail", "fail")
    );
    assert_eq!(status(&all, "criu libs"), "fail");
    for script in ["echo firn-hook 9.9.9", "echo 'wrong usage' >&2; exit 2"] {
        node.program("firn-hook", script);
        let (_, all) = checks(&node);
        assert_eq!(status(&all, "firn-hook"), "fail", "{script}");
    }

    node.configure("[checkpoint]\nhuge-pages = \"while-copying\"");
    let text_of = text(&node.firn(&["doctor"]));
    assert!(text_of.contains("huge pages    while-copying, "), "{text_of}");

    node.configure("[restore]\ngpu = \"typo\"");
    let output = node.firn(&["doctor"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output).contains("FAIL  config") && text(&output).contains("FIRN-CONFIG-INVALID"),
        "{}",
        text(&output)
    );
}

#[test]
fn doctor_finds_gpus_that_the_configuration_names_and_the_node_lacks() {
    let node = Node::new();
    node.configure(&format!(
        "[restore]\ngpus = [\"0\", \"7\"]\ngpu-map = [\"{}={}\"]",
        crate::node::uuid(0),
        crate::node::uuid(5)
    ));
    let (_, all) = checks(&node);
    assert_eq!(all.iter().filter(|(name, _)| name == "named gpus").count(), 2);
    let shown = text(&node.firn(&["doctor"]));
    let line = shown.lines().find(|line| line.contains("GPU 7")).expect("a line");
    assert!(
        line.starts_with("FAIL  named gpus") && line.contains("line 6; `nvidia-smi -L`"),
        "{line}"
    );
}

#[test]
fn all_mistakes_in_the_configuration_are_shown_with_what_they_prevent() {
    let node = Node::new();
    node.configure(
        "[restore]\ngpus = 7\npolicy = \"strict\"\nfrom-images = [\"ml\"]\ngpu-map = [\"a\"]\n\
         [pause]\nbusy = 1",
    );
    let output = node.firn(&["config", "check"]);
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    let file = node.path("config.toml").display().to_string();
    for line in [
        ":6: restore.gpus: integer in the place of a list of texts",
        ":8: restore.from-images: not NAMESPACE=IMAGE: \"ml\"",
        ":9: restore.gpu-map: ",
        ":11: pause.busy: unknown key `busy`, expected one of `gpu-busy`",
        "  refused until it is corrected: restores, restores by annotation, pauses and moves",
        "4 mistakes",
    ] {
        assert!(shown.contains(line), "{line} is not in {shown}");
    }
    assert!(shown.starts_with(&file), "{shown}");
    let json = value(&node.firn(&["config", "check", "--json"]));
    assert_eq!(json["mistakes"][3]["key"], "pause.busy");
    assert_eq!(
        json["mistakes"][3]["prevents"],
        serde_json::json!(["pauses and moves"])
    );

    node.write("good.toml", "[restore]\ngpus = [\"0\"]\n");
    let good = node.firn(&["config", "check", "good.toml"]);
    assert_eq!(
        (good.status.code(), &*text(&good)),
        (Some(0), "good.toml: no mistakes\n")
    );
    node.write("broken.toml", "[restore]\ngpus = [\n");
    let broken = text(&node.firn(&["config", "check", "broken.toml"]));
    assert!(
        broken.contains("broken.toml:") && broken.contains("checkpoints, restores"),
        "{broken}"
    );
    assert_eq!(
        node.firn(&["config", "check", "none.toml"]).status.code(),
        Some(1)
    );
}

/// A restore is refused by what it goes by, and by nothing else.
#[test]
fn a_mistake_refuses_what_goes_by_it() {
    let node = Node::new();
    let plan = ["restore", "./image", "--dry-run", "--spec", "config.json"];
    node.configure("[pause]\ngpu-busy = \"never\"");
    assert_eq!(node.firn(&plan).status.code(), Some(0));
    node.configure("[restore]\npolicy = \"never\"");
    let refused = crate::node::all_output(&node.firn(&plan));
    assert!(
        refused.contains("FIRN-CONFIG-INVALID") && refused.contains("firn config check"),
        "{refused}"
    );
    assert!(
        refused.contains("line 6: restore.policy: unknown value `never`"),
        "{refused}"
    );
}
