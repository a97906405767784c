//! A case of a pause that gives the GPU free, a resume from it, or a move.
//!
//! A failed pause or move leaves the container on its own GPU, or suspended until a client resumes it; a
//! failed resume leaves it parked. Who only hears the answer changes nothing by going away. Wherever the
//! container is afterwards, everything that records it agrees, and it counts on from there.

use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use firn_node::wait_for;

use super::attempt::{Attempt, Happened, Outcome};
use super::case::{Case, Fault, Flow, Phase, Victim};
use super::inject::Injections;
use super::place::Place;
use super::scene::{Scene, target};
use super::stalls;
use super::testbed::{Call, ID, Job, RELEASE, Testbed};

/// In which a container must have ended that was killed.
const ENDED: Duration = Duration::from_secs(15);

/// Tries a case. `kept` is a container that runs on the first GPU, before and afterwards.
pub(super) fn attempt<'t>(testbed: &'t Testbed, kept: &mut Option<Job<'t>>, case: &Case) -> Result<Attempt> {
    let mut job = match kept.take() {
        Some(job) => job,
        None => {
            let mut job = testbed.start_with(&RELEASE)?;
            // The first resume of a node makes a file, and removes leases of containers that were killed.
            job.comes_home()?;
            job
        }
    };
    let before = testbed.census()?;
    if case.flow.resumes() {
        job.parks()?;
    }
    let scene = Scene::set(testbed, case)?;
    let early = match case.first.phase {
        // What goes wrong afterwards is not to be heard of in the answer.
        Phase::Parked => {
            job.parks()?;
            Some(job.begin("true")?)
        }
        _ => None,
    };
    let injections = Injections::arm(&testbed.host, case, None)?;
    let mut call = match early {
        Some(call) => call,
        None => job.begin_flow(case.flow)?,
    };
    injections.strike(&mut call, || testbed.at_work().is_empty())?;
    let answer = call.finish()?;
    let killed = kill_is_heard(&job, case);
    testbed.after()?;
    let happened = Happened::in_cell(&injections, case);
    injections.disarm()?;
    injections.end_disks()?;
    scene.end()?;
    let happened = happened.with_context(|| format!("{answer:?}"))?;
    killed.with_context(|| format!("{answer:?}"))?;
    testbed.configure(false)?;
    let outcome = judge(testbed, &mut job, case, &happened, &answer);
    let outcome = outcome.with_context(|| format!("{answer:?}"))?;
    if outcome != Outcome::Ended {
        job.comes_home().context("afterwards")?;
        before.comes_back(&testbed.host).context("something is left")?;
        *kept = Some(job);
    }
    Ok(Attempt {
        outcome,
        whole: happened.whole,
    })
}

/// A container that its client has killed ends in time, whatever hangs.
fn kill_is_heard(job: &Job<'_>, case: &Case) -> Result<()> {
    if case.first.fault != Fault::Kill(Victim::Task) {
        return Ok(());
    }
    wait_for("the end of what was killed", ENDED, || {
        Ok((job.container.status()? == "STOPPED").then_some(()))
    })
}

fn judge(
    testbed: &Testbed,
    job: &mut Job<'_>,
    case: &Case,
    happened: &Happened,
    answer: &Result<(), String>,
) -> Result<Outcome> {
    let ends = [Victim::Shim, Victim::Task, Victim::Process];
    if ends.iter().any(|victim| happened.has_killed(*victim)) {
        if happened.has_killed(Victim::Process) {
            job.ends_by_itself()?;
        }
        testbed.forget()?;
        testbed.no_leases()?;
        return Ok(Outcome::Ended);
    }
    let panicked_late = case.first.fault == Fault::Panic && case.first.phase == Phase::ResumedHook;
    // The driver has failed before.
    let fails = case.first.phase == Phase::Repark;
    let output = match answer {
        Err(output) if fails || !(happened.is_unheard() || panicked_late) => output,
        _ => {
            let place = match case.flow {
                Flow::Pause => Place::Parked(0),
                flow => Place::On(target(flow)),
            };
            if happened.has_killed(Victim::Containerd) {
                job.is_at_untold(place)?
            } else {
                job.is_at(place)?
            }
            return Ok(match case.flow {
                Flow::Pause => Outcome::Parked,
                _ => Outcome::Runs,
            });
        }
    };
    let coded = happened.is_unheard() || output.contains(Scene::code(case));
    ensure!(coded, "no {}", Scene::code(case));
    failed(job, case, happened, output)
}

/// What has come of a container whose pause, resume or move has failed.
fn failed(job: &mut Job<'_>, case: &Case, happened: &Happened, output: &str) -> Result<Outcome> {
    if output.contains("FIRN-GPU-SUSPENDED") {
        ensure!(happened.may_suspend(), "it is suspended");
        job.is_resumed()?;
        job.is_at(Place::On(0))?;
        return Ok(Outcome::Resumed);
    }
    let status = job.container.status()?;
    match (case.flow, &*status) {
        (Flow::Pause | Flow::Move, "RUNNING") => {
            job.is_at(Place::On(0))?;
            return Ok(Outcome::RolledBack);
        }
        (Flow::Resume | Flow::ResumeElsewhere, "PAUSED") => {}
        (Flow::Move, "PAUSED") => {
            let excused = happened.may_suspend()
                || case.first.fault == Fault::Panic
                || case.first.phase == Phase::Repark;
            ensure!(excused, "it is parked");
        }
        (_, status) => bail!("it is {status}"),
    }
    // Unless the driver did not park again what it had restored, or firn's own code has failed with the new
    // GPU at hand, it has its own GPU.
    let gpu = job.gpu_in_spec()?;
    match (case.first.phase, case.first.fault) {
        (Phase::Repark, _) | (_, Fault::Panic) => job.counting.stands_still()?,
        _ => {
            ensure!(gpu == 0, "it is parked, and has another GPU");
            job.is_at(Place::Parked(0))?;
        }
    }
    job.container.task(&["resume"])?;
    job.is_at(Place::On(gpu))?;
    Ok(Outcome::StaysParked)
}

impl Job<'_> {
    /// Pauses it without fault; its GPU is free.
    fn parks(&mut self) -> Result<()> {
        let gpu = self.gpu_in_spec()?;
        self.container.task(&["pause"])?;
        self.is_at(Place::Parked(gpu))
    }

    /// Pauses it once more and resumes it on the first GPU.
    fn comes_home(&mut self) -> Result<()> {
        if self.container.status()? == "RUNNING" {
            let gpu = self.gpu_in_spec()?;
            self.container.task(&["pause"])?;
            self.is_at_untold(Place::Parked(gpu))?;
        }
        let resume = ["firn", "resume", ID, "--gpus", "0"];
        self.testbed.host.node().run(&resume)?;
        self.is_at(Place::On(0))
    }

    /// A process of it was killed, and with it the container ends; of a parked one the first resume shows
    /// that.
    fn ends_by_itself(&self) -> Result<()> {
        let stops = || {
            wait_for("the end of the container", ENDED, || {
                Ok((self.container.status()? == "STOPPED").then_some(()))
            })
        };
        if self.container.status()? != "PAUSED" {
            return stops();
        }
        // It may fail: the driver does not know the process any more.
        let _ = self.container.task(&["resume"]);
        match &*self.container.status()? {
            "PAUSED" => stalls::ends(self.testbed),
            _ => stops(),
        }
    }

    fn begin_flow(&self, flow: Flow) -> Result<Call> {
        self.begin(match flow {
            Flow::Pause => "ctr tasks pause job",
            Flow::Resume => "ctr tasks resume job",
            Flow::ResumeElsewhere => "firn resume job --gpus 1",
            Flow::Move => "firn move-gpu job --gpus 1",
            Flow::Checkpoint | Flow::Restore => bail!("{flow:?} parks nothing"),
        })
    }

    fn begin(&self, command: &str) -> Result<Call> {
        let words: Vec<&str> = command.split(' ').collect();
        let client: Child = self.testbed.host.node().spawn(&words)?;
        Ok(Call::Client(client))
    }
}
