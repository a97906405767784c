//! `firn checkpoint`: a container, or all containers of a pod, as an image, a tar file or an image directory.

mod aside;
mod error;
mod explain;
mod interrupt;
mod pod;
mod pod_call;
mod source;
mod target;

use std::collections::HashMap;
use std::time::Instant;

use anyhow::Result;
use firn_image::manifest::Manifest;
use firn_transaction::end_proof::EndProof;
use firn_transaction::transfer::StaysHere;
use serde::Serialize;

pub use error::CheckpointError;
pub use interrupt::Interrupts;
pub use pod_call::PodCall;
pub use source::{Candidate, Source};

use crate::args::checkpoint::CheckpointArgs;
use crate::containerd::{Containerd, block_on};
use crate::output::{self, line, note, printed};
use crate::place::Location;
use crate::steps::{Step, Steps};
use crate::stored::{self, InStore};
use crate::text;
use aside::aside;
use target::Target;

/// What was checkpointed.
#[derive(Serialize)]
#[serde(untagged)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
enum CheckpointOutput<'a> {
    Container(ContainerCheckpoint<'a>),
    Pod(pod::PodCheckpoints<'a>),
}

printed! { CheckpointOutput<'_>: "checkpoint" }

/// A container was checkpointed.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct ContainerCheckpoint<'a> {
    /// Id of the container.
    container: &'a str,
    /// containerd's namespace of the container.
    namespace: &'a str,
    /// What the checkpoint is: `ref` (an image in containerd), `file` (a tar file) or `dir` (an image
    /// directory).
    kind: &'a str,
    /// Name or path of the checkpoint.
    image: String,
    /// Size of the checkpoint in bytes.
    bytes: u64,
    /// How long the command took, in milliseconds.
    ms: u64,
    /// What a store has of its memory; absent if the checkpoint has all of it.
    memory: Option<InStore>,
    /// Whether the container has ended with its checkpoint.
    exited: bool,
    /// The phases that have ended, in their order.
    phases: Vec<Step<'a>>,
}

/// A checkpoint.
struct NewCheckpoint {
    /// Id of the container.
    id: String,
    bytes: u64,
    memory: Option<InStore>,
}

/// True: done.
pub fn run(args: &CheckpointArgs) -> Result<bool> {
    let (None, Some(to)) = (&args.pod, &args.to) else {
        return pod::run(args);
    };
    let (begun, mut steps) = (Instant::now(), Steps::new(args.json));
    let done = match Location::of(to, args.kind) {
        Ok(place) if args.explain => {
            explain::print(args, &place);
            return Ok(true);
        }
        Ok(place) => block_on(checkpoint(args, &place, &mut steps))?.map(|made| (place, made)),
        Err(ambiguous) => Err(ambiguous.into()),
    };
    match done {
        Ok((place, made)) => {
            print(args, &place, made, begun, &steps)?;
            Ok(true)
        }
        Err(error) => output::failed(args.json, error.shown()),
    }
}

fn print(
    args: &CheckpointArgs,
    place: &Location,
    made: NewCheckpoint,
    begun: Instant,
    steps: &Steps,
) -> Result<()> {
    let (took, shown) = (begun.elapsed(), place.shown());
    let NewCheckpoint { id, bytes, memory } = made;
    if args.json {
        return output::json(&CheckpointOutput::Container(ContainerCheckpoint {
            container: &id,
            namespace: args.namespace(),
            kind: place.kind(),
            image: shown,
            bytes,
            ms: text::ms(took),
            memory,
            exited: args.exit,
            phases: steps.ended(),
        }));
    }
    let goes = if args.exit { "has ended" } else { "continues" };
    let (size, seconds) = (text::bytes(bytes), took.as_secs_f64());
    line!("{shown}: {size}. {id} {goes}, after {seconds:.1} s");
    if let Some(memory) = &memory {
        line!("{}", memory.shown());
    }
    Ok(())
}

/// A checkpoint of a container that stands still.
struct Filled {
    bytes: u64,
    /// Of one that the container is to end with: the proof, and what a store has of it.
    ends: Option<(EndProof, Option<InStore>)>,
}

/// Makes the checkpoint. A container that continues does not stand still for the disk.
async fn filled(
    args: &CheckpointArgs,
    source: &Source,
    target: &mut Target,
    steps: &mut Steps,
) -> Result<Filled, CheckpointError> {
    let bytes = target.fill(source, steps).await?;
    if !args.exit {
        return Ok(Filled { bytes, ends: None });
    }
    // Nothing is believed here: what cannot be read may need a store that has lost it.
    let manifest = target.manifest(source.containerd()).await?;
    if let Some(manifest) = manifest.clone() {
        steps.begin("memory");
        aside("memory", move || stored::compare(&manifest)).await??;
        steps.end();
    }
    let proof = target.durable(steps).await?;
    // Order matters: from here on the checkpoint stays.
    let memory = pinned(manifest).await;
    Ok(Filled {
        bytes,
        ends: Some((proof, memory)),
    })
}

/// What a store has of the checkpoint, which is pinned there. A store that does not answer keeps no container
/// still.
async fn pinned(manifest: Option<Manifest>) -> Option<InStore> {
    let manifest = manifest?;
    let own = manifest.clone();
    match aside("pin", move || InStore::pin(&own)).await {
        Ok(pinned) => pinned,
        Err(late) => InStore::without_pin(&manifest, &late),
    }
}

/// Order matters: what is in the way is found before the container stands still.
async fn begin(
    found: Candidate,
    containerd: &Containerd,
    place: &Location,
    overrides: HashMap<String, String>,
) -> Result<(Source, Target), CheckpointError> {
    let mut target = Target::begin(containerd, place).await?;
    match found.begin(containerd, overrides).await {
        Ok(source) => Ok((source, target)),
        Err(error) => {
            target.discard(containerd).await;
            Err(error)
        }
    }
}

async fn checkpoint(
    args: &CheckpointArgs,
    place: &Location,
    steps: &mut Steps,
) -> Result<NewCheckpoint, CheckpointError> {
    let namespace = args.namespace();
    let containerd = Containerd::connect(&args.containerd.address, namespace).await?;
    let found = Source::find(&containerd, namespace, &args.container).await?;
    let id = found.container.id.clone();
    found.expect_firn().await?;
    if !matches!(place, Location::Dir(_)) {
        found.expect_base()?;
    }
    let mut interrupts = Interrupts::new()?;
    let (source, mut target) = begin(found, &containerd, place, args.overrides.annotations()).await?;
    let paused = source.pause(steps).await;
    let interrupted = || CheckpointError::Interrupted { id: id.clone() };
    let work = async {
        paused?;
        filled(args, &source, &mut target, steps).await
    };
    let mut done = interrupts
        .unless(work)
        .await
        .unwrap_or_else(|| Err(interrupted()));
    let mut memory = None;
    let ended = match done.as_mut().map(|filled| filled.ends.take()) {
        Ok(Some((proof, pinned))) => {
            memory = pinned;
            let ended = source.end(proof, steps).await;
            ended.map_err(|error| error.with(place.shown()))
        }
        Ok(None) => source.resume(StaysHere::never_sent()).await,
        Err(_) => {
            target.discard(&containerd).await;
            let resumed = source.resume(StaysHere::never_sent()).await;
            // A shim that worked on may have put something there until then.
            target.discard(&containerd).await;
            resumed
        }
    };
    let mut done = done.map(|filled| filled.bytes);
    if done.is_ok() && ended.is_ok() && !args.exit {
        let synced = interrupts.unless(target.durable(steps)).await;
        if let Err(error) = synced.unwrap_or_else(|| Err(interrupted())) {
            target.discard(&containerd).await;
            done = Err(error);
        } else {
            // What cannot be read is reported by whoever looks at the checkpoint.
            let manifest = target.manifest(&containerd).await.ok().flatten();
            memory = pinned(manifest).await;
        }
    }
    if let Err(error) = source.release().await {
        note!("firn: what was written for the checkpoint is left for a day: {error}");
    }
    match (done, ended) {
        (done, Ok(())) => done.map(|bytes| NewCheckpoint { id, bytes, memory }),
        (Ok(_), Err(error)) => Err(error),
        (Err(error), Err(other)) => {
            note!("firn: {}", error.shown());
            Err(other)
        }
    }
}
