//! A checkpoint or restore is broken off in every phase: its shim is killed, its container, containerd, its client, CRIU.
//! What is promised holds: the workload goes on as before, or it is gone and nothing of it is left; an image is complete or
//! it is not there.
//!
//! The journal tells which phase is under way; a driver call, CRIU or runc that stands still keeps it there.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::Empty;
use containerd_shim_protos::shim::oci::CheckpointOptions;
use firn_lab::{BUNDLES, Container, FIRN, GpuHost, Pending, SimGpu, Task, failure, nothing_left, on, told};
use firn_node::{Cgroup, Suite, wait_for};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
/// "At once": before any deadline of firn's passes, however slow the machine.
const AT_ONCE: Duration = Duration::from_secs(8);
const IMAGE: &str = "/tmp/image";
const STUCK: &str = "/run/stuck";

/// A runc that stands still in one verb, and a script of CRIU's that does in one action.
const RUNC: &str = r#"#!/bin/sh
case " $* " in *" $(cat /run/hold-runc 2>/dev/null || echo none) "*)
    touch /run/stuck
    while [ -e /run/hold-runc ]; do sleep 0.05; done
esac
exec /usr/sbin/runc "$@"
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
    /// The driver when it is to give back, after it has refused to take.
    Undo,
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
    point(Stop::Driver("lock"), "lock", false, false),
    point(Stop::Driver("lock"), "lock", true, true),
    point(Stop::Driver("checkpoint"), "take", true, false),
    point(Stop::Driver("checkpoint"), "take", false, true),
    point(Stop::Undo, "undo", false, false),
    point(Stop::Criu("post-dump"), "dump", false, false),
    point(Stop::Criu("post-dump"), "dump", true, true),
    complete(Stop::Driver("restore"), "give-back", false, false),
    complete(Stop::Driver("unlock"), "give-back", false, true),
];

/// The end of a checkpoint: nobody can be killed any more but the shim.
const FINISH: Point = complete(Stop::Runc("delete"), "finish", true, false);

fn host(suite: Suite, cgroup: Cgroup, name: &str, gpu: u32) -> Result<GpuHost> {
    let host = GpuHost::for_test(suite, cgroup, name, &[SimGpu::h200(gpu)])?;
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
            Self::Undo => {
                host.fault(&["--call", "checkpoint", "--after", "--error", "CUDA_ERROR_UNKNOWN"])?;
                host.fault(&["--call", "restore", "--hang"])
            }
            Self::Criu(action) => host.node().write("/run/hold-criu", action),
            Self::Runc(verb) => host.node().write("/run/hold-runc", verb),
        }
    }

    fn is_reached(self, host: &GpuHost) -> Result<bool> {
        match self {
            Self::Driver(_) | Self::Undo => {
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
    fn reached(self, host: &GpuHost, phase: &str) -> Result<()> {
        let mut last = None;
        let waited = wait_for("the phase", LIMIT, || {
            last = self::phase(host);
            Ok((last.as_deref() == Some(phase) && self.is_reached(host)?).then_some(()))
        });
        waited.with_context(|| format!("{phase} with {self:?}, the journal tells {last:?}"))
    }
}

/// The phase that the journal tells; none without a journal.
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
    point.stop.reached(host, point.phase)?;
    Ok((job, task, pending))
}

/// Kills the shim of "job" with SIGKILL.
fn kill_shim(host: &GpuHost) -> Result<()> {
    let is_shim = |args: &[String]| args.windows(2).any(|pair| pair[0] == "-id" && pair[1] == "job");
    let shim = host
        .node()
        .processes()
        .into_iter()
        .find(|process| process.command.starts_with("containerd-shim") && is_shim(&process.args));
    let pid = shim.context("no shim")?.pid.to_string();
    host.node().run(&["kill", "-KILL", &pid]).map(drop)
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
    kill_shim(host)?;
    if matches!(point.stop, Stop::Runc(_)) {
        Stop::lift(host)?;
    }
    ensure!(task.end(pending).is_err(), "the checkpoint of a dead shim");
    task_is_gone(&job)?;
    job.forget()?;
    host.idle()?;
    image_is(host, point.complete)?;
    let said = host.log_since(logged)?;
    let tells = said.contains("is complete and can be restored");
    ensure!(tells == point.complete, "of the image the log tells:\n{said}");
    Stop::lift(host)
}

/// The container is killed: at once, and the checkpoint hears of it.
fn killed_at(host: &GpuHost, point: &Point) -> Result<()> {
    let (job, task, pending) = begin(host, point)?;
    let begun = Instant::now();
    task.kill("", 9, false)
        .map_err(|error| anyhow::anyhow!("kill: {error}"))?;
    let ended = told(&task.end(pending), |_| "success".to_owned());
    ensure!(begun.elapsed() < AT_ONCE, "only after {:?}", begun.elapsed());
    ensure!(ended.contains("FIRN-ENDED:"), "the checkpoint tells: {ended}");
    ensure!(
        ended.contains("is complete and can be restored") == point.complete,
        "of the image it tells: {ended}"
    );
    job.becomes("STOPPED")?;
    job.remove()?;
    host.idle()?;
    image_is(host, point.complete)?;
    Stop::lift(host)
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

/// A restore of "job" that stands still in this phase is broken off by `break_off`; nothing is left, and the image is good.
fn restore_broken(
    host: &GpuHost,
    stop: Stop,
    phase: &str,
    break_off: fn(&GpuHost) -> Result<()>,
) -> Result<()> {
    stop.set(host)?;
    let restore = [
        "ctr",
        "containers",
        "restore",
        "--rw",
        "--live",
        "job",
        "checkpoint/job",
    ];
    let client = host.node().spawn(&restore)?;
    stop.reached(host, phase)?;
    break_off(host)?;
    let said = client.wait_with_output()?;
    ensure!(!said.status.success(), "the restore succeeded");
    let _ = host.node().run(&["ctr", "tasks", "delete", "--force", "job"]);
    host.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(host, "job")?;
    host.idle()?;
    Stop::lift(host)
}

fn delete_restore(host: &GpuHost) -> Result<()> {
    let begun = Instant::now();
    host.node().run(&["ctr", "tasks", "delete", "job"])?;
    ensure!(begun.elapsed() < AT_ONCE, "only after {:?}", begun.elapsed());
    Ok(())
}

fn kill_restore(host: &GpuHost) -> Result<()> {
    let task = Task::of(host, "job")?;
    let begun = Instant::now();
    task.kill("", 9, false)
        .map_err(|error| anyhow::anyhow!("kill: {error}"))?;
    ensure!(begun.elapsed() < AT_ONCE, "only after {:?}", begun.elapsed());
    Ok(())
}

const RESTORE_POINTS: [(Stop, &str); 3] = [
    (Stop::Criu("post-restore"), "criu-restore"),
    (Stop::Driver("restore"), "give-back"),
    (Stop::Driver("unlock"), "give-back"),
];

fn restores(host: &GpuHost) -> Result<()> {
    let job = count(host)?;
    job.checkpoint("checkpoint/job")?;
    job.remove()?;
    for (stop, phase) in RESTORE_POINTS {
        restore_broken(host, stop, phase, kill_shim).with_context(|| format!("{stop:?}, shim killed"))?;
        restore_broken(host, stop, phase, kill_restore).with_context(|| format!("{stop:?}, killed"))?;
    }
    let (stop, phase) = RESTORE_POINTS[0];
    restore_broken(host, stop, phase, delete_restore).context("deleted")?;
    let (job, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
    job.goes_on(2)?;
    job.remove()?;
    host.idle()
}

/// Phases that panic, whether the container was paused, and whether its image is complete by then.
const PANICS: &[(&str, bool, bool)] = &[
    ("lock", false, false),
    ("take", true, false),
    ("dump", false, false),
    ("give-back", true, true),
];

/// firn's own code fails in the middle: a checkpoint is taken back, of a restore nothing is left.
fn code_fails(host: &GpuHost) -> Result<()> {
    const TOLD: &str = "/run/firn-panic";
    let job = count(host)?;
    for &(phase, paused, complete) in PANICS {
        if paused {
            job.task(&["pause"])?;
        }
        host.node().write(TOLD, phase)?;
        let task = Task::of(host, "job")?;
        let ended = told(&task.end(checkpoint(&task, false)?), |_| "success".to_owned());
        ensure!(ended.contains("FIRN-INTERNAL:"), "{phase}: {ended}");
        if paused {
            ensure!(
                job.status()? == "PAUSED" && freezer(host, &job)?,
                "{phase}: it runs"
            );
            job.task(&["resume"])?;
        }
        job.goes_on(2).context(phase)?;
        image_is(host, complete).context(phase)?;
    }
    host.node().run(&["rm", TOLD])?;
    job.checkpoint("checkpoint/job")?;
    job.goes_on(2)?;
    job.remove()?;
    for phase in ["criu-restore", "dev-repair", "give-back", "continue"] {
        host.node().write(TOLD, phase)?;
        let said = failure(Container::restore(host, "job", "checkpoint/job", 1).map(drop))?;
        ensure!(said.contains("FIRN-INTERNAL:"), "{phase}: {said}");
        let _ = host.node().run(&["ctr", "tasks", "delete", "--force", "job"]);
        host.node().run(&["ctr", "containers", "delete", "job"])?;
        nothing_left(host, "job").context(phase)?;
        host.idle()?;
    }
    host.node().run(&["rm", TOLD])?;
    let (job, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
    job.goes_on(2)?;
    job.remove()?;
    host.idle()
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
        stop.reached(host, "dump")?;
        if shim {
            kill_shim(host)?;
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
fn deleted(host: &GpuHost) -> Result<()> {
    let point = point(Stop::Criu("post-dump"), "dump", false, false);
    let (job, task, pending) = begin(host, &point)?;
    let begun = Instant::now();
    // It warns of the exit code by its own.
    let _ = host.node().run(&["ctr", "tasks", "delete", "--force", "job"]);
    ensure!(begun.elapsed() < AT_ONCE, "only after {:?}", begun.elapsed());
    let ended = told(&task.end(pending), |_| "success".to_owned());
    ensure!(ended.contains("FIRN-ENDED:"), "the checkpoint tells: {ended}");
    job.forget()?;
    host.idle()?;
    image_is(host, false)?;
    Stop::lift(host)
}

/// containerd is killed, or the client, in the middle of a dump, which goes on; the container stays as the client has left
/// it, and can be resumed.
fn left_alone(host: &GpuHost) -> Result<()> {
    for containerd in [true, false] {
        let job = count(host)?;
        let stop = Stop::Criu("post-dump");
        stop.set(host)?;
        let dump = ["ctr", "tasks", "checkpoint", "--image-path", IMAGE, "job"];
        let mut client = host.node().spawn(&dump)?;
        stop.reached(host, "dump")?;
        if containerd {
            host.node().kill_containerd()?;
        } else {
            client.kill()?;
        }
        Stop::lift(host)?;
        client.wait()?;
        wait_for("the end of the checkpoint", LIMIT, || {
            Ok(phase(host).is_none().then_some(()))
        })?;
        host.node().start_containerd()?;
        if job.status()? == "PAUSED" {
            job.stands_still()?;
            job.task(&["resume"])?;
        }
        job.goes_on(2)?;
        image_is(host, true)?;
        job.checkpoint("checkpoint/next")?;
        job.goes_on(2)?;
        job.remove()?;
        host.remove_image("checkpoint/next")?;
        host.idle()?;
    }
    Ok(())
}

/// CRIU is killed in the dump of a container that its client has paused: it stays paused, with and without GPU, and goes
/// on when it is resumed.
fn criu_killed(host: &GpuHost) -> Result<()> {
    for gpu in [true, false] {
        let job = match gpu {
            true => count(host)?,
            false => idle_loop(host)?,
        };
        job.task(&["pause"])?;
        let stop = Stop::Criu("post-dump");
        // What is no GPU container has no configuration of CRIU's by firn and reads the same file.
        stop.set(host)?;
        let task = Task::of(host, "job")?;
        let pending = checkpoint(&task, false)?;
        stop.reached(host, "dump")?;
        let criu = host.node().processes().into_iter();
        let criu = criu
            .filter(|process| process.command == "criu")
            .map(|criu| criu.pid.to_string());
        for pid in criu {
            host.node().run(&["kill", "-KILL", &pid])?;
        }
        Stop::lift(host)?;
        ensure!(task.end(pending).is_err(), "a dump without CRIU");
        ensure!(job.status()? == "PAUSED", "the task is {}", job.status()?);
        ensure!(freezer(host, &job)?, "the freezer is off");
        job.task(&["resume"])?;
        ensure!(!freezer(host, &job)?, "the freezer is on");
        if gpu {
            job.goes_on(2)?;
            image_is(host, false)?;
        } else {
            host.node().run(&["rm", "-rf", IMAGE])?;
        }
        job.remove()?;
        host.idle()?;
    }
    Ok(())
}

/// Whether the freezer of a container is on.
fn freezer(host: &GpuHost, job: &Container<'_>) -> Result<bool> {
    let look = "for f in /sys/fs/cgroup/freezer/default/job/freezer.state /sys/fs/cgroup/default/job/cgroup.freeze; do \
                [ -e $f ] && cat $f; done; true";
    let state = host.node().run(&["sh", "-c", look])?.stdout;
    ensure!(!state.is_empty(), "no freezer of {}", job.id());
    Ok(matches!(state.trim(), "FROZEN" | "1"))
}

/// Resume, Pause and Kill act on what the freezer is, whoever has turned it.
fn freezer_of_others(host: &GpuHost) -> Result<()> {
    let job = count(host)?;
    let runc = |verb: &str| {
        let root = ["--root", "/run/containerd/runc/default", verb, "job"];
        host.node()
            .run(&[&["/usr/sbin/runc"], &root[..]].concat())
            .map(drop)
    };
    runc("pause")?;
    job.task(&["resume"])?;
    job.goes_on(2)?;
    job.task(&["pause"])?;
    runc("resume")?;
    job.task(&["pause"])
        .context("pause of what somebody has resumed")?;
    job.stands_still()?;
    runc("resume")?;
    job.task(&["resume"])?;
    job.goes_on(2)?;
    runc("pause")?;
    job.remove()?;
    host.idle()
}

#[test]
fn a_shim_that_is_killed_leaves_nothing() -> Result<()> {
    on([host(Suite::Forky, Cgroup::Auto, "rc-s", 1)?], |[host]| {
        at_points(host, POINTS.iter().chain([&FINISH]), shim_killed_at)
    })
}

#[test]
fn a_shim_that_is_killed_leaves_nothing_on_cgroup_v2() -> Result<()> {
    on([host(Suite::Forky, Cgroup::V2, "rc-s2", 1)?], |[host]| {
        at_points(host, POINTS[3..].iter().step_by(2), shim_killed_at)
    })
}

#[test]
fn a_container_that_is_killed_ends_at_once() -> Result<()> {
    on([host(Suite::Forky, Cgroup::Auto, "rc-k", 1)?], |[host]| {
        at_points(host, POINTS, killed_at)?;
        deleted(host)?;
        without_gpu(host)
    })
}

#[test]
fn a_container_that_is_killed_ends_at_once_on_cgroup_v2() -> Result<()> {
    on([host(Suite::Forky, Cgroup::V2, "rc-k2", 1)?], |[host]| {
        at_points(host, POINTS[1..].iter().step_by(2), killed_at)
    })
}

#[test]
fn a_restore_that_is_broken_off_leaves_nothing() -> Result<()> {
    on([host(Suite::Forky, Cgroup::Auto, "rc-r", 1)?], |[host]| {
        restores(host)
    })
}

#[test]
fn a_checkpoint_whose_client_has_gone_ends_as_it_would() -> Result<()> {
    on([host(Suite::Forky, Cgroup::Auto, "rc-c", 1)?], |[host]| {
        left_alone(host)?;
        criu_killed(host)?;
        freezer_of_others(host)
    })
}

#[test]
fn what_firn_cannot_finish_itself_is_taken_back() -> Result<()> {
    on([host(Suite::Forky, Cgroup::V2, "rc-p", 1)?], |[host]| {
        code_fails(host)
    })
}
