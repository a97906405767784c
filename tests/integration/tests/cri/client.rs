//! The kubelet's side of CRI: pods and containers by the calls that the kubelet makes.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use firn_lab::{GpuHost, SimGpu};
use firn_node::{Remnants, wait_for};
use serde_json::{Value, json};

use crate::cri::hosts::Way;

/// Where the client is on a node.
pub const CLIENT: &str = "/usr/local/bin/cri-client";
/// The image of the pods' containers.
pub const IMAGE: &str = firn_lab::IMAGE;
/// The cgroup in which pods have theirs.
pub const PARENT: &str = "/kubepods/pod";
/// Where pods' logs are.
pub const LOGS: &str = "/var/log/pods";
/// Where containerd keeps the bundles of pods.
pub const BUNDLES: &str = "/run/containerd/io.containerd.runtime.v2.task/k8s.io";

const LIMIT: Duration = Duration::from_secs(60);
/// How long something that nobody waits for may take to go.
const SOON: Duration = Duration::from_secs(8);

/// containerd's CRI services, and the way in which pods get their shim.
#[derive(Clone, Copy)]
pub struct Cri<'h> {
    pub host: &'h GpuHost,
    pub way: Way,
}

impl<'h> Cri<'h> {
    /// Calls a method.
    pub fn call(self, method: &str, request: &Value) -> Result<Value> {
        let output = self.host.output_of(&[CLIENT, method], &request.to_string())?;
        if output.code != Some(0) {
            bail!("{}", output.stderr.trim_end());
        }
        serde_json::from_str(&output.stdout).with_context(|| format!("{method} answered {}", output.stdout))
    }

    /// Runs a pod in the host's network, so that no network plugin is needed.
    pub fn pod(self, name: &str) -> Result<Pod<'h>> {
        self.pod_with(name, &json!({}))
    }

    /// As [`Cri::pod`], with more of `linux.securityContext.namespaceOptions`.
    pub fn pod_with(self, name: &str, namespaces: &Value) -> Result<Pod<'h>> {
        let mut options = json!({ "network": "NODE", "pid": "CONTAINER" });
        merge(&mut options, namespaces);
        let map = format!("{}={}", SimGpu::h200(1).uuid, SimGpu::h200(2).uuid);
        let config = json!({
            "metadata": { "name": name, "namespace": "default", "uid": format!("uid-{name}"), "attempt": 0 },
            "logDirectory": format!("{LOGS}/{name}"),
            "annotations": {
                "firn.dev/gpu-map": map,
                "firn.dev/ipc": "none",
                "firn.dev/exec": "refuse",
                // The handler does not pass it on.
                "firn.dev/tcp": "close",
                "other.dev/annotation": "not passed on",
            },
            "linux": { "cgroupParent": PARENT, "securityContext": { "namespaceOptions": options } },
        });
        self.pod_of(config)
    }

    /// As [`Cri::pod`], with a network of its own, in which CUDA's sockets have names that a replica has too,
    /// and with these annotations.
    pub fn pod_annotated(self, name: &str, annotations: &Value) -> Result<Pod<'h>> {
        self.pod_of(annotated(name, annotations))
    }

    /// Runs a pod by its whole configuration.
    pub fn pod_of(self, config: Value) -> Result<Pod<'h>> {
        let request = json!({ "config": config, "runtimeHandler": self.way.handler() });
        let answer = self.call("RunPodSandbox", &request)?;
        Ok(self.found(text(&answer["podSandboxId"])?, config))
    }

    /// A pod that runs already.
    pub fn found(self, id: String, config: Value) -> Pod<'h> {
        let cri = self;
        Pod { cri, id, config }
    }
}

/// The configuration of a pod with a network of its own.
pub fn annotated(name: &str, annotations: &Value) -> Value {
    let options = json!({ "network": "POD", "pid": "CONTAINER" });
    json!({
        "metadata": { "name": name, "namespace": "default", "uid": format!("uid-{name}"), "attempt": 0 },
        "logDirectory": format!("{LOGS}/{name}"),
        "annotations": annotations,
        "linux": { "cgroupParent": PARENT, "securityContext": { "namespaceOptions": options } },
    })
}

/// The configuration of a container of a pod, by what is special of it.
pub fn container(pod: &Value, name: &str, special: &Value) -> Value {
    let namespaces = &pod["linux"]["securityContext"]["namespaceOptions"];
    let mut config = json!({
        "metadata": { "name": name, "attempt": 0 },
        "image": { "image": IMAGE },
        "logPath": format!("{name}.log"),
        "linux": { "securityContext": { "namespaceOptions": namespaces } },
    });
    merge(&mut config, special);
    config
}

/// A pod that runs.
pub struct Pod<'h> {
    pub cri: Cri<'h>,
    pub id: String,
    config: Value,
}

impl<'h> Pod<'h> {
    /// Starts a container that runs a shell script.
    pub fn start(&self, name: &str, script: &str) -> Result<Ctr<'h>> {
        self.start_with(name, &json!({ "command": ["sh", "-c", script] }))
    }

    /// Starts a container by what is special of its configuration.
    pub fn start_with(&self, name: &str, special: &Value) -> Result<Ctr<'h>> {
        let container = self.create(name, special)?;
        container.start()?;
        Ok(container)
    }

    /// Creates a container by what is special of its configuration.
    pub fn create(&self, name: &str, special: &Value) -> Result<Ctr<'h>> {
        let config = container(&self.config, name, special);
        let request = json!({ "podSandboxId": self.id, "config": config, "sandboxConfig": self.config });
        let answer = self.cri.call("CreateContainer", &request)?;
        Ok(Ctr {
            cri: self.cri,
            id: text(&answer["containerId"])?,
        })
    }

    /// `SANDBOX_READY` or `SANDBOX_NOTREADY`.
    pub fn state(&self) -> Result<String> {
        let answer = self
            .cri
            .call("PodSandboxStatus", &json!({ "podSandboxId": self.id }))?;
        text(&answer["status"]["state"])
    }

    /// What a container has written, in the form in which the kubelet keeps it, without the time of each
    /// line.
    pub fn log(&self, container: &str) -> Result<String> {
        let path = format!("{}/{container}.log", text(&self.config["logDirectory"])?);
        let log = self.cri.host.node().read(path)?;
        let lines = log.lines().map(|line| match line.split_once(' ') {
            Some((time, rest)) if time.ends_with('Z') && time.contains('T') => rest.to_owned(),
            _ => format!("no time in {line:?}"),
        });
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }

    /// Waits until a container's log has this in it.
    pub fn logs(&self, container: &str, wanted: &str) -> Result<String> {
        let waited = wait_for(&format!("{wanted:?} in the log of {container}"), LIMIT, || {
            let log = self.log(container).unwrap_or_default();
            Ok(log.contains(wanted).then_some(log))
        });
        waited.with_context(|| format!("the log is {:?}", self.log(container)))
    }

    /// Pids of the shims that work for the pod and its containers.
    pub fn shims(&self) -> Vec<i32> {
        let shims = self.cri.host.shims();
        let its = shims.filter(|shim| shim.args.contains(&self.id));
        its.map(|shim| shim.pid).collect()
    }

    /// Stops and removes the pod with its containers, and makes sure that nothing of it is left.
    pub fn remove(&self, containers: &[&Ctr<'_>]) -> Result<()> {
        self.end()?;
        for id in containers.iter().map(|container| &container.id).chain([&self.id]) {
            firn_lab::nothing_left(self.cri.host, id)?;
        }
        Ok(())
    }

    /// As [`Pod::remove`], but returns what is left, and removes that by hand.
    pub fn remove_and_list(&self, containers: &[&Ctr<'_>]) -> Result<String> {
        self.end()?;
        let node = self.cri.host.node();
        let mut left = Vec::new();
        for id in containers.iter().map(|container| &container.id).chain([&self.id]) {
            let gone = || Ok(node.remnants(id)?.is_empty().then_some(()));
            if wait_for("its end", SOON, gone).is_ok() {
                continue;
            }
            let Remnants {
                processes,
                mounts,
                cgroups,
                state,
            } = node.remnants(id)?;
            for process in &processes {
                left.push(process.command.clone());
                // It may end by itself just now.
                let _ = node.run(&["kill", "-KILL", &process.pid.to_string()]);
            }
            left.extend(mounts.iter().map(|_| "a mount".to_owned()));
            left.extend(cgroups.first().map(|_| "its cgroups".to_owned()));
            if !state.is_empty() {
                left.push("its state".to_owned());
                let root = format!("{}/k8s.io", self.cri.way.runc_root());
                node.run(&["runc", "--root", &root, "delete", "--force", id])?;
            }
            firn_lab::nothing_left(self.cri.host, id)?;
        }
        left.sort();
        Ok(if left.is_empty() {
            "nothing".into()
        } else {
            left.join(", ")
        })
    }

    /// Stops and removes it.
    fn end(&self) -> Result<()> {
        let own = json!({ "podSandboxId": self.id });
        self.cri.call("StopPodSandbox", &own)?;
        ensure!(
            self.state()? == "SANDBOX_NOTREADY",
            "a stopped pod is {}",
            self.state()?
        );
        self.cri.call("RemovePodSandbox", &own)?;
        let logs = self.cri.host.node().path(text(&self.config["logDirectory"])?);
        // containerd leaves them to the kubelet; a pod without output has none.
        let _ = std::fs::remove_dir_all(logs);
        Ok(())
    }
}

/// A container of a pod.
pub struct Ctr<'h> {
    pub cri: Cri<'h>,
    pub id: String,
}

impl Ctr<'_> {
    /// Starts it.
    pub fn start(&self) -> Result<()> {
        self.own("StartContainer").map(drop)
    }

    /// Stops it, after this many seconds by force.
    pub fn stop(&self, seconds: u32) -> Result<()> {
        let request = json!({ "containerId": self.id, "timeout": seconds });
        self.cri.call("StopContainer", &request).map(drop)
    }

    /// Removes it.
    pub fn remove(&self) -> Result<()> {
        self.own("RemoveContainer").map(drop)
    }

    /// Calls a method whose request is the container.
    fn own(&self, method: &str) -> Result<Value> {
        self.cri.call(method, &json!({ "containerId": self.id }))
    }

    /// What the kubelet gets to know of it.
    pub fn status(&self) -> Result<Value> {
        Ok(self.own("ContainerStatus")?["status"].take())
    }

    /// `CONTAINER_RUNNING` and the like.
    pub fn state(&self) -> Result<String> {
        text(&self.status()?["state"])
    }

    /// Waits until it has ended, and returns how.
    pub fn ended(&self) -> Result<String> {
        wait_for(&format!("end of {}", self.id), LIMIT, || {
            let status = self.status()?;
            Ok((status["state"] == "CONTAINER_EXITED")
                .then(|| format!("{} {}", status["exitCode"], status["reason"])))
        })
    }

    /// Makes an empty file in its root directory, without a process in it.
    pub fn touch(&self, name: &str) -> Result<()> {
        let file = format!("{BUNDLES}/{}/rootfs/{name}", self.id);
        self.cri.host.node().write(file, "")
    }

    /// Its statistics.
    pub fn stats(&self) -> Result<Value> {
        Ok(self.own("ContainerStats")?["stats"].take())
    }

    /// Runs a script in it to its end and returns its exit code and output.
    pub fn exec(&self, script: &str) -> Result<String> {
        self.exec_of(&self.script(script))
    }

    /// What a script in it prints.
    pub fn output(&self, script: &str) -> Result<String> {
        decoded(&self.cri.call("ExecSync", &self.script(script))?["stdout"])
    }

    /// The request that runs a script in it.
    fn script(&self, script: &str) -> Value {
        json!({ "containerId": self.id, "cmd": ["sh", "-c", script], "timeout": "20" })
    }

    /// Runs a program in it by the whole request.
    pub fn exec_of(&self, request: &Value) -> Result<String> {
        let answer = self.cri.call("ExecSync", request)?;
        Ok(format!(
            "{} out {:?} err {:?}",
            answer["exitCode"],
            decoded(&answer["stdout"])?,
            decoded(&answer["stderr"])?
        ))
    }

    /// Opens the streams that `Exec` or `Attach` give.
    pub fn open(&self, method: &str, request: &Value) -> Result<Stream> {
        let mut whole = json!({ "containerId": self.id });
        merge(&mut whole, request);
        let url = text(&self.cri.call(method, &whole)?["url"])?;
        let mut client = self.cri.host.node().command("timeout");
        client
            .args(["60", CLIENT, "stream", &url])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut client = client.spawn().context("start the client")?;
        let stdout = client.stdout.take().context("no standard output")?;
        Ok(Stream {
            client,
            stdout: BufReader::new(stdout),
        })
    }
}

/// Streams of a container that are open.
pub struct Stream {
    client: Child,
    stdout: BufReader<ChildStdout>,
}

impl Stream {
    /// Sends a line to the container.
    pub fn send(&mut self, line: &str) -> Result<()> {
        let mut stdin = self.client.stdin.as_ref().context("no standard input")?;
        writeln!(stdin, "{line}").context("write to the stream")
    }

    /// Waits until this line comes from the container; those before it are lost.
    pub fn hears(&mut self, wanted: &str) -> Result<()> {
        let mut line = String::new();
        while line.trim_end() != wanted {
            line.clear();
            let got = self.stdout.read_line(&mut line)?;
            ensure!(got > 0, "the stream has ended before {wanted:?}");
        }
        Ok(())
    }

    /// Waits until the container's side has ended, and returns what came.
    pub fn end(mut self) -> Result<String> {
        let mut stdout = String::new();
        self.stdout.read_to_string(&mut stdout)?;
        let output = self.client.wait_with_output().context("wait for the stream")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        Ok(format!("out {stdout:?} err {stderr:?}"))
    }
}

/// Puts the second object's members over those of the first.
fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from.clone(),
    }
}

/// A string of an answer.
pub fn text(value: &Value) -> Result<String> {
    let text = value.as_str().map(str::to_owned);
    text.with_context(|| format!("no text: {value}"))
}

/// Bytes of an answer, which JSON holds in base64, as text.
fn decoded(value: &Value) -> Result<String> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Ok(u32::from(c - b'A')),
        b'a'..=b'z' => Ok(u32::from(c - b'a') + 26),
        b'0'..=b'9' => Ok(u32::from(c - b'0') + 52),
        b'+' => Ok(62),
        b'/' => Ok(63),
        _ => bail!("not base64: {value}"),
    };
    let mut bytes = Vec::new();
    for group in text(value)?.trim_end_matches('=').as_bytes().chunks(4) {
        let mut bits = 0;
        for position in 0..4 {
            bits = bits << 6 | group.get(position).map_or(Ok(0), |c| digit(*c))?;
        }
        bytes.extend(&bits.to_be_bytes()[1..group.len()]);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
