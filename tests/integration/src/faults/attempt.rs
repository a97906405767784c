//! One cell: the fault, what came of it, and whether that is what firn promises.

use std::fmt;

use anyhow::{Context, Result, bail, ensure};

use super::cell::{Cell, Fault, Flow, From, Often, Victim};
use super::ground::{Asked, Call, Ground, ID, Job, TEMPLATE};
use super::inject::Injections;
use super::stalls;
use crate::Census;

/// What came of a cell that is within the promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// An error, and everything as before.
    Undone,
    /// Success, and everything as before, with an image.
    Done,
    /// The image is complete and restores; the container has ended, as was asked.
    Image,
    /// The driver did not give the GPU state back, and the container stands still; an image that is said to be complete
    /// restores.
    Frozen,
    /// The driver did not give the GPU state back at first: suspended, and as before when a client resumed it.
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
            Self::Undone => "undone",
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

/// A cell that was tried and is within the promise.
pub(super) struct Attempt {
    pub outcome: Outcome,
    /// Whether each of its faults has happened: the second of a pair may find no occasion.
    pub whole: bool,
}

/// Tries a cell. `job` is the container that an earlier one has left running, or becomes the one that this leaves.
pub(super) fn attempt<'g>(ground: &'g Ground, job: &mut Option<Job<'g>>, cell: &Cell) -> Result<Attempt> {
    ground.configure(cell.faults().any(|at| at.fault.hangs()))?;
    match cell.flow {
        Flow::Checkpoint => match cell.first.fault {
            Fault::Stall(stall) => stalls::attempt(ground, job, cell, stall),
            _ => checkpoint(ground, job, cell),
        },
        Flow::Restore => {
            if let Some(job) = job.take() {
                job.end()?;
            }
            restore(ground, cell)
        }
    }
}

/// What has gone wrong.
struct Happened {
    faults: Vec<Fault>,
    whole: bool,
}

impl Happened {
    fn in_cell(injections: &Injections<'_>, cell: &Cell) -> Result<Self> {
        let faults = injections.happened()?;
        // Of a pair one may keep the other from happening: a directory that is read-only is refused.
        ensure!(!faults.is_empty(), "the fault did not happen");
        let whole = faults.len() == cell.faults().count();
        Ok(Self { faults, whole })
    }

    fn has_killed(&self, victim: Victim) -> bool {
        self.faults.contains(&Fault::Kill(victim))
    }

    /// Whether nobody hears the answer.
    fn is_unheard(&self) -> bool {
        self.has_killed(Victim::Client) || self.has_killed(Victim::Containerd)
    }

    /// Whether the GPU state may stay with firn until somebody tries again: the driver gave it back at no try, or more than
    /// one thing has gone wrong on the way back.
    fn may_suspend(&self) -> bool {
        let permanent = self.faults.iter().any(|fault| fault.is_permanent());
        let of_the_way_back = |fault: &&Fault| {
            fault.is_the_drivers() || matches!(fault, Fault::Panic | Fault::Kill(Victim::Worker))
        };
        permanent || self.faults.iter().filter(of_the_way_back).count() > 1
    }
}

fn checkpoint<'g>(ground: &'g Ground, kept: &mut Option<Job<'g>>, cell: &Cell) -> Result<Attempt> {
    let mut job = match kept.take() {
        Some(job) => job,
        None => ground.start()?,
    };
    let before = ground.census()?;
    job.comes_from(cell.from)?;
    let injections = Injections::arm(&ground.host, cell, None)?;
    let image = injections.image();
    let holds_image = image.is_some();
    let image = image.unwrap_or_else(|| "/srv/images/cell".to_owned());
    let asked = Asked {
        image: &image,
        work: injections.work(),
        exit: cell.exit,
    };
    let mut call = job.checkpoint(&asked, cell.needs_client())?;
    injections.strike(&mut call, || ground.at_work().is_empty())?;
    let answer = call.finish()?;
    ground.after()?;
    let happened = Happened::in_cell(&injections, cell);
    injections.disarm()?;
    let happened = happened.with_context(|| format!("{answer:?}"))?;
    // An image can be judged as long as it is there; whoever resumes the container wants its bundle back.
    let outcome = if holds_image {
        let outcome = ended(ground, &mut job, cell, &happened, answer, &image);
        injections.end_disks()?;
        outcome?
    } else {
        injections.end_disks()?;
        ended(ground, &mut job, cell, &happened, answer, &image)?
    };
    if matches!(outcome, Outcome::Undone | Outcome::Done | Outcome::Resumed) {
        before.comes_back(&ground.host).context("something is left")?;
        ground.configure(false)?;
        job.checkpoints().context("a second checkpoint")?;
        *kept = Some(job);
    }
    Ok(Attempt {
        outcome,
        whole: happened.whole,
    })
}

/// What the checkpoint has come to.
fn ended(
    ground: &Ground,
    job: &mut Job<'_>,
    cell: &Cell,
    happened: &Happened,
    answer: Result<(), String>,
    image: &str,
) -> Result<Outcome> {
    let said = match &answer {
        Ok(()) => "success",
        Err(said) => said,
    };
    let exists = || ground.host.node().path(image).exists();
    let remove_image = || ground.host.node().run(&["rm", "-r", image]).map(drop);
    if happened.has_killed(Victim::Shim) {
        // What its shim has begun is cleaned up by the time that nothing else is left of the container.
        ground.forget()?;
        if !exists() {
            return Ok(Outcome::Ended);
        }
        ensure!(ground.manifest_of(image), "a half image is left in {image}");
        ground.is_good_image(image)?;
        remove_image()?;
        return Ok(Outcome::EndedWithImage);
    }
    if !job.is_alive() {
        let told = answer.is_ok() || happened.is_unheard();
        ensure!(cell.exit && told, "the workload is lost: {said}");
        ground.forget()?;
        ground.is_good_image(image).context(said.to_owned())?;
        remove_image()?;
        return Ok(Outcome::Image);
    }
    let complete = said.contains(&format!("{image} is complete"));
    if said.contains("FIRN-GPU-LOST") {
        ensure!(happened.may_suspend(), "GPU state is lost: {said}");
        job.counting.stands_still()?;
        ensure!(
            complete == exists(),
            "it is not said whether there is an image: {said}"
        );
        ground.forget()?;
        if complete {
            ground.is_good_image(image).context(said.to_owned())?;
            remove_image()?;
        }
        return Ok(Outcome::Frozen);
    }
    if said.contains("FIRN-GPU-SUSPENDED") {
        ensure!(happened.may_suspend(), "it is suspended: {said}");
        // Nothing fails any more: the client that resumes it gets it back, with every count.
        job.is_resumed().with_context(|| said.to_owned())?;
        ensure!(
            complete == exists(),
            "it is not said whether there is an image: {said}"
        );
        if complete {
            ensure!(ground.manifest_of(image), "the image in {image} has no manifest");
            remove_image()?;
        }
        return Ok(Outcome::Resumed);
    }
    if happened.is_unheard() && happened.may_suspend() {
        // Nobody has heard whether it is paused or suspended; the next client sees no difference.
        job.is_resumed().with_context(|| said.to_owned())?;
    }
    let state = match (happened.is_unheard(), cell.needs_client()) {
        // A client that is gone has not resumed what it had paused.
        (true, _) if !happened.may_suspend() => From::Paused,
        // One that was to be killed and was not has done so.
        (_, true) => job.freezer()?,
        (_, false) => cell.from,
    };
    job.is(state).with_context(|| said.to_owned())?;
    // firn's own code that fails when the image is complete leaves it there.
    let panicked = happened.faults.contains(&Fault::Panic);
    if answer.is_ok() || (happened.is_unheard() || panicked) && exists() {
        ensure!(
            !cell.exit || panicked,
            "it lives on, although success was reported"
        );
        ensure!(
            ground.manifest_of(image),
            "success was reported, or a half image is left in {image}"
        );
        remove_image()?;
        return Ok(Outcome::Done);
    }
    ensure!(!exists(), "half an image is left in {image}: {said}");
    ensure!(said.contains("FIRN-") || happened.is_unheard(), "no code: {said}");
    Ok(Outcome::Undone)
}

fn restore(ground: &Ground, cell: &Cell) -> Result<Attempt> {
    let before = ground.census()?;
    let injections = Injections::arm(&ground.host, cell, None)?;
    let mut call = Call::Client(crate::Container::begin_restore(&ground.host, ID, TEMPLATE)?);
    injections.strike(&mut call, || ground.at_work().is_empty())?;
    let answer = call.finish()?;
    ground.after()?;
    let happened = Happened::in_cell(&injections, cell);
    injections.disarm()?;
    injections.end_disks()?;
    let happened = happened.with_context(|| format!("{answer:?}"))?;
    let outcome = restored(ground, &happened, answer, &before)?;
    if outcome == Outcome::NothingLeft {
        ground.configure(false)?;
        ground.restores().context("a second restore")?;
        before.comes_back(&ground.host).context("something is left")?;
    }
    Ok(Attempt {
        outcome,
        whole: happened.whole,
    })
}

fn restored(
    ground: &Ground,
    happened: &Happened,
    answer: Result<(), String>,
    before: &Census,
) -> Result<Outcome> {
    let known = crate::Container::known(&ground.host, ID);
    let gone = happened.has_killed(Victim::Shim) || answer.is_err();
    let runs = || -> Result<()> {
        let mut job = ground.restored()?;
        job.is(From::Running)?;
        job.checkpoints()
            .context("a checkpoint of the restored container")?;
        job.end()
    };
    match answer {
        Ok(()) => runs()?,
        Err(_) if happened.is_unheard() && known.status().is_ok_and(|status| status == "RUNNING") => runs()?,
        Err(said) => {
            let excused = happened
                .faults
                .iter()
                .any(|fault| matches!(fault, Fault::Kill(_)));
            ensure!(excused || said.contains("FIRN-"), "no code: {said}");
            ground.forget().with_context(|| said.clone())?;
            before
                .comes_back(&ground.host)
                .context("something is left")
                .context(said)?;
            return Ok(Outcome::NothingLeft);
        }
    }
    if gone && !happened.is_unheard() {
        bail!("it runs, and its client was told otherwise");
    }
    before.comes_back(&ground.host).context("something is left")?;
    Ok(Outcome::Runs)
}

impl Ground {
    /// Waits until the flow is over, also for those whom nobody answers any more; starts the daemon that was killed.
    fn after(&self) -> Result<()> {
        self.host.node().start_containerd()?;
        self.is_quiet()
    }
}

impl Cell {
    /// Whether a client or its daemon is killed: then one must take part, and nobody hears the answer.
    fn needs_client(&self) -> bool {
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
    fn is_permanent(self) -> bool {
        matches!(
            self,
            Self::DriverError(Often::Always)
                | Self::DriverHang(Often::Always)
                | Self::WorkerCrash(Often::Always)
        )
    }
}
