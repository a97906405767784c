//! A restore is broken off in its middle: by the end of its shim, by Kill, by Delete.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use firn_lab::{CommandOutput, Container, GpuHost, Task, nothing_left, on};
use firn_node::Platform;

use super::{AT_ONCE, Stop, count, host, idle_loop};

/// A restore of "job" that stands still in this phase is broken off by `break_off`; nothing is left, and the
/// image is good.
fn restore_broken(
    host: &GpuHost,
    stop: Stop,
    phase: &str,
    break_off: fn(&GpuHost) -> Result<()>,
) -> Result<()> {
    stop.set(host)?;
    let client = Container::begin_restore(host, "job", "checkpoint/job")?;
    stop.wait_until_reached(host, phase)?;
    break_off(host)?;
    CommandOutput::wait(client)?.failed()?;
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

pub const POINTS: [(Stop, &str); 3] = [
    (Stop::Criu("post-restore"), "criu-restore"),
    (Stop::Driver("restore"), "gpu-restore"),
    (Stop::Driver("unlock"), "gpu-restore"),
];

/// Restores are broken off at these points, and the image restores afterwards.
pub fn broken_off_at(host: &GpuHost, points: &[(Stop, &str)]) -> Result<()> {
    let job = count(host)?;
    job.checkpoint("checkpoint/job")?;
    job.remove()?;
    for &(stop, phase) in points {
        restore_broken(host, stop, phase, |host| host.kill_shim("job"))
            .with_context(|| format!("{stop:?}, shim killed"))?;
        restore_broken(host, stop, phase, kill_restore).with_context(|| format!("{stop:?}, killed"))?;
    }
    let (stop, phase) = points[0];
    restore_broken(host, stop, phase, delete_restore).context("deleted")?;
    let (job, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
    job.goes_on(2)?;
    job.remove()?;
    host.idle()
}

/// Kill ends a restore without GPU, which no deadline ends.
fn without_gpu(host: &GpuHost) -> Result<()> {
    host.remove_image("checkpoint/job")?;
    let job = idle_loop(host)?;
    job.checkpoint("checkpoint/job")?;
    job.remove()?;
    let (stop, phase) = POINTS[0];
    restore_broken(host, stop, phase, kill_restore)
}

pub fn an_interrupted_restore_leaves_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "rc-r", 1)?], |[host]| {
        broken_off_at(host, &POINTS)?;
        without_gpu(host)
    })
}
