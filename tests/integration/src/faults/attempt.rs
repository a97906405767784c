//! One case: the fault, what came of it, and whether that is what firn promises.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::case::{Case, Fault, Flow, From, Often, Victim};
use super::inject::Injections;
use super::testbed::{Asked, Call, ID, Job, TEMPLATE, Testbed};
use super::{park, stalls};
use crate::{Census, GC};

/// Between two collections of a store's garbage.
const BETWEEN: Duration = Duration::from_millis(50);

/// What came of a case that is within the promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// A paused container whose GPU is free.
    Parked,
    /// A resume or move that failed: it is parked, and a later resume works.
    StaysParked,
    /// An error, and everything as before.
    RolledBack,
    /// Success, and everything as before, with an image.
    Done,
    /// The image is complete and restores; the container has ended, as was asked.
    Image,
    /// The driver did not give the GPU state back, and the container stands still; an image that is reported
    /// complete restores.
    Frozen,
    /// The driver did not give the GPU state back at first: suspended, and as before when a client resumed
    /// it.
    Resumed,
    /// The shim was killed: the container has ended and nothing is left of it.
    Ended,
    /// As [`Outcome::Ended`], with an image that restores.
    EndedWithImage,
    /// A restored container that runs.
    Runs,
    /// A restore that failed, of which nothing is left; the next one works.
    NothingLeft,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Parked => "parked",
            Self::StaysParked => "stays parked",
            Self::RolledBack => "rolled back",
            Self::Done => "done",
            Self::Image => "image",
            Self::Frozen => "frozen",
            Self::Resumed => "suspended, resumed",
            Self::Ended => "ended",
            Self::EndedWithImage => "ended, image",
            Self::Runs => "runs",
            Self::NothingLeft => "nothing left",
        })
    }
}

/// A case that was tried and is within the promise.
pub(super) struct Attempt {
    pub outcome: Outcome,
    /// Whether each of its faults has happened: the second of a pair may find no occasion.
    pub whole: bool,
}

/// Tries a case. `job` is the container that an earlier one has left running, or becomes the one that this
/// leaves.
pub(super) fn attempt<'t>(testbed: &'t Testbed, job: &mut Option<Job<'t>>, case: &Case) -> Result<Attempt> {
    testbed.configure(case.faults().any(|at| at.fault.hangs()))?;
    let other = job.take_if(|job| job.releases != case.flow.parks());
    other.map_or(Ok(()), Job::end)?;
    let attempt = collecting(testbed, || match case.flow {
        Flow::Checkpoint => match case.first.fault {
            Fault::Stall(stall) => stalls::attempt(testbed, job, case, stall),
            _ => checkpoint(testbed, job, case),
        },
        Flow::Restore => {
            if let Some(job) = job.take() {
                job.end()?;
            }
            restore(testbed, case)
        }
        Flow::Pause | Flow::Resume | Flow::ResumeElsewhere | Flow::Move => park::attempt(testbed, job, case),
    })?;
    testbed.has_sound_store()?;
    Ok(attempt)
}

/// Collects the store's garbage again and again meanwhile, if there is a store.
fn collecting<T>(testbed: &Testbed, attempt: impl FnOnce() -> T) -> T {
    if !testbed.subject.stored {
        return attempt();
    }
    let (node, over) = (testbed.host.node(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                // It fails while the store does.
                let _ = node.run(&GC);
                std::thread::sleep(BETWEEN);
            }
        });
        let attempted = attempt();
        over.store(true, Ordering::Relaxed);
        attempted
    })
}

/// What has gone wrong.
pub(super) struct Happened {
    pub faults: Vec<Fault>,
    pub whole: bool,
}

impl Happened {
    pub(super) fn in_cell(injections: &Injections<'_>, case: &Case) -> Result<Self> {
        let faults = injections.happened()?;
        // Of a pair one may keep the other from happening: a directory that is read-only is refused.
        ensure!(!faults.is_empty(), "the fault did not happen");
        let whole = faults.len() == case.faults().count();
        Ok(Self { faults, whole })
    }

    pub(super) fn has_killed(&self, victim: Victim) -> bool {
        self.faults.contains(&Fault::Kill(victim))
    }

    /// Whether nobody hears the answer.
    pub(super) fn is_unheard(&self) -> bool {
        self.has_killed(Victim::Client) || self.has_killed(Victim::Containerd)
    }

    /// Whether the GPU state may stay with firn until somebody tries again: the driver gave it back at no
    /// try, or more than one thing has gone wrong in the rollback.
    pub(super) fn may_suspend(&self) -> bool {
        let permanent = self.faults.iter().any(|fault| fault.is_permanent());
        let of_the_rollback = |fault: &&Fault| {
            fault.is_the_drivers() || matches!(fault, Fault::Panic | Fault::Kill(Victim::Worker))
        };
        permanent || self.faults.iter().filter(of_the_rollback).count() > 1
    }
}

fn checkpoint<'t>(testbed: &'t Testbed, kept: &mut Option<Job<'t>>, case: &Case) -> Result<Attempt> {
    let mut job = match kept.take() {
        Some(job) => job,
        None => testbed.start()?,
    };
    let before = testbed.census()?;
    job.comes_from(case.from)?;
    let injections = Injections::arm(&testbed.host, case, None)?;
    let image = injections.image();
    let holds_image = image.is_some();
    let image = image.unwrap_or_else(|| "/srv/images/case".to_owned());
    let asked = Asked {
        image: &image,
        work: injections.work(),
        exit: case.exit,
    };
    let mut call = job.checkpoint(&asked, case.needs_client())?;
    injections.strike(&mut call, || testbed.at_work().is_empty())?;
    let answer = call.finish()?;
    testbed.after()?;
    let happened = Happened::in_cell(&injections, case);
    injections.disarm()?;
    let happened = happened.with_context(|| format!("{answer:?}"))?;
    // An image is what is on the disk, and not what the page cache has.
    if answer.is_ok() {
        injections.forget_caches()?;
    }
    // An image can be judged as long as it is there; whoever resumes the container wants its bundle back.
    let outcome = if holds_image {
        let outcome = ended(testbed, &mut job, case, &happened, answer, &image);
        injections.end_disks()?;
        outcome?
    } else {
        injections.end_disks()?;
        ended(testbed, &mut job, case, &happened, answer, &image)?
    };
    if matches!(outcome, Outcome::RolledBack | Outcome::Done | Outcome::Resumed) {
        before.comes_back(&testbed.host).context("something is left")?;
        testbed.configure(false)?;
        job.checkpoints().context("a second checkpoint")?;
        *kept = Some(job);
    }
    Ok(Attempt {
        outcome,
        whole: happened.whole,
    })
}

/// What has come of a container that has ended, or whose GPU state is not on the GPU.
fn ended_or_stopped(
    testbed: &Testbed,
    job: &mut Job<'_>,
    case: &Case,
    happened: &Happened,
    answer: &Result<(), String>,
    image: &str,
) -> Result<Option<Outcome>> {
    let output = answer.as_ref().err().map_or("success", String::as_str);
    let exists = || testbed.host.node().path(image).exists();
    let remove_image = || testbed.host.node().run(&["rm", "-r", image]).map(drop);
    if happened.has_killed(Victim::Shim) {
        // What its shim has begun is cleaned up by the time that nothing else is left of the container.
        testbed.forget()?;
        if !exists() {
            return Ok(Some(Outcome::Ended));
        }
        ensure!(testbed.manifest_of(image), "a half image is left in {image}");
        testbed.is_good_image(image)?;
        remove_image()?;
        return Ok(Some(Outcome::EndedWithImage));
    }
    if !job.is_alive() {
        let reported = answer.is_ok() || happened.is_unheard();
        ensure!(case.exit && reported, "the workload is lost: {output}");
        let thawed = happened.faults.contains(&Fault::Thawed);
        ensure!(!thawed, "it ended for an image of threads that ran");
        testbed.forget()?;
        testbed.is_good_image(image).context(output.to_owned())?;
        remove_image()?;
        return Ok(Some(Outcome::Image));
    }
    let complete = output.contains(&format!("{image} is complete"));
    if output.contains("FIRN-GPU-LOST") {
        ensure!(happened.may_suspend(), "GPU state is lost: {output}");
        job.counting.stands_still()?;
        ensure!(
            complete == exists(),
            "no report whether there is an image: {output}"
        );
        testbed.forget()?;
        if complete {
            testbed.is_good_image(image).context(output.to_owned())?;
            remove_image()?;
        }
        return Ok(Some(Outcome::Frozen));
    }
    if output.contains("FIRN-GPU-SUSPENDED") {
        ensure!(happened.may_suspend(), "it is suspended: {output}");
        // Nothing fails any more: the client that resumes it gets it back, with every count.
        job.is_resumed().with_context(|| output.to_owned())?;
        ensure!(
            complete == exists(),
            "no report whether there is an image: {output}"
        );
        if complete {
            ensure!(testbed.manifest_of(image), "the image in {image} has no manifest");
            remove_image()?;
        }
        return Ok(Some(Outcome::Resumed));
    }
    Ok(None)
}

/// What the checkpoint has come to.
fn ended(
    testbed: &Testbed,
    job: &mut Job<'_>,
    case: &Case,
    happened: &Happened,
    answer: Result<(), String>,
    image: &str,
) -> Result<Outcome> {
    let output = match &answer {
        Ok(()) => "success",
        Err(output) => output,
    };
    let exists = || testbed.host.node().path(image).exists();
    let remove_image = || testbed.host.node().run(&["rm", "-r", image]).map(drop);
    if let Some(outcome) = ended_or_stopped(testbed, job, case, happened, &answer, image)? {
        return Ok(outcome);
    }
    // Whose daemon is killed after the answer has heard it.
    let is_unheard = happened.is_unheard() && answer.is_err();
    if is_unheard && happened.may_suspend() {
        // Nobody has heard whether it is paused or suspended; the next client sees no difference.
        job.is_resumed().with_context(|| output.to_owned())?;
    }
    let state = match (is_unheard, case.needs_client()) {
        // A client that is gone has not resumed what it had paused.
        (true, _) if !happened.may_suspend() => From::Paused,
        // One that was to be killed and was not has done so.
        (_, true) => job.freezer()?,
        (_, false) => case.from,
    };
    job.is(state).with_context(|| output.to_owned())?;
    // firn's own code that fails when the image is complete leaves it there.
    let panicked = happened.faults.contains(&Fault::Panic);
    if answer.is_ok() || (happened.is_unheard() || panicked) && exists() {
        ensure!(
            !case.exit || panicked,
            "it lives on, although success was reported"
        );
        let thawed = happened.faults.contains(&Fault::Thawed);
        ensure!(!thawed, "an image of threads that ran");
        ensure!(
            testbed.manifest_of(image),
            "success was reported, or a half image is left in {image}"
        );
        remove_image()?;
        return Ok(Outcome::Done);
    }
    ensure!(!exists(), "half an image is left in {image}: {output}");
    ensure!(
        output.contains("FIRN-") || happened.is_unheard(),
        "no code: {output}"
    );
    Ok(Outcome::RolledBack)
}

fn restore(testbed: &Testbed, case: &Case) -> Result<Attempt> {
    let before = testbed.census()?;
    let injections = Injections::arm(&testbed.host, case, None)?;
    let mut call = Call::Client(crate::Container::begin_restore(&testbed.host, ID, TEMPLATE)?);
    injections.strike(&mut call, || testbed.at_work().is_empty())?;
    let answer = call.finish()?;
    testbed.after()?;
    let happened = Happened::in_cell(&injections, case);
    injections.disarm()?;
    injections.end_disks()?;
    let happened = happened.with_context(|| format!("{answer:?}"))?;
    let outcome = restored(testbed, &happened, answer, &before)?;
    if outcome == Outcome::NothingLeft {
        testbed.configure(false)?;
        testbed.restores().context("a second restore")?;
        before.comes_back(&testbed.host).context("something is left")?;
    }
    Ok(Attempt {
        outcome,
        whole: happened.whole,
    })
}

fn restored(
    testbed: &Testbed,
    happened: &Happened,
    answer: Result<(), String>,
    before: &Census,
) -> Result<Outcome> {
    let known = crate::Container::known(&testbed.host, ID);
    let gone = happened.has_killed(Victim::Shim) || answer.is_err();
    let runs = || -> Result<()> {
        let mut job = testbed.restored()?;
        job.is(From::Running)?;
        job.checkpoints()
            .context("a checkpoint of the restored container")?;
        job.end()
    };
    match answer {
        Ok(()) => runs()?,
        Err(_) if happened.is_unheard() && known.status().is_ok_and(|status| status == "RUNNING") => runs()?,
        Err(output) => {
            let excused = happened
                .faults
                .iter()
                .any(|fault| matches!(fault, Fault::Kill(_)));
            ensure!(excused || output.contains("FIRN-"), "no code: {output}");
            testbed.forget().with_context(|| output.clone())?;
            before
                .comes_back(&testbed.host)
                .context("something is left")
                .context(output)?;
            return Ok(Outcome::NothingLeft);
        }
    }
    if gone && !happened.is_unheard() {
        bail!("it runs, and its client got an error");
    }
    before.comes_back(&testbed.host).context("something is left")?;
    Ok(Outcome::Runs)
}

impl Testbed {
    /// Waits until the flow is over, also for those whom nobody answers any more; starts the daemon that was
    /// killed.
    pub(super) fn after(&self) -> Result<()> {
        self.host.node().start_containerd()?;
        self.is_quiet()
    }
}

impl Case {
    /// Whether a client or its daemon is killed: then one must take part, and nobody hears the answer.
    pub(super) fn needs_client(&self) -> bool {
        self.faults()
            .any(|at| matches!(at.fault, Fault::Kill(Victim::Client | Victim::Containerd)))
    }
}

impl Fault {
    /// Whether a deadline must pass.
    fn hangs(self) -> bool {
        matches!(
            self,
            Self::DriverHang(_)
                | Self::RuncHang(_)
                | Self::RuncHangAt(_)
                | Self::CriuHangAt(_)
                | Self::Stall(_)
        )
    }

    /// Whether trying again cannot help.
    pub(super) fn is_permanent(self) -> bool {
        matches!(
            self,
            Self::DriverError(Often::Always)
                | Self::DriverHang(Often::Always)
                | Self::WorkerCrash(Often::Always)
        )
    }
}
