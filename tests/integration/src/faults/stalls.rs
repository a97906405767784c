//! File systems that hang: of one that takes part in a checkpoint, one operation gets no answer. The workload
//! must not wait for it, nor whoever ends the container.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use firn_node::wait_for;

use super::attempt::{Attempt, Outcome};
use super::case::{Case, From, Phase};
use super::inject::Injections;
use super::testbed::{Asked, Call, ID, Job, Testbed};
use crate::StallFs;

/// Where the file system is mounted; the image and work directories on it.
pub(super) const POINT: &str = "/srv/stall";
const IMAGE: &str = "/srv/stall/images/case";
const WORK: &str = "/srv/stall/work";
/// Where a container has it that binds it.
const INSIDE: &str = "/stall";
/// In which a checkpoint must be over, whatever hangs: its deadlines, half a minute in which CRIU is waited
/// for that does not die, the rollback, and what is tidied.
const OVER: Duration = Duration::from_secs(90);
/// In which a container must be gone that is killed and deleted.
const GONE: Duration = Duration::from_secs(15);
/// In which what is left goes when the file system continues.
const TIDY: Duration = Duration::from_secs(30);

/// A file system that hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    pub place: Place,
    pub operation: Operation,
    pub since: Since,
    pub then: Then,
}

/// What lies on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Image,
    /// CRIU's work directory.
    Work,
    /// What the container has from the host.
    Bind,
}

/// What gets no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Stat,
    Statfs,
    Open,
    Create,
    Write,
    Unlink,
}

/// From when on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// Before the checkpoint is asked for.
    Begin,
    /// When runc is called.
    Dump,
    /// When CRIU has written the image, and firn's manifest comes next.
    Manifest,
    /// The same, and runc reports that it has failed: what is written must go.
    Cleanup,
}

/// What comes of the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It continues, and the file system does in the end.
    GoesOn,
    /// It is killed and deleted after the checkpoint, while the file system still hangs.
    Ended,
    /// It is killed and deleted while the checkpoint hangs.
    Killed,
}

/// Those that are tried: where firn, runc or CRIU asks the file system for it.
const STALLS: &[(Place, Since, &[Operation])] = {
    use Operation::{Create, Open, Stat, Statfs, Unlink, Write};
    &[
        (Place::Image, Since::Begin, &[Stat, Statfs, Open]),
        (Place::Image, Since::Dump, &[Stat, Open, Create, Write]),
        (Place::Image, Since::Manifest, &[Stat, Open, Create, Write]),
        (Place::Image, Since::Cleanup, &[Stat, Open, Unlink]),
        (Place::Work, Since::Begin, &[Stat, Statfs, Open]),
        (Place::Work, Since::Dump, &[Open, Create, Write]),
        (Place::Work, Since::Cleanup, &[Stat, Open, Unlink]),
        (Place::Bind, Since::Begin, &[Stat, Statfs, Open]),
        (Place::Bind, Since::Dump, &[Stat, Open]),
    ]
};

impl Stall {
    /// All that are tried.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let kinds = STALLS.iter().flat_map(|&(place, since, operations)| {
            operations.iter().map(move |&operation| (place, since, operation))
        });
        kinds.flat_map(|(place, since, operation)| {
            [Then::GoesOn, Then::Ended, Then::Killed].map(|then| Self {
                place,
                operation,
                since,
                then,
            })
        })
    }

    /// Lets it hang.
    pub(super) fn begin(self, on: &StallFs<'_>) -> Result<()> {
        on.stall(&[match self.operation {
            Operation::Stat => "stat",
            Operation::Statfs => "statfs",
            Operation::Open => "open",
            Operation::Create => "create",
            Operation::Write => "write",
            Operation::Unlink => "unlink",
        }])
    }

    pub(super) fn phase(self) -> Phase {
        match self.since {
            Since::Begin => Phase::Inspect,
            Since::Dump | Since::Manifest | Since::Cleanup => Phase::CriuDump,
        }
    }

    fn image(self) -> &'static str {
        match self.place {
            Place::Image => IMAGE,
            Place::Work | Place::Bind => "/srv/images/case",
        }
    }
}

/// Success leaves an image; a failure whose container continues leaves nothing of one.
fn leaves_no_half_image(testbed: &Testbed, stall: Stall, outcome: Outcome) -> Result<()> {
    let image = testbed.host.node().path(stall.image());
    let left = || {
        let entries = std::fs::read_dir(&image).into_iter().flatten().flatten();
        let names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
        format!("left in {}: {names:?}", stall.image())
    };
    match stall.then {
        Then::GoesOn if outcome == Outcome::Done => {
            ensure!(
                testbed.manifest_of(stall.image()),
                "success was reported, and no image"
            );
        }
        Then::GoesOn => {
            wait_for(
                "half an image to go",
                TIDY,
                || Ok((!image.exists()).then_some(())),
            )
            .with_context(left)?;
        }
        // With the container goes its shim: what hung then stays, and is no image.
        Then::Ended | Then::Killed => {}
    }
    Ok(())
}

/// Tries a case whose fault is `stall`.
pub(super) fn attempt<'t>(
    testbed: &'t Testbed,
    kept: &mut Option<Job<'t>>,
    case: &Case,
    stall: Stall,
) -> Result<Attempt> {
    let fs = StallFs::mount(&testbed.host, POINT)?;
    testbed
        .host
        .node()
        .run(&["mkdir", "-p", WORK, "/srv/stall/images"])?;
    let mut job = match (stall.place, kept.take()) {
        (Place::Bind, old) => {
            old.map_or(Ok(()), Job::end)?;
            let bind = format!("type=bind,src={POINT},dst={INSIDE},options=rbind:rw");
            testbed.start_with(&["--mount", &bind])?
        }
        (_, Some(job)) => job,
        (_, None) => testbed.start()?,
    };
    let before = testbed.census()?;
    let outcome = under(testbed, &mut job, case, stall, &fs)?;
    fs.go_on()?;
    testbed.is_quiet()?;
    if outcome == Outcome::Resumed && stall.then == Then::GoesOn {
        job.is_resumed()?;
    }
    leaves_no_half_image(testbed, stall, outcome)?;
    // CRIU's log stays in a work directory that the client has named.
    let node = testbed.host.node();
    node.run(&["sh", "-c", &format!("rm -rf {} {WORK}/*", stall.image())])?;
    match stall.then {
        Then::GoesOn => {
            before.comes_back(&testbed.host).context("something is left")?;
            testbed.configure(false)?;
            job.checkpoints().context("a second checkpoint")?;
            match stall.place {
                Place::Bind => job.end()?,
                Place::Image | Place::Work => *kept = Some(job),
            }
        }
        Then::Ended | Then::Killed => testbed.forget()?,
    }
    drop(fs);
    wait_for("the end of the file system", TIDY, || {
        let processes = testbed.host.node().processes();
        Ok((!processes.iter().any(|process| process.command == "stall-fs")).then_some(()))
    })?;
    let remove = format!("rmdir {POINT}; rm -r {POINT}.lower {POINT}.stall");
    testbed.host.node().run(&["sh", "-c", &remove])?;
    Ok(Attempt { outcome, whole: true })
}

/// What is seen while the file system hangs.
fn under(
    testbed: &Testbed,
    job: &mut Job<'_>,
    case: &Case,
    stall: Stall,
    fs: &StallFs<'_>,
) -> Result<Outcome> {
    let injections = Injections::arm(&testbed.host, case, Some(fs))?;
    if stall.since == Since::Begin {
        stall.begin(fs)?;
    }
    let asked = Asked {
        image: stall.image(),
        work: (stall.place == Place::Work).then(|| WORK.to_owned()),
        exit: false,
    };
    let mut call = job.checkpoint(&asked, false)?;
    let struck = injections.strike(&mut call, || true);
    let outcome = struck.and_then(|()| match stall.then {
        Then::Killed => {
            // The checkpoint needs a moment to run into it; where it has not, it is killed elsewhere, which
            // is as good.
            std::thread::sleep(Duration::from_millis(300));
            ends(testbed)?;
            answer_of(&mut call).map(|_| Outcome::Ended)
        }
        Then::GoesOn | Then::Ended => {
            let answer = answer_of(&mut call)?;
            let output = answer.as_ref().err().map_or("success", String::as_str).to_owned();
            // CRIU that sleeps in the file system cannot be killed and holds the tasks that it traces.
            let held = stall.since == Since::Dump && output.contains("FIRN-GPU-SUSPENDED");
            let judge = || -> Result<Outcome> {
                if held {
                    job.container.becomes("PAUSED")?;
                } else {
                    job.is(From::Running)?;
                }
                if stall.then == Then::Ended {
                    ends(testbed)?;
                }
                match answer {
                    Ok(()) => Ok(Outcome::Done),
                    Err(_) if held => Ok(Outcome::Resumed),
                    Err(output) if output.contains("FIRN-") => Ok(Outcome::RolledBack),
                    Err(_) => bail!("no code"),
                }
            };
            judge().context(output)
        }
    });
    injections.disarm()?;
    outcome
}

/// The answer, which must come however long the file system hangs.
fn answer_of(call: &mut Call) -> Result<Result<(), String>> {
    wait_for("the end of the checkpoint", OVER, || {
        Ok(call.is_over()?.then_some(()))
    })?;
    call.finish()
}

/// The container can be killed and deleted at once.
pub(super) fn ends(testbed: &Testbed) -> Result<()> {
    let begun = Instant::now();
    let node = testbed.host.node();
    node.run(&["ctr", "tasks", "kill", "--signal", "SIGKILL", ID])?;
    wait_for("the end of the task", GONE, || {
        let table = node.run(&["ctr", "tasks", "list"])?.stdout;
        let stopped = table
            .lines()
            .any(|row| row.starts_with(ID) && row.contains("STOPPED"));
        Ok(stopped.then_some(()))
    })?;
    node.run(&["ctr", "tasks", "delete", ID])?;
    let took = begun.elapsed();
    ensure!(took < GONE, "kill and delete took {took:?}");
    Ok(())
}
