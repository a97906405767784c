//! The jobs of a node: pods that run under firn with GPUs, and what keeps one from being moved.

use std::collections::BTreeMap;

use firn_config::names;
use firn_preflight::takes_any_cpu;
use firn_transaction::restore::name_for;
use serde::{Deserialize, Serialize};

/// The RuntimeClass that config/kubernetes has.
pub const RUNTIME_CLASS: &str = "firn";
/// Kinds of volumes that nobody writes to, or that go with their pod.
const OWN_VOLUMES: [&str; 6] = [
    "configMap",
    "secret",
    "projected",
    "downwardAPI",
    "emptyDir",
    "image",
];
/// How the names of NVIDIA's resources begin.
const GPU_RESOURCES: &str = "nvidia.com/";

/// A list of `kubectl get --output json`, with the fields that are used.
#[derive(Debug, Deserialize)]
pub struct List<T> {
    pub items: Vec<T>,
}

#[derive(Debug, Deserialize)]
pub struct Pod {
    pub metadata: Metadata,
    pub spec: PodSpec,
    #[serde(default)]
    pub status: PodStatus,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    pub name: String,
    #[serde(default)]
    pub namespace: String,
    #[serde(default)]
    pub uid: String,
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub owner_references: Vec<Owner>,
    pub deletion_timestamp: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct Owner {
    pub kind: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    pub node_name: Option<String>,
    pub runtime_class_name: Option<String>,
    pub containers: Vec<PodContainer>,
    #[serde(default)]
    pub volumes: Vec<Volume>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodContainer {
    pub name: String,
    #[serde(default)]
    pub resources: Resources,
    #[serde(default)]
    pub volume_mounts: Vec<VolumeMount>,
}

#[derive(Debug, Deserialize)]
pub struct Volume {
    pub name: String,
    /// The kind is the name of the only other field.
    #[serde(flatten)]
    pub kind: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeMount {
    pub name: String,
    #[serde(default)]
    pub read_only: bool,
}

#[derive(Debug, Default, Deserialize)]
pub struct Resources {
    #[serde(default)]
    pub limits: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    #[serde(default)]
    pub phase: String,
    #[serde(default)]
    pub container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerStatus {
    pub name: String,
    #[serde(rename = "containerID", default)]
    pub id: String,
    #[serde(default)]
    pub state: ContainerState,
}

#[derive(Debug, Default, Deserialize)]
pub struct ContainerState {
    pub running: Option<serde_json::Value>,
    pub waiting: Option<Waiting>,
}

#[derive(Debug, Deserialize)]
pub struct Waiting {
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub message: String,
}

#[derive(Debug, Deserialize)]
pub struct Node {
    pub metadata: Metadata,
    pub spec: NodeSpec,
    #[serde(default)]
    pub status: NodeStatus,
}

#[derive(Debug, Deserialize)]
pub struct NodeSpec {
    #[serde(default)]
    pub unschedulable: bool,
}

#[derive(Debug, Default, Deserialize)]
pub struct NodeStatus {
    #[serde(default)]
    pub allocatable: BTreeMap<String, String>,
}

/// Numbers of GPUs, by the names of their resources.
pub type Gpus = BTreeMap<String, u64>;

/// The GPUs in a list of resources.
pub fn gpus(resources: &BTreeMap<String, String>) -> impl Iterator<Item = (&String, u64)> {
    let gpus = resources.iter().filter(|(key, _)| key.starts_with(GPU_RESOURCES));
    gpus.filter_map(|(key, count)| Some((key, count.parse().ok()?)))
}

impl Pod {
    /// Whether none of its containers runs again.
    pub fn has_ended(&self) -> bool {
        ["Succeeded", "Failed"].contains(&&*self.status.phase)
    }

    /// The GPUs that it has on its node until it ends.
    pub fn gpus(&self) -> Gpus {
        let mut sum = Gpus::new();
        if !self.has_ended() {
            for (key, count) in self
                .spec
                .containers
                .iter()
                .flat_map(|one| gpus(&one.resources.limits))
            {
                *sum.entry(key.clone()).or_default() += count;
            }
        }
        sum
    }

    /// The volumes outside of the pod that containers with GPUs may write to. What they write after their
    /// checkpoint stays there.
    fn written_volumes(&self) -> impl Iterator<Item = &str> {
        let outside = self.spec.volumes.iter().filter(|volume| {
            !volume
                .kind
                .keys()
                .any(|kind| OWN_VOLUMES.contains(&kind.as_str()))
        });
        outside.map(|volume| volume.name.as_str()).filter(|name| {
            let mut mounts = self.gpu_containers().flat_map(|one| &one.volume_mounts);
            mounts.any(|mount| mount.name == *name && !mount.read_only)
        })
    }

    fn annotation(&self, key: &str) -> Option<&str> {
        self.metadata.annotations.get(key).map(String::as_str)
    }

    fn restore_from(&self) -> &str {
        self.annotation(names::ANNOTATION_RESTORE_FROM)
            .unwrap_or_default()
    }

    /// The names of the containers that have GPUs.
    fn with_gpus(&self) -> impl Iterator<Item = &str> {
        self.gpu_containers().map(|one| one.name.as_str())
    }

    fn gpu_containers(&self) -> impl Iterator<Item = &PodContainer> {
        let has_gpus = |one: &&PodContainer| {
            one.resources
                .limits
                .keys()
                .any(|key| key.starts_with(GPU_RESOURCES))
        };
        self.spec.containers.iter().filter(has_gpus)
    }

    /// Whether one of its containers would be restored from the checkpoint of this name.
    fn takes(&self, name: &str) -> bool {
        let mut containers = self.spec.containers.iter();
        containers.any(|one| matches!(name_for(self.restore_from(), &one.name), Ok(Some(its)) if its == name))
    }

    /// Whether it is the pod that has taken over this job, by now.
    pub fn follows(&self, job: &Job) -> bool {
        let is_other = self.metadata.uid != job.uid && self.metadata.deletion_timestamp.is_none();
        is_other
            && self.metadata.namespace == job.namespace
            && job.parts.iter().all(|part| self.takes(&part.checkpoint))
    }
}

/// A container with GPUs, and the name that its pod gives its checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Part {
    /// Name of the container in its pod.
    pub container: String,
    /// The name of its checkpoint.
    pub checkpoint: String,
}

/// A pod with GPUs of the node.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Job {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    #[serde(skip)]
    pub uid: String,
    /// Numbers of GPUs, by the names of their resources.
    pub gpus: Gpus,
    /// Its containers with GPUs.
    pub parts: Vec<Part>,
    /// Whether it is restored on a CPU that lacks instructions, too.
    #[serde(skip)]
    pub takes_any_cpu: bool,
    /// Why it cannot be moved. Empty: it can.
    pub obstacles: Vec<String>,
}

/// The jobs of a node, of all pods of the cluster. `with_volumes`: also those that write to volumes.
pub fn jobs(pods: &[Pod], node: &str, with_volumes: bool) -> Vec<Job> {
    let is_job = |pod: &&Pod| {
        pod.spec.node_name.as_deref() == Some(node)
            && pod.spec.runtime_class_name.as_deref() == Some(RUNTIME_CLASS)
            && pod.status.phase == "Running"
            && pod.metadata.deletion_timestamp.is_none()
            && pod.with_gpus().next().is_some()
    };
    let found = pods.iter().filter(is_job);
    found.map(|pod| job(pod, pods, with_volumes)).collect()
}

fn job(pod: &Pod, pods: &[Pod], with_volumes: bool) -> Job {
    let mut obstacles = Vec::new();
    for volume in pod.written_volumes().filter(|_| !with_volumes) {
        obstacles.push(format!(
            "it may write to volume {volume} after its checkpoint; a job that bears that is moved with \
             --with-volumes"
        ));
    }
    match pod
        .metadata
        .owner_references
        .first()
        .map(|owner| owner.kind.as_str())
    {
        None => obstacles.push("no controller makes it again elsewhere".to_owned()),
        Some(kind @ ("DaemonSet" | "Node")) => obstacles.push(format!("a {kind} makes it, for this node")),
        Some(_) => {}
    }
    let mut parts: Vec<Part> = Vec::new();
    for container in pod.with_gpus() {
        match name_for(pod.restore_from(), container) {
            Ok(Some(name)) if !parts.iter().any(|part| part.checkpoint == name) => parts.push(Part {
                container: container.to_owned(),
                checkpoint: name,
            }),
            Ok(Some(name)) => obstacles.push(format!("two of its containers have the checkpoint {name}")),
            _ => obstacles.push(format!(
                "annotation {} names no checkpoint for container {container} in a directory",
                names::ANNOTATION_RESTORE_FROM
            )),
        }
    }
    for part in &parts {
        let others = pods.iter().filter(|other| {
            other.metadata.namespace == pod.metadata.namespace
                && other.metadata.uid != pod.metadata.uid
                && other.takes(&part.checkpoint)
        });
        for other in others {
            obstacles.push(format!(
                "pod {} would be restored from its checkpoint {} too",
                other.metadata.name, part.checkpoint
            ));
        }
    }
    Job {
        namespace: pod.metadata.namespace.clone(),
        pod: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
        gpus: pod.gpus(),
        parts,
        takes_any_cpu: takes_any_cpu(pod.annotation(names::ANNOTATION_CPU)),
        obstacles,
    }
}

#[cfg(test)]
pub mod tests;
