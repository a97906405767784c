//! `firn drain`: moves the GPU jobs of a Kubernetes node to other nodes, by checkpoints.
//!
//! kubectl reaches the cluster. The kubelet of the node makes the checkpoints; agents
//! (config/kubernetes/agents.yaml) carry them from node to node; pods restore them by their annotation.

mod copies;
mod end;
mod error;
mod json;
mod kubectl;
mod pods;
mod report;
mod room;
mod whole;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use firn_host::{CpuFeatures, ProblemLine};
use firn_transaction::transfer::{RunsElsewhere, Sighting};

use crate::args::DrainArgs;
use crate::output::{self, line, note};
use copies::Copies;
use error::DrainError;
use kubectl::Kubectl;
use pods::{Job, List, Node, Part, Pod, jobs};
use room::{Target, is_like, look_for_room};

/// Where agents have the node's checkpoints, and the directory that pods are restored from.
const CHECKPOINTS: &str = "/host/checkpoints";
const NAMED: &str = "/host/named";
/// Where they have the notes of which containers were restored.
const RESTORED: &str = "/host/restored";
/// Prints what the first CPU of a node can do. Argument: where the kernel has it.
const LOOK_AT_CPU: &str = "grep -m 1 -E '^(flags|Features)[[:space:]]*:' \"$1\" || [ $? -eq 1 ]";
const PAUSE: Duration = Duration::from_millis(500);

/// A node and the agent's pod on it.
struct Agent {
    node: String,
    pod: String,
}

/// A drain of a node, ready to begin.
struct Drain {
    kubectl: Kubectl,
    nodes: Vec<Node>,
    from: Agent,
    to: Vec<Agent>,
    timeout: Duration,
    as_json: bool,
    /// Another run's is another one.
    run: String,
}

pub fn run(args: &DrainArgs) -> Result<bool> {
    match drain(args) {
        Ok(done) => Ok(done),
        Err(error) => output::failed(args.json, ProblemLine(&error)),
    }
}

fn drain(args: &DrainArgs) -> Result<bool, DrainError> {
    let drain = Drain::of(args)?;
    let all: List<Pod> = drain.kubectl.get(&["pods", "--all-namespaces"])?;
    let mut jobs = jobs(&all.items, &args.node, args.with_volumes);
    drain.look_for_names(&mut jobs)?;
    let targets = if jobs.is_empty() {
        Vec::new()
    } else {
        drain.targets()?
    };
    let lesser = look_for_room(&mut jobs, &targets, &all.items);
    let movable = jobs.iter().all(|job| job.obstacles.is_empty());
    let mut outcomes = Vec::new();
    for job in &jobs {
        for obstacle in &job.obstacles {
            note!("{}/{}: cannot be moved: {obstacle}", job.namespace, job.pod);
        }
        if job.obstacles.is_empty() && (args.dry_run || !movable) {
            note!("{}/{}: can be moved", job.namespace, job.pod);
        }
    }
    for target in lesser.iter().filter(|_| movable) {
        note!(
            "firn: the scheduler may choose {}, and jobs start cold there: {}; `kubectl cordon {}` before",
            target.name(),
            target.lacks(),
            target.name()
        );
    }
    if !movable {
        note!("firn: nothing was touched");
    } else if !args.dry_run {
        drain.kubectl.run(&["cordon", &args.node])?;
        for job in &jobs {
            outcomes.push(drain.move_job(job));
        }
    }
    let failed = outcomes.iter().filter(|outcome| outcome.is_err()).count();
    report::report(args, &jobs, &outcomes, failed);
    Ok(movable && failed == 0)
}

/// What has become of a job that was ended.
enum Seen {
    GoesOn {
        pod: String,
        node: String,
        /// Ids of its containers.
        ids: Vec<String>,
    },
    /// For a message; empty while no pod has taken its place.
    Waits(String),
}

/// A job that continues in another pod.
struct Arrived {
    pod: String,
    node: String,
    /// When it was seen first.
    at: Instant,
    runs: RunsElsewhere,
}

/// Where a job continues, or why it does not.
type Outcome = Result<Moved, DrainError>;

/// A job that continues.
struct Moved {
    pod: String,
    node: String,
    /// From the checkpoint, whose state it continues from, until it runs again.
    took: Duration,
}

impl Drain {
    fn of(args: &DrainArgs) -> Result<Self, DrainError> {
        let kubectl = Kubectl::new(args.context.as_deref());
        let nodes: List<Node> = kubectl.get(&["nodes"])?;
        let agents: List<Pod> = kubectl.agents()?;
        let agents: BTreeMap<String, String> = agents
            .items
            .into_iter()
            .filter_map(|pod| Some((pod.spec.node_name?, pod.metadata.name)))
            .collect();
        let agent = |node: &str| {
            let pod = agents.get(node)?.clone();
            let node = node.to_owned();
            Some(Agent { node, pod })
        };
        let from = agent(&args.node).ok_or_else(|| DrainError::NoAgent {
            node: args.node.clone(),
        })?;
        let others = nodes.items.iter().filter(|node| {
            let name = &node.metadata.name;
            !node.spec.unschedulable && *name != args.node && (args.to.is_empty() || args.to.contains(name))
        });
        let to: Vec<Agent> = others.filter_map(|node| agent(&node.metadata.name)).collect();
        if to.is_empty() {
            return Err(DrainError::NoTarget);
        }
        Ok(Self {
            kubectl,
            nodes: nodes.items,
            from,
            to,
            timeout: Duration::from_secs(args.timeout),
            as_json: args.json,
            run: format!("{:016x}", RandomState::new().hash_one(())),
        })
    }

    fn on(&self, agent: &Agent, script: &str, arguments: &[&str]) -> Result<String, DrainError> {
        self.kubectl.on(&agent.pod, script, arguments)
    }

    /// Those of these paths that are there.
    fn existing(&self, agent: &Agent, paths: &[String]) -> Result<Vec<String>, DrainError> {
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        let look = "for path; do [ ! -e \"$path\" ] || echo \"$path\"; done";
        let shown = self.on(agent, look, &paths)?;
        Ok(shown.lines().map(str::to_owned).collect())
    }

    fn exists(&self, agent: &Agent, path: String) -> Result<bool, DrainError> {
        Ok(!self.existing(agent, &[path])?.is_empty())
    }

    /// Adds an obstacle to jobs whose names are in use: an operator may have put a checkpoint there.
    fn look_for_names(&self, jobs: &mut [Job]) -> Result<(), DrainError> {
        let places = jobs
            .iter()
            .flat_map(|job| job.parts.iter().map(|part| place(job, part)));
        let places: Vec<String> = places.collect();
        for agent in self.to.iter().filter(|_| !places.is_empty()) {
            let found = self.existing(agent, &places)?;
            for job in &mut *jobs {
                for part in &job.parts {
                    if found.contains(&place(job, part)) {
                        let (node, path) = (agent.node.clone(), name(job, part));
                        job.obstacles.push(DrainError::Taken { node, path }.to_string());
                    }
                }
            }
        }
        Ok(())
    }

    /// The nodes to which jobs may go, but for those where no checkpoint of this node is restored.
    fn targets(&self) -> Result<Vec<Target<'_>>, DrainError> {
        let named = |agent: &Agent| self.nodes.iter().find(|node| node.metadata.name == agent.node);
        let (from, cpu) = (named(&self.from), self.cpu(&self.from)?);
        let mut targets = Vec::new();
        for agent in &self.to {
            if let Some(node) = named(agent).filter(|node| from.is_none_or(|from| is_like(from, node))) {
                let lacking = cpu
                    .lacking(&self.cpu(agent)?)
                    .into_iter()
                    .map(str::to_owned)
                    .collect();
                targets.push(Target { node, lacking });
            }
        }
        Ok(targets)
    }

    /// What the CPUs of an agent's node can do.
    fn cpu(&self, agent: &Agent) -> Result<CpuFeatures, DrainError> {
        let shown = self.on(agent, LOOK_AT_CPU, &["/proc/cpuinfo"])?;
        Ok(CpuFeatures::of(&shown))
    }

    fn move_job(&self, job: &Job) -> Outcome {
        let moved = self.try_move(job);
        match &moved {
            Ok(Moved { pod, node, took }) => {
                let shown = format!(
                    "{}/{}: {pod} continues on {node}, {:.1} s after the checkpoint",
                    job.namespace,
                    job.pod,
                    took.as_secs_f64()
                );
                // Standard output has the object alone.
                if self.as_json {
                    note!("{shown}")
                } else {
                    line!("{shown}")
                }
            }
            Err(error) => note!("{}/{}: {}", job.namespace, job.pod, ProblemLine(error)),
        }
        moved
    }

    fn try_move(&self, job: &Job) -> Outcome {
        let begun = Instant::now();
        let mut copies = Copies::default();
        match self.copy(job, &mut copies) {
            Ok(there) => self.end(job, there, &copies)?,
            Err(error) => return Err(self.without_copies(job, &copies, error)),
        }
        let Arrived { pod, node, at, runs } = self.arrival(job)?;
        self.remove_needless(&copies, runs);
        Ok(Moved {
            pod,
            node,
            took: at.duration_since(begun),
        })
    }

    /// Waits for the pod that takes the job's place and runs all its parts from their checkpoints, and still
    /// does a while later. The job has been ended by now: a call of kubectl that fails is made again.
    fn arrival(&self, job: &Job) -> Result<Arrived, DrainError> {
        let begun = Instant::now();
        let (mut seen, mut first) = (String::new(), None::<Sighting<Vec<String>>>);
        while begun.elapsed() < self.timeout {
            match self.look_for_arrival(job) {
                Ok(Seen::GoesOn { pod, node, ids }) => {
                    let again = Sighting::now(ids);
                    let before = first.take().filter(|before| before.is_same(&again));
                    let before = before.unwrap_or_else(|| again.clone());
                    if let Some(runs) = RunsElsewhere::confirmed(&before, &again) {
                        let at = before.at();
                        return Ok(Arrived { pod, node, at, runs });
                    }
                    (seen, first) = (format!("; {pod} was started"), Some(before));
                }
                Ok(Seen::Waits(what)) => (seen, first) = (what, None),
                Err(DrainError::Kubectl { call, message }) => seen = format!("; `kubectl {call}`: {message}"),
                Err(error) => return Err(error),
            }
            thread::sleep(PAUSE);
        }
        Err(DrainError::Late {
            pod: format!("{}/{}", job.namespace, job.pod),
            seconds: self.timeout.as_secs(),
            seen,
        })
    }

    fn look_for_arrival(&self, job: &Job) -> Result<Seen, DrainError> {
        let pods: List<Pod> = self.kubectl.get(&["pods", "--namespace", &job.namespace])?;
        let Some(pod) = pods.items.iter().find(|pod| pod.follows(job)) else {
            return Ok(Seen::Waits(String::new()));
        };
        Ok(match self.goes_on(job, pod)? {
            Some((node, ids)) => Seen::GoesOn {
                pod: pod.metadata.name.clone(),
                node,
                ids,
            },
            None => Seen::Waits(waits_for(pod)),
        })
    }

    /// The node of this pod, and the ids of its containers, once all of the job's run in it.
    fn goes_on(&self, job: &Job, pod: &Pod) -> Result<Option<(String, Vec<String>)>, DrainError> {
        let Some(node) = &pod.spec.node_name else {
            return Ok(None);
        };
        let mut ids = Vec::new();
        for part in &job.parts {
            let mut statuses = pod.status.container_statuses.iter();
            let running = statuses.find(|one| one.name == part.container && one.state.running.is_some());
            let Some(running) = running else {
                return Ok(None);
            };
            let Some(agent) = self.to.iter().find(|agent| agent.node == *node) else {
                return Err(self.elsewhere(job, part, node));
            };
            let id = running.id.trim_start_matches("containerd://");
            ids.push(id.to_owned());
            if !self.exists(agent, format!("{RESTORED}/{id}"))? {
                return Err(DrainError::Cold {
                    pod: format!("{}/{}", job.namespace, job.pod),
                    container: part.container.clone(),
                    node: node.clone(),
                    path: name(job, part),
                });
            }
        }
        Ok(Some((node.clone(), ids)))
    }

    fn elsewhere(&self, job: &Job, part: &Part, node: &str) -> DrainError {
        let kept: Vec<&str> = self.to.iter().map(|agent| &*agent.node).collect();
        DrainError::Elsewhere {
            pod: format!("{}/{}", job.namespace, job.pod),
            container: part.container.clone(),
            node: node.to_owned(),
            path: name(job, part),
            kept: kept.join(", "),
        }
    }
}

/// What the operator's directory calls it: NAMESPACE/NAME.
fn name(job: &Job, part: &Part) -> String {
    format!("{}/{}", job.namespace, part.checkpoint)
}

/// Where agents have it.
fn place(job: &Job, part: &Part) -> String {
    format!("{NAMED}/{}", name(job, part))
}

/// What containers of a pod wait for, for a message.
fn waits_for(pod: &Pod) -> String {
    let statuses = pod.status.container_statuses.iter();
    let waiting = statuses.filter_map(|one| one.state.waiting.as_ref());
    let shown = waiting.map(|waiting| format!("{} {}", waiting.reason, waiting.message));
    let shown: Vec<String> = shown.collect();
    match (shown.is_empty(), &pod.spec.node_name) {
        (false, _) => format!("; {} waits: {}", pod.metadata.name, shown.join("; ").trim()),
        (true, None) => format!("; {} is not scheduled", pod.metadata.name),
        (true, Some(_)) => String::new(),
    }
}

#[cfg(test)]
mod tests;
