//! `firn cdi`, over a driver's directory and CDI directories of the test's own.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use firn_cdi::{DeviceName, Registry};
use serde_json::{Value, json};

const DRIVER: &str = "580.95.05";

struct Node {
    dir: tempfile::TempDir,
}

fn uuid(i: u32) -> String {
    format!("GPU-0{i}0{i}0{i}0{i}-0000-0000-0000-000000000000")
}

/// A node of two GPUs whose nodes are ones that every machine has.
fn inventory() -> Value {
    let node = |path: &str, minor: u32| json!({"path": path, "type": "c", "major": 1, "minor": minor});
    let gpu = |i: u32, path: &str, minor: u32| {
        json!({
            "uuid": uuid(i), "name": "Simulated", "pci_device_id": 1,
            "pci_address": format!("00000000:0{i}:00.0"), "memory_total": 8u64 << 30, "memory_free": 1,
            "minor": i, "mig": false, "persistence": true, "node": node(path, minor),
        })
    };
    json!({
        "driver_version": DRIVER, "cuda_version": 13000, "checkpoint_api": true,
        "gpus": [gpu(0, "/dev/null", 3), gpu(1, "/dev/zero", 5)],
        "common_nodes": [node("/dev/full", 7), node("/dev/nvidia-caps/nvidia-cap1", 1)],
    })
}

impl Node {
    fn new() -> Self {
        let node = Self {
            dir: tempfile::tempdir().expect("a directory"),
        };
        for dir in ["bin", "root/usr/lib64"] {
            std::fs::create_dir_all(node.path(dir)).expect("a directory");
        }
        for name in ["libcuda", "libnvidia-ml"] {
            node.write(&format!("root/usr/lib64/{name}.so.{DRIVER}"), name);
        }
        node.write("inventory.json", &inventory().to_string());
        node.program(
            "firn-gpu",
            &format!("cat {}", node.path("inventory.json").display()),
        );
        node.program("firn-hook", "true");
        let (etc, run) = (node.path("etc"), node.path("run"));
        let bin = node.path("bin");
        let (worker, hook) = (bin.join("firn-gpu"), bin.join("firn-hook"));
        node.write(
            "config.toml",
            &format!(
                "[worker]\npath = {worker:?}\n[hook]\npath = {hook:?}\n[create]\ncdi-dirs = [{etc:?}, {run:?}]\n"
            ),
        );
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("written");
    }

    fn program(&self, name: &str, script: &str) {
        self.write(&format!("bin/{name}"), &format!("#!/bin/sh\n{script}\n"));
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(self.path("bin").join(name), mode).expect("made executable");
    }

    fn firn(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_firn"))
            .args(arguments)
            .current_dir(self.dir.path())
            .env("FIRN_CONFIG", self.path("config.toml"))
            .output()
            .expect("firn starts")
    }

    fn generate(&self, options: &[&str]) -> Output {
        let root = self.path("root");
        let root = root.to_str().expect("a text");
        self.firn(&[&["cdi", "generate", "--driver-root", root], options].concat())
    }

    /// The spec of a container that is given these devices.
    fn injected(&self, devices: &[&str]) -> Value {
        let names: Vec<DeviceName> = devices.iter().map(|name| name.parse().expect("a name")).collect();
        let mut spec = json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, "mounts": []});
        let registry = Registry::read(&[self.path("etc")]);
        registry.inject(&mut spec, &names).expect("the devices are there");
        spec
    }
}

fn said(output: &Output) -> String {
    [&output.stdout[..], &output.stderr]
        .map(String::from_utf8_lossy)
        .concat()
}

fn paths(list: &Value, key: &str) -> Vec<String> {
    let entries = list.as_array().expect("a list").iter();
    entries
        .map(|entry| entry[key].as_str().expect("a text").to_owned())
        .collect()
}

#[test]
fn what_is_generated_gives_a_container_its_gpu_and_the_driver() {
    let node = Node::new();
    for file in ["etc/nvidia.yaml", "etc/nvidia.json"] {
        let done = node.generate(&["--output", file]);
        assert_eq!(done.status.code(), Some(0), "{}", said(&done));
        for device in ["nvidia.com/gpu=1", &format!("nvidia.com/gpu={}", uuid(1))] {
            let spec = node.injected(&[device]);
            assert_eq!(
                paths(&spec["linux"]["devices"], "path"),
                ["/dev/full", "/dev/zero"]
            );
            assert_eq!(spec["linux"]["devices"][1]["minor"], 5);
            let libraries = ["libcuda", "libnvidia-ml"].map(|name| format!("/usr/lib64/{name}.so.{DRIVER}"));
            assert_eq!(paths(&spec["mounts"], "destination"), libraries);
            let root = node.path("root");
            assert!(
                paths(&spec["mounts"], "source")
                    .iter()
                    .all(|source| Path::new(source).starts_with(&root))
            );
            assert_eq!(spec["process"]["env"], json!(["NVIDIA_VISIBLE_DEVICES=void"]));
            let hooks = &spec["hooks"]["createContainer"];
            assert_eq!(hooks[0]["path"], json!(node.path("bin/firn-hook")));
            let link = format!("libcuda.so.{DRIVER}::/usr/lib64/libcuda.so.1");
            assert!(
                hooks[0]["args"].as_array().expect("words").contains(&json!(link)),
                "{hooks}"
            );
            assert!(
                hooks[1]["args"]
                    .as_array()
                    .expect("words")
                    .contains(&json!("/usr/lib64/libcuda.so.1"))
            );
        }
        assert_eq!(
            paths(
                &node.injected(&["nvidia.com/gpu=all"])["linux"]["devices"],
                "path"
            ),
            ["/dev/full", "/dev/null", "/dev/zero"]
        );
        std::fs::remove_dir_all(node.path("etc")).expect("removed");
    }
}

#[test]
fn without_a_file_nothing_is_written() {
    let node = Node::new();
    let listing = || {
        let mut names: Vec<_> = std::fs::read_dir(node.dir.path())
            .expect("listed")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        names.sort();
        names
    };
    let before = listing();
    for options in [&[][..], &["--output", "-"], &["--format", "json"]] {
        let shown = node.generate(options);
        assert_eq!(shown.status.code(), Some(0), "{}", said(&shown));
        let text = String::from_utf8(shown.stdout).expect("a text");
        assert_eq!(text.starts_with('{'), options.contains(&"json"));
        let value: Value = serde_yaml_ng::from_str(&text).expect("YAML");
        assert_eq!(value["kind"], "nvidia.com/gpu");
    }
    assert_eq!(listing(), before);
}

#[test]
fn files_of_other_tools_are_not_overwritten_unless_told() {
    let node = Node::new();
    std::fs::create_dir(node.path("etc")).expect("made");
    let theirs = json!({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
        {"name": "0", "containerEdits": {"env": ["A=b"]}}
    ]});
    node.write("etc/theirs.json", &theirs.to_string());
    for (file, word) in [
        ("etc/theirs.json", "was not written by firn"),
        ("etc/ours.yaml", "theirs.json describes"),
    ] {
        let refused = node.generate(&["--output", file]);
        assert_eq!(refused.status.code(), Some(1));
        let said = said(&refused);
        assert!(said.contains("FIRN-CDI-EXISTS") && said.contains(word), "{said}");
    }
    assert_eq!(
        std::fs::read_to_string(node.path("etc/theirs.json")).expect("read"),
        theirs.to_string()
    );
    assert!(!node.path("etc/ours.yaml").exists());
    assert_eq!(
        node.generate(&["--output", "etc/theirs.json", "--force"])
            .status
            .code(),
        Some(0)
    );
    // Now it is firn's own.
    assert_eq!(
        node.generate(&["--output", "etc/theirs.json"]).status.code(),
        Some(0)
    );
}

#[test]
fn what_is_missing_is_named_and_nothing_is_written() {
    let node = Node::new();
    let fails = |word: &str| {
        let failed = node.generate(&["--output", "etc/nvidia.yaml"]);
        assert_eq!(failed.status.code(), Some(1));
        let said = said(&failed);
        assert!(said.contains(word), "{said}");
        assert!(!node.path("etc/nvidia.yaml").exists());
    };
    std::fs::remove_file(node.path("root/usr/lib64").join(format!("libcuda.so.{DRIVER}"))).expect("removed");
    fails("FIRN-DRIVER-MISSING");
    let mut bare = inventory();
    bare["gpus"][1]["node"] = Value::Null;
    node.write("inventory.json", &bare.to_string());
    node.write(&format!("root/usr/lib64/libcuda.so.{DRIVER}"), "");
    fails("FIRN-GPU-NO-NODE");
    node.write("inventory.json", "");
    fails("cannot read the GPUs of this node");
}

#[test]
fn list_shows_devices_conflicts_and_broken_files() {
    let node = Node::new();
    let list = || node.firn(&["cdi", "list"]);
    assert_eq!(said(&list()), "no CDI devices\n");
    node.generate(&["--output", "etc/nvidia.yaml"]);
    let good = list();
    assert_eq!(good.status.code(), Some(0));
    assert!(said(&good).contains("nvidia.com/gpu=all  "), "{}", said(&good));
    node.write("etc/broken.json", "{");
    let broken = list();
    assert_eq!(broken.status.code(), Some(1));
    assert!(
        said(&broken).contains("broken.json: it is not valid"),
        "{}",
        said(&broken)
    );
    std::fs::copy(node.path("etc/nvidia.yaml"), node.path("etc/copy.yaml")).expect("copied");
    assert!(said(&list()).contains("nvidia.com/gpu=0  in conflict: "));
    let value: Value = serde_json::from_slice(&node.firn(&["cdi", "list", "--json"]).stdout).expect("JSON");
    assert_eq!(value["devices"][0]["files"].as_array().map(Vec::len), Some(2));
    assert_eq!(value["broken"].as_array().map(Vec::len), Some(1));
}
