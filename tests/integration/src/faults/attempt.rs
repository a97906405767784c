//! One cell: the fault, what came of it, and whether that is what firn promises.

use std::fmt;

use anyhow::{Context, Result, bail, ensure};

use super::cell::{Cell, Fault, Flow, From, Often, Victim};
use super::disk::Failing;
use super::ground::{Asked, Call, Ground, ID, Job, TEMPLATE};
use super::inject::Injection;
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
    /// The image is complete and restores; the driver did not give the GPU state back, and the container stands still.
    Frozen,
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
            Self::Frozen => "frozen, image",
            Self::Ended => "ended",
            Self::EndedWithImage => "ended, image",
            Self::Runs => "runs",
            Self::NothingLeft => "nothing left",
        })
    }
}

/// Tries a cell. `job` is the container that an earlier one has left running, or becomes the one that this leaves.
pub(super) fn attempt<'g>(ground: &'g Ground, job: &mut Option<Job<'g>>, cell: &Cell) -> Result<Outcome> {
    ground.configure(cell.fault.hangs())?;
    match cell.flow {
        Flow::Checkpoint => checkpoint(ground, job, cell),
        Flow::Restore => {
            if let Some(job) = job.take() {
                job.end()?;
            }
            restore(ground, cell)
        }
    }
}

fn checkpoint<'g>(ground: &'g Ground, kept: &mut Option<Job<'g>>, cell: &Cell) -> Result<Outcome> {
    let mut job = match kept.take() {
        Some(job) => job,
        None => ground.start()?,
    };
    let before = ground.census()?;
    job.comes_from(cell.from)?;
    let injection = Injection::arm(&ground.host, cell)?;
    let disk = injection.disk.as_ref();
    let image = disk.and_then(|disk| disk.image());
    let image = image.unwrap_or_else(|| "/srv/images/cell".to_owned());
    let asked = Asked {
        image: &image,
        work: disk.and_then(|disk| disk.work()),
        exit: cell.exit,
    };
    let mut call = job.checkpoint(&asked, cell.fault.needs_client())?;
    injection.strike(&mut call)?;
    let answer = call.finish()?;
    ground.after(cell.fault)?;
    let struck = injection.has_struck()?;
    injection.disarm()?;
    let (holds_image, disk) = (disk.is_some_and(|disk| disk.image().is_some()), injection.disk);
    let end_disk = || disk.map_or(Ok(()), Failing::end);
    // An image can be judged as long as it is there; whoever resumes the container wants its bundle back.
    let end = if holds_image {
        let end = ended(ground, &mut job, cell, answer, &image);
        end_disk()?;
        end
    } else {
        end_disk()?;
        ended(ground, &mut job, cell, answer, &image)
    };
    let outcome = end?;
    ensure!(struck, "the fault did not happen");
    if matches!(outcome, Outcome::Undone | Outcome::Done) {
        before.comes_back(&ground.host).context("something is left")?;
        ground.configure(false)?;
        job.checkpoints().context("a second checkpoint")?;
        *kept = Some(job);
    }
    Ok(outcome)
}

/// What the checkpoint has come to.
fn ended(
    ground: &Ground,
    job: &mut Job<'_>,
    cell: &Cell,
    answer: Result<(), String>,
    image: &str,
) -> Result<Outcome> {
    let said = match &answer {
        Ok(()) => "success",
        Err(said) => said,
    };
    let exists = || ground.host.node().path(image).exists();
    let remove_image = || ground.host.node().run(&["rm", "-r", image]).map(drop);
    if cell.fault == Fault::Kill(Victim::Shim) {
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
        let told = answer.is_ok() || cell.fault.needs_client();
        ensure!(cell.exit && told, "the workload is lost: {said}");
        ground.forget()?;
        ground.is_good_image(image).context(said.to_owned())?;
        remove_image()?;
        return Ok(Outcome::Image);
    }
    if said.contains("FIRN-GPU-LOST") {
        ensure!(cell.fault.is_permanent(), "GPU state is lost: {said}");
        job.counting.stands_still()?;
        ensure!(
            said.contains(&format!("{image} is complete")),
            "the image is not named: {said}"
        );
        ground.forget()?;
        ground.is_good_image(image).context(said.to_owned())?;
        remove_image()?;
        return Ok(Outcome::Frozen);
    }
    // A client that is gone has not resumed what it had paused.
    let state = if cell.fault.needs_client() {
        From::Paused
    } else {
        cell.from
    };
    job.is(state).with_context(|| said.to_owned())?;
    if answer.is_ok() || cell.fault.needs_client() && exists() {
        ensure!(!cell.exit, "it lives on, although success was reported");
        ensure!(
            ground.manifest_of(image),
            "success was reported, or a half image is left in {image}"
        );
        remove_image()?;
        return Ok(Outcome::Done);
    }
    ensure!(!exists(), "half an image is left in {image}: {said}");
    ensure!(
        said.contains("FIRN-") || cell.fault.needs_client(),
        "no code: {said}"
    );
    Ok(Outcome::Undone)
}

fn restore(ground: &Ground, cell: &Cell) -> Result<Outcome> {
    let before = ground.census()?;
    let injection = Injection::arm(&ground.host, cell)?;
    let mut call = Call::Client(crate::Container::begin_restore(&ground.host, ID, TEMPLATE)?);
    injection.strike(&mut call)?;
    let answer = call.finish()?;
    ground.after(cell.fault)?;
    let struck = injection.has_struck()?;
    injection.disarm()?;
    if let Some(disk) = injection.disk {
        disk.end()?;
    }
    let outcome = restored(ground, cell, answer, &before)?;
    ensure!(struck, "the fault did not happen");
    if outcome == Outcome::NothingLeft {
        ground.configure(false)?;
        ground.restores().context("a second restore")?;
        before.comes_back(&ground.host).context("something is left")?;
    }
    Ok(outcome)
}

fn restored(ground: &Ground, cell: &Cell, answer: Result<(), String>, before: &Census) -> Result<Outcome> {
    let known = crate::Container::known(&ground.host, ID);
    let gone = cell.fault == Fault::Kill(Victim::Shim) || answer.is_err();
    let runs = || -> Result<()> {
        let mut job = ground.restored()?;
        job.is(From::Running)?;
        job.checkpoints()
            .context("a checkpoint of the restored container")?;
        job.end()
    };
    match answer {
        Ok(()) => runs()?,
        Err(_) if cell.fault.needs_client() && known.status().is_ok_and(|status| status == "RUNNING") => {
            runs()?
        }
        Err(said) => {
            let excused = matches!(cell.fault, Fault::Kill(_));
            ensure!(excused || said.contains("FIRN-"), "no code: {said}");
            ground.forget().with_context(|| said.clone())?;
            before
                .comes_back(&ground.host)
                .context("something is left")
                .context(said)?;
            return Ok(Outcome::NothingLeft);
        }
    }
    if gone && !cell.fault.needs_client() {
        bail!("it runs, and its client was told otherwise");
    }
    before.comes_back(&ground.host).context("something is left")?;
    Ok(Outcome::Runs)
}

impl Ground {
    /// Waits until the flow is over, also for those whom nobody answers any more; starts the daemon that was killed.
    fn after(&self, fault: Fault) -> Result<()> {
        if fault == Fault::Kill(Victim::Containerd) {
            self.host.node().start_containerd()?;
        }
        self.is_quiet()
    }
}

impl Fault {
    /// Whether a deadline must pass.
    fn hangs(self) -> bool {
        matches!(
            self,
            Self::DriverHang(_) | Self::RuncHang(_) | Self::RuncHangAt(_) | Self::CriuHangAt(_)
        )
    }

    /// Whether a client or its daemon is killed: then one must take part, and nobody hears the answer.
    fn needs_client(self) -> bool {
        matches!(self, Self::Kill(Victim::Client | Victim::Containerd))
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
