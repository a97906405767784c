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
        // Nobody who waits for the end of the test's output is to wait for it.
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
    /// From now on the driver takes every process for one that uses CUDA.
    fn all_use_cuda(&self, bytes: u64) {
        let process =
            format!(r#"{{\"pid\":%d,\"state\":null,\"restore_tid\":%d,\"gpu_bytes\":{bytes},\"micros\":1}}"#);
        let script = format!(
            "case $1 in discover) shift; c='['; for p; do printf \"$c{process}\" $p $p; c=,; done; echo ']';; *) cat {};; esac",
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
fn audit_tells_that_a_process_can_be_moved_and_what_that_takes() {
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
    assert!(report["estimate"]["checkpoint_s"].as_f64().expect("seconds") > 0.0);
    assert!(
        report["signals"]
            .as_array()
            .expect("a list")
            .iter()
            .all(|s| s["certainty"] == "none")
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
    let shown = text(&node.firn(&["audit", &idle.pid()]));
    assert!(
        shown.contains("none       io_uring") && shown.contains("can be checkpointed"),
        "{shown}"
    );
}

#[test]
fn audit_tells_what_is_refused_from_what_is_suspected() {
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
fn audit_tells_where_there_is_no_room() {
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
fn audit_looks_for_containers_where_it_is_told_that_containerd_keeps_its_state() {
    let node = Node::new();
    let bundle = node.path("state/io.containerd.runtime.v2.task/ns/job");
    std::fs::create_dir_all(&bundle).expect("a directory");
    let tell = |state: &str| {
        let output = node.firn(&["audit", "job", "-n", "ns", "--state", state]);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(tell("elsewhere").contains("no container job runs in namespace ns"));
    assert!(tell("state").contains("read the spec of container job in namespace ns"));
    std::fs::write(bundle.join("config.json"), "{}").expect("written");
    assert!(tell("state").contains("state/io.containerd.runtime.v2.task/ns/job/init.pid"));
}

#[test]
fn audit_of_an_image_tells_whether_it_is_whole_and_fits_this_node() {
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
fn audit_names_what_it_cannot_find() {
    let node = Node::new();
    for (arguments, said) in [
        (
            &["no-such-container"][..],
            "no container no-such-container runs in namespace default",
        ),
        (
            &["a/b"],
            "neither an image directory, a pid nor the id of a container",
        ),
        (&["2147483647"], "there is no process 2147483647"),
    ] {
        let output = node.firn(&[&["audit"], arguments].concat());
        assert_eq!(output.status.code(), Some(1));
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains(said), "{told}");
    }
    assert_eq!(node.firn(&["audit"]).status.code(), Some(2));
}
