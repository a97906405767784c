//! Which nodes have room.

use serde_json::{Value, json};

use super::super::pods::jobs;
use super::super::pods::tests::pod;
use super::*;

/// A node with two GPUs.
fn node(name: &str, labels: Value) -> Node {
    let node = json!({
        "metadata": { "name": name, "labels": labels }, "spec": {},
        "status": { "allocatable": { "nvidia.com/gpu": "2", "cpu": "8" } },
    });
    serde_json::from_value(node).unwrap()
}

#[test]
fn gpus_are_counted_on_the_other_nodes() {
    let south = node("south", json!({}));
    let target = Target {
        node: &south,
        lacking: Vec::new(),
    };
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
        look_for_room(&mut jobs, std::slice::from_ref(&target), others);
        jobs.iter().map(|job| job.obstacles.is_empty()).collect()
    };
    assert_eq!(fits(&[]), [true, true]);
    assert_eq!(fits(&[other("Succeeded")]), [true, true]);
    assert_eq!(fits(&[other("Running")]), [true, false]);
    assert_eq!(fits(&[other("Running"), other("Pending")]), [false, false]);
}

#[test]
fn a_node_of_another_driver_or_gpu_is_not_like_it() {
    let are_like = |here: Value, there: Value| is_like(&node("north", here), &node("south", there));
    let labels = |driver: &str, model: &str| json!({"firn.dev/driver": driver, "firn.dev/gpu-model": model});
    assert!(are_like(labels("580.1", "H200"), labels("580.1", "H200")));
    assert!(!are_like(labels("580.1", "H200"), labels("570.1", "H200")));
    assert!(!are_like(labels("580.1", "H200"), labels("580.1", "H100")));
    // Nodes that nobody has labelled.
    assert!(are_like(json!({}), labels("580.1", "H200")));
    assert!(are_like(labels("580.1", "H200"), json!({})));
}

#[test]
fn a_cpu_that_can_do_less_has_no_room_for_a_job_that_may_need_it() {
    let (south, west) = (node("south", json!({})), node("west", json!({})));
    let lacking = vec!["avx512f".to_owned(), "vaes".to_owned()];
    let less = || Target {
        node: &south,
        lacking: lacking.clone(),
    };
    let same = || Target {
        node: &west,
        lacking: Vec::new(),
    };
    let obstacles = |pods: &[Pod], targets: &[Target<'_>]| {
        let mut jobs = jobs(pods, "north", false);
        let lesser = look_for_room(&mut jobs, targets, &[]);
        let lesser: Vec<String> = lesser.iter().map(|target| target.name().to_owned()).collect();
        (
            jobs.into_iter().flat_map(|job| job.obstacles).collect::<Vec<_>>(),
            lesser,
        )
    };
    let any = |name: &str| {
        let annotations = json!({ "firn.dev/restore-from": name, "firn.dev/cpu": "any" });
        pod(name, &[("/metadata/annotations", annotations)])
    };
    let (found, lesser) = obstacles(&[pod("job", &[])], &[less()]);
    assert!(
        found.len() == 1 && found[0].contains("the CPU of south lacks avx512f, vaes. "),
        "{found:?}"
    );
    assert_eq!(lesser, ["south"]);
    // The scheduler may choose either.
    let both = [less(), same()];
    assert_eq!(
        obstacles(&[pod("job", &[])], &both),
        (vec![], vec!["south".to_owned()])
    );
    assert_eq!(obstacles(&[any("job")], &[less()]), (vec![], vec![]));
    // Whoever takes any CPU leaves the better one to others, also if it comes first.
    let two = (
        "/spec/containers/0/resources/limits",
        json!({ "nvidia.com/gpu": "2" }),
    );
    let mut first = any("a");
    first.spec.containers = pod("a", std::slice::from_ref(&two)).spec.containers;
    let jobs = [first, pod("b", std::slice::from_ref(&two))];
    assert!(obstacles(&jobs, &[same(), less()]).0.is_empty());
    // What lacks GPUs too is not to blame on its CPU.
    let four = (
        "/spec/containers/0/resources/limits",
        json!({ "nvidia.com/gpu": "4" }),
    );
    let (found, lesser) = obstacles(&[pod("job", &[four])], &[less()]);
    let found = found.join("");
    assert!(
        found.contains("4 nvidia.com/gpu free") && !found.contains("lacks"),
        "{found}"
    );
    assert!(lesser.is_empty());
}
