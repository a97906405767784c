//! Jobs, and what keeps them from being moved.

use serde_json::{Value, json};

use super::*;

pub fn pod(name: &str, changes: &[(&str, Value)]) -> Pod {
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
    jobs(pods, "north", false).remove(0).obstacles
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
    let found = jobs(&pods[..1], "north", false);
    let part = Part {
        container: "train".into(),
        checkpoint: "moved".into(),
    };
    assert_eq!(found[0].parts, [part]);
    assert!(found[0].obstacles.is_empty(), "{found:?}");
    let names: Vec<_> = jobs(&pods, "north", false)
        .into_iter()
        .map(|job| job.pod)
        .collect();
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
fn a_job_that_writes_to_a_volume_is_moved_only_if_it_bears_that() {
    let with = |volume: Value, mount: Value| pod("job", &[]).volume(volume).mounted(0, mount);
    let data = json!({ "name": "data", "persistentVolumeClaim": { "claimName": "data" } });
    let found = obstacles(&[with(data.clone(), json!({ "name": "data" }))]);
    assert_eq!(found.len(), 1);
    assert!(found[0].contains("volume data"), "{found:?}");
    let all = [with(data.clone(), json!({ "name": "data" }))];
    assert!(jobs(&all, "north", true)[0].obstacles.is_empty());
    let free = |pod: Pod| obstacles(&[pod]).is_empty();
    assert!(free(with(
        data.clone(),
        json!({ "name": "data", "readOnly": true })
    )));
    assert!(
        free(pod("job", &[]).volume(data).mounted(1, json!({ "name": "data" }))),
        "no GPU"
    );
    for kind in [
        "configMap",
        "secret",
        "projected",
        "downwardAPI",
        "emptyDir",
        "image",
    ] {
        assert!(
            free(with(json!({ "name": "own", kind: {} }), json!({ "name": "own" }))),
            "{kind}"
        );
    }
    for kind in ["hostPath", "nfs", "csi", "ephemeral", "whatever"] {
        assert!(
            !free(with(json!({ "name": "v", kind: {} }), json!({ "name": "v" }))),
            "{kind}"
        );
    }
}

impl Pod {
    fn volume(mut self, volume: Value) -> Self {
        self.spec.volumes.push(serde_json::from_value(volume).unwrap());
        self
    }

    fn mounted(mut self, container: usize, mount: Value) -> Self {
        let mounts = &mut self.spec.containers[container].volume_mounts;
        mounts.push(serde_json::from_value(mount).unwrap());
        self
    }
}

#[test]
fn a_job_is_followed_by_the_pod_with_its_checkpoint() {
    let job = jobs(&[pod("job", &[])], "north", false).remove(0);
    assert!(pod("next", &[("/spec/nodeName", json!("south"))]).follows(&job));
    assert!(!pod("job", &[]).follows(&job), "itself");
    let other = json!({"firn.dev/restore-from": "train=other"});
    assert!(!pod("next", &[("/metadata/annotations", other)]).follows(&job));
    assert!(!pod("next", &[("/metadata/namespace", json!("web"))]).follows(&job));
}
