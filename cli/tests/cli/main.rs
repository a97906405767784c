//! Runs `firn` with directories of the test, and with scripts in the place of the programs that it calls.

mod audit;
mod cdi;
mod doctor;
mod documents;
mod images;
mod inspect;
mod manifests;
mod node;
mod ps;
mod restore;
mod store;
mod terminal;

use node::{Node, text};

#[test]
fn wrong_usage_and_help() {
    let node = Node::new();
    assert_eq!(node.firn(&["restore"]).status.code(), Some(2));
    assert_eq!(node.firn(&["images", "prune"]).status.code(), Some(2));
    assert_eq!(node.firn(&["thaw"]).status.code(), Some(2));
    for command in [
        "inspect",
        "doctor",
        "restore",
        "ps",
        "images ls",
        "images prune",
        "store gc",
        "store verify",
    ] {
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let output = node.firn(&words);
        assert!(
            output.status.success() && text(&output).contains("Exit status: "),
            "{command}"
        );
    }
}

/// An error is an object, too, and standard error has none.
#[test]
fn a_command_that_fails_prints_why_as_json() {
    let node = Node::new();
    node.program("firn-gpu", "exit 1");
    for (line, why) in [
        ("ps --state nowhere", "nowhere"),
        ("ps job --state nowhere", "nowhere"),
        ("audit job --state nowhere", "no container"),
        ("inspect none.tar", "none.tar"),
        (
            "restore ./image --dry-run --spec config.json",
            "cannot read the GPUs of this node",
        ),
        ("config check none.toml", "there is no none.toml"),
        ("history --dir config.toml", "config.toml"),
        ("store ls --store nowhere", "FIRN-STORE-UNUSABLE"),
        (
            "images prune none --no-containerd --state .",
            "FIRN-PRUNE-UNKNOWN",
        ),
    ] {
        let words: Vec<&str> = line.split(' ').chain(["--json"]).collect();
        let output = node.firn(&words);
        let failure = node::value(&output)["failure"].clone();
        let shown = failure.to_string();
        assert_eq!(output.status.code(), Some(1), "{line}: {shown}");
        assert!(
            shown.contains(why) && output.stderr.is_empty(),
            "{line}: {output:?}"
        );
    }
    assert_eq!(node.firn(&["ps", "--none", "--json"]).status.code(), Some(2));
}

#[test]
fn labels_are_an_object() {
    let labels = node::value(&Node::new().firn(&["labels", "--json"]));
    assert_eq!(labels["firn.dev/version"], env!("CARGO_PKG_VERSION"), "{labels}");
    assert_eq!(labels["firn.dev/driver"], "580.95.05", "{labels}");
}

/// The program's output, with no byte of it that a terminal would act on.
fn harmless(output: &std::process::Output) -> String {
    let text = String::from_utf8(node::all_output(output).into_bytes()).expect("text");
    let acts = text
        .chars()
        .find(|c| *c != '\n' && (c.is_control() || matches!(c, '\u{202a}'..='\u{202e}')));
    assert_eq!(acts, None, "{text:?}");
    text
}

#[test]
fn what_others_have_written_does_nothing_to_a_terminal() {
    const HOSTILE: &str = "\u{1b}]0;x\u{7}\r\nverdict    can\u{202e}\u{9b}2J";
    const SHOWN: &str = r"\u{1b}]0;x\u{7}\r\nverdict    can\u{202e}\u{9b}2J";
    let node = Node::new();
    // A manifest has no control characters, and marks of direction are none.
    let mut manifest = node.manifest();
    manifest.versions.criu = "x\u{202e}y".to_owned();
    manifest.gpus[0].name = "x\u{202e}y".to_owned();
    manifest.write(&node.path("image")).expect("a manifest");
    let shown = harmless(&node.firn(&["inspect", "image", "-v"]));
    assert_eq!(shown.matches(r"x\u{202e}y").count(), 2, "{shown}");
    let output = node.firn(&["inspect", "image", "--json"]);
    harmless(&output);
    assert_eq!(node::value(&output)["manifest"]["gpus"][0]["name"], "x\u{202e}y");
    let shown = harmless(&node.firn(&["restore", "./image", "--dry-run", "--spec", HOSTILE]));
    assert!(shown.contains(SHOWN), "{shown}");

    node.program("runc", &format!("printf '%s' '{HOSTILE}'"));
    harmless(&node.firn(&["doctor"]));
    harmless(&node.firn(&["doctor", "--json"]));
    std::fs::create_dir(node.path("cdi")).expect("a directory");
    node.write(&format!("cdi/{}.json", HOSTILE.replace('/', "")), "{}");
    node.configure("[create]\ncdi-dirs = [\"cdi\"]");
    let shown = harmless(&node.firn(&["cdi", "list"]));
    assert!(shown.contains("not used: ") && shown.contains(SHOWN), "{shown}");
    harmless(&node.firn(&["cdi", "list", "--json"]));
    // An error that ends the program.
    let shown = harmless(&node.firn(&["audit", HOSTILE]));
    assert!(shown.contains(SHOWN), "{shown}");
    let output = node.firn(&["audit", HOSTILE, "--json"]);
    harmless(&output);
    let failure = node::value(&output)["failure"].clone();
    assert!(
        failure["message"]
            .as_str()
            .is_some_and(|text| text.contains(HOSTILE)),
        "{failure}"
    );
}

#[test]
fn a_reader_that_goes_away_is_no_failure_and_a_full_disk_is_one() {
    let node = Node::new();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = node.command(&["inspect", "image"]).stdout(writer).output();
    let output = output.expect("firn starts");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(node::all_output(&output), "");

    let full = std::fs::File::options().write(true).open("/dev/full");
    let output = node
        .command(&["inspect", "image"])
        .stdout(full.expect("/dev/full"))
        .output();
    let output = output.expect("firn starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(node::all_output(&output).contains("cannot write to standard output"));
}
