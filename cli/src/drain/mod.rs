//! `firn drain`: moves the GPU jobs of a Kubernetes node to other nodes, by checkpoints.
//!
//! kubectl reaches the cluster. The kubelet of the node makes the checkpoints; agents
//! (config/kubernetes/agents.yaml) carry them from node to node; pods restore them by their annotation.

mod error;
mod json;
mod kubectl;
mod pods;

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use firn_config::names;
use firn_host::ProblemLine;
use serde::Deserialize;

use crate::args::DrainArgs;
use crate::output::{self, line, note};
use crate::text::{self, bytes};
use error::DrainError;
use json::{Drained, MovedTo, Row};
use kubectl::Kubectl;
use pods::{Job, List, Node, Part, Pod, jobs, look_for_gpus};

/// Where agents have the node's checkpoints, and the directory that pods are restored from.
const CHECKPOINTS: &str = "/host/checkpoints";
const NAMED: &str = "/host/named";
/// Where they have the bundles of Kubernetes' containers.
const BUNDLES: &str = "/host/bundles/k8s.io";
/// How often a person sees that it is still under way.
const PROGRESS: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(500);

/// The kubelet's answer to a checkpoint.
#[derive(Debug, Deserialize)]
struct Made {
    items: Vec<String>,
}

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
    let mut jobs = jobs(&all.items, &args.node);
    drain.look_for_names(&mut jobs)?;
    let free = drain.to.iter().map(|agent| &*agent.node);
    look_for_gpus(&mut jobs, &drain.nodes, free, &all.items);
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
    if !movable {
        note!("firn: nothing was touched");
    } else if !args.dry_run {
        drain.kubectl.run(&["cordon", &args.node])?;
        for job in &jobs {
            outcomes.push(drain.move_job(job));
        }
    }
    let failed = outcomes.iter().filter(|outcome| outcome.is_err()).count();
    report(args, &jobs, &outcomes, failed);
    Ok(movable && failed == 0)
}

/// What has become of a job that was ended.
enum Seen {
    GoesOn {
        pod: String,
        node: String,
    },
    /// For a message; empty while no pod has taken its place.
    Waits(String),
}

/// Where a job goes on, or why it does not.
type Outcome = Result<Moved, DrainError>;

/// A job that goes on.
struct Moved {
    pod: String,
    node: String,
    /// From the checkpoint, whose state it goes on from, until it runs again.
    took: Duration,
}

/// A job, and what became of it.
fn row<'a>(job: &'a Job, outcome: Option<&'a Outcome>) -> Row<'a> {
    let moved = outcome.and_then(|outcome| outcome.as_ref().ok());
    let error = outcome.and_then(|outcome| outcome.as_ref().err());
    Row {
        job,
        moved: moved.map(|Moved { pod, node, took }| MovedTo {
            pod,
            node,
            ms: text::ms(*took),
        }),
        failure: error.map(|error| ProblemLine(error).to_string()),
    }
}

fn report(args: &DrainArgs, jobs: &[Job], outcomes: &[Outcome], failed: usize) {
    if args.json {
        let rows = jobs
            .iter()
            .enumerate()
            .map(|(at, job)| row(job, outcomes.get(at)));
        // Writing to memory cannot fail; what standard output does is recorded.
        let _written = output::json(&Drained {
            node: &args.node,
            jobs: rows.collect(),
        });
    } else if failed > 0 {
        note!(
            "firn: {failed} of {} not moved; {} stays cordoned",
            text::count(jobs.len(), "job"),
            args.node
        );
    } else if !outcomes.is_empty() || jobs.is_empty() {
        line!(
            "{}: {} with GPUs moved; it is cordoned",
            args.node,
            text::count(outcomes.len(), "job")
        );
    }
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

    fn move_job(&self, job: &Job) -> Outcome {
        let moved = self.try_move(job);
        match &moved {
            Ok(Moved { pod, node, took }) => {
                let shown = format!(
                    "{}/{}: {pod} goes on on {node}, {:.1} s after the checkpoint",
                    job.namespace,
                    job.pod,
                    took.as_secs_f64()
                );
                // Standard output has the object alone.
                match self.as_json {
                    true => note!("{shown}"),
                    false => line!("{shown}"),
                }
            }
            Err(error) => note!("{}/{}: {}", job.namespace, job.pod, ProblemLine(error)),
        }
        moved
    }

    fn try_move(&self, job: &Job) -> Outcome {
        let begun = Instant::now();
        let mut archives = Vec::new();
        for part in &job.parts {
            let archive = self.checkpoint(job, part);
            let sent = archive.and_then(|archive| {
                archives.push(archive.clone());
                self.to
                    .iter()
                    .try_for_each(|agent| self.send(job, part, &archive, agent))
            });
            if let Err(error) = sent {
                // The job runs on: what was copied is of no use.
                self.remove(job, &archives);
                return Err(error);
            }
        }
        if let Err(error) = self.evict(job) {
            self.remove(job, &archives);
            return Err(error);
        }
        let (pod, node) = self.arrival(job)?;
        self.remove(job, &archives);
        Ok(Moved {
            pod,
            node,
            took: begun.elapsed(),
        })
    }

    /// Ends the pod, if its disruption budget permits it, with the condition by which a Job does not count it
    /// as failed. What it does after its checkpoint is done again: it gets no time to do more.
    fn evict(&self, job: &Job) -> Result<(), DrainError> {
        let Job { namespace, pod, .. } = job;
        let eviction = serde_json::json!({
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": { "name": pod, "namespace": namespace },
            "deleteOptions": { "gracePeriodSeconds": 1, "preconditions": { "uid": job.uid } },
        });
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/eviction");
        self.kubectl.post(&path, &eviction.to_string()).map(drop)
    }

    /// Lets the kubelet make a checkpoint. Returns the archive as the agent has it.
    fn checkpoint(&self, job: &Job, part: &Part) -> Result<String, DrainError> {
        note!("{}/{}: checkpoint of {}", job.namespace, job.pod, part.container);
        let url = format!(
            "/api/v1/nodes/{}/proxy/checkpoint/{}/{}/{}?timeout={}",
            self.from.node,
            job.namespace,
            job.pod,
            part.container,
            self.timeout.as_secs()
        );
        let answer = self.kubectl.post(&url, "")?;
        let made: Option<Made> = serde_json::from_str(&answer).ok();
        let archive = made.and_then(|made| made.items.into_iter().next());
        let name = archive.as_deref().and_then(|archive| archive.rsplit('/').next());
        match name {
            Some(name) if !name.is_empty() => Ok(format!("{CHECKPOINTS}/{name}")),
            _ => Err(DrainError::Answer { answer }),
        }
    }

    fn send(&self, job: &Job, part: &Part, archive: &str, agent: &Agent) -> Result<(), DrainError> {
        let place = place(job, part);
        if self.exists(agent, place.clone())? {
            // The nodes share the directory.
            return Ok(());
        }
        let unpack = "umask 077; mkdir -p \"${1%/*}\"; rm -rf \"$2\"; mkdir \"$2\"; tar -xf - -C \"$2\"";
        let partial = format!("{NAMED}/{}/.{}", job.namespace, part.checkpoint);
        let mut shown = Instant::now();
        let (mut total, begun) = (0, Instant::now());
        self.kubectl.pipe(
            (&self.from.pod, ("cat \"$1\"", &[archive])),
            (&agent.pod, (unpack, &[&place, &partial])),
            |sent| {
                total = sent;
                if shown.elapsed() >= PROGRESS {
                    shown = Instant::now();
                    note!(
                        "{}/{}: {} sent to {}",
                        job.namespace,
                        job.pod,
                        bytes(sent),
                        agent.node
                    );
                }
            },
        )?;
        // Order matters: a pod that looks for the name finds all of it.
        self.on(agent, "mv \"$2\" \"$1\"", &[&place, &partial])?;
        note!(
            "{}/{}: {} sent to {} in {:.1} s",
            job.namespace,
            job.pod,
            bytes(total),
            agent.node,
            begun.elapsed().as_secs_f64()
        );
        Ok(())
    }

    /// Waits for the pod that takes the job's place and runs all its parts from their checkpoints. The job
    /// has been ended by now: a call of kubectl that fails is made again.
    fn arrival(&self, job: &Job) -> Result<(String, String), DrainError> {
        let begun = Instant::now();
        let mut seen = String::new();
        while begun.elapsed() < self.timeout {
            match self.look_for_arrival(job) {
                Ok(Seen::GoesOn { pod, node }) => return Ok((pod, node)),
                Ok(Seen::Waits(what)) => seen = what,
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
            Some(node) => Seen::GoesOn {
                pod: pod.metadata.name.clone(),
                node,
            },
            None => Seen::Waits(waits_for(pod)),
        })
    }

    /// The node of this pod, once all of the job's containers run in it.
    fn goes_on(&self, job: &Job, pod: &Pod) -> Result<Option<String>, DrainError> {
        let Some(node) = &pod.spec.node_name else {
            return Ok(None);
        };
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
            let file = format!("{BUNDLES}/{id}/{}", names::BUNDLE_RESTORED_FROM);
            if !self.exists(agent, file)? {
                return Err(DrainError::Cold {
                    pod: format!("{}/{}", job.namespace, job.pod),
                    container: part.container.clone(),
                    node: node.clone(),
                    path: name(job, part),
                });
            }
        }
        Ok(Some(node.clone()))
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

    /// Removes the job's checkpoints from the other nodes, and the archives from its own.
    fn remove(&self, job: &Job, archives: &[String]) {
        let places = job.parts.iter().map(|part| place(job, part));
        let partial = job
            .parts
            .iter()
            .map(|part| format!("{NAMED}/{}/.{}", job.namespace, part.checkpoint));
        let places: Vec<String> = places.chain(partial).collect();
        let removals = self.to.iter().map(|agent| (agent, &places[..]));
        for (agent, paths) in removals.chain([(&self.from, archives)]) {
            let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
            if let Err(error) = self.on(agent, "rm -rf \"$@\"", &paths) {
                note!(
                    "{}: {} is left: {}",
                    agent.node,
                    paths.join(" "),
                    ProblemLine(&error)
                );
            }
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
