//! What became of the jobs of a node, as JSON.

use serde::Serialize;

use super::pods::Job;
use crate::output::printed;

/// The jobs of a node, and what became of them.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Drained<'a> {
    /// The node.
    pub node: &'a str,
    /// Its pods with GPUs.
    pub jobs: Vec<Row<'a>>,
}

/// A pod with GPUs, and what became of it.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Row<'a> {
    #[serde(flatten)]
    pub job: &'a Job,
    /// Where it continues; absent if it was not moved.
    pub moved: Option<MovedTo<'a>>,
    /// Why it does not continue elsewhere; absent if it does, and if nothing was tried.
    pub failure: Option<String>,
}

/// Where a job continues.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MovedTo<'a> {
    /// Name of the pod that has taken its place.
    pub pod: &'a str,
    /// The node of that pod.
    pub node: &'a str,
    /// How long it took from the checkpoint until it ran again, in milliseconds.
    pub ms: u64,
}

printed! { Drained<'_>: "drain" }
