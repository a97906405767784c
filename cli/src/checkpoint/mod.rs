//! `firn checkpoint`: a container, or all containers of a pod, as an image, a tar file or an image directory.

mod aside;
mod candidate;
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

pub use candidate::Candidate;
pub use error::CheckpointError;
pub use interrupt::Interrupts;
pub use pod_call::PodCall;
pub use source::Source;

use crate::args::checkpoint::CheckpointArgs;
use crate::containerd::{Containerd, block_on};
use crate::outcome::Outcome;
use crate::output::{self, line, note, printed};
use crate::place::Location;
use crate::state_after::StateAfter;
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
    /// Whether the container is paused, as it was before.
    paused: bool,
    /// The phases that have ended, in their order.
    phases: Vec<Step<'a>>,
}

/// A checkpoint.
struct NewCheckpoint {
    /// Id of the container.
    id: String,
    bytes: u64,
    memory: Option<InStore>,
    was_paused: bool,
}

pub fn run(args: &CheckpointArgs) -> Result<Outcome> {
    let (None, Some(to)) = (&args.pod, &args.to) else {
        return pod::run(args);
    };
    let (begun, mut steps) = (Instant::now(), Steps::new(args.json || args.quiet));
    let done = match Location::of(to, args.kind) {
        Ok(place) if args.explain => {
            explain::print(args, &place);
            return Ok(Outcome::Done);
        }
        Ok(place) => block_on(checkpoint(args, &place, &mut steps))?.map(|made| (place, made)),
        Err(ambiguous) => Err(ambiguous.into()),
    };
    match done {
        Ok((place, made)) => {
            print(args, &place, made, begun, &steps)?;
            Ok(Outcome::Done)
        }
        Err(error) => failed(args, &error, &steps),
    }
}

/// Reports why there is no checkpoint, and how the container is now.
fn failed(args: &CheckpointArgs, error: &CheckpointError, steps: &Steps) -> Result<Outcome> {
    let (socket, namespace) = (&args.containerd.address, args.namespace());
    let state = block_on(StateAfter::of(socket, namespace, &args.container))?;
    output::failed_with(args.json, error.shown(), state.as_slice())?;
    Ok(outcome(error.is_refusal(has_begun(steps)), steps, state.as_ref()))
}

/// Whether the container was paused, or the shim was called.
pub fn has_begun(steps: &Steps) -> bool {
    steps.have_begun(&["pause", "checkpoint"])
}

/// How a command has ended that was to checkpoint a container: refused only if the container is as it was.
pub fn outcome(is_refusal: bool, steps: &Steps, state: Option<&StateAfter>) -> Outcome {
    let may_be_left = steps.have_begun(&["pause"]) && state.is_none_or(StateAfter::may_stand_still);
    Outcome::failed(is_refusal && !may_be_left)
}

fn print(
    args: &CheckpointArgs,
    place: &Location,
    made: NewCheckpoint,
    begun: Instant,
    steps: &Steps,
) -> Result<()> {
    let (took, shown) = (begun.elapsed(), place.shown());
    let NewCheckpoint {
        id,
        bytes,
        memory,
        was_paused,
    } = made;
    let paused = was_paused && !args.exit;
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
            paused,
            phases: steps.ended(),
        }));
    }
    let now = match (args.exit, paused) {
        (true, _) => "has ended",
        (false, true) => "is paused, as it was",
        (false, false) => "continues",
    };
    let (size, seconds) = (text::bytes(bytes), took.as_secs_f64());
    line!("{shown}: {size}. {id} {now}, after {seconds:.1} s");
    if let Some(memory) = &memory {
        line!("{}", memory.shown());
    }
    Ok(())
}

/// A checkpoint of a container that stands still.
struct Filled {
    bytes: u64,
    ends: Option<Ends>,
}

/// A checkpoint that the container is to end with.
struct Ends {
    proof: EndProof,
    /// What a store has of it.
    memory: Option<InStore>,
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
    // Order matters: next to a checkpoint on its disk it does not run again by itself. Where this fails, the
    // end asks again, and the checkpoint stays.
    let _kept = source.stay_paused().await;
    let proof = target.durable(steps).await?;
    // Order matters: from here on the checkpoint stays.
    let memory = pinned(manifest).await;
    Ok(Filled {
        bytes,
        ends: Some(Ends { proof, memory }),
    })
}

/// Ends the container, unless somebody has resumed it since: a pause that is there by now is his.
async fn end(source: &Source, proof: EndProof, steps: &mut Steps) -> Result<(), CheckpointError> {
    match source.stay_paused().await {
        Err(error @ CheckpointError::NotOurs { .. }) => Err(error),
        _ => source.end(proof, steps).await,
    }
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

async fn find(
    args: &CheckpointArgs,
    place: &Location,
    containerd: &Containerd,
) -> Result<Candidate, CheckpointError> {
    let found = Source::find(containerd, args.namespace(), &args.container).await?;
    found.expect_firn().await?;
    if !matches!(place, Location::Dir(_)) {
        found.expect_base()?;
    }
    Ok(found)
}

async fn checkpoint(
    args: &CheckpointArgs,
    place: &Location,
    steps: &mut Steps,
) -> Result<NewCheckpoint, CheckpointError> {
    let containerd = Containerd::connect(&args.containerd.address, args.namespace()).await?;
    let found = find(args, place, &containerd).await?;
    let id = found.container.id.clone();
    let mut interrupts = Interrupts::new()?;
    let (mut source, mut target) = begin(found, &containerd, place, args.overrides.annotations()).await?;
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
        Ok(Some(ends)) => {
            memory = ends.memory;
            let ended = end(&source, ends.proof, steps).await;
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
        (done, Ok(())) => done.map(|bytes| NewCheckpoint {
            id,
            bytes,
            memory,
            was_paused: source.was_paused(),
        }),
        (Ok(_), Err(error)) => Err(error),
        (Err(error), Err(other)) => {
            note!("firn: {}", error.shown());
            Err(other)
        }
    }
}

#[cfg(test)]
mod tests {
    use tonic::Status;

    use super::*;
    use crate::containerd::CallError;
    use crate::state_after::tests::state;

    #[test]
    fn a_checkpoint_is_refused_only_if_the_container_is_as_it_was() {
        let error = |status| {
            let status = Box::new(status);
            let call = "Tasks/Checkpoint";
            CheckpointError::from(CallError::Call { call, status })
        };
        let by_shim = || error(Status::failed_precondition("FIRN-EXEC: no. hint: x"));
        let suspended = || error(Status::aborted("FIRN-GPU-SUSPENDED: no. hint: x"));
        let taken = || CheckpointError::Exists { what: String::new() };
        // The steps that have begun, the error, the state, and whether it is refused.
        for (steps, error, now, wanted) in [
            (&[][..], taken(), "running", true),
            (&[], taken(), "paused", true),
            (&["pause"], by_shim(), "running", true),
            (&["pause"], by_shim(), "stopped", true),
            (&["pause"], by_shim(), "paused", false),
            (&["pause"], by_shim(), "unknown", false),
            (&["checkpoint"], by_shim(), "paused", true),
            (&["checkpoint"], suspended(), "paused", false),
            (&["pause", "checkpoint"], suspended(), "running", false),
            (&["pause"], taken(), "running", false),
        ] {
            let mut begun = Steps::new(true);
            steps.iter().for_each(|step| begun.begin(step));
            let found = outcome(error.is_refusal(has_begun(&begun)), &begun, Some(&state(now)));
            assert_eq!(found, Outcome::failed(wanted), "{steps:?}, {error}, {now}");
        }
        let mut begun = Steps::new(true);
        begun.begin("pause");
        let found = outcome(by_shim().is_refusal(has_begun(&begun)), &begun, None);
        assert_eq!(found, Outcome::Failed);
    }
}
