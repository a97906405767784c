//! What became of the jobs of a node, for people and programs.

use firn_host::ProblemLine;

use super::json::{Drained, MovedTo, Row};
use super::pods::Job;
use super::{Moved, Outcome};
use crate::args::DrainArgs;
use crate::output::{self, line, note};
use crate::text;

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

pub(super) fn report(args: &DrainArgs, jobs: &[Job], outcomes: &[Outcome], failed: usize) {
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
