//! What the other node does in a move: it is looked at, gets the checkpoint, restores it, and is looked at
//! again.

use std::io::{self, Write};
use std::process::ChildStdin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use firn_transaction::transfer::{PROBATION, RunsElsewhere, Sighting, Transfer};
use serde_json::Value;
use tokio::time::{sleep, timeout};

use super::check;
use super::error::MoveError;
use super::limits::Limits;
use super::ssh::Remote;
use crate::args::relocate::MoveArgs;
use crate::checkpoint::Source;
use crate::containerd::{Task, TaskState};
use crate::oci_image::{self, BaseImage, Blob, ImageError, Index, Layout, Part, media};
use crate::outlet::Outlet;
use crate::output::Failure;
use crate::restore::check::Node;
use crate::restore::facts::Facts;
use crate::steps::Steps;

/// The other node has failed to restore the container and to end what it began.
const LEFT: &str = "FIRN-RESTORE-LEFT";

/// For how long the other node is looked at again if that fails.
const LOOKS: Duration = Duration::from_secs(60);

/// How often.
const AGAIN: Duration = Duration::from_secs(1);

/// The other node.
pub struct There<'a> {
    args: &'a MoveArgs,
    limits: &'a Limits,
    /// Name of the image that the container's root file system began with.
    base: &'a str,
}

impl<'a> There<'a> {
    pub fn new(args: &'a MoveArgs, limits: &'a Limits, base: &'a str) -> Self {
        Self { args, limits, base }
    }

    /// The node, if it can take the container, as its own dry run decides.
    pub async fn checked(&self, facts: &Facts) -> Result<Node, MoveError> {
        let facts = serde_json::to_vec(facts).unwrap_or_default();
        let node = self.look(facts).await?;
        match check::obstacle(&node, self.args.name()) {
            Some(why) => Err(MoveError::Target {
                target: self.args.target.clone(),
                id: self.args.container.clone(),
                why,
            }),
            None => Ok(node),
        }
    }

    /// `facts`: of the container, if it is to be asked whether it would be restored.
    async fn look(&self, facts: Vec<u8>) -> Result<Node, MoveError> {
        let mut words = vec!["restore", "-", "--check", self.base];
        words.extend(self.choices());
        let failed = |message: String| MoveError::Ssh {
            target: self.args.target.clone(),
            message,
        };
        let remote = Remote::start(self.args, &words);
        let (remote, stdin) = remote.map_err(|error| failed(format!("{}: {error}", self.args.ssh)))?;
        write_aside(stdin, facts);
        let answer = remote.answer(self.limits.look).await;
        let answer = answer.map_err(|why| failed(format!("{}: {why}", self.args.remote_firn)))?;
        let shown = answer.to_string();
        serde_json::from_value(answer).map_err(|_| failed(shown))
    }

    /// Checkpoints the container and streams it. Returns who answers, and the bytes.
    pub async fn send(
        &self,
        node: &Node,
        source: &Source,
        steps: &mut Steps,
        transfer: &Transfer,
    ) -> Result<(Remote, u64), MoveError> {
        let taken = timeout(self.limits.checkpoint, source.take_whole(steps)).await;
        let taken = taken.map_err(|_late| self.late())??;
        let (mut part, mut parts) = (taken.part, taken.index.manifests.clone());
        if !node.has_image {
            (part, parts) = with_base(source, taken.index).await?;
        }
        steps.begin("send");
        let failed = |error: io::Error| MoveError::Ssh {
            target: self.args.target.clone(),
            message: error.to_string(),
        };
        let (remote, stdin) = Remote::start(self.args, &self.words()).map_err(failed)?;
        let mut out = Outlet::new(stdin, self.limits.restore, |_closed| Ok(())).map_err(failed)?;
        let layout = Layout {
            name: "checkpoint/moved",
            index: &part,
            parts: &parts,
        };
        let is_another = AtomicBool::new(false);
        let last = async || {
            let kept = source.stay_paused().await;
            kept.inspect_err(|_| is_another.store(true, Ordering::Relaxed))?;
            transfer.send_last();
            Ok::<_, MoveError>(())
        };
        let written = oci_image::write(&source.containerd, &layout, &mut out, steps, last);
        // Order matters: the other node reads until its input is closed.
        let written = match written.await {
            Ok(bytes) => out
                .end()
                .await
                .map(|()| bytes)
                .map_err(|error| ImageError::file("send the checkpoint")(error).into()),
            Err(error) => {
                drop(out);
                Err(error)
            }
        };
        steps.end();
        match written {
            Ok(bytes) => Ok((remote, bytes)),
            // The other node has no part in it.
            Err(error) if is_another.load(Ordering::Relaxed) => Err(error),
            // A node that refuses closes the stream, and answers why.
            Err(error) => match remote.answer(self.limits.look).await {
                Ok(answer) if is_failure(&answer) => Err(self.refused(&answer)),
                _ => Err(error),
            },
        }
    }

    /// The command that restores the stream.
    fn words(&self) -> Vec<&'a str> {
        let mut words = vec!["restore", "-"];
        words.extend(self.choices());
        words
    }

    /// The container there, and its GPUs.
    fn choices(&self) -> Vec<&'a str> {
        let (name, namespace) = (self.args.name(), &*self.args.containerd.namespace);
        let mut words = vec!["--name", name, "--namespace", namespace, "--json"];
        if let Some(gpus) = &self.args.gpus {
            words.extend(["--gpus", gpus]);
        }
        if let Some(map) = &self.args.gpu_map {
            words.extend(["--gpu-map", map]);
        }
        if let Some(word) = &self.args.cpu {
            words.extend(["--cpu", word]);
        }
        words
    }

    /// Waits until the copy runs, and still does after a while. Returns the other node's answer, and the
    /// proof.
    pub async fn taken_over(
        &self,
        remote: Remote,
        steps: &mut Steps,
    ) -> Result<(Value, RunsElsewhere), MoveError> {
        steps.begin("restore there");
        let answer = remote.answer(self.limits.restore).await.ok();
        steps.end();
        let (answer, pid) = self.judged(answer)?;
        steps.begin("confirm");
        let runs = self.confirmed(pid).await?;
        steps.end();
        Ok((answer, runs))
    }

    /// What the other node has answered, and the pid of the copy.
    fn judged(&self, answer: Option<Value>) -> Result<(Value, u64), MoveError> {
        match answer {
            Some(answer) if is_failure(&answer) => Err(self.refused(&answer)),
            // Whatever else it prints proves nothing.
            Some(answer) => match answer["pid"].as_u64() {
                Some(pid) => Ok((answer, pid)),
                None => Err(self.unknown()),
            },
            None => Err(self.unknown()),
        }
    }

    /// The copy still runs.
    async fn confirmed(&self, pid: u64) -> Result<RunsElsewhere, MoveError> {
        let (first, begun) = (Sighting::now(pid), Instant::now());
        sleep(PROBATION).await;
        loop {
            let looked = self.look(Vec::new()).await;
            let again = match looked {
                Ok(node) => self.sighting(node.task.as_ref(), pid)?,
                Err(_) if begun.elapsed() < LOOKS => {
                    sleep(AGAIN).await;
                    continue;
                }
                Err(_) => return Err(self.unknown()),
            };
            return RunsElsewhere::confirmed(&first, &again).ok_or_else(|| self.unknown());
        }
    }

    /// What is known of the copy, which had this pid, by the task that is there now.
    fn sighting(&self, task: Option<&Task>, pid: u64) -> Result<Sighting<u64>, MoveError> {
        // Somebody has removed it, or started it again: what became of it is not known.
        let task = task.filter(|task| u64::from(task.pid) == pid);
        let task = task.ok_or_else(|| self.unknown())?;
        let (target, id) = (self.args.target.clone(), self.args.container.clone());
        match task.state {
            TaskState::Running | TaskState::Paused => Ok(Sighting::now(pid)),
            TaskState::Stopped if task.exit_status == 0 => Err(MoveError::Finished { target, id }),
            TaskState::Stopped => Err(MoveError::Died {
                target,
                id,
                status: task.exit_status,
            }),
            TaskState::Other => Err(self.unknown()),
        }
    }

    fn refused(&self, answer: &Value) -> MoveError {
        let message = failure(answer).map_or_else(|| answer.to_string(), |failure| failure.to_string());
        MoveError::Failed {
            target: self.args.target.clone(),
            id: self.args.container.clone(),
            message,
        }
    }

    pub fn unknown(&self) -> MoveError {
        MoveError::Unknown {
            target: self.args.target.clone(),
            id: self.args.container.clone(),
        }
    }

    fn late(&self) -> MoveError {
        MoveError::Late {
            id: self.args.container.clone(),
            seconds: self.limits.checkpoint.as_secs(),
        }
    }
}

/// Writes what a command reads, and closes its input. In a thread: who does not read it may not end either.
fn write_aside(mut stdin: ChildStdin, facts: Vec<u8>) {
    let write = move || {
        // A command that does not read it answers nevertheless, or not at all.
        let _written = stdin.write_all(&facts);
    };
    // Without a thread its input is closed at once, and it answers that it has no facts.
    let _started = thread::Builder::new().name("facts".to_owned()).spawn(write);
}

/// Whether the other node answers that nothing runs there: a failure that may have left a task does not.
fn is_failure(answer: &Value) -> bool {
    failure(answer).is_some_and(|failure| failure.code.as_deref() != Some(LEFT))
}

/// Why a command has failed there. That of an older firn prints a text.
fn failure(answer: &Value) -> Option<Failure> {
    match &answer["failure"] {
        Value::String(text) => Some(Failure::of(text)),
        failure => serde_json::from_value(failure.clone()).ok(),
    }
}

/// The checkpoint with the image that the container began with.
async fn with_base(source: &Source, mut index: Index) -> Result<(Part, Vec<Part>), MoveError> {
    let (containerd, name) = (&source.containerd, &source.container.image);
    let target = containerd.image(name).await?.and_then(|image| image.target);
    let target = target.ok_or_else(|| ImageError::NoImage { name: name.clone() })?;
    let base = BaseImage::read(containerd, name, Part::here(target)).await?;
    index.manifests.extend(base.parts.first().cloned());
    let blob = Blob::new(media::INDEX, serde_json::to_vec(&index).unwrap_or_default());
    blob.upload(containerd, &index.manifests).await?;
    index.manifests.extend(base.parts);
    Ok((blob.part, index.manifests))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::args::{Args, Command};

    fn with_there(test: impl FnOnce(There<'_>)) {
        let Command::Move(args) = Args::parse_from(["firn", "move", "job", "root@other"]).command else {
            panic!("not a move")
        };
        test(There::new(&args, &Limits::default(), "image"));
    }

    #[test]
    fn only_a_failure_proves_that_nothing_runs_there() {
        with_there(|there| {
            let of = |answer: Option<Value>| there.judged(answer);
            assert!(of(Some(json!({ "pid": 7 }))).is_ok_and(|(_, pid)| pid == 7));
            let count = json!({ "code": "FIRN-GPU-COUNT", "message": "two" });
            for failure in [json!("FIRN-GPU-COUNT: two"), count] {
                let Err(MoveError::Failed { message, .. }) = of(Some(json!({ "failure": failure }))) else {
                    panic!("{failure} is a failure");
                };
                assert_eq!(message, "FIRN-GPU-COUNT: two");
            }
            let left =
                json!({ "failure": { "code": "FIRN-RESTORE-LEFT", "message": "its task may be left" } });
            let before = json!({ "failure": "FIRN-RESTORE-LEFT: its task may be left" });
            let no_failure = json!({ "failure": 7 });
            for answer in [
                None,
                Some(Value::Null),
                Some(json!({})),
                Some(left),
                Some(before),
                Some(no_failure),
            ] {
                assert!(matches!(of(answer), Err(MoveError::Unknown { .. })));
            }
        });
    }

    #[test]
    fn a_copy_is_alive_dead_or_not_known() {
        with_there(|there| {
            let of = |pid, state, exit_status| {
                let task = Task {
                    pid,
                    state,
                    exit_status,
                };
                there.sighting(Some(&task), 7)
            };
            assert!(of(7, TaskState::Running, 0).is_ok());
            assert!(of(7, TaskState::Paused, 0).is_ok());
            let died = of(7, TaskState::Stopped, 137).err();
            assert!(matches!(died, Some(MoveError::Died { status: 137, .. })));
            let finished = of(7, TaskState::Stopped, 0).err();
            assert!(matches!(finished, Some(MoveError::Finished { .. })));
            for unknown in [
                of(7, TaskState::Other, 0),
                of(8, TaskState::Running, 0),
                of(8, TaskState::Stopped, 137),
                there.sighting(None, 7),
            ] {
                assert!(matches!(unknown.err(), Some(MoveError::Unknown { .. })));
            }
        });
    }

    #[test]
    fn a_source_goes_on_only_if_its_copy_does_not() {
        with_there(|there| {
            let (target, id, status) = ("b".to_owned(), "job".to_owned(), 137);
            let refused = there.refused(&json!({ "failure": "no" }));
            let finished = MoveError::Finished {
                target: target.clone(),
                id: id.clone(),
            };
            let (unsent, sent) = (Transfer::default(), Transfer::default());
            sent.send_last();
            // Whether it continues if not all was sent, and if all was.
            for (error, before, after) in [
                (MoveError::Interrupted { id: id.clone() }, true, false),
                (there.late(), true, false),
                (
                    MoveError::from(ImageError::NoImage { name: id.clone() }),
                    true,
                    false,
                ),
                (refused, true, true),
                (MoveError::Died { target, id, status }, true, true),
                (there.unknown(), false, false),
                (finished, false, false),
            ] {
                assert_eq!(error.stays_here(&unsent).is_some(), before, "{error}");
                assert_eq!(error.stays_here(&sent).is_some(), after, "{error}");
            }
            assert!(there.late().shown().starts_with("FIRN-MOVE-LATE: "));
        });
    }
}
