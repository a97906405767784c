//! The fault matrix: for every phase of a checkpoint, a restore, a pause that gives the GPU free, a resume
//! from it and a move, everything that can fail in it, and what is left of the workload afterwards.
//!
//! firn promises one of two ends. Checkpoint: the workload runs, or is paused, as before with its GPU state;
//! or the image is complete and valid, and the container has ended if that was asked. Restore: the workload
//! runs on its new GPUs, or nothing of it is left and the image is still good. Pause, resume and move: it
//! runs, or it is parked and can be resumed. Cases are made by rule ([`all`]), tried on a few hosts one after
//! the other ([`run`]), and each is judged by what a user would notice.

mod attempt;
mod case;
mod counting;
mod disk;
mod inject;
mod names;
mod pairs;
mod park;
mod phases;
mod place;
mod rules;
mod scene;
mod soak;
mod stalls;
mod testbed;
mod victims;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::Result;
use firn_node::Suite;

use attempt::attempt;
use testbed::Testbed;

pub use attempt::Outcome;
pub use case::{Case, Fault, FaultAt, Flow, From, Phase, Subject, Why, all, has_cgroup_v1, quick};
pub use pairs::Pairs;
pub use soak::{Soak, Soaked, soak};

/// How often it is tried to make a host.
const TRIES: usize = 3;

/// What came of a case.
#[derive(Clone, Debug)]
pub struct Tried {
    pub case: Case,
    /// Within the promise; else why not.
    pub outcome: Result<Outcome, String>,
    /// Whether all of its faults have happened: the second of a pair may find no occasion.
    pub whole: bool,
    pub took: Duration,
}

/// Tries the cases, on so many hosts at a time, and reports each as it is done.
pub fn run(suite: Suite, cases: &[Case], jobs: usize, report: impl Fn(&Tried) + Sync) -> Result<Vec<Tried>> {
    let shards = Mutex::new(shards(cases, jobs));
    let done = Mutex::new(Vec::new());
    let next = || shards.lock().unwrap_or_else(|broken| broken.into_inner()).pop();
    let work = |job: usize| -> Result<()> {
        while let Some(shard) = next() {
            try_all(suite, &shard, &format!("ft{job}"), |tried| {
                report(&tried);
                done.lock()
                    .unwrap_or_else(|broken| broken.into_inner())
                    .push(tried);
            })?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.max(1))
            .map(|job| scope.spawn(move || work(job)))
            .collect();
        workers
            .into_iter()
            .map(|worker| {
                worker
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect::<Result<Vec<()>>>()
    })?;
    let mut done = done.into_inner().unwrap_or_else(|broken| broken.into_inner());
    done.sort_by_key(|tried| cases.iter().position(|case| *case == tried.case));
    Ok(done)
}

/// Cases of one kind of host together, in pieces that keep all jobs busy.
fn shards(cases: &[Case], jobs: usize) -> Vec<Vec<Case>> {
    let mut shards = Vec::new();
    let size = (cases.len() / (jobs.max(1) * 4)).clamp(8, 60);
    let mut rest = cases;
    while let Some(first) = rest.first() {
        let alike = rest
            .iter()
            .take_while(|case| case.subject == first.subject)
            .count();
        let (now, later) = rest.split_at(alike.min(size));
        shards.push(now.to_vec());
        rest = later;
    }
    shards.reverse();
    shards
}

/// Tries cases of one kind of host one after the other. After one outside of the promise the host is made
/// again.
fn try_all(suite: Suite, cases: &[Case], name: &str, mut report: impl FnMut(Tried)) -> Result<()> {
    let mut rest = cases;
    let (mut made, mut failed) = (0, 0);
    while let Some(first) = rest.first() {
        made += 1;
        let testbed = match Testbed::new(suite, first.subject, &format!("{name}-{made}")) {
            Ok(testbed) => testbed,
            Err(error) if failed + 1 == TRIES => return Err(error),
            Err(error) => {
                failed += 1;
                eprintln!("{error:#}");
                continue;
            }
        };
        failed = 0;
        let mut job = None;
        while let Some((case, later)) = rest.split_first() {
            rest = later;
            let begun = Instant::now();
            let attempt = attempt(&testbed, &mut job, case)
                .map_err(|error| format!("{error:#}\n{}", testbed.host.log()));
            let broken = attempt.is_err();
            report(Tried {
                case: *case,
                whole: attempt.as_ref().is_ok_and(|attempt| attempt.whole),
                outcome: attempt.map(|attempt| attempt.outcome),
                took: begun.elapsed(),
            });
            if broken {
                break;
            }
        }
    }
    Ok(())
}
