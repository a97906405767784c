//! crictl on a test node.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use firn_lab::{GpuHost, IMAGE, Lines};
use firn_node::wait_for;
use serde_json::{Value, json};

pub const LIMIT: Duration = Duration::from_secs(60);
pub const ARCHIVE: &str = "/root/job.tar";

/// crictl on a node.
#[derive(Clone, Copy)]
pub struct Crictl<'h>(pub &'h GpuHost);

/// A pod that runs, by its id and the file of its configuration.
pub struct Pod<'h> {
    crictl: Crictl<'h>,
    id: String,
    config: String,
}

impl<'h> Crictl<'h> {
    pub fn run(self, words: &[&str]) -> Result<String> {
        let output = self.0.node().run(&[&["crictl"], words].concat())?;
        Ok(output.stdout.trim_end().to_owned())
    }

    /// What it prints when it fails.
    pub fn fails(self, words: &[&str]) -> Result<String> {
        let output = self.0.node().command("crictl").args(words).output()?;
        ensure!(!output.status.success(), "{words:?} did not fail");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Starts a pod with a network of its own.
    pub fn pod(self, name: &str, handler: &str) -> Result<Pod<'h>> {
        let config = format!("/root/{name}.pod.json");
        let text = json!({
            "metadata": { "name": name, "namespace": "default", "uid": format!("uid-{name}"), "attempt": 0 },
            "log_directory": format!("/var/log/pods/{name}"),
            "linux": { "cgroup_parent": "/kubepods/pod", "security_context": security() },
        });
        self.0.node().write(&config, text.to_string())?;
        self.0
            .node()
            .run(&["mkdir", "-p", &format!("/var/log/pods/{name}")])?;
        let id = self.run(&["runp", "--runtime", handler, &config])?;
        Ok(Pod {
            crictl: self,
            id,
            config,
        })
    }

    pub fn lines(self, id: &str) -> Result<Lines> {
        Ok(Lines::parse(&(self.run(&["logs", id])? + "\n")))
    }

    /// Waits for more iterations of the counter, all of them right. Gives the number of the first.
    pub fn goes_on(self, id: &str, more: u64) -> Result<u64> {
        let from = self.lines(id)?.reached(1);
        let reached = || {
            let lines = self.lines(id)?;
            if let Some(fault) = lines.fault_if_carried(0) {
                bail!("{id}: {fault}");
            }
            Ok((lines.reached(1) >= from + more).then_some(()))
        };
        wait_for(&format!("{more} iterations of {id} after {from}"), LIMIT, reached)?;
        Ok(from)
    }

    /// Uses GPU memory of these GPUs and of no others.
    pub fn uses(self, gpus: &[usize]) -> Result<()> {
        let used: Vec<usize> = (0..)
            .zip(self.0.gpu_memory()?)
            .filter(|(_, used)| *used > 0)
            .map(|(gpu, _)| gpu)
            .collect();
        ensure!(used == gpus, "in use: {used:?} instead of {gpus:?}");
        Ok(())
    }

    pub fn checkpoint(self, id: &str) -> Result<()> {
        self.run(&["checkpoint", "--export", ARCHIVE, id]).map(drop)
    }

    /// `CONTAINER_RUNNING` and the like.
    pub fn state(self, id: &str) -> Result<String> {
        self.run(&[
            "inspect",
            "--output",
            "go-template",
            "--template",
            "{{.status.state}}",
            id,
        ])
    }

    /// Whether firn-runc has a note of an open transaction.
    fn is_noted(self) -> bool {
        let find = ["find", "/run/firn/runc", "-type", "f"];
        let found = self.0.node().run(&find);
        found.is_ok_and(|output| !output.stdout.is_empty())
    }

    /// The mounts of the checkpointed container that CRI-O wants to have in the request of a restore.
    pub fn mounts(self) -> Result<Value> {
        let spec = self
            .0
            .node()
            .run(&["tar", "--extract", "--to-stdout", "--file", ARCHIVE, "spec.dump"])?;
        let spec: Value = serde_json::from_str(&spec.stdout)?;
        let mounts = spec["mounts"].as_array().context("no mounts")?.iter();
        let libraries = mounts.filter(|mount| mount["source"].as_str().is_some_and(|s| s.contains("/lib/")));
        Ok(libraries
            .map(|mount| {
                json!({
                    "container_path": mount["destination"],
                    "host_path": mount["source"],
                    "readonly": true,
                })
            })
            .collect())
    }

    /// Removes all pods. Nothing of them is left.
    pub fn clear(self) -> Result<()> {
        for id in self.run(&["ps", "--quiet"])?.lines() {
            self.run(&["stop", "--timeout", "0", id])?;
        }
        self.run(&["rmp", "--all", "--force"])?;
        ensure!(!self.is_noted(), "a note is left");
        self.0.nothing_of_runc_runs(LIMIT)?;
        self.uses(&[])
    }
}

impl Pod<'_> {
    /// Creates a container by its whole configuration.
    pub fn create(&self, config: &Value) -> Result<String> {
        let file = format!("{}.ctr.json", self.config);
        self.crictl.0.node().write(&file, config.to_string())?;
        self.crictl.run(&["create", &self.id, &file, &self.config])
    }

    /// Starts a container by its whole configuration.
    pub fn start(&self, config: &Value) -> Result<String> {
        let id = self.create(config)?;
        self.crictl.run(&["start", &id])?;
        Ok(id)
    }

    /// Starts a counter that gets its GPU by an annotation.
    pub fn count(&self, gpu: &str) -> Result<String> {
        let id = self.start(&counter(&json!({
            "annotations": { "cdi.k8s.io/firn-test": format!("nvidia.com/gpu={gpu}") },
        })))?;
        self.crictl.goes_on(&id, 3)?;
        Ok(id)
    }
}

/// As the kubelet requests it: a PID namespace for each container.
pub fn security() -> Value {
    json!({ "namespace_options": { "pid": 1 } })
}

/// The configuration of a counter, with these members in addition.
pub fn counter(more: &Value) -> Value {
    let mut config = json!({
        "metadata": { "name": "job", "attempt": 0 },
        "image": { "image": IMAGE },
        "command": ["/bin/gpu-counter", "--interval-ms", "50", "--mib", "8"],
        "log_path": "job.log",
        "linux": { "security_context": security() },
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config
}
