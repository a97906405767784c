//! Which nodes have room.

use serde_json::{Value, json};

use super::super::pods::jobs;
use super::super::pods::tests::pod;
use super::*;

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
        let mut jobs = jobs(&two, "north", false);
        look_for_gpus(&mut jobs, &nodes, "north", ["south"].into_iter(), others);
        jobs.iter().map(|job| job.obstacles.is_empty()).collect()
    };
    assert_eq!(fits(&[]), [true, true]);
    assert_eq!(fits(&[other("Succeeded")]), [true, true]);
    assert_eq!(fits(&[other("Running")]), [true, false]);
    assert_eq!(fits(&[other("Running"), other("Pending")]), [false, false]);
}

#[test]
fn a_node_of_another_driver_or_gpu_has_no_room() {
    let node = |name: &str, labels: Value| -> Node {
        let node = json!({
            "metadata": { "name": name, "labels": labels }, "spec": {},
            "status": { "allocatable": { "nvidia.com/gpu": "2" } },
        });
        serde_json::from_value(node).unwrap()
    };
    let fits = |here: Value, there: Value| {
        let nodes = [node("north", here), node("south", there)];
        let mut jobs = jobs(&[pod("job", &[])], "north", false);
        look_for_gpus(&mut jobs, &nodes, "north", ["south"].into_iter(), &[]);
        jobs[0].obstacles.is_empty()
    };
    let labels = |driver: &str, model: &str| json!({"firn.dev/driver": driver, "firn.dev/gpu-model": model});
    assert!(fits(labels("580.1", "H200"), labels("580.1", "H200")));
    assert!(!fits(labels("580.1", "H200"), labels("570.1", "H200")));
    assert!(!fits(labels("580.1", "H200"), labels("580.1", "H100")));
    // Nodes that nobody has labelled.
    assert!(fits(json!({}), labels("580.1", "H200")));
    assert!(fits(labels("580.1", "H200"), json!({})));
}
