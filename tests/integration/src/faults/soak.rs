//! Checkpoints and restores by the hundred, every third disturbed: nothing is lost and nothing piles up.

use std::fmt;

use anyhow::{Context, Result, ensure};
use firn_node::Suite;

use super::attempt::attempt;
use super::case::{Case, Fault, Flow, Often, Subject, Victim, all};
use super::testbed::{ID, Testbed};
use crate::ShimUse;
use crate::random::Random;

/// One cycle of so many is disturbed.
const DISTURBED: u64 = 3;
/// Cycles between two reports on the shim.
const PER_REPORT: usize = 25;
/// What a shim's private memory may have grown by. Samples of one run that does not leak lie 256 apart.
const GROWTH_KIB: i64 = 384;

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Soak {
    pub suite: Suite,
    pub subject: Subject,
    /// Checkpoints, and as many restores.
    pub cycles: usize,
    /// Chooses the faults.
    pub seed: u64,
}

/// What was done. Whatever is lost or left is an error.
#[derive(Clone, Copy, Debug, Default)]
pub struct Soaked {
    pub checkpoints: usize,
    pub restores: usize,
    pub disturbed: usize,
}

impl fmt::Display for Soaked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            checkpoints,
            restores,
            disturbed,
        } = self;
        write!(
            f,
            "{checkpoints} checkpoints, {restores} restores, {disturbed} of them disturbed"
        )
    }
}

/// Faults of a flow that leave a living container, so that all of them can happen to one.
fn faults(subject: Subject, flow: Flow) -> Vec<Case> {
    let (cases, _) = all();
    let ends = |fault: Fault| {
        matches!(
            fault,
            Fault::Kill(Victim::Shim)
                | Fault::DriverError(Often::Always)
                | Fault::DriverHang(Often::Always)
                | Fault::WorkerCrash(Often::Always)
                | Fault::Stall(_)
        )
    };
    cases
        .into_iter()
        .filter(|case| case.subject == subject && case.flow == flow && !case.exit && !ends(case.first.fault))
        .collect()
}

/// A case in one of three cases.
fn fault(random: &mut Random, cases: &[Case]) -> Option<Case> {
    let chosen = random.below(DISTURBED) == 0;
    let at = random.index(cases.len());
    chosen.then(|| cases[at])
}

/// Runs it; reports each cycle.
pub fn soak(what: &Soak, report: impl Fn(&str)) -> Result<Soaked> {
    let testbed = Testbed::new(what.suite, what.subject, "soak")?;
    let done = cycles(what, &testbed, &report);
    if done.is_err() {
        eprintln!("{}", testbed.host.log());
    }
    done
}

fn cycles(what: &Soak, testbed: &Testbed, report: &impl Fn(&str)) -> Result<Soaked> {
    let empty = testbed.census()?;
    let (mut random, mut done) = (Random::new(what.seed), Soaked::default());

    let cases = faults(what.subject, Flow::Checkpoint);
    ensure!(!cases.is_empty(), "there are no cases of {}", what.subject);
    let (mut job, mut young) = (Some(testbed.start()?), None);
    while done.checkpoints < what.cycles {
        // What is made once and kept, by any of the faults, is made in the first half.
        if done.checkpoints == what.cycles / 2 {
            young = Some(ShimUse::at_rest(&testbed.host, ID, None)?);
        }
        let cycle = match fault(&mut random, &cases) {
            Some(case) => {
                done.disturbed += 1;
                let outcome = attempt(testbed, &mut job, &case)
                    .with_context(|| case.to_string())?
                    .outcome;
                ensure!(job.is_some(), "{case}: {outcome}, and no container");
                format!("{case}: {outcome}")
            }
            None => {
                testbed.configure(false)?;
                job.as_mut().context("no container")?.checkpoints()?;
                "checkpoint".to_owned()
            }
        };
        done.checkpoints += 1;
        if done.checkpoints.is_multiple_of(PER_REPORT) {
            report(&format!(
                "the shim: {}",
                ShimUse::at_rest(&testbed.host, ID, None)?
            ));
        }
        report(&format!("{:>4} {cycle}", done.checkpoints));
    }
    let young = young.context("no cycles")?;
    let old = ShimUse::at_rest(&testbed.host, ID, Some(&young))?;
    report(&format!("the shim before: {young}; after: {old}"));
    let growth = old.private_kib - young.private_kib;
    ensure!(
        growth <= GROWTH_KIB,
        "the shim has {growth} KiB more private memory"
    );
    job.take().context("no container")?.end()?;
    empty.comes_back(&testbed.host)?;
    restores(what, testbed, &mut random, &mut done, report)?;
    let after = empty.comes_back(&testbed.host)?;
    report(&format!("the node before: {empty}; after: {after}"));
    Ok(done)
}

fn restores(
    what: &Soak,
    testbed: &Testbed,
    random: &mut Random,
    done: &mut Soaked,
    report: &impl Fn(&str),
) -> Result<()> {
    let cases = faults(what.subject, Flow::Restore);
    while done.restores < what.cycles {
        let cycle = match fault(random, &cases) {
            Some(case) => {
                done.disturbed += 1;
                let outcome = attempt(testbed, &mut None, &case)
                    .with_context(|| case.to_string())?
                    .outcome;
                format!("{case}: {outcome}")
            }
            None => {
                testbed.configure(false)?;
                testbed.restores()?;
                "restore".to_owned()
            }
        };
        done.restores += 1;
        report(&format!("{:>4} {cycle}", done.restores));
    }
    Ok(())
}
