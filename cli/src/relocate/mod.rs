//! `firn move`: a container continues on another node.
//!
//! ```text
//!   check both -> pause -> dump -> stream -> the copy runs there -> it still does -> end the source
//!                  |        |       |              |                   |
//!                  +--------+-------+--------------+-------------------+-> failed, died: the source resumes
//!                                   +--------------+-------------------+-> no answer: it stays paused
//! ```
//!
//! The source never runs while the copy may: the copy begins to run only after the last byte of the stream,
//! and the source is resumed only if that was not sent, or if the other node reports that nothing runs there
//! (decision 0029). It is ended only with the proof that the copy was seen twice
//! ([`firn_transaction::transfer`]).
//! Every phase has a limit ([`limits`]) and ends when firn is interrupted.

mod check;
mod error;
mod limits;
mod ssh;
mod there;

use std::time::Instant;

use anyhow::Result;
use firn_remap::plan::GpuMap;
use firn_transaction::end_proof::EndProof;
use firn_transaction::transfer::Transfer;
use serde::Serialize;
use serde_json::Value;
use tokio::time::timeout;

use crate::args::relocate::MoveArgs;
use crate::checkpoint::{Candidate, Interrupts, Source, has_begun, outcome};
use crate::containerd::{CallError, ContainerSpec, Containerd, NERDCTL_STATE, Snapshot, block_on};
use crate::outcome::Outcome;
use crate::output::{self, line, note, printed};
use crate::restore::facts::{Facts, Running};
use crate::state_after::StateAfter;
use crate::steps::{Step, Steps};
use crate::text;
use error::MoveError;
use limits::Limits;
use there::There;

/// What was moved, or would be.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Relocation<'a> {
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
    /// A pair for every GPU; absent if it has no GPU state.
    map: Option<GpuMap>,
    /// File of the other node that gets what the container writes to its standard output and error; absent
    /// with --dry-run, and if none gets it.
    log: Option<&'a str>,
    /// The phases that have ended, in their order.
    phases: Vec<Step<'a>>,
}

printed! { Relocation<'_>: "move" }

pub fn run(args: &MoveArgs) -> Result<Outcome> {
    let (begun, mut steps) = (Instant::now(), Steps::new(args.json || args.quiet));
    let mut args = args.clone();
    let done = match block_on(find(&args))? {
        // Not in a future: it waits for firn-gpu.
        Ok((found, chain)) => {
            args.container.clone_from(&found.container.id);
            let (spec, bundle) = (
                found.container.spec(),
                found.bundle(&args.containerd.socket.address),
            );
            let running = Running {
                spec,
                bundle: &bundle,
                init: found.init(),
                chain,
            };
            match Facts::of(running) {
                Ok(facts) => block_on(moved(&args, found, &facts, &mut steps))?,
                Err(failure) => Err(MoveError::Source(failure)),
            }
        }
        Err(error) => Err(error),
    };
    match done {
        Ok((bytes, answer)) => {
            print(&args, bytes, &answer, begun, &steps)?;
            Ok(Outcome::Done)
        }
        Err(error) => failed(&args, &error, &steps),
    }
}

/// Reports why it was not moved, and how the container is here.
fn failed(args: &MoveArgs, error: &MoveError, steps: &Steps) -> Result<Outcome> {
    let (socket, namespace) = (&args.containerd.socket.address, &args.containerd.namespace);
    let mut state = block_on(StateAfter::of(socket, namespace, &args.container))?;
    if error.may_run_there() {
        state = state.map(StateAfter::not_to_be_resumed);
    }
    output::failed_with(args.json, error.shown(), state.as_slice())?;
    Ok(outcome(error.is_refusal(has_begun(steps)), steps, state.as_ref()))
}

fn print(args: &MoveArgs, bytes: u64, answer: &Value, begun: Instant, steps: &Steps) -> Result<()> {
    let (name, target, took) = (args.name(), &args.target, begun.elapsed());
    let map: Option<GpuMap> = serde_json::from_value(answer["map"].clone()).unwrap_or_default();
    if args.json {
        return output::json(&Relocation {
            container: &args.container,
            namespace: &args.containerd.namespace,
            to: target,
            name,
            pid: answer["pid"].as_u64(),
            bytes,
            ms: text::ms(took),
            dry_run: args.dry_run,
            map,
            log: answer["log"].as_str(),
            phases: steps.ended(),
        });
    }
    for pair in map.iter().flat_map(GpuMap::pairs) {
        line!("gpu     {} -> {}", pair.old, pair.new);
    }
    if args.dry_run {
        line!("nothing is in the way on {target}")
    } else {
        line!(
            "{name} runs on {target}, after {:.1} s. {} were sent",
            took.as_secs_f64(),
            text::bytes(bytes)
        );
        if let Some(log) = answer["log"].as_str() {
            let namespace = &args.containerd.namespace;
            line!("its output goes to {log} there: `firn logs --namespace {namespace} {name}`");
        }
    }
    Ok(())
}

async fn connect(args: &MoveArgs) -> Result<Containerd, MoveError> {
    Ok(Containerd::connect(&args.containerd.socket.address, &args.containerd.namespace).await?)
}

/// The container, and the chain id of the layers that it began with.
async fn find(args: &MoveArgs) -> Result<(Candidate, Option<String>), MoveError> {
    let containerd = connect(args).await?;
    let found = Source::find(&containerd, &args.containerd.namespace, &args.container).await?;
    found.expect_firn().await?;
    found.expect_base()?;
    let (spec, id) = (found.container.spec(), found.container.id.clone());
    if !spec.author().owns_node() {
        Err(MoveError::Kubernetes { id })
    } else if spec.annotation(NERDCTL_STATE).is_some() {
        Err(MoveError::Nerdctl { id })
    } else {
        let chain = found.chain(&containerd).await;
        Ok((found, chain))
    }
}

/// Returns the bytes that were sent, and what the other node has answered.
async fn moved(
    args: &MoveArgs,
    found: Candidate,
    facts: &Facts,
    steps: &mut Steps,
) -> Result<(u64, Value), MoveError> {
    let (limits, base) = (Limits::here(), found.container.image.clone());
    let there = There::new(args, &limits, &base);
    let interrupted = || MoveError::Interrupted {
        id: args.container.clone(),
    };
    let mut interrupts = Interrupts::new()?;
    steps.begin("check");
    let checked = interrupts.unless(there.checked(facts)).await;
    let node = checked.ok_or_else(interrupted)??;
    let containerd = connect(args).await?;
    if !node.has_image {
        found
            .expect_base_image(&containerd, facts.chain.as_deref())
            .await?;
    }
    steps.end();
    if args.dry_run {
        return Ok((0, serde_json::json!({ "map": node.map })));
    }
    let mut source = found.begin(&containerd, args.overrides.annotations()).await?;
    // Not to be interrupted: whether it was paused would not be known. The shim has deadlines for it.
    let paused = source.pause(steps).await;
    let transfer = Transfer::default();
    let work = async {
        paused?;
        let (remote, bytes) = there.send(&node, &source, steps, &transfer).await?;
        let (answer, runs) = there.taken_over(remote, steps).await?;
        Ok((bytes, answer, runs))
    };
    let done = match interrupts.unless(work).await {
        None => Err(interrupted()),
        Some(done) => done,
    };
    let (done, ended) = match done {
        Ok((bytes, answer, runs)) => {
            let proof = EndProof::of_copy(&args.target, runs);
            let ended = remove_source(&source, proof, &limits, steps).await;
            let left = |message: String| MoveError::Left {
                target: args.target.clone(),
                id: args.container.clone(),
                message,
            };
            (Ok((bytes, answer)), ended.map_err(left))
        }
        Err(error) => match error.stays_here(&transfer) {
            Some(proof) => (Err(error), source.resume(proof).await.map_err(MoveError::from)),
            None if matches!(error, MoveError::Finished { .. }) => (Err(error), Ok(())),
            // Only the answer of the other node decides who continues.
            None => (Err(there.unknown()), Ok(())),
        },
    };
    if let Err(error) = source.release().await {
        note!("firn: what was written for the move is left for a day: {error}");
    }
    ended.and(done)
}

/// Removes the source, which runs elsewhere. Returns why it is left.
async fn remove_source(
    source: &Source,
    proof: EndProof,
    limits: &Limits,
    steps: &mut Steps,
) -> Result<(), String> {
    let removal = async {
        source.end(proof, steps).await?;
        let (container, containerd) = (&source.container, &source.containerd);
        CallError::allow_absent(containerd.delete_container(&container.id).await)?;
        let snapshot = Snapshot::of(container);
        Ok(CallError::allow_absent(
            containerd.remove_snapshot(snapshot).await,
        )?)
    };
    match timeout(limits.end, removal).await {
        Ok(removed) => removed.map_err(|error: MoveError| error.shown()),
        Err(_late) => Err("containerd does not answer".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_stays_is_not_to_be_resumed() {
        let (target, id, message) = ("b".to_owned(), "job".to_owned(), "gone".to_owned());
        let shown = MoveError::Left { target, id, message }.shown();
        assert!(shown.starts_with("FIRN-MOVE-LEFT: "), "{shown}");
        assert!(shown.contains("never resume it"), "{shown}");
    }
}
