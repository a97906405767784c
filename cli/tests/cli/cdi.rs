//! `firn cdi`, over a driver's directory and CDI directories of the test's own.

use std::path::Path;
use std::process::Output;

use firn_cdi::{DeviceName, Registry};
use serde_json::{Value, json};

use crate::node::{DRIVER, Node, all_output, inventory_of, uuid, value};

/// A node of two GPUs whose nodes are ones that every machine has.
fn inventory() -> Value {
    let mut inventory = inventory_of([("/dev/null", 1, 3), ("/dev/zero", 1, 5)]);
    let node = |path: &str, minor: u32| json!({"path": path, "type": "c", "major": 1, "minor": minor});
    inventory["common_nodes"] = json!([node("/dev/full", 7), node("/dev/nvidia-caps/nvidia-cap1", 1)]);
    inventory
}

impl Node {
    /// With a driver's libraries below `root`, and CDI directories `etc` and `run`.
    fn with_driver() -> Self {
        let node = Self::empty();
        std::fs::create_dir_all(node.path("root/usr/lib64")).expect("a directory");
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
        node.configure(&format!("[create]\ncdi-dirs = [{etc:?}, {run:?}]"));
        node
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

fn paths(list: &Value, key: &str) -> Vec<String> {
    let entries = list.as_array().expect("a list").iter();
    entries
        .map(|entry| entry[key].as_str().expect("a text").to_owned())
        .collect()
}

#[test]
fn what_is_generated_gives_a_container_its_gpu_and_the_driver() {
    let node = Node::with_driver();
    for file in ["etc/nvidia.yaml", "etc/nvidia.json"] {
        let done = node.generate(&["--output", file]);
        assert_eq!(done.status.code(), Some(0), "{}", all_output(&done));
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
fn a_gpu_in_mig_mode_is_reported_as_left_out() {
    let node = Node::with_driver();
    let mut divided = inventory();
    divided["gpus"][1]["mig"] = json!(true);
    node.write("inventory.json", &divided.to_string());
    let done = node.generate(&["--output", "etc/nvidia.yaml"]);
    assert_eq!(done.status.code(), Some(0), "{}", all_output(&done));
    let output = all_output(&done);
    assert!(
        output.contains(&format!("GPU {} is in MIG mode", uuid(1))),
        "{output}"
    );
    assert!(!output.contains(&uuid(0)), "{output}");
}

#[test]
fn without_a_file_nothing_is_written() {
    let node = Node::with_driver();
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
        assert_eq!(shown.status.code(), Some(0), "{}", all_output(&shown));
        let text = String::from_utf8(shown.stdout).expect("a text");
        assert_eq!(text.starts_with('{'), options.contains(&"json"));
        let value: Value = serde_yaml_ng::from_str(&text).expect("YAML");
        assert_eq!(value["kind"], "nvidia.com/gpu");
    }
    assert_eq!(listing(), before);
}

#[test]
fn files_of_other_tools_are_overwritten_only_with_force() {
    let node = Node::with_driver();
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
        let output = all_output(&refused);
        assert!(
            output.contains("FIRN-CDI-EXISTS") && output.contains(word),
            "{output}"
        );
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
    let node = Node::with_driver();
    let fails = |word: &str| {
        let failed = node.generate(&["--output", "etc/nvidia.yaml"]);
        assert_eq!(failed.status.code(), Some(1));
        let output = all_output(&failed);
        assert!(output.contains(word), "{output}");
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
    let node = Node::with_driver();
    let list = || node.firn(&["cdi", "list"]);
    assert_eq!(all_output(&list()), "no CDI devices\n");
    node.generate(&["--output", "etc/nvidia.yaml"]);
    let good = list();
    assert_eq!(good.status.code(), Some(0));
    assert!(
        all_output(&good).contains("nvidia.com/gpu=all  "),
        "{}",
        all_output(&good)
    );
    node.write("etc/broken.json", "{");
    let broken = list();
    assert_eq!(broken.status.code(), Some(1));
    assert!(
        all_output(&broken).contains("broken.json: it is not valid"),
        "{}",
        all_output(&broken)
    );
    std::fs::copy(node.path("etc/nvidia.yaml"), node.path("etc/copy.yaml")).expect("copied");
    assert!(all_output(&list()).contains("nvidia.com/gpu=0  in conflict: "));
    let listed = value(&node.firn(&["cdi", "list", "--json"]));
    assert_eq!(listed["devices"][0]["files"].as_array().map(Vec::len), Some(2));
    assert_eq!(listed["broken"].as_array().map(Vec::len), Some(1));
}
