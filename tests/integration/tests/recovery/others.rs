//! Others than firn fail or meddle: containerd, the client, CRIU, whoever turns the freezer.

use anyhow::{Context, Result, ensure};
use firn_lab::{GpuHost, Task, on};
use firn_node::{Platform, wait_for};

use super::{IMAGE, LIMIT, Stop, checkpoint, count, freezer, host, idle_loop, image_is, phase};

/// containerd is killed, or the client, in the middle of a dump, which continues; the container stays as the
/// client has left it, and can be resumed.
fn left_alone(host: &GpuHost) -> Result<()> {
    for containerd in [true, false] {
        let job = count(host)?;
        let stop = Stop::Criu("post-dump");
        stop.set(host)?;
        let dump = ["ctr", "tasks", "checkpoint", "--image-path", IMAGE, "job"];
        let mut client = host.node().spawn(&dump)?;
        stop.wait_until_reached(host, "criu-dump")?;
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

/// CRIU is killed in the dump of a container that its client has paused: it stays paused, with and without
/// GPU, and continues when it is resumed.
fn criu_killed(host: &GpuHost) -> Result<()> {
    for gpu in [true, false] {
        let job = if gpu { count(host)? } else { idle_loop(host)? };
        job.task(&["pause"])?;
        let stop = Stop::Criu("post-dump");
        // What is no GPU container has no configuration of CRIU's by firn and reads the same file.
        stop.set(host)?;
        let task = Task::of(host, "job")?;
        let pending = checkpoint(&task, false)?;
        stop.wait_until_reached(host, "criu-dump")?;
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

pub fn a_checkpoint_ends_the_same_without_its_client(platform: Platform) -> Result<()> {
    on([host(platform, "rc-c", 1)?], |[host]| {
        left_alone(host)?;
        criu_killed(host)?;
        freezer_of_others(host)
    })
}
