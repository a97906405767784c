//! `firn move`: a container goes on on another node.
//!
//! ```text
//!   check both -> pause -> dump into the content store -> stream -> the copy runs there -> end the source
//!                  |             |                          |                |
//!                  +-------------+--------------------------+----------------+-> failed: the source goes on
//!                                                           +-> no answer after the last byte: stays paused
//! ```
//!
//! The source never runs while the copy may: the copy begins to run only after the last byte of the stream,
//! and the source is resumed only if that was not sent, or if the other node reports that nothing runs there
//! (decision 0029).

mod check;
mod error;
mod ssh;

use std::cell::Cell;
use std::time::Instant;

use anyhow::Result;
use firn_gpu::Gpu;
use firn_transaction::end_proof::EndProof;
use serde::Serialize;
use serde_json::Value;

use crate::args::relocate::MoveArgs;
use crate::checkpoint::{Interrupts, Source, SourceFound};
use crate::containerd::{CallError, Containerd, NERDCTL_STATE, Snapshot, block_on};
use crate::oci_image::{self, BaseImage, Blob, Index, Layout, Part, media};
use crate::output::{self, line, note, printed};
use crate::restore::check::Node;
use crate::steps::{Step, Steps};
use crate::text;
use error::MoveError;
use ssh::Remote;

/// The other node has failed to restore the container and to end what it began.
const LEFT: &str = "FIRN-RESTORE-LEFT";

/// What was moved, or would be.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Done<'a> {
    /// Id of the container on this node.
    container: &'a str,
    /// containerd's namespace of the container, on both nodes.
    namespace: &'a str,
    /// The other node, as the command line names it.
    to: &'a str,
    /// Id of the container on the other node.
    name: &'a str,
    /// Pid of its first process on the other node; absent with --dry-run.
    pid: Option<u64>,
    /// Bytes that were sent.
    bytes: u64,
    /// How long the command took, in milliseconds.
    ms: u64,
    /// Whether only both nodes were checked: --dry-run.
    dry_run: bool,
    /// The phases that have ended, in their order.
    phases: Vec<Step<'a>>,
}

printed! { Done<'_>: "move" }

/// True: done.
pub fn run(args: &MoveArgs) -> Result<bool> {
    let (begun, mut steps) = (Instant::now(), Steps::new(args.json));
    let mut args = args.clone();
    let done = match block_on(find(&args))? {
        // Not in a future: it waits for firn-gpu.
        Ok(found) => {
            args.container.clone_from(&found.container.id);
            let own = check::own_gpus(&found.container.spec());
            block_on(moved(&args, found, own.as_ref(), &mut steps))?
        }
        Err(error) => Err(error),
    };
    match done {
        Ok((bytes, answer)) => {
            print(&args, bytes, &answer, begun, &steps)?;
            Ok(true)
        }
        Err(error) => output::failed(args.json, error.shown()),
    }
}

fn print(args: &MoveArgs, bytes: u64, answer: &Value, begun: Instant, steps: &Steps) -> Result<()> {
    let (name, target, took) = (args.name(), &args.target, begun.elapsed());
    if args.json {
        return output::json(&Done {
            container: &args.container,
            namespace: &args.containerd.namespace,
            to: target,
            name,
            pid: answer["pid"].as_u64(),
            bytes,
            ms: text::ms(took),
            dry_run: args.dry_run,
            phases: steps.ended(),
        });
    }
    match args.dry_run {
        true => line!("nothing is in the way on {target}"),
        false => line!(
            "{name} runs on {target}, after {:.1} s. {} were sent",
            took.as_secs_f64(),
            text::bytes(bytes)
        ),
    }
    Ok(())
}

async fn connect(args: &MoveArgs) -> Result<Containerd, MoveError> {
    Ok(Containerd::connect(&args.containerd.socket.address, &args.containerd.namespace).await?)
}

async fn find(args: &MoveArgs) -> Result<SourceFound, MoveError> {
    let containerd = connect(args).await?;
    let found = Source::find(&containerd, &args.containerd.namespace, &args.container).await?;
    found.expect_base()?;
    let (spec, id) = (found.container.spec(), found.container.id.clone());
    match () {
        () if !spec.author().owns_node() => Err(MoveError::Kubernetes { id }),
        () if spec.annotation(NERDCTL_STATE).is_some() => Err(MoveError::Nerdctl { id }),
        () => Ok(found),
    }
}

/// Returns the bytes that were sent, and what the other node has answered.
async fn moved(
    args: &MoveArgs,
    found: SourceFound,
    own: Option<&(String, Vec<Gpu>)>,
    steps: &mut Steps,
) -> Result<(u64, Value), MoveError> {
    steps.begin("check");
    let node = checked(args, &found.container.image, own)?;
    steps.end();
    if args.dry_run {
        return Ok((0, Value::Null));
    }
    let mut interrupts = Interrupts::new()?;
    let containerd = connect(args).await?;
    let source = found.begin(&containerd).await?;
    let paused = source.pause(steps).await;
    let is_sent = Cell::new(false);
    let work = async {
        paused?;
        send(args, &node, &source, steps, &is_sent).await
    };
    let sent = match interrupts.unless(work).await {
        Some(sent) => sent,
        None => Err(MoveError::Interrupted {
            id: args.container.clone(),
        }),
    };
    let done = match sent {
        // Not to be interrupted: only the answer decides who goes on.
        Ok((remote, bytes)) => {
            steps.begin("restore there");
            let answer = remote.answer();
            steps.end();
            judged(args, answer).map(|answer| (bytes, answer))
        }
        Err(_) if is_sent.get() => Err(unknown(args)),
        Err(error) => Err(error),
    };
    let ended = match &done {
        Ok(_) => ended(&source, EndProof::of_copy(&args.target), steps)
            .await
            .map_err(|error| MoveError::Left {
                target: args.target.clone(),
                id: args.container.clone(),
                message: error.shown(),
            }),
        Err(MoveError::Unknown { .. }) => Ok(()),
        Err(_) => source.resume().await.map_err(MoveError::from),
    };
    if let Err(error) = source.release().await {
        note!("firn: what was written for the move is left for a day: {error}");
    }
    ended.and(done)
}

/// What the other node is, if it can take the container.
fn checked(args: &MoveArgs, base: &str, own: Option<&(String, Vec<Gpu>)>) -> Result<Node, MoveError> {
    let target = args.target.clone();
    let namespace = &args.containerd.namespace;
    let words = [
        "restore",
        "-",
        "--check",
        base,
        "--name",
        args.name(),
        "--namespace",
        namespace,
        "--json",
    ];
    let remote = Remote::start(args, &words);
    let failed = |message: String| MoveError::Ssh {
        target: target.clone(),
        message,
    };
    let remote = remote.map_err(|error| failed(format!("{}: {error}", args.ssh)))?;
    let answer = remote
        .ended()
        .map_err(|why| failed(format!("{}: {why}", args.remote_firn)))?;
    let shown = answer.to_string();
    let node: Node = serde_json::from_value(answer).map_err(|_| failed(shown))?;
    match check::obstacle(&node, args.name(), own) {
        Some(why) => Err(MoveError::Target {
            target,
            id: args.container.clone(),
            why,
        }),
        None => Ok(node),
    }
}

/// Checkpoints the container and streams it. Returns who answers, and the bytes.
async fn send(
    args: &MoveArgs,
    node: &Node,
    source: &Source,
    steps: &mut Steps,
    is_sent: &Cell<bool>,
) -> Result<(Remote, u64), MoveError> {
    let taken = source.take(steps).await?;
    let (mut part, mut parts) = (taken.part, taken.index.manifests.clone());
    if !node.has_image {
        (part, parts) = with_base(source, taken.index).await?;
    }
    let namespace = &args.containerd.namespace;
    let mut words = vec![
        "restore",
        "-",
        "--name",
        args.name(),
        "--namespace",
        namespace,
        "--json",
    ];
    if let Some(gpus) = &args.gpus {
        words.extend(["--gpus", gpus]);
    }
    if let Some(map) = &args.gpu_map {
        words.extend(["--gpu-map", map]);
    }
    steps.begin("send");
    let target = args.target.clone();
    let failed = |error: std::io::Error| MoveError::Ssh {
        target,
        message: error.to_string(),
    };
    let mut remote = Remote::start(args, &words).map_err(failed)?;
    let layout = Layout {
        name: "checkpoint/moved",
        index: &part,
        parts: &parts,
    };
    let written = oci_image::write(&source.containerd, &layout, &mut remote, steps, || {
        is_sent.set(true)
    });
    let written = written.await;
    steps.end();
    match written {
        Ok(bytes) => Ok((remote, bytes)),
        // A node that refuses closes the stream, and has answered why.
        Err(error) if !is_sent.get() => match remote.answer() {
            Some(answer) => Err(refused(args, &answer)),
            None => Err(error.into()),
        },
        Err(error) => Err(error.into()),
    }
}

/// The checkpoint with the image that the container began with.
async fn with_base(source: &Source, mut index: Index) -> Result<(Part, Vec<Part>), MoveError> {
    let (containerd, name) = (&source.containerd, &source.container.image);
    let target = containerd.image(name).await?.and_then(|image| image.target);
    let target = target.ok_or_else(|| oci_image::ImageError::NoImage { name: name.clone() })?;
    let base = BaseImage::read(containerd, name, Part::here(target)).await?;
    index.manifests.extend(base.parts.first().cloned());
    let blob = Blob::new(media::INDEX, serde_json::to_vec(&index).unwrap_or_default());
    blob.upload(containerd, &index.manifests).await?;
    index.manifests.extend(base.parts);
    Ok((blob.part, index.manifests))
}

fn judged(args: &MoveArgs, answer: Option<Value>) -> Result<Value, MoveError> {
    match answer {
        Some(answer) if answer["pid"].as_u64().is_some() => Ok(answer),
        // Whatever else it prints proves nothing, nor does a failure that may have left a task.
        Some(answer)
            if answer["failure"]
                .as_str()
                .is_some_and(|text| !text.starts_with(LEFT)) =>
        {
            Err(refused(args, &answer))
        }
        _ => Err(unknown(args)),
    }
}

fn refused(args: &MoveArgs, answer: &Value) -> MoveError {
    let message = answer["failure"]
        .as_str()
        .map_or_else(|| answer.to_string(), str::to_owned);
    MoveError::Failed {
        target: args.target.clone(),
        id: args.container.clone(),
        message,
    }
}

fn unknown(args: &MoveArgs) -> MoveError {
    MoveError::Unknown {
        target: args.target.clone(),
        id: args.container.clone(),
    }
}

/// Removes the source.
async fn ended(source: &Source, proof: EndProof, steps: &mut Steps) -> Result<(), MoveError> {
    source.end(proof, steps).await?;
    let (container, containerd) = (&source.container, &source.containerd);
    CallError::removed(containerd.delete_container(&container.id).await)?;
    let snapshot = Snapshot {
        snapshotter: &container.snapshotter,
        key: &container.snapshot_key,
    };
    Ok(CallError::removed(containerd.remove_snapshot(snapshot).await)?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::args::{Args, Command};

    #[test]
    fn only_a_failure_proves_that_nothing_runs_there() {
        let Command::Move(args) = Args::parse_from(["firn", "move", "job", "root@other"]).command else {
            panic!("not a move")
        };
        let of = |answer: Option<Value>| judged(&args, answer);
        assert!(of(Some(json!({ "pid": 7 }))).is_ok());
        let failed = of(Some(json!({ "failure": "FIRN-GPU-COUNT: two" })));
        assert!(matches!(failed, Err(MoveError::Failed { message, .. }) if message.contains("two")));
        let left = json!({ "failure": "FIRN-RESTORE-LEFT: its task may be left" });
        for answer in [None, Some(Value::Null), Some(json!({})), Some(left)] {
            assert!(matches!(of(answer), Err(MoveError::Unknown { .. })));
        }
    }

    #[test]
    fn a_source_that_stays_is_not_to_be_resumed() {
        let (target, id, message) = ("b".to_owned(), "job".to_owned(), "gone".to_owned());
        let shown = MoveError::Left { target, id, message }.shown();
        assert!(shown.starts_with("FIRN-MOVE-LEFT: "), "{shown}");
        assert!(shown.contains("never resume it"), "{shown}");
    }
}
