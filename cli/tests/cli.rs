//! Runs `firn` as a person does, on a checkpoint directory and with stand-ins for the programs that it calls.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::AtomicBool;

use firn_gpu::{CudaState, Inventory};
use firn_oci::manifest::{
    CudaProcess, DriverVersion, DumpFlags, Manifest, SourceGpu, Versions, describe_images,
};
use serde_json::{Value, json};

/// A directory with a checkpoint in `image`, a spec, stand-ins for programs in `bin`, and a configuration.
struct Node {
    dir: tempfile::TempDir,
}

fn inventory() -> Value {
    let gpu = |i: u32| {
        json!({
            "uuid": format!("GPU-0{i}0{i}0{i}0{i}-0000-0000-0000-000000000000"), "name": "Simulated", "pci_device_id": 1,
            "pci_address": format!("00000000:0{i}:00.0"), "memory_total": 8u64 << 30, "memory_free": 1, "minor": i,
            "mig": false, "persistence": true,
            "node": {"path": format!("/dev/nvidia{i}"), "type": "c", "major": 195, "minor": i},
        })
    };
    json!({
        "driver_version": "580.95.05", "cuda_version": 13000, "checkpoint_api": true, "gpus": [gpu(0), gpu(1)],
        "common_nodes": [],
    })
}

fn uuid(i: u32) -> String {
    inventory()["gpus"][i as usize]["uuid"]
        .as_str()
        .expect("a text")
        .to_owned()
}

impl Node {
    fn new() -> Self {
        let node = Self {
            dir: tempfile::tempdir().expect("a directory"),
        };
        for name in ["image", "bin"] {
            std::fs::create_dir(node.path(name)).expect("a directory");
        }
        for (name, size) in [
            ("inventory.img", 40),
            ("pstree.img", 30),
            ("pages-1.img", 2 << 20),
        ] {
            node.write(&format!("image/{name}"), &"x".repeat(size));
        }
        node.manifest().write(&node.path("image")).expect("a manifest");
        node.write("inventory.json", &inventory().to_string());
        let worker = format!("cat {}", node.path("inventory.json").display());
        node.program(
            "firn-gpu",
            &format!(
                "[ \"$1\" = --version ] && echo firn-gpu {} || {worker}",
                env!("CARGO_PKG_VERSION")
            ),
        );
        node.program(
            "firn-hook",
            &format!("echo firn-hook {}", env!("CARGO_PKG_VERSION")),
        );
        node.program("runc", "echo runc version 1.3.6");
        node.program("criu", "echo Version: 4.2.1");
        node.program("iptables-restore", "true");
        node.configure("");
        node.grant(0);
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("written");
    }

    fn program(&self, name: &str, script: &str) {
        let path = self.path("bin").join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("made executable");
    }

    fn configure(&self, more: &str) {
        let bin = self.path("bin");
        let (worker, hook) = (bin.join("firn-gpu"), bin.join("firn-hook"));
        let text = format!("[worker]\npath = {worker:?}\n[hook]\npath = {hook:?}\n{more}\n");
        self.write("config.toml", &text);
    }

    fn grant(&self, minor: u32) {
        let device =
            json!({"path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor});
        self.write(
            "config.json",
            &json!({"linux": {"devices": [device]}}).to_string(),
        );
    }

    fn manifest(&self) -> Manifest {
        let source: Inventory = serde_json::from_value(inventory()).expect("an inventory");
        Manifest {
            dump: DumpFlags {
                open_tcp: true,
                ..DumpFlags::default()
            },
            driver: Some(DriverVersion {
                driver: source.driver_version.clone(),
                cuda: source.cuda_version,
            }),
            gpus: vec![SourceGpu::from(&source.gpus[0])],
            job: None,
            processes: vec![CudaProcess {
                pid: 7,
                restore_tid: 9,
                state: CudaState::Running,
            }],
            topology: source.topology,
            mounts: vec![],
            versions: Versions {
                firn: "0.1.0".into(),
                criu: "4.2.1".into(),
                ..Versions::default()
            },
            images: describe_images(&self.path("image"), &AtomicBool::new(false)).expect("images"),
        }
    }

    fn firn(&self, arguments: &[&str]) -> Output {
        let path = format!("{}:/usr/bin:/bin", self.path("bin").display());
        Command::new(env!("CARGO_BIN_EXE_firn"))
            .args(arguments)
            .current_dir(self.dir.path())
            .env("PATH", path)
            .env("FIRN_CONFIG", self.path("config.toml"))
            .output()
            .expect("firn starts")
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn value(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn inspect_shows_what_a_checkpoint_holds() {
    let node = Node::new();
    let output = node.firn(&["inspect", "image"]);
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(0), "{shown}");
    for part in [
        "580.95.05 (CUDA 13.0)",
        &uuid(0),
        "8.0 GiB",
        "pid 7",
        "tcp-established",
        "3 files, 2.0 MiB",
        "whole",
    ] {
        assert!(shown.contains(part), "{part:?} is missing in\n{shown}");
    }
    let output = value(&node.firn(&["inspect", "--json", "image"]));
    assert_eq!(output["manifest"]["gpus"][0]["uuid"], json!(uuid(0)));
    assert_eq!(output["failure"], Value::Null);
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
fn inspect_tells_a_finished_image_without_manifest_from_an_unfinished_one() {
    let node = Node::new();
    std::fs::remove_file(node.path("image/firn.json")).expect("removed");
    let output = node.firn(&["inspect", "image"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output).contains("not made by firn"));
    std::fs::remove_file(node.path("image/pstree.img")).expect("removed");
    assert_eq!(node.firn(&["inspect", "image"]).status.code(), Some(1));
    assert_eq!(node.firn(&["inspect", "nowhere"]).status.code(), Some(1));
}

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
        text(&output).starts_with("FIRN-DRIVER-VERSION: "),
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

#[test]
fn plan_says_when_the_driver_cannot_be_asked() {
    let node = Node::new();
    node.program(
        "firn-gpu",
        "echo 'firn-gpu: cannot open libnvidia-ml.so.1' >&2; exit 1",
    );
    let output = node.firn(&["plan", "image", "--spec", "config.json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot open libnvidia-ml.so.1"));
}

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
fn wrong_usage_and_help() {
    let node = Node::new();
    assert_eq!(node.firn(&["plan", "image"]).status.code(), Some(2));
    assert_eq!(node.firn(&["thaw"]).status.code(), Some(2));
    for command in ["inspect", "plan", "doctor"] {
        let output = node.firn(&[command, "--help"]);
        assert!(
            output.status.success() && text(&output).contains("Exit status: "),
            "{command}"
        );
    }
}

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
