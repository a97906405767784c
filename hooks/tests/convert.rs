//! `firn-hook convert`, over CDI files of a node of two GPUs.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use firn_host::FileId;
use serde_json::{Value, json};

struct Bundle {
    dir: tempfile::TempDir,
}

impl Bundle {
    fn new(spec: &Value) -> Self {
        let bundle = Self {
            dir: tempfile::tempdir().expect("a directory"),
        };
        fs::create_dir(bundle.path("cdi")).expect("a directory");
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cdi/tests/fixtures");
        fs::copy(fixtures.join("two-gpus.yaml"), bundle.path("cdi/nvidia.yaml")).expect("copied");
        fs::write(bundle.path("config.json"), spec.to_string()).expect("written");
        bundle.configure("");
        bundle
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn configure(&self, more: &str) {
        let text = format!("[create]\ncdi-dirs = [{:?}]\n{more}", self.path("cdi"));
        fs::write(self.path("config.toml"), text).expect("written");
    }

    fn convert(&self, options: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_firn-hook"))
            .arg("convert")
            .arg(self.dir.path())
            .args(options)
            .env("FIRN_CONFIG", self.path("config.toml"))
            .env("NVIDIA_CTK_CONFIG_FILE_PATH", self.path("toolkit.toml"))
            .output()
            .expect("firn-hook starts")
    }

    fn spec(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("config.json")).expect("read")).expect("JSON")
    }

    /// What it refuses with; the spec stays as it is.
    fn refusal(&self) -> Value {
        let before = self.spec();
        let refused = self.convert(&[]);
        assert_eq!(refused.status.code(), Some(1));
        assert_eq!(self.spec(), before);
        serde_json::from_slice(&refused.stdout).expect("JSON")
    }
}

fn spec(devices: &str) -> Value {
    json!({
        "ociVersion": "1.2.0",
        "process": {"args": ["sh"], "env": [format!("NVIDIA_VISIBLE_DEVICES={devices}")]},
        "hooks": {"prestart": [
            {"path": "/usr/bin/nvidia-container-runtime-hook", "args":
              ["nvidia-container-runtime-hook", "prestart"]},
        ]},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "future": [1],
    })
}

fn gpus(spec: &Value) -> Vec<&str> {
    let paths = spec["linux"]["devices"].as_array().expect("devices").iter();
    let paths = paths.filter_map(|device| device["path"].as_str());
    paths
        .filter(|path| path.starts_with("/dev/nvidia") && path.ends_with(|c: char| c.is_ascii_digit()))
        .collect()
}

/// Names of the devices that it has given.
fn given(done: &Output) -> Value {
    assert_eq!(done.status.code(), Some(0), "{done:?}");
    serde_json::from_slice::<Value>(&done.stdout).expect("JSON")["devices"].clone()
}

#[test]
fn what_a_hook_would_have_mounted_is_in_the_spec_afterwards() {
    let uuid = "GPU-b7e94d13-2c65-4a8b-9f21-55aa66bb77c1";
    for (asked, expected) in [
        ("0", &["/dev/nvidia0"][..]),
        (uuid, &["/dev/nvidia1"]),
        ("nvidia.com/gpu=1,0", &["/dev/nvidia1", "/dev/nvidia0"]),
        ("all", &["/dev/nvidia0", "/dev/nvidia1"]),
    ] {
        let bundle = Bundle::new(&spec(asked));
        let done = bundle.convert(&[]);
        assert_eq!(done.status.code(), Some(0), "{done:?}");
        let spec = bundle.spec();
        assert_eq!(gpus(&spec), expected);
        assert_eq!(spec["hooks"]["prestart"], json!([]));
        assert_eq!(spec["process"]["env"][0], "NVIDIA_VISIBLE_DEVICES=void");
        assert!(spec["mounts"].as_array().expect("mounts").len() > 5);
        assert_eq!(spec["future"], json!([1]));
        let hooks = spec["hooks"]["createContainer"].to_string();
        assert!(hooks.contains("create-symlinks") && !hooks.contains("disable-device-node-modification"));
    }
}

#[test]
fn a_container_that_asks_for_no_gpu_is_not_touched() {
    let bundle = Bundle::new(&spec("void"));
    let before = fs::metadata(bundle.path("config.json")).expect("there");
    let done = bundle.convert(&[]);
    assert_eq!(done.status.code(), Some(0));
    assert_eq!(given(&done), json!([]));
    let after = fs::metadata(bundle.path("config.json")).expect("there");
    assert_eq!(
        (FileId::of(&before), before.mtime_nsec()),
        (FileId::of(&after), after.mtime_nsec())
    );
    assert_eq!(bundle.spec(), spec("void"));
}

#[test]
fn refusals_have_a_code_and_a_hint_and_leave_the_spec() {
    let unknown = Bundle::new(&spec("7")).refusal();
    assert_eq!(unknown["code"], "FIRN-CDI-DEVICE");
    let message = unknown["message"].as_str().expect("a text");
    assert!(
        message.contains("nvidia.com/gpu=7") && message.contains("nvidia.com/gpu=all"),
        "{message}"
    );
    assert!(
        unknown["hint"]
            .as_str()
            .expect("a text")
            .contains("firn cdi list")
    );
    assert_eq!(Bundle::new(&spec("-")).refusal()["code"], "FIRN-CDI-DEVICE");

    let bare = Bundle::new(&spec("0"));
    fs::remove_file(bare.path("cdi/nvidia.yaml")).expect("removed");
    let refusal = bare.refusal();
    assert_eq!(refusal["code"], "FIRN-NO-CDI-SPEC");
    assert!(
        refusal["hint"]
            .as_str()
            .expect("a text")
            .contains("firn cdi generate")
    );
}

#[test]
fn at_a_restore_the_configured_gpus_stand_for_those_of_another_node() {
    let elsewhere = "GPU-00000000-0000-4000-8000-000000000000";
    let bundle = Bundle::new(&spec(elsewhere));
    bundle.configure("[restore]\ngpus = [\"1\"]\n");
    assert_eq!(bundle.refusal()["code"], "FIRN-CDI-DEVICE", "not a restore");
    assert_eq!(bundle.convert(&["--restore"]).status.code(), Some(0));
    assert_eq!(gpus(&bundle.spec()), ["/dev/nvidia1"]);

    // The kubelet's grant is not widened.
    let mut granted = spec(elsewhere);
    granted["annotations"] = json!({"io.kubernetes.cri.container-type": "container"});
    let bundle = Bundle::new(&granted);
    bundle.configure("[restore]\ngpus = [\"1\"]\n");
    assert_eq!(bundle.convert(&["--restore"]).status.code(), Some(1));
}

/// As the Kubernetes device plugin asks with PASS_DEVICE_SPECS: nodes, and a name for the rest.
fn with_nodes(minor: u64, devices: &str) -> Value {
    let numbers = json!({"path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor});
    json!({
        "ociVersion": "1.2.0",
        "process": {"args": ["sh"], "env": [format!("NVIDIA_VISIBLE_DEVICES={devices}")]},
        "linux": {"devices": [numbers]},
    })
}

#[test]
fn a_name_and_nodes_add_libraries_and_no_gpu() {
    let uuid = "GPU-b7e94d13-2c65-4a8b-9f21-55aa66bb77c1";
    let bundle = Bundle::new(&with_nodes(1, uuid));
    assert_eq!(
        given(&bundle.convert(&[])),
        json!([]),
        "the operator lets no variable count"
    );
    assert_eq!(bundle.spec(), with_nodes(1, uuid));

    bundle.configure("visible-devices = true\n");
    assert_eq!(
        given(&bundle.convert(&[])),
        json!([format!("nvidia.com/gpu={uuid}")])
    );
    let spec = bundle.spec();
    assert_eq!(spec["linux"], with_nodes(1, uuid)["linux"], "no node and no rule");
    let mounts = spec["mounts"].as_array().expect("mounts");
    assert!(mounts.len() > 4);
    for mount in mounts {
        assert!(mount["options"].to_string().contains("\"ro\""), "{mount}");
    }

    // An image's own variable does not extend the grant.
    let bundle = Bundle::new(&with_nodes(1, "all"));
    bundle.configure("visible-devices = true\n");
    let refusal = bundle.refusal();
    assert_eq!(refusal["code"], "FIRN-CDI-GRANT");
    let message = refusal["message"].as_str().expect("a text");
    let file = bundle.path("cdi/nvidia.yaml").display().to_string();
    assert!(
        message.contains("/dev/nvidia0") && message.contains(&file),
        "{message}"
    );
}

/// An image's author alone can do this.
#[test]
fn names_of_other_devices_give_nothing() {
    let backup = json!({
        "cdiVersion": "0.6.0",
        "kind": "vendor.example/backup",
        "devices": [{"name": "host", "containerEdits": {
            "deviceNodes": [{"path": "/dev/sda", "type": "b", "major": 8, "minor": 0}],
            "mounts": [{"hostPath": "/", "containerPath": "/host", "options": ["rbind", "rw"]}],
        }}],
    });
    let names = "0,vendor.example/backup=host";
    for (spec, options) in [
        (spec(names), &[][..]),
        (with_nodes(0, names), &[]),
        (
            with_nodes(0, names),
            &["--wrapper", "/usr/bin/nvidia-container-runtime"],
        ),
    ] {
        let bundle = Bundle::new(&spec);
        bundle.configure("visible-devices = true\n");
        fs::write(bundle.path("cdi/backup.json"), backup.to_string()).expect("written");
        let refused = bundle.convert(options);
        assert_eq!(refused.status.code(), Some(1));
        assert_eq!(bundle.spec(), spec);
        let refusal: Value = serde_json::from_slice(&refused.stdout).expect("JSON");
        assert_eq!(refusal["code"], "FIRN-CDI-KIND");
        let message = refusal["message"].as_str().expect("a text");
        assert!(message.contains("vendor.example/backup=host"), "{message}");
    }
}

#[test]
fn the_toolkits_settings_hold_for_its_hook() {
    let bundle = Bundle::new(&spec("all"));
    let hardened = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n";
    fs::write(bundle.path("toolkit.toml"), hardened).expect("written");
    assert_eq!(given(&bundle.convert(&[])), json!([]));
    assert_eq!(bundle.spec(), spec("all"));

    let mut privileged = spec("all");
    privileged["process"]["capabilities"] = json!({"bounding": ["CAP_SYS_ADMIN"]});
    let bundle = Bundle::new(&privileged);
    fs::write(bundle.path("toolkit.toml"), hardened).expect("written");
    assert_eq!(given(&bundle.convert(&[])), json!(["nvidia.com/gpu=all"]));
}

#[test]
fn what_nvidias_wrapper_would_give_is_given_by_its_configuration() {
    let wrapper = ["--wrapper", "/usr/bin/nvidia-container-runtime"];
    let bundle = Bundle::new(&with_nodes(1, "runtime.nvidia.com/gpu=1"));
    assert_eq!(given(&bundle.convert(&wrapper)), json!(["nvidia.com/gpu=1"]));
    assert_eq!(gpus(&bundle.spec()), ["/dev/nvidia1"]);

    let named = with_nodes(1, "1");
    let bundle = Bundle::new(&named);
    let hardened = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n";
    fs::write(bundle.path("toolkit.toml"), hardened).expect("written");
    assert_eq!(given(&bundle.convert(&wrapper)), json!([]));
    assert_eq!(bundle.spec(), named);

    let mut annotated = with_nodes(1, "void");
    annotated["linux"] = json!({});
    annotated["annotations"] = json!({"cdi.k8s.io/plugin_a": "nvidia.com/gpu=0,nvidia.com/gpu=1"});
    let bundle = Bundle::new(&annotated);
    assert_eq!(bundle.convert(&wrapper).status.code(), Some(0));
    assert_eq!(gpus(&bundle.spec()), ["/dev/nvidia0", "/dev/nvidia1"]);
}

#[test]
fn at_a_restore_by_the_wrapper_nodes_of_the_other_node_are_left_behind() {
    let bundle = Bundle::new(&with_nodes(7, "1"));
    let options = ["--restore", "--wrapper", "/usr/bin/nvidia-container-runtime"];
    assert_eq!(bundle.convert(&options).status.code(), Some(0));
    assert_eq!(gpus(&bundle.spec()), ["/dev/nvidia1"]);
}
