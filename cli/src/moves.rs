//! `firn resume` and `firn move-gpu`: a container continues, on its own GPUs or on others of the node.
//!
//! The shim does it. containerd hands the annotations of an update to the shim; its Resume has no arguments.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;
use firn_config::names;
use firn_host::{Problem, ProblemLine};
use serde::Serialize;
use tokio::time::interval;
use tonic::Code;

use crate::args::{MoveGpuArgs, ResumeArgs, TaskArgs};
use crate::containerd::{CallError, Containerd, block_on};
use crate::outcome::Outcome;
use crate::output::{self, line, note, printed};
use crate::state_after::StateAfter;
use crate::text;

/// How often a person sees that it is still under way.
const PROGRESS: Duration = Duration::from_secs(2);

/// Why a container does not continue, or was not moved.
#[derive(Debug, thiserror::Error, Problem)]
enum MoveError {
    #[error("there is no task of container {id} in namespace {namespace}")]
    #[problem("FIRN-NO-CONTAINER", "see `ctr tasks list` and --namespace")]
    NoTask { id: String, namespace: String },
    #[error("the shim of container {id} does not move GPUs: {message}")]
    #[problem(
        "FIRN-MOVE-CLIENT",
        "run the container with io.containerd.firn.v2, and install the shim of this version"
    )]
    Other { id: String, message: String },
    #[error(transparent)]
    #[problem("FIRN-CONTAINERD", "see containerd's log; --address names its socket")]
    Call(#[from] CallError),
}

/// A container that continues.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct GoesOn<'a> {
    /// Id of the container.
    container: &'a str,
    /// containerd's namespace.
    namespace: &'a str,
    /// The GPUs that were asked for, as the command line names them; `same` for those that it had.
    gpus: &'a str,
    /// How long the command took, in milliseconds.
    ms: u64,
}

printed! { GoesOn<'_>: "resume", "move-gpu" }

pub fn resume(args: &ResumeArgs) -> Result<Outcome> {
    let gpus = args.gpus.as_deref().unwrap_or(names::SAME_GPUS);
    run(&args.task, gpus, "resuming")
}

pub fn move_gpu(args: &MoveGpuArgs) -> Result<Outcome> {
    run(&args.task, &args.gpus, "moving")
}

fn run(task: &TaskArgs, gpus: &str, doing: &str) -> Result<Outcome> {
    let begun = Instant::now();
    let doing = format!("{doing} {}", task.id);
    match block_on(with_progress(task.quiet, &doing, call(task, gpus)))? {
        Ok(()) => {
            let (id, namespace, took) = (&task.id, &task.containerd.namespace, begun.elapsed());
            if task.json {
                output::json(&GoesOn {
                    container: id,
                    namespace,
                    gpus,
                    ms: text::ms(took),
                })?
            } else {
                line!("{id} continues, after {:.1} s", took.as_secs_f64())
            }
            Ok(Outcome::Done)
        }
        Err(failure) => {
            let at = &task.containerd;
            let state = block_on(StateAfter::of_id(&at.socket.address, &at.namespace, &task.id))?;
            output::failed_with(task.json, failure.shown, &[state])?;
            Ok(Outcome::failed(failure.is_refused))
        }
    }
}

/// Why it does not continue.
struct Failure {
    /// For a person: the shim's error, which has its own code and remedy, or one of ours.
    shown: String,
    /// Nothing was touched.
    is_refused: bool,
}

/// Waits for a call. A person sees from time to time what it does, unless it is to be `quiet`.
pub async fn with_progress<T>(quiet: bool, doing: &str, call: impl Future<Output = T>) -> T {
    if quiet {
        return call.await;
    }
    let begun = Instant::now();
    let mut call = Box::pin(call);
    let mut ticks = interval(PROGRESS);
    ticks.tick().await;
    loop {
        tokio::select! {
            done = &mut call => return done,
            _ = ticks.tick() => note!("firn: {doing}: {} s", begun.elapsed().as_secs()),
        }
    }
}

async fn call(task: &TaskArgs, gpus: &str) -> Result<(), Failure> {
    let at = &task.containerd;
    let containerd = Containerd::connect(&at.socket.address, &at.namespace).await;
    let containerd = containerd.map_err(|error| Failure::of(&error.into(), false))?;
    let mut annotations = HashMap::from([(names::ANNOTATION_MOVE_GPU.to_owned(), gpus.to_owned())]);
    if let Some(busy) = task.busy.and_then(|busy| busy.to_possible_value()) {
        annotations.insert(names::ANNOTATION_GPU_BUSY.to_owned(), busy.get_name().to_owned());
    }
    let done = containerd.annotate(&task.id, annotations).await;
    done.map_err(|error| match error {
        error if error.is_absent() => {
            let (id, namespace) = (task.id.clone(), task.containerd.namespace.clone());
            Failure::of(&MoveError::NoTask { id, namespace }, true)
        }
        CallError::Call { ref status, .. } if is_firns(status.message()) => Failure {
            shown: status.message().to_owned(),
            is_refused: error.is_refusal(),
        },
        CallError::Call { ref status, .. } if !error.is_lost() => {
            let (id, message) = (task.id.clone(), status.message().to_owned());
            // A shim that does not know the call has done nothing.
            let is_refused = status.code() == Code::Unimplemented;
            Failure::of(&MoveError::Other { id, message }, is_refused)
        }
        error => Failure::of(&error.into(), false),
    })
}

impl Failure {
    fn of(error: &MoveError, is_refused: bool) -> Self {
        Self {
            shown: ProblemLine(error).to_string(),
            is_refused,
        }
    }
}

/// Whether an error is one of firn's: it has a code.
pub fn is_firns(message: &str) -> bool {
    message.starts_with("FIRN-") || message.contains(": FIRN-") || message.starts_with("cannot ")
}
