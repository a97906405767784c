//! The host's setting of huge pages changes while the driver copies, and is what it was afterwards, whatever
//! becomes of the checkpoint. Without `huge-pages = "while-copying"` firn does not touch it.

use anyhow::{Result, ensure};
use firn_lab::{CommandOutput, Container, GpuHost, Task, describe, on};
use firn_node::{Platform, wait_for};

use super::{IMAGE, LIMIT, Point, Stop, checkpoint, count, host, image_is, killed_at, point, shim_killed_at};

const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const NOTES: &str = "/run/firn/huge-pages";
const WHILE_COPYING: &str = "[checkpoint]\nhuge-pages = \"while-copying\"\n";

/// The driver copies.
const COPY: Point = point(Stop::Driver("checkpoint"), "gpu-checkpoint", false, false);

/// Puts a file in the place of the kernel's setting, which is read-only in a node: it is the whole machine's.
fn stand_in(host: &GpuHost) -> Result<()> {
    host.node().write("/srv/enabled", "madvise")?;
    let mount = ["mount", "--bind", "/srv/enabled", ENABLED];
    host.node().run(&mount).map(drop)
}

fn setting(host: &GpuHost) -> Result<String> {
    host.node().read("/srv/enabled")
}

/// It is the former one, and nobody is noted.
fn is_former(host: &GpuHost) -> Result<()> {
    let (setting, notes) = (setting(host)?, host.node().path(NOTES).join("former"));
    ensure!(setting == "madvise", "the setting is {setting}");
    ensure!(!notes.exists(), "{} is left", notes.display());
    Ok(())
}

fn becomes_always(host: &GpuHost) -> Result<()> {
    wait_for("huge pages", LIMIT, || {
        Ok((setting(host)? == "always").then_some(()))
    })
}

/// The next copy takes long enough to look at it.
fn slow(host: &GpuHost) -> Result<()> {
    host.fault(&["--call", "checkpoint", "--delay-ms", "3000"])
}

/// Where nothing is configured, or the setting cannot be changed, only the log may mention it.
fn nothing_is_done(host: &GpuHost) -> Result<()> {
    let job = count(host)?;
    job.checkpoint("checkpoint/job")?;
    ensure!(!host.node().path(NOTES).exists(), "firn has noted something");
    host.remove_image("checkpoint/job")?;
    host.configure(WHILE_COPYING)?;
    let logged = host.log_length()?;
    job.checkpoint("checkpoint/job")?;
    job.goes_on(2)?;
    let log = host.log_since(logged)?;
    let lines = log.matches(&format!("{ENABLED} stays as it is")).count();
    ensure!(lines == 1, "{lines} lines in the log:\n{log}");
    job.remove()?;
    host.remove_image("checkpoint/job")
}

/// A checkpoint, a pause that gives the GPU free, and a checkpoint that the driver fails.
fn copies(host: &GpuHost) -> Result<()> {
    let release = ["--annotation", "firn.dev/pause=release-gpu"];
    let job = Container::count_with(host, "job", &["0"], 1, &release, &[])?;
    job.goes_on(2)?;
    slow(host)?;
    let task = Task::of(host, "job")?;
    let pending = checkpoint(&task, false)?;
    becomes_always(host)?;
    let done = describe(&task.end(pending), |_| "success".to_owned());
    ensure!(done == "success", "the checkpoint returns: {done}");
    is_former(host)?;
    image_is(host, true)?;

    let pause = host.node().spawn(&["ctr", "tasks", "pause", "job"])?;
    becomes_always(host)?;
    CommandOutput::wait(pause)?;
    ensure!(job.status()? == "PAUSED", "the task is {}", job.status()?);
    is_former(host)?;
    job.task(&["resume"])?;
    Stop::lift(host)?;

    host.fault(&["--call", "checkpoint", "--error", "CUDA_ERROR_UNKNOWN"])?;
    let failed = describe(&task.end(checkpoint(&task, false)?), |_| "success".to_owned());
    ensure!(
        failed.contains("FIRN-GPU-DRIVER:"),
        "the checkpoint returns: {failed}"
    );
    is_former(host)?;
    Stop::lift(host)?;
    job.goes_on(2)?;
    job.remove()?;
    host.idle()
}

/// The setting stays for as long as one of two shims needs it, also if the other is killed.
fn two_shims(host: &GpuHost) -> Result<()> {
    let other = Container::count(host, "other", &["0"], 1, &[])?;
    let (job, task, pending) = super::begin(host, &COPY)?;
    let other_task = Task::of(host, "other")?;
    let other_pending = other_task.checkpoint("/tmp/other", &Default::default())?;
    wait_for("both to copy", LIMIT, || {
        let faults = host.node().run(&["simgpu", "fault", "list"])?.stdout;
        Ok(faults.contains("\"seen\": 2").then_some(()))
    })?;
    host.kill_shim("job")?;
    ensure!(task.end(pending).is_err(), "the checkpoint of a dead shim");
    super::task_is_gone(&job)?;
    job.forget()?;
    ensure!(setting(host)? == "always", "the other shim has no huge pages");
    other_task
        .kill("", 9, false)
        .map_err(|error| anyhow::anyhow!("kill: {error}"))?;
    ensure!(other_task.end(other_pending).is_err(), "it was killed");
    is_former(host)?;
    Stop::lift(host)?;
    other.remove()?;
    host.node().run(&["rm", "-rf", IMAGE, "/tmp/other"])?;
    host.idle()
}

/// `firn doctor` puts back what a killed shim has left, and no setting that somebody has chosen since.
fn doctor(host: &GpuHost) -> Result<()> {
    let leave = |setting: &str| -> Result<String> {
        host.node().write(format!("{NOTES}/former"), "madvise")?;
        host.node().write("/srv/enabled", setting)?;
        // Other things of a node may be wrong.
        let doctor = ["sh", "-c", "firn doctor || true"];
        Ok(host.node().run(&doctor)?.stdout)
    };
    let printed = leave("always")?;
    ensure!(printed.contains("madvise again: a shim was killed"), "{printed}");
    is_former(host)?;
    let printed = leave("never")?;
    ensure!(printed.contains("while-copying, now never"), "{printed}");
    ensure!(setting(host)? == "never", "the setting is {}", setting(host)?);
    host.node().write("/srv/enabled", "madvise")
}

pub fn huge_pages_are_on_while_the_driver_copies(platform: Platform) -> Result<()> {
    on([host(platform, "rc-huge", 1)?], |[host]| {
        nothing_is_done(host)?;
        stand_in(host)?;
        copies(host)?;
        killed_at(host, &COPY)?;
        is_former(host)?;
        let logged = host.log_length()?;
        shim_killed_at(host, &COPY)?;
        is_former(host)?;
        let log = host.log_since(logged)?;
        ensure!(log.contains("is madvise again: a shim was killed"), "{log}");
        two_shims(host)?;
        doctor(host)
    })
}
