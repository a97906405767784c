//! `firn doctor`.

use serde_json::Value;

use crate::node::{Node, text, value};

/// Status of each check, by name; the CDI check depends on the machine and is left out.
fn checks(node: &Node) -> (Option<i32>, Vec<(String, String)>) {
    let output = node.firn(&["doctor", "--json"]);
    let all = value(&output);
    let part = |check: &Value, key: &str| check[key].as_str().expect("a text").to_owned();
    let list = all
        .as_array()
        .expect("a list")
        .iter()
        .filter(|check| check["name"] != "cdi");
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
    assert_eq!(code, Some(0));
    assert_eq!(all.iter().filter(|(name, _)| name == "gpu").count(), 2);
    assert!(text(&node.firn(&["doctor"])).contains("0 failed"));
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
    assert!(text_of.contains("huge pages  while-copying, "), "{text_of}");

    node.configure("[restore]\ngpu = \"typo\"");
    let output = node.firn(&["doctor"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output).contains("FAIL  config") && text(&output).contains("FIRN-CONFIG-INVALID"),
        "{}",
        text(&output)
    );
}
