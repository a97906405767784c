//! A directory with all that a run of `firn` uses: stand-ins for the programs that it calls, a configuration,
//! an inventory, a spec, and a checkpoint.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::AtomicBool;

use firn_documents::schema;
use firn_gpu::SourceGpu;
use firn_gpu::{Backend, CudaState, Inventory};
use firn_image::manifest::{
    CheckpointedProcess, DriverVersion, DumpFlags, Manifest, Versions, describe_images,
};
use serde_json::{Value, json};

/// Version of the driver of every inventory.
pub const DRIVER: &str = "580.95.05";

pub struct Node {
    pub dir: tempfile::TempDir,
}

pub fn uuid(i: u32) -> String {
    format!("GPU-0{i}0{i}0{i}0{i}-0000-0000-0000-000000000000")
}

/// A node of two GPUs.
pub fn inventory() -> Value {
    inventory_of([("/dev/nvidia0", 195, 0), ("/dev/nvidia1", 195, 1)])
}

/// As [`inventory`], with these device nodes.
pub fn inventory_of(nodes: [(&str, u32, u32); 2]) -> Value {
    let gpu = |(i, (path, major, minor)): (u32, (&str, u32, u32))| {
        json!({
            "uuid": uuid(i), "name": "Simulated", "pci_device_id": 1,
            "pci_address": format!("00000000:0{i}:00.0"), "memory_total": 8u64 << 30, "memory_free": 1,
            "minor": i, "mig": false, "persistence": true,
            "node": {"path": path, "type": "c", "major": major, "minor": minor},
        })
    };
    let gpus: Vec<Value> = (0..).zip(nodes).map(gpu).collect();
    json!({
        "driver_version": DRIVER, "cuda_version": 13000, "checkpoint_api": true, "gpus": gpus,
        "common_nodes": [],
    })
}

impl Node {
    /// With nothing but a directory for programs.
    pub fn empty() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir.path().join("bin")).expect("a directory");
        Self { dir }
    }

    /// With a checkpoint in `image`.
    pub fn new() -> Self {
        let node = Self::empty();
        std::fs::create_dir(node.path("image")).expect("a directory");
        for (name, size) in [("inventory.img", 40), ("pages-1.img", 2 << 20)] {
            node.write(&format!("image/{name}"), &"x".repeat(size));
        }
        // A list of no processes: what is not as CRIU writes it is refused.
        let tree = [0x5456_4319_u32, 0x5027_3030].map(u32::to_le_bytes).concat();
        std::fs::write(node.path("image/pstree.img"), tree).expect("written");
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
        node.program("libfirn_criu.so", "");
        node.program("libfirn_cuda.so", "");
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

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("written");
    }

    /// Puts a script into PATH.
    pub fn program(&self, name: &str, script: &str) {
        let path = self.path("bin").join(name);
        firn_process::testing::write_program(&path, &format!("#!/bin/sh\n{script}\n"));
    }

    /// Writes firn's configuration.
    pub fn configure(&self, more: &str) {
        let bin = self.path("bin");
        let (worker, hook) = (bin.join("firn-gpu"), bin.join("firn-hook"));
        let text = format!("[worker]\npath = {worker:?}\n[hook]\npath = {hook:?}\n{more}\n");
        self.write("config.toml", &text);
    }

    /// Writes the spec of a container with this GPU.
    pub fn grant(&self, minor: u32) {
        let device =
            json!({"path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor});
        self.write(
            "config.json",
            &json!({"linux": {"devices": [device]}}).to_string(),
        );
    }

    /// That of the checkpoint in `image`, as its files are now.
    pub fn manifest(&self) -> Manifest {
        let source: Inventory = serde_json::from_value(inventory()).expect("an inventory");
        Manifest {
            checkpoint: String::new(),
            backend: Backend::Nvidia,
            dump: DumpFlags {
                open_tcp: true,
                ..DumpFlags::default()
            },
            driver: Some(DriverVersion {
                driver: source.driver_version.clone(),
                cuda: source.cuda_version,
            }),
            gpus: vec![SourceGpu::from(&source.gpus[0])],
            inherited_gpus: Vec::new(),
            released_gpus: None,
            origin: None,
            bulk: None,
            hooks: Default::default(),
            processes: vec![CheckpointedProcess {
                pid: 7,
                restore_tid: 9,
                state: CudaState::Running,
            }],
            topology: source.topology,
            mounts: vec![],
            cpu: Default::default(),
            versions: Versions {
                firn: "0.1.0".into(),
                criu: "4.2.1".into(),
                ..Versions::default()
            },
            images: describe_images(&self.path("image"), &AtomicBool::new(false)).expect("images"),
        }
    }

    /// Makes `image` a checkpoint whose job has let go of its GPU.
    pub fn let_go(&self) {
        let manifest = self.manifest().without_devices();
        manifest.write(&self.path("image")).expect("a manifest");
    }

    /// Runs firn. What it prints with `--json` is as its schema describes it.
    pub fn firn(&self, arguments: &[&str]) -> Output {
        let output = self.command(arguments).output().expect("firn starts");
        // An error that has no object is on standard error alone.
        if arguments.contains(&"--json") && !output.stdout.is_empty() {
            let printed = schema::printed(arguments, &text(&output));
            printed.unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
        }
        output
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let path = format!("{}:/usr/bin:/bin", self.path("bin").display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
        command
            .args(arguments)
            .current_dir(self.dir.path())
            .env("PATH", path)
            .env("TZ", "UTC")
            .env("FIRN_CONFIG", self.path("config.toml"));
        command
    }
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Standard output and standard error.
pub fn all_output(output: &Output) -> String {
    [&output.stdout[..], &output.stderr]
        .map(String::from_utf8_lossy)
        .concat()
}

pub fn value(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("JSON")
}
