//! Room for jobs on other nodes.

use firn_config::names;

use super::pods::{Gpus, Job, Node, Pod, gpus};

/// What a checkpoint needs to be the same on both nodes: labels of `firn labels`.
const SAME: [&str; 2] = [names::LABEL_DRIVER, names::LABEL_MODEL];

/// Whether nothing is known by which checkpoints of one node are not restored on the other.
fn is_like(node: Option<&Node>, other: Option<&Node>) -> bool {
    let label = |node: Option<&Node>, key| node.and_then(|node| node.metadata.labels.get(key).cloned());
    SAME.iter()
        .all(|key| match (label(node, *key), label(other, *key)) {
            (Some(here), Some(there)) => here == there,
            _ => true,
        })
}

/// Adds an obstacle to jobs for which none of these nodes has GPUs left, after the jobs before. Whether the
/// scheduler may use a node for a job is not known here.
pub fn look_for_gpus<'a>(
    jobs: &mut [Job],
    nodes: &[Node],
    from: &str,
    targets: impl Iterator<Item = &'a str>,
    pods: &[Pod],
) {
    let named = |name: &str| nodes.iter().find(|node| node.metadata.name == name);
    let mut free: Vec<Gpus> = Vec::new();
    for target in targets.filter(|target| is_like(named(from), named(target))) {
        let node = named(target);
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
                job.obstacles.push(format!(
                    "no other node of this driver and GPU has {needs} free for it"
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests;
