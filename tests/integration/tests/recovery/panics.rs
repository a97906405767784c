//! firn's own code panics, as a shim that is built for tests does on request.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GpuHost, Task, describe, failure, nothing_left, on};
use firn_node::Platform;

use super::{checkpoint, count, freezer, host, idle_loop, image_is};

/// Names the phases.
const ORDER: &str = "/run/firn-panic";

/// The error of a checkpoint whose code panics in these phases.
fn panics_in(host: &GpuHost, phases: &str, exit: bool) -> Result<String> {
    host.node().write(ORDER, phases)?;
    let task = Task::of(host, "job")?;
    let ended = task.end(checkpoint(&task, exit)?);
    Ok(describe(&ended, |_| "success".to_owned()))
}

/// Phases that panic, whether the container was paused, and whether its image is complete by then.
const PANICS: &[(&str, bool, bool)] = &[
    ("gpu-lock", false, false),
    ("gpu-checkpoint", true, false),
    ("criu-dump", false, false),
    ("sync", false, true),
    ("sync", true, true),
    ("gpu-restore", true, true),
];

/// firn's own code fails in the middle: a checkpoint is rolled back, of a restore nothing is left.
fn code_fails(host: &GpuHost) -> Result<()> {
    let job = count(host)?;
    for &(phase, paused, complete) in PANICS {
        if paused {
            job.task(&["pause"])?;
        }
        // Only of a container that is to end is the image written to its disk first.
        let ended = panics_in(host, phase, phase == "sync")?;
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
    // The rollback fails too, once.
    let output = panics_in(host, "gpu-checkpoint rollback", false)?;
    ensure!(output.contains("FIRN-INTERNAL:"), "{output}");
    job.goes_on(2)?;
    image_is(host, false)?;
    host.node().run(&["rm", ORDER])?;
    job.checkpoint("checkpoint/job")?;
    job.goes_on(2)?;
    job.remove()?;
    for phase in ["criu-restore", "dev-repair", "gpu-restore rollback", "continue"] {
        host.node().write(ORDER, phase)?;
        let output = failure(Container::restore(host, "job", "checkpoint/job", 1).map(drop))?;
        ensure!(output.contains("FIRN-INTERNAL:"), "{phase}: {output}");
        let _ = host.node().run(&["ctr", "tasks", "delete", "--force", "job"]);
        host.node().run(&["ctr", "containers", "delete", "job"])?;
        nothing_left(host, "job").context(phase)?;
        host.idle()?;
    }
    host.node().run(&["rm", ORDER])?;
    let (job, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
    job.goes_on(2)?;
    job.remove()?;
    host.idle()
}

/// Every rollback fails: a container that may be without its GPU state does not run until one succeeds.
fn every_rollback_fails(host: &GpuHost) -> Result<()> {
    let job = count(host)?;
    let output = panics_in(host, "gpu-checkpoint rollback rollback", false)?;
    ensure!(output.contains("FIRN-GPU-SUSPENDED:"), "{output}");
    job.stands_still()?;
    // One more, of Resume; the last one works.
    host.node().write(ORDER, "rollback")?;
    let output = failure(job.task(&["resume"]))?;
    ensure!(output.contains("FIRN-GPU-SUSPENDED:"), "{output}");
    job.stands_still()?;
    host.node().run(&["rm", ORDER])?;
    job.task(&["resume"])?;
    job.goes_on(2)?;
    job.remove()?;
    host.idle()
}

/// A restore without GPU has made the processes, fails, and panics when they are to be killed.
fn a_rollback_without_gpu_fails(host: &GpuHost) -> Result<()> {
    let job = idle_loop(host)?;
    job.checkpoint("checkpoint/plain")?;
    job.remove()?;
    host.node().write("/run/fail-runc", "restore")?;
    host.node().write(ORDER, "rollback")?;
    let output = failure(Container::restore(host, "job", "checkpoint/plain", 0).map(drop))?;
    ensure!(output.contains("FIRN-INTERNAL:"), "{output}");
    let processes = host.node().processes();
    let is_loop = |args: &[String]| args.iter().any(|arg| arg.contains("echo x"));
    let left = processes.iter().find(|process| is_loop(&process.args));
    ensure!(left.is_none(), "it runs: {left:?}");
    host.node().run(&["rm", ORDER, "/run/fail-runc"])?;
    let _ = host.node().run(&["ctr", "tasks", "delete", "--force", "job"]);
    host.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(host, "job")?;
    host.idle()
}

pub fn panics_and_failed_rollbacks_are_recovered(platform: Platform) -> Result<()> {
    on([host(platform, "rc-p", 1)?], |[host]| {
        code_fails(host)?;
        every_rollback_fails(host)?;
        a_rollback_without_gpu_fails(host)
    })
}
