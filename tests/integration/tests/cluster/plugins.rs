//! NVIDIA's device plugin as operators configure it: how it hands GPUs to containers, and GPUs offered twice.

use anyhow::{Context, Result, ensure};
use firn_lab::Lines;
use firn_node::wait_for;
use serde_json::Value;

use crate::cluster::{Cluster, LIMIT, restart_device_plugin};
use crate::stories::{answers, deployment, forget, is_right, remove, running};

const BUNDLES: &str = "/run/containerd/io.containerd.runtime.v2.task/k8s.io";

/// The only strategy that needs nothing of firn's configuration and no annotation.
const USUAL: &[&str] = &["--device-list-strategy=cdi-cri"];

/// Options of the plugin, and what firn's configuration needs for them.
const STRATEGIES: [(&[&str], &str); 4] = [
    (
        &["--device-list-strategy=envvar"],
        "[create]\nvisible-devices = true\n",
    ),
    (
        &["--device-list-strategy=envvar", "--pass-device-specs=true"],
        "[create]\nvisible-devices = true\n",
    ),
    (
        &["--device-list-strategy=volume-mounts"],
        "[create]\nvolume-mounts = true\n",
    ),
    (&["--device-list-strategy=cdi-annotations"], ""),
];

/// A pod gets its GPU and nothing else, and the kubelet checkpoints it.
pub fn strategies(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["cordon", cluster.north.name()])?;
    for (options, configuration) in STRATEGIES {
        let done = strategy(cluster, options, configuration);
        done.with_context(|| options.join(" "))?;
    }
    cluster.south.host.configure("")?;
    restart_device_plugin(cluster, &cluster.south, USUAL, "2")?;
    cluster.kubectl(&["uncordon", cluster.north.name()])?;
    forget(cluster)
}

fn strategy(cluster: &Cluster, options: &[&str], configuration: &str) -> Result<()> {
    cluster.south.host.configure(configuration)?;
    restart_device_plugin(cluster, &cluster.south, options, "2")?;
    cluster.apply(&deployment("strategy", 1, ""))?;
    let pod = running(cluster, "strategy", 1)?.remove(0);
    let reached = answers(cluster, &pod, 2)?;
    let used = cluster.south.host.gpu_memory()?;
    ensure!(
        used.iter().filter(|mib| **mib > 0).count() == 1,
        "GPU memory: {used:?}"
    );
    let name = pod["metadata"]["name"].as_str().context("a pod has a name")?;
    let id = pod["status"]["containerStatuses"][0]["containerID"].as_str();
    let id = id
        .and_then(|id| id.strip_prefix("containerd://"))
        .context("no id")?;
    let spec = cluster.south.read(format!("{BUNDLES}/{id}/config.json"))?;
    let spec: Value = serde_json::from_str(&spec)?;
    let devices = spec["linux"]["devices"].as_array().cloned().unwrap_or_default();
    let paths = devices.iter().filter_map(|device| device["path"].as_str());
    let gpus = paths.filter(|path| path.trim_end_matches(char::is_numeric) == "/dev/nvidia");
    ensure!(gpus.count() == 1, "its devices are {devices:?}");
    let url = format!(
        "/api/v1/nodes/{}/proxy/checkpoint/default/{name}/server",
        cluster.south.name()
    );
    let made = cluster.kubectl(&["create", "--raw", &url, "--filename", "/dev/null"])?;
    ensure!(made.contains(".tar"), "the kubelet answers {made}");
    answers(cluster, &pod, reached + 2)?;
    is_right(cluster, &pod)?;
    remove(cluster, "strategy")
}

const LEND: &str = include_str!("../../../../examples/time-slicing/kubernetes/lend");
const AGENT: &str = include_str!("../../../../examples/time-slicing/kubernetes/agent.yaml");
const PRIORITIES: &str = include_str!("../../../../examples/time-slicing/kubernetes/priorities.yaml");
const PODS: &str = include_str!("../../../../examples/time-slicing/kubernetes/pods.yaml");
const TWICE: &str = include_str!("../../../../examples/time-slicing/kubernetes/time-slicing.yaml");

/// The example as written, but for images, commands and sizes.
pub fn lent(cluster: &Cluster) -> Result<()> {
    let south = &cluster.south;
    cluster.kubectl(&["cordon", cluster.north.name()])?;
    cluster.kubectl(&["label", "node", south.name(), "nvidia.com/gpu.present=true"])?;
    south.write("/etc/time-slicing.yaml", TWICE)?;
    let twice = [USUAL[0], "--config-file=/etc/time-slicing.yaml"];
    restart_device_plugin(cluster, south, &twice, "4")?;
    cluster.north.write("/tmp/lend", LEND)?;
    let configmap = ["create", "configmap", "gpu-lend", "--namespace", "kube-system"];
    cluster.kubectl(&[&configmap[..], &["--from-file=/tmp/lend"]].concat())?;
    let local = "image: localhost/firn-test:latest";
    let never = |indent: &str| format!("{local}\n{indent}imagePullPolicy: Never");
    cluster.apply(&AGENT.replace("image: registry.example/busybox:latest", &never("          ")))?;
    cluster.apply(PRIORITIES)?;
    let counter = format!(
        "{}\n      command: [/bin/gpu-counter, --interval-ms, \"50\", --mib, \"8\"]",
        never("      ")
    );
    let pods = PODS
        .replace("image: registry.example/busybox:latest", &never("      "))
        .replace("image: registry.example/answer:latest", &counter)
        .replace("image: registry.example/train:latest", &counter)
        .replace("      command: [\"python3\", \"/train.py\"]\n", "")
        .replace("memory: 96Gi", "memory: 1Gi");
    let (train, answer) = pods.split_once("\n---\n").context("the example has two pods")?;
    cluster.apply(train)?;
    let before = reaches(cluster, "train", 5)?;
    cluster.apply(answer)?;
    reaches(cluster, "answer", 5)?;
    let tasks = south
        .run(&["ctr", "--namespace", "k8s.io", "tasks", "list"])?
        .stdout;
    ensure!(tasks.contains("PAUSED"), "nothing is paused: {tasks}");
    let stands = reaches(cluster, "train", before - 1)?;
    reaches(cluster, "answer", 20)?;
    ensure!(
        reaches(cluster, "train", before - 1)? == stands,
        "the lent pod continued"
    );
    cluster.kubectl(&["delete", "pod", "answer"])?;
    reaches(cluster, "train", stands + 5)?;
    let lines = Lines::parse(&cluster.kubectl(&["logs", "train"])?);
    if let Some(fault) = lines.fault_if_carried(1) {
        anyhow::bail!("train: {fault}");
    }
    cluster.kubectl(&["delete", "pod", "train"])?;
    cluster.kubectl(&[
        "delete",
        "--namespace",
        "kube-system",
        "daemonset,configmap",
        "gpu-lend",
    ])?;
    restart_device_plugin(cluster, south, USUAL, "2")?;
    cluster.kubectl(&["uncordon", cluster.north.name()]).map(drop)
}

/// Waits until the counter of a pod has gone further than this. Returns how far.
fn reaches(cluster: &Cluster, pod: &str, beyond: u64) -> Result<u64> {
    wait_for(&format!("pod {pod} beyond {beyond}"), LIMIT, || {
        let log = cluster.kubectl(&["logs", pod]).unwrap_or_default();
        let reached = Lines::parse(&log).reached(1);
        Ok((reached > beyond).then_some(reached))
    })
}
