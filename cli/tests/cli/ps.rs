//! `firn ps`, with bundles as shims leave them.

use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use firn_documents::schema;
use serde_json::{Value, json};

use crate::node::{Node, text, value};

const BUNDLES: &str = "state/io.containerd.runtime.v2.task";

/// A program that has a shim's name.
pub struct Shim(pub Child);

impl Shim {
    fn start(node: &Node) -> Self {
        let program = node.path("containerd-shim-firn-v2");
        std::os::unix::fs::symlink("/bin/sleep", &program).expect("a program");
        let shim = Self(Command::new(program).arg("1000").spawn().expect("a process"));
        // The kernel lets the parent continue before it gives the process its name.
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
pub fn journal(shim: u32, op: &str, phase: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("the boot's id");
    let begin = json!({
        "event": "begin", "version": 1, "boot": boot.trim(), "shim": shim, "at": now() - 60_000, "op": op,
        "container": "job", "gpu": true, "exit": false, "image": "/i", "work": "/w", "work_is_ours": true,
        "was_frozen": false,
    });
    let enter = json!({"event": "enter", "phase": phase, "at": now() - 5000});
    format!("{begin}\n{enter}\n")
}

pub fn bundle(node: &Node, name: &str, journal: &str) {
    std::fs::create_dir_all(node.path(&format!("{BUNDLES}/{name}"))).expect("a directory");
    if !journal.is_empty() {
        node.write(&format!("{BUNDLES}/{name}/firn-journal"), journal);
    }
}

/// What is in progress, with the names of the containers.
fn ps(node: &Node, arguments: &[&str]) -> Vec<Value> {
    let words = [&["ps", "--state", "state", "--json"], arguments].concat();
    let output = node.firn(&words);
    assert!(output.status.success(), "{output:?}");
    value(&output)["containers"].as_array().expect("a list").clone()
}

fn seconds(value: &Value) -> u64 {
    value.as_u64().expect("a number") / 1000
}

/// A checkpoint and a restore that are in progress.
pub fn two_at_work(node: &Node) -> Shim {
    let shim = Shim::start(node);
    bundle(node, "default/idle", "");
    bundle(
        node,
        "default/job",
        &journal(shim.0.id(), "checkpoint", "criu-dump"),
    );
    bundle(node, "other/job", &journal(shim.0.id(), "restore", "gpu-restore"));
    let progress =
        json!({"phase": "copy-memory", "begun": now() - 4000, "done": 1 << 30, "all": 4_u64 << 30});
    node.write(
        &format!("{BUNDLES}/default/job/firn-progress.json"),
        &progress.to_string(),
    );
    // The last restore took 90 s, this one takes 60 s so far.
    node.write(
        &format!("{BUNDLES}/other/job/firn-timings.json"),
        r#"{"op":"restore","container":"job","phases":[],"total_ms":90000.0,"ok":true}"#,
    );
    shim
}

#[test]
fn ps_shows_what_is_in_progress_and_how_far_it_is() {
    let node = Node::new();
    let _shim = two_at_work(&node);
    let found = ps(&node, &[]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(
        (&found[0]["namespace"], &found[0]["state"]),
        (&json!("default"), &json!("checkpoint"))
    );
    let [copying, restoring] = [&found[0]["transaction"], &found[1]["transaction"]];
    assert_eq!(
        [&copying["operation"], &copying["phase"], &copying["state"]],
        ["checkpoint", "copy-memory", "running"]
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
    let left = restoring["left_s"]
        .as_u64()
        .expect("an estimate by the last restore");
    assert!((1..=30).contains(&left), "{restoring}");

    let elsewhere = ps(&node, &["--namespace", "other"]);
    assert_eq!(
        (elsewhere.len(), &elsewhere[0]["namespace"]),
        (1, &json!("other"))
    );
    let shown = text(&node.firn(&["ps", "--state", "state"]));
    assert!(
        shown.contains("copy-memory") && shown.contains("1.0 GiB of 4.0 GiB"),
        "{shown}"
    );
    assert!(
        shown.contains("gpu-restore") && shown.starts_with("CONTAINER"),
        "{shown}"
    );
    let detail = text(&node.firn(&["ps", "job", "--namespace", "default", "--state", "state"]));
    assert!(
        detail.contains("checkpoint  copy-memory, for ") && detail.contains("copied     1.0 GiB of 4.0 GiB"),
        "{detail}"
    );
    // Of the same name in both namespaces.
    let both = value(&node.firn(&["ps", "job", "--state", "state", "--json"]));
    assert_eq!(both["containers"].as_array().map(Vec::len), Some(2));
}

#[test]
fn ps_names_why_a_container_stands_still_and_what_resumes_it() {
    let node = Node::new();
    let mut shim = Shim::start(&node);
    let journal = journal(shim.0.id(), "checkpoint", "criu-dump");
    bundle(&node, "default/job", &journal);
    assert_eq!(ps(&node, &[])[0]["transaction"]["state"], "running");
    shim.0.kill().expect("a process");
    shim.0.wait().expect("its end");
    let killed = ps(&node, &[]);
    assert_eq!(
        (&killed[0]["state"], &killed[0]["resume"]),
        (&json!("killed"), &Value::Null)
    );
    let reason = killed[0]["reason"].as_str().expect("a reason");
    assert!(
        reason.contains("its shim was killed during the checkpoint"),
        "{reason}"
    );

    let end = |more: &str| format!("{journal}{{\"event\":\"end\",\"outcome\":\"suspended\"{more}}}\n");
    // As an older firn writes it.
    bundle(&node, "default/job", &end(""));
    assert_eq!(ps(&node, &[])[0]["state"], "suspended");
    bundle(
        &node,
        "k8s.io/job",
        &end(r#","reason":"FIRN-GPU-OCCUPIED: the GPU is full""#),
    );
    let suspended = &ps(&node, &["-n", "k8s.io"])[0];
    assert_eq!(suspended["reason"], "FIRN-GPU-OCCUPIED: the GPU is full");
    assert_eq!(suspended["resume"], "ctr --namespace k8s.io tasks resume job");
    let shown = text(&node.firn(&["ps", "--state", "state"]));
    for line in [
        "job is suspended: FIRN-GPU-OCCUPIED: the GPU is full",
        "job is suspended; to resume it: ctr --namespace k8s.io tasks resume job",
        "job is suspended; to resume it: ctr tasks resume job",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{shown}");
    }
}

#[test]
fn ps_shows_it_again_until_its_reader_goes_away() {
    let node = Node::new();
    bundle(&node, "default/idle", "");
    let mut ps = node.command(&["ps", "--watch", "--json", "--state", "state"]);
    let mut ps = ps
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("firn starts");
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(ps.stdout.take().expect("a pipe")));
    for _ in 0..2 {
        let line = lines.next().expect("a line").expect("text");
        let found = schema::printed(&["ps"], &line).expect("an object in a line");
        assert_eq!(found, json!({"containers": []}));
    }
    drop(lines);
    let begun = Instant::now();
    while ps.try_wait().expect("a process").is_none() {
        if begun.elapsed() > Duration::from_secs(10) {
            ps.kill().expect("a process");
            panic!("it continues without a reader");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ps_of_nothing() {
    let node = Node::new();
    bundle(&node, "default/idle", "");
    let shown = text(&node.firn(&["ps", "--state", "state"]));
    assert_eq!(shown.trim(), "no container runs under firn");
    let unknown = node.firn(&["ps", "none", "--state", "state"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no container none runs under firn here"));
    let elsewhere = node.firn(&["ps", "--state", "nowhere"]);
    assert_eq!(elsewhere.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&elsewhere.stderr).contains("nowhere, containerd's state directory"));
}
