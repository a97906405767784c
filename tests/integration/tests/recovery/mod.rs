//! A checkpoint or restore is broken off in every phase: its shim is killed, its container, containerd, its
//! client, CRIU. What is promised holds: the workload continues as before, or it is gone and nothing of it is
//! left; an image is complete or it is not there.
//!
//! The journal shows which phase is under way; a driver call, CRIU or runc that stands still keeps it there.

mod acknowledged;
mod hooks;
mod huge_pages;
mod others;
mod page_dumps;
mod panics;
mod restores;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::Empty;
use containerd_shim_protos::shim::oci::CheckpointOptions;
use firn_lab::{BUNDLES, Container, FIRN, GpuHost, Pending, SimGpu, Task, cases, describe, matrix, on};
use firn_node::{Platform, wait_for};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
/// "At once": before any deadline of firn's passes, however slow the machine.
const AT_ONCE: Duration = Duration::from_secs(8);
const IMAGE: &str = "/tmp/image";
const STUCK: &str = "/run/stuck";

/// A runc that stands still in one verb, and fails after one that it has carried out, and a script of CRIU's
/// that does in one action.
const RUNC: &str = r#"#!/bin/sh
case " $* " in *" $(cat /run/hold-runc 2>/dev/null || echo none) "*)
    touch /run/stuck
    while [ -e /run/hold-runc ]; do sleep 0.05; done
esac
/usr/sbin/runc "$@"
code=$?
case " $* " in *" $(cat /run/fail-runc 2>/dev/null || echo none) "*) exit 1 ;; esac
exit $code
"#;
const CRIU: &str = r#"#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = "$(cat /run/hold-criu 2>/dev/null)" ] || exit 0
touch /run/stuck
while [ -e /run/hold-criu ]; do sleep 0.05; done
"#;

/// What stands still.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// A call of the driver.
    Driver(&'static str),
    /// The driver in the rollback, after its checkpoint has failed.
    Rollback,
    /// CRIU, before this action of its script.
    Criu(&'static str),
    /// runc, before this verb.
    Runc(&'static str),
}

/// A point of a checkpoint at which it is broken off.
struct Point {
    stop: Stop,
    phase: &'static str,
    exit: bool,
    paused: bool,
    /// The image is complete by then.
    complete: bool,
}

const fn point(stop: Stop, phase: &'static str, exit: bool, paused: bool) -> Point {
    Point {
        stop,
        phase,
        exit,
        paused,
        complete: false,
    }
}

const fn complete(stop: Stop, phase: &'static str, exit: bool, paused: bool) -> Point {
    Point {
        complete: true,
        ..point(stop, phase, exit, paused)
    }
}

const POINTS: &[Point] = &[
    point(Stop::Driver("tid"), "inspect", false, true),
    point(Stop::Driver("lock"), "gpu-lock", false, false),
    point(Stop::Driver("lock"), "gpu-lock", true, true),
    point(Stop::Driver("checkpoint"), "gpu-checkpoint", true, false),
    point(Stop::Driver("checkpoint"), "gpu-checkpoint", false, true),
    point(Stop::Rollback, "rollback", false, false),
    point(Stop::Criu("post-dump"), "criu-dump", false, false),
    point(Stop::Criu("post-dump"), "criu-dump", true, true),
    complete(Stop::Driver("restore"), "gpu-restore", false, false),
    complete(Stop::Driver("unlock"), "gpu-restore", false, true),
];

/// The end of a checkpoint: nobody can be killed any more but the shim.
const FINISH: Point = complete(Stop::Runc("delete"), "end", true, false);

fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    let host = GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])?;
    let script = "/usr/local/bin/hold-criu";
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), CRIU)?;
    host.node().install(file.path(), script, 0o755)?;
    host.node()
        .write("/etc/criu/runc.conf", format!("action-script {script}\n"))?;
    host.replace_runc(RUNC)?;
    Ok(host)
}

impl Stop {
    fn set(self, host: &GpuHost) -> Result<()> {
        host.node().run(&["rm", "-f", STUCK])?;
        match self {
            Self::Driver(call) => host.fault(&["--call", call, "--hang"]),
            Self::Rollback => {
                host.fault(&["--call", "checkpoint", "--after", "--error", "CUDA_ERROR_UNKNOWN"])?;
                host.fault(&["--call", "restore", "--hang"])
            }
            Self::Criu(action) => host.node().write("/run/hold-criu", action),
            Self::Runc(verb) => host.node().write("/run/hold-runc", verb),
        }
    }

    fn is_reached(self, host: &GpuHost) -> Result<bool> {
        match self {
            Self::Driver(_) | Self::Rollback => {
                let faults = host.node().run(&["simgpu", "fault", "list"])?.stdout;
                Ok(!faults.contains("\"seen\": 0"))
            }
            Self::Criu(_) | Self::Runc(_) => Ok(host.node().path(STUCK).exists()),
        }
    }

    fn lift(host: &GpuHost) -> Result<()> {
        host.no_faults()?;
        host.node()
            .run(&["rm", "-f", "/run/hold-criu", "/run/hold-runc"])
            .map(drop)
    }

    /// Waits until it stands still in this phase.
    fn wait_until_reached(self, host: &GpuHost, phase: &str) -> Result<()> {
        let mut last = None;
        let waited = wait_for("the phase", LIMIT, || {
            last = self::phase(host);
            Ok((last.as_deref() == Some(phase) && self.is_reached(host)?).then_some(()))
        });
        waited.with_context(|| format!("{phase} with {self:?}, the journal shows {last:?}"))
    }
}

/// The phase in the journal; none without a journal.
fn phase(host: &GpuHost) -> Option<String> {
    let journal = host.node().read(format!("{BUNDLES}/job/firn-journal")).ok()?;
    let lines = journal.lines().filter_map(|line| serde_json::from_str(line).ok());
    let mut entered = lines.filter(|line: &Value| line["event"] == "enter");
    Some(entered.next_back()?["phase"].as_str()?.to_owned())
}

fn count(host: &GpuHost) -> Result<Container<'_>> {
    let job = Container::count(host, "job", &["0"], 1, &[])?;
    job.goes_on(2)?;
    Ok(job)
}

/// A checkpoint as a client of the shim asks for it that has not paused the container, or has.
fn checkpoint(task: &Task, exit: bool) -> Result<Pending<Empty>> {
    let mut options = CheckpointOptions::new();
    options.exit = exit;
    task.checkpoint(IMAGE, &options)
}

fn begin<'h>(host: &'h GpuHost, point: &Point) -> Result<(Container<'h>, Task, Pending<Empty>)> {
    let job = count(host)?;
    if point.paused {
        job.task(&["pause"])?;
    }
    point.stop.set(host)?;
    let task = Task::of(host, "job")?;
    let pending = checkpoint(&task, point.exit)?;
    point.stop.wait_until_reached(host, point.phase)?;
    Ok((job, task, pending))
}

/// containerd has noticed that the shim is gone.
fn task_is_gone(job: &Container<'_>) -> Result<()> {
    wait_for("the end of the task", LIMIT, || {
        Ok(job.status().is_err().then_some(()))
    })
}

/// The image is there, when it should be, and nothing of a partial one.
fn image_is(host: &GpuHost, complete: bool) -> Result<()> {
    let image = host.node().path(IMAGE);
    if complete {
        ensure!(image.join("firn.json").is_file(), "a complete image is gone");
        host.node().run(&["rm", "-r", IMAGE]).map(drop)
    } else {
        ensure!(!image.exists(), "a partial image is left");
        Ok(())
    }
}

/// The shim is killed: containerd's `delete` leaves nothing of the container.
fn shim_killed_at(host: &GpuHost, point: &Point) -> Result<()> {
    let logged = host.log_length()?;
    let (job, task, pending) = begin(host, point)?;
    host.kill_shim("job")?;
    if matches!(point.stop, Stop::Runc(_)) {
        Stop::lift(host)?;
    }
    ensure!(task.end(pending).is_err(), "the checkpoint of a dead shim");
    task_is_gone(&job)?;
    job.forget()?;
    host.idle()?;
    image_is(host, point.complete)?;
    let output = host.log_since(logged)?;
    let reported = output.contains("is complete and can be restored");
    ensure!(
        reported == point.complete,
        "in the log about the image:\n{output}"
    );
    Stop::lift(host)
}

/// The container is killed: at once, and the checkpoint hears of it.
fn killed_at(host: &GpuHost, point: &Point) -> Result<()> {
    let (job, task, pending) = begin(host, point)?;
    let begun = Instant::now();
    task.kill("", 9, false)
        .map_err(|error| anyhow::anyhow!("kill: {error}"))?;
    let ended = describe(&task.end(pending), |_| "success".to_owned());
    ensure!(begun.elapsed() < AT_ONCE, "only after {:?}", begun.elapsed());
    ensure!(ended.contains("FIRN-ENDED:"), "the checkpoint returns: {ended}");
    ensure!(
        ended.contains("is complete and can be restored") == point.complete,
        "about the image: {ended}"
    );
    job.becomes("STOPPED")?;
    job.remove()?;
    host.idle()?;
    image_is(host, point.complete)?;
    Stop::lift(host)
}

/// The container is killed when its image is complete and it has been ended: that is what was asked for.
fn killed_in_finish(host: &GpuHost) -> Result<()> {
    let (job, task, pending) = begin(host, &FINISH)?;
    let begun = Instant::now();
    task.kill("", 9, false)
        .map_err(|error| anyhow::anyhow!("kill: {error}"))?;
    ensure!(begun.elapsed() < AT_ONCE, "only after {:?}", begun.elapsed());
    Stop::lift(host)?;
    let ended = describe(&task.end(pending), |_| "success".to_owned());
    ensure!(ended == "success", "the checkpoint returns: {ended}");
    job.becomes("STOPPED")?;
    job.remove()?;
    host.idle()?;
    image_is(host, true)
}

type Story = fn(&GpuHost, &Point) -> Result<()>;

/// The story at each point.
fn at_points<'p>(host: &GpuHost, points: impl IntoIterator<Item = &'p Point>, story: Story) -> Result<()> {
    for point in points {
        let Point {
            phase, exit, paused, ..
        } = point;
        let begun = Instant::now();
        story(host, point).with_context(|| format!("{phase}, exit {exit}, paused {paused}"))?;
        println!(
            "{phase}, exit {exit}, paused {paused}: {:.1} s",
            begun.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

/// A loop without GPU.
fn idle_loop(host: &GpuHost) -> Result<Container<'_>> {
    let script = "while :; do echo x >>/log; sleep 0.05; done";
    Container::run(host, "job", &["--runtime", FIRN], &["sh", "-c", script])
}

/// A container without GPU is killed in the middle of its dump, or its shim is: nothing is left either.
fn without_gpu(host: &GpuHost) -> Result<()> {
    for shim in [false, true] {
        let job = idle_loop(host)?;
        let stop = Stop::Criu("post-dump");
        stop.set(host)?;
        let task = Task::of(host, "job")?;
        let pending = checkpoint(&task, true)?;
        stop.wait_until_reached(host, "criu-dump")?;
        if shim {
            host.kill_shim("job")?;
            task_is_gone(&job)?;
        } else {
            task.kill("", 9, false)
                .map_err(|error| anyhow::anyhow!("kill: {error}"))?;
        }
        ensure!(task.end(pending).is_err(), "a dump that was broken off");
        if shim {
            job.forget()?;
        } else {
            job.remove()?;
        }
        host.idle()?;
        image_is(host, false)?;
        Stop::lift(host)?;
    }
    Ok(())
}

/// A client deletes the container by force, as `ctr` does it, in the middle of a dump.
fn delete(host: &GpuHost) -> Result<()> {
    let point = point(Stop::Criu("post-dump"), "criu-dump", false, false);
    let (job, task, pending) = begin(host, &point)?;
    let begun = Instant::now();
    // It warns of the exit code by its own.
    let _ = host.node().run(&["ctr", "tasks", "delete", "--force", "job"]);
    ensure!(begun.elapsed() < AT_ONCE, "only after {:?}", begun.elapsed());
    let ended = describe(&task.end(pending), |_| "success".to_owned());
    ensure!(ended.contains("FIRN-ENDED:"), "the checkpoint returns: {ended}");
    job.forget()?;
    host.idle()?;
    image_is(host, false)?;
    Stop::lift(host)
}

/// Whether the freezer of a container is on.
fn freezer(host: &GpuHost, job: &Container<'_>) -> Result<bool> {
    let look = "for f in /sys/fs/cgroup/freezer/default/job/freezer.state \
                /sys/fs/cgroup/default/job/cgroup.freeze; do \
                [ -e $f ] && cat $f; done; true";
    let state = host.node().run(&["sh", "-c", look])?.stdout;
    ensure!(!state.is_empty(), "no freezer of {}", job.id());
    Ok(matches!(state.trim(), "FROZEN" | "1"))
}

fn a_killed_shim_leaves_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "rc-shim", 1)?], |[host]| match platform {
        Platform::FORKY => at_points(host, POINTS.iter().chain([&FINISH]), shim_killed_at),
        Platform::FORKY_V2 => at_points(host, POINTS[3..].iter().step_by(2), shim_killed_at),
        _ => {
            let points = POINTS[3..].iter().step_by(5).chain([&FINISH]);
            at_points(host, points, shim_killed_at)?;
            restores::broken_off_at(host, &restores::POINTS[1..2])
        }
    })
}

fn a_killed_container_ends_at_once(platform: Platform) -> Result<()> {
    on([host(platform, "rc-killed", 1)?], |[host]| {
        if platform == Platform::FORKY_V2 {
            return at_points(host, POINTS[1..].iter().step_by(2), killed_at);
        }
        at_points(host, POINTS, killed_at)?;
        killed_in_finish(host)?;
        delete(host)?;
        without_gpu(host)
    })
}

pub(crate) fn suite() -> matrix::Suite {
    let cases = cases! {
        a_killed_shim_leaves_nothing [FORKY, FORKY_V2, TRIXIE];
        a_killed_container_ends_at_once [FORKY, FORKY_V2];
        acknowledged::a_kill_that_is_acknowledged_kills_at_every_point [FORKY, FORKY_V2];
        hooks::hooks_have_time_until_a_kill_and_updates_wait [FORKY];
        huge_pages::huge_pages_are_on_while_the_driver_copies [FORKY, FORKY_V2];
        others::a_checkpoint_ends_the_same_without_its_client [FORKY];
        page_dumps::memory_stays_mapped_when_a_dump_ends_in_its_pages [FORKY, FORKY_V2];
        panics::panics_and_failed_rollbacks_are_recovered [FORKY_V2];
        restores::an_interrupted_restore_leaves_nothing [FORKY];
    };
    let sources = matrix::without_node(
        "every_failpoint_of_the_shim_is_tried",
        acknowledged::every_failpoint_of_the_shim_is_tried,
    );
    matrix::Suite::new(&cases).with([sources])
}
