//! The checkpoints of a job on other nodes: what this run has put there, and removes.
//!
//! Another `firn drain` may move the same job. What it has put there is known by its content: a run
//! takes nothing else for its own, and removes nothing else.

use std::time::{Duration, Instant};

use firn_host::ProblemLine;
use firn_transaction::transfer::{RunsElsewhere, StaysHere};
use serde::Deserialize;

use super::error::DrainError;
use super::kubectl::Script;
use super::pods::{Job, Part};
use super::{Agent, CHECKPOINTS, Drain, NAMED, name, place, whole};
use crate::output::note;
use crate::text::bytes;

/// How often a person sees that it is still under way.
const PROGRESS: Duration = Duration::from_secs(2);

/// Lets the kubelet of the agent's node make a checkpoint, by the right of the agent's account. Prints all of
/// the answer: wget would hide the reason of a failure. Arguments: path, seconds.
const CALL_KUBELET: &str = "case $NODE_IP in *:*) host=[$NODE_IP] ;; *) host=$NODE_IP ;; esac
    token=$(cat /var/run/secrets/kubernetes.io/serviceaccount/token)
    printf '%s\\r\\n' \"POST $1 HTTP/1.0\" 'Host: kubelet' \"Authorization: Bearer $token\" \
        'Content-Length: 0' '' | timeout \"$2\" ssl_client \"$host:10250\"";

/// Unpacks an archive into a directory, and has all of it on disk. Arguments: the final place, the directory.
const UNPACK: &str = "umask 077; mkdir -p \"${1%/*}\"; mkdir \"$2\"; tar -xf - -C \"$2\"
    find \"$2\" | while read -r path; do sync \"$path\" || exit 1; done";

/// Prints firn.json and, for each file next to it, its size and name; nothing if there is no such directory.
/// Argument: the checkpoint.
const LOOK: &str = "[ -e \"$1\" ] || exit 0
    cd \"$1/checkpoint\"; cat firn.json; echo; stat -c '%s %n' *";

/// Gives a directory its name, unless there is one of that name. Arguments: the name, the directory.
const NAME: &str = "mv -T \"$2\" \"$1\" || rm -rf \"$2\"; sync \"${1%/*}\"";

/// The kubelet's answer to a checkpoint.
#[derive(Debug, Deserialize)]
struct KubeletAnswer {
    items: Vec<String>,
}

/// Proof that a job can begin again on every node that may get it: its checkpoint is there, whole, with all
/// of its memory, and on disk.
pub(super) struct OnTargets(());

/// What this run has made of a job.
#[derive(Default)]
pub(super) struct Copies<'a> {
    /// As the agent of its own node has them.
    archives: Vec<String>,
    placed: Vec<Placed<'a>>,
}

/// A checkpoint that this run has put on another node.
struct Placed<'a> {
    agent: &'a Agent,
    place: String,
    /// Where it was before it got its name, which is this run's own.
    partial: String,
    /// What a look has shown.
    shown: String,
}

impl Copies<'_> {
    /// All of them, for a message.
    pub fn shown(&self, from: &Agent) -> String {
        let here = self.archives.iter().map(|archive| (from, archive));
        let there = self.placed.iter().map(|placed| (placed.agent, &placed.place));
        let shown = there.chain(here).map(|(agent, path)| {
            let below = |dir: &str| path.strip_prefix(dir)?.strip_prefix('/');
            let path = below(NAMED).or(below(CHECKPOINTS)).unwrap_or(path);
            format!("{path} on {}", agent.node)
        });
        shown.collect::<Vec<_>>().join(", ")
    }
}

impl Drain {
    /// Checkpoints a job, and copies its checkpoints to the other nodes.
    pub(super) fn copy<'a>(&'a self, job: &Job, copies: &mut Copies<'a>) -> Result<OnTargets, DrainError> {
        for part in &job.parts {
            let archive = self.checkpoint(job, part)?;
            copies.archives.push(archive.clone());
            for agent in &self.to {
                self.send(job, part, &archive, agent, copies)?;
            }
        }
        Ok(OnTargets(()))
    }

    /// Lets the kubelet make a checkpoint. Returns the archive as the agent has it.
    fn checkpoint(&self, job: &Job, part: &Part) -> Result<String, DrainError> {
        note!("{}/{}: checkpoint of {}", job.namespace, job.pod, part.container);
        let seconds = self.timeout.as_secs();
        let (namespace, pod, container) = (&job.namespace, &job.pod, &part.container);
        let path = format!("/checkpoint/{namespace}/{pod}/{container}?timeout={seconds}");
        // A kubelet that answers does so before.
        let limit = (seconds + 30).to_string();
        let answer = self.on(&self.from, CALL_KUBELET, &[&path, &limit])?;
        let made: Option<KubeletAnswer> =
            whole::body(&answer).and_then(|body| serde_json::from_str(body).ok());
        let archive = made.and_then(|made| made.items.into_iter().next());
        let name = archive.as_deref().and_then(|archive| archive.rsplit('/').next());
        match name {
            Some(name) if !name.is_empty() => Ok(format!("{CHECKPOINTS}/{name}")),
            _ => Err(DrainError::Answer { answer }),
        }
    }

    /// Puts a checkpoint on another node.
    fn send<'a>(
        &self,
        job: &Job,
        part: &Part,
        archive: &str,
        agent: &'a Agent,
        copies: &mut Copies<'a>,
    ) -> Result<(), DrainError> {
        let place = place(job, part);
        let taken = || DrainError::Taken {
            node: agent.node.clone(),
            path: name(job, part),
        };
        let there = self.on(agent, LOOK, &[&place])?;
        if !there.is_empty() {
            // The nodes share the directory.
            let is_own = |own: &Placed<'_>| own.place == place && own.shown == there;
            return copies.placed.iter().any(is_own).then_some(()).ok_or_else(taken);
        }
        let partial = format!("{NAMED}/{}/.{}-{}", job.namespace, part.checkpoint, self.run);
        let (begun, unpacked) = (
            Instant::now(),
            self.unpack(job, archive, agent, [&place, &partial]),
        );
        let placed = unpacked.and_then(|total| {
            let shown = self.on(agent, LOOK, &[&partial])?;
            expect_whole(&shown, part, agent)?;
            Ok((total, shown))
        });
        let (total, shown) = match placed {
            Ok(placed) => placed,
            Err(error) => {
                self.clear(agent, &[&partial]);
                return Err(error);
            }
        };
        // Order matters: the answer to what comes next may be lost, and a pod that looks for the name finds
        // all of it.
        copies.placed.push(Placed {
            agent,
            place: place.clone(),
            partial: partial.clone(),
            shown: shown.clone(),
        });
        self.on(agent, NAME, &[&place, &partial])?;
        if self.on(agent, LOOK, &[&place])? != shown {
            return Err(taken());
        }
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

    /// Sends an archive, and unpacks it there. Returns its size.
    fn unpack(
        &self,
        job: &Job,
        archive: &str,
        agent: &Agent,
        directories: [&str; 2],
    ) -> Result<u64, DrainError> {
        let (mut total, mut shown) = (0, Instant::now());
        self.kubectl.pipe(
            &Script {
                agent: &self.from.pod,
                text: "cat \"$1\"",
                arguments: &[archive],
            },
            &Script {
                agent: &agent.pod,
                text: UNPACK,
                arguments: &directories,
            },
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
        Ok(total)
    }

    /// Removes the checkpoints of a job that runs elsewhere.
    pub(super) fn remove_needless(&self, copies: &Copies<'_>, _runs: RunsElsewhere) {
        self.remove(copies);
    }

    /// Removes the checkpoints of a job that was not ended.
    pub(super) fn remove_useless(&self, copies: &Copies<'_>, _runs: StaysHere) {
        self.remove(copies);
    }

    /// Removes what this run has made, of what is still there.
    fn remove(&self, copies: &Copies<'_>) {
        for placed in &copies.placed {
            let Placed {
                agent,
                place,
                partial,
                ..
            } = placed;
            match self.on(agent, LOOK, &[place]) {
                Ok(there) if there == placed.shown => self.clear(agent, &[place, partial]),
                Ok(_) => self.clear(agent, &[partial]),
                Err(error) => note_left(agent, place, &error),
            }
        }
        let archives: Vec<&str> = copies.archives.iter().map(String::as_str).collect();
        self.clear(&self.from, &archives);
    }

    fn clear(&self, agent: &Agent, paths: &[&str]) {
        if let Err(error) = self.on(agent, "rm -rf \"$@\"", paths) {
            note_left(agent, &paths.join(" "), &error);
        }
    }
}

fn note_left(agent: &Agent, what: &str, error: &DrainError) {
    note!("{}: {what} is left: {}", agent.node, ProblemLine(error));
}

/// Fails unless all that a restore of this checkpoint needs was shown.
fn expect_whole(shown: &str, part: &Part, agent: &Agent) -> Result<(), DrainError> {
    whole::expect(shown).map_err(|lack| match lack {
        whole::Lack::Store(store) => DrainError::Store {
            container: part.container.clone(),
            store,
        },
        whole::Lack::File(why) => DrainError::Copy {
            container: part.container.clone(),
            node: agent.node.clone(),
            why,
        },
    })
}
