//! Room for jobs on other nodes.

use firn_config::names;

use super::pods::{Gpus, Job, Node, Pod, gpus};

/// What a checkpoint needs to be the same on both nodes: labels of `firn labels`.
const SAME: [&str; 2] = [names::LABEL_DRIVER, names::LABEL_MODEL];

/// A node to which jobs may go.
pub struct Target<'a> {
    pub node: &'a Node,
    /// Instructions that its CPUs lack and those of the drained node have.
    pub lacking: Vec<String>,
}

/// What is left of a target's GPUs.
struct Room<'a> {
    gpus: Gpus,
    target: &'a Target<'a>,
}

/// Whether nothing is known by which checkpoints of one node are not restored on the other.
pub fn is_like(node: &Node, other: &Node) -> bool {
    let labels = |key: &str| (node.metadata.labels.get(key), other.metadata.labels.get(key));
    SAME.iter().all(|key| match labels(key) {
        (Some(here), Some(there)) => here == there,
        _ => true,
    })
}

/// Adds an obstacle to jobs for which none of these nodes has GPUs left, after the jobs before, and CPUs that
/// can do enough. Whether the scheduler may use a node for a job is not known here.
///
/// Returns the nodes with GPUs for a job that needs better CPUs.
pub fn look_for_room<'a>(jobs: &mut [Job], targets: &'a [Target<'a>], pods: &[Pod]) -> Vec<&'a Target<'a>> {
    let mut rooms: Vec<Room<'_>> = targets.iter().map(|target| Room::of(target, pods)).collect();
    let mut lesser = Vec::new();
    // The other jobs take what these leave.
    let (strict, others): (Vec<_>, Vec<_>) = jobs.iter_mut().partition(|job| !job.takes_any_cpu);
    for job in strict.into_iter().chain(others) {
        let with_gpus: Vec<_> = rooms.iter_mut().filter(|room| room.fits(&job.gpus)).collect();
        let (fit, lacking): (Vec<_>, Vec<_>) = with_gpus
            .into_iter()
            .partition(|room| job.takes_any_cpu || room.target.lacking.is_empty());
        let lacks: Vec<String> = lacking.iter().map(|room| room.target.lacks()).collect();
        lesser.extend(lacking.iter().map(|room| room.target));
        match fit.into_iter().next() {
            Some(room) => room.take(&job.gpus),
            None => job.obstacles.push(obstacle(&job.gpus, &lacks)),
        }
    }
    lesser.sort_by_key(|target| target.name());
    lesser.dedup_by_key(|target| target.name());
    lesser
}

fn obstacle(needed: &Gpus, lacks: &[String]) -> String {
    let needed = needed.iter().map(|(key, count)| format!("{count} {key}"));
    let mut obstacle = format!(
        "no other node of this driver, GPU and CPU has {} free for it",
        needed.collect::<Vec<_>>().join(", ")
    );
    if !lacks.is_empty() {
        obstacle += &format!(
            ": {}. A job that uses none of that may go there if the template of its pods had the annotation \
             firn.dev/cpu=any when it was started",
            lacks.join("; ")
        );
    }
    obstacle
}

impl Target<'_> {
    pub fn name(&self) -> &str {
        &self.node.metadata.name
    }

    /// What its CPUs lack, for a message.
    pub fn lacks(&self) -> String {
        format!("the CPU of {} lacks {}", self.name(), self.lacking.join(", "))
    }
}

impl<'a> Room<'a> {
    fn of(target: &'a Target<'a>, pods: &[Pod]) -> Self {
        let all = gpus(&target.node.status.allocatable);
        let mut left: Gpus = all.map(|(key, count)| (key.clone(), count)).collect();
        let node = Some(target.name());
        for pod in pods.iter().filter(|pod| pod.spec.node_name.as_deref() == node) {
            for (key, count) in pod.gpus() {
                let left = left.entry(key).or_default();
                *left = left.saturating_sub(count);
            }
        }
        Self { gpus: left, target }
    }

    fn fits(&self, gpus: &Gpus) -> bool {
        let mut gpus = gpus.iter();
        gpus.all(|(key, count)| self.gpus.get(key).is_some_and(|free| free >= count))
    }

    fn take(&mut self, gpus: &Gpus) {
        for (key, count) in gpus {
            self.gpus.entry(key.clone()).and_modify(|free| *free -= count);
        }
    }
}

#[cfg(test)]
mod tests;
