//! `firn status`, with bundles as shims leave them.

use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::node::{Node, text, value};

const BUNDLES: &str = "state/io.containerd.runtime.v2.task";

/// A program that has a shim's name.
struct Shim(Child);

impl Shim {
    fn start(node: &Node) -> Self {
        let program = node.path("containerd-shim-firn-v2");
        std::os::unix::fs::symlink("/bin/sleep", &program).expect("a program");
        let shim = Self(Command::new(program).arg("1000").spawn().expect("a process"));
        // The kernel lets the parent go on before it gives the process its name.
        let comm = format!("/proc/{}/comm", shim.0.id());
        let named = || std::fs::read_to_string(&comm).is_ok_and(|name| name.starts_with("containerd-shim"));
        let begun = Instant::now();
        while !named() && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(1));
        }
        shim
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        self.0.kill().expect("a process");
        self.0.wait().expect("its end");
    }
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    u64::try_from(now.as_millis()).expect("a time")
}

/// The lines of a journal that began 60 s ago and entered this phase 5 s ago.
fn journal(shim: u32, op: &str, phase: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("the boot's id");
    let begin = json!({
        "event": "begin", "version": 1, "boot": boot.trim(), "shim": shim, "at": now() - 60_000, "op": op,
        "container": "job", "gpu": true, "exit": false, "image": "/i", "work": "/w", "work_is_ours": true,
        "was_frozen": false,
    });
    let enter = json!({"event": "enter", "phase": phase, "at": now() - 5000});
    format!("{begin}\n{enter}\n")
}

fn bundle(node: &Node, name: &str, journal: &str) {
    std::fs::create_dir_all(node.path(&format!("{BUNDLES}/{name}"))).expect("a directory");
    if !journal.is_empty() {
        node.write(&format!("{BUNDLES}/{name}/firn-journal"), journal);
    }
}

fn status(node: &Node, arguments: &[&str]) -> Vec<Value> {
    let words = [&["status", "--state", "state", "--json"], arguments].concat();
    let output = node.firn(&words);
    assert!(output.status.success(), "{output:?}");
    value(&output)["transactions"].as_array().expect("a list").clone()
}

fn seconds(value: &Value) -> u64 {
    value.as_u64().expect("a number") / 1000
}

#[test]
fn status_shows_what_is_in_progress_and_how_far_it_is() {
    let node = Node::new();
    let shim = Shim::start(&node);
    bundle(&node, "default/idle", "");
    bundle(
        &node,
        "default/job",
        &journal(shim.0.id(), "checkpoint", "criu-dump"),
    );
    bundle(
        &node,
        "other/job",
        &journal(shim.0.id(), "restore", "gpu-restore"),
    );
    let progress =
        json!({"phase": "copy-memory", "begun": now() - 4000, "done": 1 << 30, "all": 4_u64 << 30});
    node.write(
        &format!("{BUNDLES}/default/job/firn-progress.json"),
        &progress.to_string(),
    );

    let found = status(&node, &[]);
    assert_eq!(found.len(), 2, "{found:?}");
    let [copying, restoring] = [&found[0], &found[1]];
    assert_eq!(
        [
            &copying["namespace"],
            &copying["operation"],
            &copying["phase"],
            &copying["state"]
        ],
        ["default", "checkpoint", "copy-memory", "running"]
    );
    assert_eq!(
        (&copying["copied"], &copying["of"]),
        (&json!(1 << 30), &json!(4_u64 << 30))
    );
    assert!((60..90).contains(&seconds(&copying["ms"])), "{copying}");
    assert!((4..30).contains(&seconds(&copying["phase_ms"])), "{copying}");
    let left = copying["left_s"].as_u64().expect("an estimate");
    assert!((12..90).contains(&left), "{copying}");
    assert_eq!(
        (&restoring["phase"], &restoring["copied"]),
        (&json!("gpu-restore"), &Value::Null)
    );
    assert!((5..30).contains(&seconds(&restoring["phase_ms"])), "{restoring}");

    let elsewhere = status(&node, &["job", "--namespace", "other"]);
    assert_eq!(
        (elsewhere.len(), &elsewhere[0]["namespace"]),
        (1, &json!("other"))
    );
    assert_eq!(status(&node, &["idle"]), Vec::<Value>::new());
    let shown = text(&node.firn(&["status", "--state", "state", "job"]));
    assert!(
        shown.contains("copy-memory") && shown.contains("1.0 GiB of 4.0 GiB"),
        "{shown}"
    );
    assert!(shown.contains("gpu-restore"), "{shown}");
}

#[test]
fn status_of_what_nobody_works_on_any_more() {
    let node = Node::new();
    let mut shim = Shim::start(&node);
    let journal = journal(shim.0.id(), "checkpoint", "criu-dump");
    bundle(&node, "default/job", &journal);
    assert_eq!(status(&node, &["job"])[0]["state"], "running");
    shim.0.kill().expect("a process");
    shim.0.wait().expect("its end");
    assert_eq!(status(&node, &["job"])[0]["state"], "killed");
    bundle(
        &node,
        "default/job",
        &format!("{journal}{{\"event\":\"end\",\"outcome\":\"suspended\"}}\n"),
    );
    assert_eq!(status(&node, &["job"])[0]["state"], "suspended");
    let shown = text(&node.firn(&["status", "--state", "state"]));
    assert!(shown.contains("suspended"), "{shown}");
}

#[test]
fn status_of_nothing() {
    let node = Node::new();
    bundle(&node, "default/idle", "");
    let shown = text(&node.firn(&["status", "--state", "state"]));
    assert_eq!(shown.trim(), "nothing is in progress");
    let unknown = node.firn(&["status", "none", "--state", "state"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no container none runs here"));
    let elsewhere = node.firn(&["status", "--state", "nowhere"]);
    assert_eq!(elsewhere.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&elsewhere.stderr).contains("nowhere, containerd's state directory"));
}
