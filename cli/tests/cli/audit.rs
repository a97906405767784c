//! `firn audit`.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::node::{Node, inventory, text, value};

/// A process that does nothing, for as long as this lives.
struct Idle(std::process::Child);

impl Idle {
    fn start(script: &str, environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", script]).envs(environment.iter().copied());
        // A reader of the test's output must not wait for this process.
        command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        Self(command.spawn().expect("sh starts"))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let group = format!("-{}", self.0.id());
        let _killed = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ended = self.0.wait();
    }
}

impl Node {
    /// From now on the driver reports that every process uses CUDA.
    fn all_use_cuda(&self, bytes: u64) {
        let gpu = format!("GPU-{}", "00000000-0000-0000-0000-000000000000");
        let process = format!(
            r#"{{\"pid\":%d,\"state\":null,\"restore_tid\":%d,\"gpu_memory\":{{\"{gpu}\":{bytes}}}}}"#
        );
        let script = format!(
            "case $1 in discover) shift; c='['; for p; do printf \"$c{process}\" $p $p; c=,; done; echo ']';;\
             *) cat {};; esac",
            self.path("inventory.json").display()
        );
        self.program("firn-gpu", &script);
    }

    /// A library that makes whatever loads it look as if it had GPU memory.
    fn map_uvm(&self) -> String {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let library = maps.lines().find_map(|line| {
            let at = line.find('/')?;
            line.ends_with("/libgcc_s.so.1").then(|| &line[at..])
        });
        let copy = self.path("nvidia-uvm.so");
        std::fs::copy(library.expect("this program has one"), &copy).expect("copied");
        copy.to_str().expect("a text").to_owned()
    }

    /// Exit status and what was found of one signal.
    fn audit(&self, arguments: &[&str], signal: &str) -> (Option<i32>, Value) {
        let output = self.firn(&[&["audit", "--json"], arguments].concat());
        let report = value(&output);
        let found = report["signals"]
            .as_array()
            .expect("a list")
            .iter()
            .find(|s| s["signal"] == signal);
        (output.status.code(), found.cloned().unwrap_or_default())
    }
}

#[test]
fn audit_shows_that_a_process_can_be_moved_and_its_costs() {
    let node = Node::new();
    node.all_use_cuda(1 << 20);
    let idle = Idle::start("exec sleep 1000", &[]);
    let output = node.firn(&["audit", &idle.pid(), "--json", "--target", "inventory.json"]);
    let report = value(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    assert_eq!(
        (&report["verdict"], &report["gpu_bytes"]),
        (&json!("can"), &json!(1 << 20))
    );
    assert_eq!(report["processes"][0]["cuda"], json!(true));
    let map = report["plan"]["map"].as_array().expect("a map");
    assert_eq!(
        map.len(),
        2,
        "outside a container every GPU of the node is needed"
    );
    assert!(
        report["signals"]
            .as_array()
            .expect("a list")
            .iter()
            // Here every process of the machine has memory of the GPUs.
            .all(|s| s["certainty"] == "none" || s["signal"] == "processes_that_share_a_gpu")
    );

    let mut other = inventory();
    other["driver_version"] = json!("580.105.08");
    node.write("other.json", &other.to_string());
    let there = "gpus_without_place_on_the_target";
    let (status, signal) = node.audit(&[&idle.pid(), "--target", "other.json"], there);
    assert_eq!(
        (status, &signal["failure"]["code"]),
        (Some(1), &json!("FIRN-DRIVER-VERSION"))
    );
    let short = text(&node.firn(&["audit", &idle.pid()]));
    assert!(
        short.lines().count() <= 5 && !short.contains("none of"),
        "{short}"
    );
    let shown = text(&node.firn(&["audit", &idle.pid(), "-v"]));
    assert!(
        shown.starts_with("verdict    can be checkpointed")
            && shown.contains("\nnone of ")
            && shown.contains(" io_uring"),
        "{shown}"
    );
}

#[test]
fn audit_distinguishes_refusals_from_suspicions() {
    let node = Node::new();
    node.all_use_cuda(1 << 20);
    let idle = Idle::start("exec sleep 1000", &[("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")]);
    let (status, signal) = node.audit(&[&idle.pid()], "mps");
    assert_eq!(
        (status, &signal["certainty"], &signal["refused"]),
        (Some(3), &json!("suspected"), &json!(false))
    );
    assert!(signal["detail"].as_str().expect("a text").contains("/run/mps"));

    let mapped = node.map_uvm();
    let two = Idle::start("sleep 1000 & echo; wait", &[("LD_PRELOAD", &mapped)]);
    let children = format!("/proc/{0}/task/{0}/children", two.pid());
    while std::fs::read_to_string(&children).expect("children").is_empty() {
        std::thread::yield_now();
    }
    let (status, signal) = node.audit(&[&two.pid()], "shared_gpu_memory");
    assert_eq!(
        (status, &signal["failure"]["code"]),
        (Some(1), &json!("FIRN-IPC"))
    );
}

#[test]
fn audit_shows_missing_capacity() {
    let node = Node::new();
    node.all_use_cuda(1 << 60);
    let idle = Idle::start("exec sleep 1000", &[]);
    let arguments = [&idle.pid(), "--image-dir", "image"];
    for (signal, code) in [
        ("too_little_memory", "FIRN-HOST-MEMORY"),
        ("too_little_image_space", "FIRN-IMAGE-SPACE"),
    ] {
        let (status, found) = node.audit(&arguments, signal);
        assert_eq!(
            (status, &found["failure"]["code"]),
            (Some(1), &json!(code)),
            "{found:#}"
        );
    }
    let (_, found) = node.audit(&arguments, "too_little_image_space");
    let message = found["failure"]["message"].as_str().expect("a text");
    assert!(message.contains("the file system of image has "), "{message}");
}

#[test]
fn audit_finds_containers_below_the_state_directory() {
    let node = Node::new();
    let bundle = node.path("state/io.containerd.runtime.v2.task/ns/job");
    std::fs::create_dir_all(&bundle).expect("a directory");
    let error = |state: &str| {
        let output = node.firn(&["audit", "job", "-n", "ns", "--state", state]);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(error("elsewhere").contains("no container job runs in namespace ns"));
    assert!(error("state").contains("read the spec of container job in namespace ns"));
    std::fs::write(bundle.join("config.json"), "{}").expect("written");
    assert!(error("state").contains("state/io.containerd.runtime.v2.task/ns/job/init.pid"));
}

#[test]
fn audit_of_an_image_checks_it_and_whether_it_fits_this_node() {
    let node = Node::new();
    let (status, signal) = node.audit(&["image"], "damaged_image");
    assert_eq!((status, &signal["certainty"]), (Some(0), &json!("none")));
    let mut small = inventory();
    small["gpus"].as_array_mut().expect("a list").clear();
    node.write("small.json", &small.to_string());
    let there = "gpus_without_place_on_the_target";
    let (status, signal) = node.audit(&["image", "--target", "small.json"], there);
    assert_eq!(
        (status, &signal["failure"]["code"]),
        (Some(1), &json!("FIRN-GPU-COUNT"))
    );
    node.write("image/pages-1.img", "short");
    let (status, signal) = node.audit(&["image"], "damaged_image");
    assert_eq!(
        (status, &signal["failure"]["code"]),
        (Some(1), &json!("FIRN-IMAGE-TRUNCATED"))
    );
}

#[test]
fn audit_of_a_damaged_image_shows_no_size() {
    let node = Node::new();
    let report = || value(&node.firn(&["audit", "image", "--json"]));
    let whole = report();
    assert!(whole["image_bytes"].as_u64().expect("bytes") > 2 << 20);
    node.write("image/firn.json", "{");
    let damaged = report();
    assert_eq!(damaged["verdict"], "cannot");
    assert_eq!(damaged["image_bytes"], json!(null));
    let output = node.firn(&["audit", "image"]);
    assert_eq!(output.status.code(), Some(1));
    let shown = text(&output);
    assert!(shown.starts_with("verdict    cannot\n"), "{shown}");
    assert!(
        shown.contains("FIRN-MANIFEST-CORRUPT") && !shown.contains("\nimage "),
        "{shown}"
    );
}

/// The journals are those that the shim writes.
#[test]
fn audit_of_a_container_goes_by_its_journal() {
    let node = Node::new();
    let idle = Idle::start("exec sleep 1000", &[]);
    let bundle = "state/io.containerd.runtime.v2.task/default/job";
    std::fs::create_dir_all(node.path(bundle)).expect("a directory");
    node.write(&format!("{bundle}/config.json"), "{}");
    node.write(&format!("{bundle}/init.pid"), &idle.pid());
    let audit = |arguments: &[&str]| {
        node.audit(
            &[&["job", "--state", "state"], arguments].concat(),
            "unfinished_transaction",
        )
    };
    let (status, signal) = audit(&[]);
    assert_eq!((status, &signal["certainty"]), (Some(0), &json!("none")));
    let begin = json!({
        "event": "begin", "version": 1, "boot": "b", "shim": 7, "op": "checkpoint", "container": "job",
        "gpu": true, "exit": false, "image": "/i", "work": "/w", "work_is_ours": true, "was_frozen": false,
    })
    .to_string();
    let begun = format!("{begin}\n{{\"event\":\"enter\",\"phase\":\"gpu-checkpoint\"}}\n");
    let end = |outcome: &str| format!("{begun}{{\"event\":\"end\",\"outcome\":\"{outcome}\"}}\n");
    for (journal, code, words) in [
        (
            begun.clone(),
            "FIRN-BUSY",
            "a checkpoint of the container is in progress (phase gpu-checkpoint)",
        ),
        (format!("{begun}{{\"event\":\"e"), "FIRN-BUSY", "in progress"),
        (
            begin.replace("checkpoint", "restore") + "\n",
            "FIRN-BUSY",
            "a restore of the container",
        ),
        (end("suspended"), "FIRN-GPU-SUSPENDED", "could not be restored"),
        (end("lost"), "FIRN-GPU-SUSPENDED", "could not be restored"),
    ] {
        node.write(&format!("{bundle}/firn-journal"), &journal);
        let (status, signal) = audit(&[]);
        assert_eq!(
            (status, &signal["failure"]["code"]),
            (Some(1), &json!(code)),
            "{journal}"
        );
        let message = signal["failure"]["message"].as_str().expect("a text");
        assert!(message.contains(words), "{message}");
        assert_eq!(signal["refused"], json!(true));
    }
    for journal in [end("done"), end("failed"), String::new()] {
        node.write(&format!("{bundle}/firn-journal"), &journal);
        assert_eq!(audit(&[]).0, Some(0), "{journal}");
    }
    let shown = text(&node.firn(&["audit", "job", "--state", "state"]));
    assert!(shown.starts_with("verdict    can"), "{shown}");
}

#[test]
fn audit_refuses_what_is_no_workload() {
    let node = Node::new();
    node.all_use_cuda(1 << 20);
    let own = std::process::id().to_string();
    let refused = |pid: &str, words: &str| {
        let (status, signal) = node.audit(&[pid], "no_workload");
        assert_eq!(
            (status, &signal["failure"]["code"]),
            (Some(1), &json!("FIRN-SUBJECT")),
            "{pid}"
        );
        let message = signal["failure"]["message"].as_str().expect("a text");
        assert!(message.contains(words), "{message}");
    };
    refused("1", "is the first of this node");
    refused(&own, "has this audit below it");
    let mut ended = Command::new("true").spawn().expect("true starts");
    let stat = format!("/proc/{}/stat", ended.id());
    while !std::fs::read_to_string(&stat)
        .expect("it is there")
        .contains(") Z ")
    {
        std::thread::yield_now();
    }
    refused(&ended.id().to_string(), "has ended");
    ended.wait().expect("it has ended");
}

#[test]
fn audit_wants_a_directory_for_the_image() {
    let node = Node::new();
    let idle = Idle::start("exec sleep 1000", &[]);
    for dir in ["/nope", "inventory.json"] {
        let output = node.firn(&["audit", &idle.pid(), "--image-dir", dir]);
        assert_eq!(output.status.code(), Some(1), "{dir}");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains(dir) && error.contains("hint: "), "{error}");
    }
}

#[test]
fn audit_names_what_it_cannot_find() {
    let node = Node::new();
    for (arguments, words) in [
        (
            &["no-such-container"][..],
            "no container no-such-container runs in namespace default",
        ),
        (
            &["a/b", "--address", "/none.sock"],
            "FIRN-CONTAINERD: cannot connect to containerd at /none.sock",
        ),
        (&["2147483647"], "there is no process 2147483647"),
    ] {
        let output = node.firn(&[&["audit"], arguments].concat());
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(node.firn(&["audit"]).status.code(), Some(2));
}
