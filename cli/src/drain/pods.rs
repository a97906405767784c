//! The jobs of a node: pods that run under firn with GPUs, and what keeps one from being moved.

use std::collections::BTreeMap;

use firn_config::names;
use firn_transaction::restore::name_for;
use serde::{Deserialize, Serialize};

/// The RuntimeClass that config/kubernetes has.
pub const RUNTIME_CLASS: &str = "firn";
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
}

#[derive(Debug, Deserialize)]
pub struct PodContainer {
    pub name: String,
    #[serde(default)]
    pub resources: Resources,
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
type Gpus = BTreeMap<String, u64>;

/// The GPUs in a list of resources.
fn gpus(resources: &BTreeMap<String, String>) -> impl Iterator<Item = (&String, u64)> {
    let gpus = resources.iter().filter(|(key, _)| key.starts_with(GPU_RESOURCES));
    gpus.filter_map(|(key, count)| Some((key, count.parse().ok()?)))
}

impl Pod {
    /// The GPUs that it has on its node until it ends.
    fn gpus(&self) -> Gpus {
        let mut sum = Gpus::new();
        if !["Succeeded", "Failed"].contains(&&*self.status.phase) {
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

    fn restore_from(&self) -> &str {
        let annotation = self.metadata.annotations.get(names::ANNOTATION_RESTORE_FROM);
        annotation.map_or("", String::as_str)
    }

    /// The containers that have GPUs.
    fn with_gpus(&self) -> impl Iterator<Item = &str> {
        let has_gpus = |one: &&PodContainer| {
            one.resources
                .limits
                .keys()
                .any(|key| key.starts_with(GPU_RESOURCES))
        };
        self.spec
            .containers
            .iter()
            .filter(has_gpus)
            .map(|one| one.name.as_str())
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
    /// Why it cannot be moved. Empty: it can.
    pub obstacles: Vec<String>,
}

/// The jobs of a node, of all pods of the cluster.
pub fn jobs(pods: &[Pod], node: &str) -> Vec<Job> {
    let is_job = |pod: &&Pod| {
        pod.spec.node_name.as_deref() == Some(node)
            && pod.spec.runtime_class_name.as_deref() == Some(RUNTIME_CLASS)
            && pod.status.phase == "Running"
            && pod.metadata.deletion_timestamp.is_none()
            && pod.with_gpus().next().is_some()
    };
    pods.iter().filter(is_job).map(|pod| job(pod, pods)).collect()
}

fn job(pod: &Pod, pods: &[Pod]) -> Job {
    let mut obstacles = Vec::new();
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
        obstacles,
    }
}

/// Adds an obstacle to jobs for which none of these nodes has GPUs left, after the jobs before. Whether the
/// scheduler may use a node for a job is not known here.
pub fn look_for_gpus<'a>(
    jobs: &mut [Job],
    nodes: &[Node],
    targets: impl Iterator<Item = &'a str>,
    pods: &[Pod],
) {
    let mut free: Vec<Gpus> = Vec::new();
    for target in targets {
        let node = nodes.iter().find(|node| node.metadata.name == target);
        let all = node.iter().flat_map(|node| gpus(&node.status.allocatable));
        let mut left: Gpus = all.map(|(key, count)| (key.clone(), count)).collect();
        for pod in pods
            .iter()
            .filter(|pod| pod.spec.node_name.as_deref() == Some(target))
        {
            for (key, count) in pod.gpus() {
                let left = left.entry(key).or_default();
                *left = left.saturating_sub(count);
            }
        }
        free.push(left);
    }
    for job in jobs {
        let mut fits = free.iter_mut().filter(|free| {
            job.gpus
                .iter()
                .all(|(key, count)| free.get(key).is_some_and(|free| free >= count))
        });
        match fits.next() {
            Some(free) => {
                for (key, count) in &job.gpus {
                    free.entry(key.clone()).and_modify(|free| *free -= count);
                }
            }
            None => {
                let needs = job.gpus.iter().map(|(key, count)| format!("{count} {key}"));
                let needs = needs.collect::<Vec<_>>().join(", ");
                job.obstacles
                    .push(format!("no other node has {needs} free for it"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(name: &str, changes: &[(&str, Value)]) -> Pod {
        let mut pod = json!({
            "metadata": {
                "name": name, "namespace": "ml", "uid": name,
                "annotations": { "firn.dev/restore-from": "train=moved" },
                "ownerReferences": [{ "kind": "ReplicaSet" }],
            },
            "spec": {
                "nodeName": "north", "runtimeClassName": "firn",
                "containers": [
                    { "name": "train", "resources": { "limits": { "nvidia.com/gpu": "1" } } },
                    { "name": "logs" },
                ],
            },
            "status": { "phase": "Running" },
        });
        for (place, value) in changes {
            *pod.pointer_mut(place).unwrap() = value.clone();
        }
        serde_json::from_value(pod).unwrap()
    }

    fn obstacles(pods: &[Pod]) -> Vec<String> {
        jobs(pods, "north").remove(0).obstacles
    }

    #[test]
    fn jobs_are_the_nodes_pods_with_gpus_under_firn() {
        let pods = [
            pod("job", &[]),
            pod("elsewhere", &[("/spec/nodeName", json!("south"))]),
            pod("stock", &[("/spec/runtimeClassName", json!("runc"))]),
            pod(
                "cpu",
                &[("/spec/containers/0/resources/limits", json!({"cpu": "1"}))],
            ),
            pod("ended", &[("/status/phase", json!("Succeeded"))]),
        ];
        let found = jobs(&pods[..1], "north");
        let part = Part {
            container: "train".into(),
            checkpoint: "moved".into(),
        };
        assert_eq!(found[0].parts, [part]);
        assert!(found[0].obstacles.is_empty(), "{found:?}");
        let names: Vec<_> = jobs(&pods, "north").into_iter().map(|job| job.pod).collect();
        assert_eq!(names, ["job"]);
    }

    #[test]
    fn what_cannot_be_moved_is_named() {
        let of = |place: &str, value: Value| obstacles(&[pod("job", &[(place, value)])]).join("; ");
        assert_eq!(
            of("/metadata/ownerReferences", json!([])),
            "no controller makes it again elsewhere"
        );
        assert!(of("/metadata/ownerReferences/0/kind", json!("DaemonSet")).contains("for this node"));
        for annotations in [json!({}), json!({"firn.dev/restore-from": "logs=a"})] {
            assert!(of("/metadata/annotations", annotations).contains("no checkpoint for container train"));
        }
        // Names that would lead out of the directory.
        let wrong = json!({"firn.dev/restore-from": "train=../../etc"});
        assert!(of("/metadata/annotations", wrong).contains("no checkpoint for container train"));
        let twice = json!({"name": "second", "resources": {"limits": {"nvidia.com/gpu": "1"}}});
        let both = [
            ("/metadata/annotations", json!({"firn.dev/restore-from": "moved"})),
            ("/spec/containers/1", twice),
        ];
        assert!(
            obstacles(&[pod("job", &both)])
                .join("")
                .contains("two of its containers")
        );
        let found = obstacles(&[
            pod("job", &[]),
            pod("twin", &[("/spec/nodeName", json!("south"))]),
        ]);
        assert_eq!(
            found,
            ["pod twin would be restored from its checkpoint moved too"]
        );
    }

    #[test]
    fn gpus_are_counted_on_the_other_nodes() {
        let node = |name: &str, count: &str| -> Node {
            let node = json!({
                "metadata": { "name": name }, "spec": {},
                "status": { "allocatable": { "nvidia.com/gpu": count, "cpu": "8" } },
            });
            serde_json::from_value(node).unwrap()
        };
        let nodes = [node("north", "2"), node("south", "2")];
        let other = |phase: &str| {
            let no_name = ("/metadata/annotations", json!({}));
            let changes = [
                no_name,
                ("/spec/nodeName", json!("south")),
                ("/status/phase", json!(phase)),
            ];
            pod("other", &changes)
        };
        let fits = |others: &[Pod]| -> Vec<bool> {
            let two = [
                pod("a", &[]),
                pod(
                    "b",
                    &[("/metadata/annotations/firn.dev~1restore-from", json!("b"))],
                ),
            ];
            let mut jobs = jobs(&two, "north");
            look_for_gpus(&mut jobs, &nodes, ["south"].into_iter(), others);
            jobs.iter().map(|job| job.obstacles.is_empty()).collect()
        };
        assert_eq!(fits(&[]), [true, true]);
        assert_eq!(fits(&[other("Succeeded")]), [true, true]);
        assert_eq!(fits(&[other("Running")]), [true, false]);
        assert_eq!(fits(&[other("Running"), other("Pending")]), [false, false]);
    }

    #[test]
    fn a_job_is_followed_by_the_pod_with_its_checkpoint() {
        let job = jobs(&[pod("job", &[])], "north").remove(0);
        assert!(pod("next", &[("/spec/nodeName", json!("south"))]).follows(&job));
        assert!(!pod("job", &[]).follows(&job), "itself");
        let other = json!({"firn.dev/restore-from": "train=other"});
        assert!(!pod("next", &[("/metadata/annotations", other)]).follows(&job));
        assert!(!pod("next", &[("/metadata/namespace", json!("web"))]).follows(&job));
    }
}
