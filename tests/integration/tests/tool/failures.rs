//! What is refused, fails or is interrupted.

use std::process::Child;

use anyhow::{Context, Result, ensure};
use firn_lab::{BUNDLES, Container, GpuHost, STOCK, failure, on};
use firn_node::{Platform, wait_for};

use super::{LIMIT, counter, host, nothing_left};

/// `firn` with these words fails with this code, and names a remedy.
pub fn refused(host: &GpuHost, words: &[&str], code: &str) -> Result<String> {
    let output = failure(host.node().run(&[&["firn"], words].concat()))?;
    let is_shown = output.contains(&format!("{code}: ")) && output.matches("hint: ").count() == 1;
    ensure!(is_shown, "{words:?}: {output}");
    Ok(output)
}

/// How often a task was paused on the node, by containerd's events so far.
fn pauses(host: &GpuHost) -> Result<usize> {
    let log = host.node().read("/srv/events")?;
    Ok(log.matches("/tasks/paused").count())
}

fn watch(host: &GpuHost) -> Result<Child> {
    let watching = host.node().spawn(&["sh", "-c", "exec ctr events >/srv/events"])?;
    wait_for("the watcher", LIMIT, || {
        Ok(host.node().path("/srv/events").exists().then_some(()))
    })?;
    Ok(watching)
}

pub fn what_is_in_the_way_is_refused_before_the_pause(platform: Platform) -> Result<()> {
    on([host(platform, "to-way", 1)?], |[host]| {
        let mut watching = watch(host)?;
        let job = counter(host)?;
        job.task(&["pause"])?;
        job.task(&["resume"])?;
        wait_for("the watcher's first event", LIMIT, || {
            Ok((pauses(host)? > 0).then_some(()))
        })?;
        let before = pauses(host)?;
        host.node().run(&[
            "sh",
            "-c",
            "touch /srv/job.tar name; mkdir -p /srv/image/checkpoint",
        ])?;
        let image = firn_lab::IMAGE;
        for (words, code) in [
            (&["checkpoint", "job", image][..], "FIRN-EXISTS"),
            (&["checkpoint", "job", "/srv/job.tar"], "FIRN-EXISTS"),
            (&["checkpoint", "job", "/srv/image"], "FIRN-EXISTS"),
            (&["checkpoint", "job", "/nowhere/job.tar"], "FIRN-FILE"),
            (&["checkpoint", "job", "name"], "FIRN-PLACE"),
            (&["checkpoint", "none", "checkpoint/none"], "FIRN-NO-CONTAINER"),
            (&["restore", image], "FIRN-NO-CHECKPOINT"),
            (&["restore", "checkpoint/none"], "FIRN-NO-IMAGE"),
            (&["restore", "/srv/job.tar"], "FIRN-NO-CHECKPOINT"),
            (&["restore", "/srv/image"], "FIRN-RESTORE-NAME"),
        ] {
            refused(host, words, code)?;
        }
        ensure!(pauses(host)? == before, "the container was paused");
        // What explains does nothing either.
        let explained =
            host.node()
                .run(&["firn", "checkpoint", "job", "/srv/x.tar", "--exit", "--explain"])?;
        ensure!(
            explained
                .stdout
                .starts_with("ctr containers checkpoint --rw --task job checkpoint/job\n")
                && explained
                    .stdout
                    .contains("--skip-manifest-json /srv/x.tar checkpoint/job"),
            "{}",
            explained.stdout
        );
        restores_are_refused(host, &job)?;
        job.task(&["kill", "--signal", "SIGKILL"])?;
        job.becomes("STOPPED")?;
        refused(host, &["checkpoint", "job", "checkpoint/job"], "FIRN-NOT-RUNNING")?;
        job.remove()?;
        watching.kill()?;
        watching.wait()?;
        nothing_left(host)?;
        host.idle()
    })
}

/// What is asked of this node, or of a container that it does not have under firn.
fn restores_are_refused(host: &GpuHost, job: &Container<'_>) -> Result<()> {
    host.firn(&["checkpoint", "job", "checkpoint/job"])?;
    refused(host, &["restore", "checkpoint/job"], "FIRN-EXISTS")?;
    refused(
        host,
        &["restore", "checkpoint/job", "--name", "x", "--gpus", "7"],
        "FIRN-GPU-UNKNOWN",
    )?;
    refused(
        host,
        &["restore", "checkpoint/job", "--name", "x", "--gpus", "0,1"],
        "FIRN-GPU-COUNT",
    )?;
    let program = "/usr/local/bin/firn-gpu";
    host.node().run(&["mv", program, "/srv"])?;
    let output =
        failure(
            host.node()
                .run(&["firn", "restore", "checkpoint/job", "--name", "x", "--gpus", "0"]),
        )?;
    ensure!(output.contains("FIRN-RESTORE-NODE: "), "{output}");
    host.node().run(&["mv", "/srv/firn-gpu", program])?;
    let other = Container::run(host, "other", &["--runtime", STOCK], &["sleep", "600"])?;
    refused(
        host,
        &["checkpoint", "other", "./other"],
        "FIRN-CHECKPOINT-CLIENT",
    )?;
    ensure!(other.status()? == "RUNNING");
    other.remove()?;
    job.goes_on(3)?;
    host.remove_image("checkpoint/job")
}

pub fn a_failure_leaves_nothing_and_the_container_runs(platform: Platform) -> Result<()> {
    on([host(platform, "to-fail", 1)?], |[host]| {
        let job = counter(host)?;
        host.fault(&["--call", "checkpoint", "--error", "CUDA_ERROR_UNKNOWN"])?;
        for to in ["checkpoint/job", "/srv/job.tar", "/srv/image"] {
            refused(host, &["checkpoint", "job", to, "--exit"], "FIRN-GPU-DRIVER")?;
            ensure!(job.status()? == "RUNNING", "after {to}: {}", job.status()?);
            job.goes_on(3)?;
            nothing_left(host)?;
            ensure!(
                !host.has_image("checkpoint/job")? && !host.node().path(to).exists(),
                "{to} is left"
            );
        }
        host.no_faults()?;
        // The disk is full once the processes are in the content store.
        let full = "mkdir -p /srv/full && mount -t tmpfs -o size=1m tmpfs /srv/full";
        host.node().run(&["sh", "-c", full])?;
        refused(
            host,
            &["checkpoint", "job", "/srv/full/job.tar", "--exit"],
            "FIRN-FILE",
        )?;
        ensure!(
            !host.node().path("/srv/full/job.tar").exists(),
            "the file is left"
        );
        host.node().run(&["umount", "/srv/full"])?;
        job.goes_on(3)?;
        nothing_left(host)?;
        job.remove()?;
        host.idle()
    })
}

/// Interrupts firn once a checkpoint stands still in this phase.
fn interrupted(host: &GpuHost, to: &str, phase: &str) -> Result<String> {
    host.node().run(&["rm", "-f", "/run/firn-held"])?;
    host.node().write("/run/firn-hold", phase)?;
    let client = host.node().spawn(&["firn", "checkpoint", "job", to, "--exit"])?;
    wait_for("the checkpoint to stand still", LIMIT, || {
        Ok(host.node().path("/run/firn-held").exists().then_some(()))
    })?;
    // It would resume the container under the first one.
    refused(host, &["checkpoint", "job", "/srv/second.tar"], "FIRN-BUSY")?;
    let state = Container::known(host, "job").status()?;
    ensure!(state == "PAUSED", "after a second command: {state}");
    let processes = host.node().processes();
    let firn = processes.iter().find(|process| process.command == "firn");
    host.node()
        .run(&["kill", "-INT", &firn.context("no firn")?.pid.to_string()])?;
    if !to.starts_with('/') {
        wait_for("the end of containerd's directory", LIMIT, || {
            let list = host.node().run(&["ls", "/tmp"])?.stdout;
            Ok((!list.contains("ctrd-checkpoint")).then_some(()))
        })?;
    } else {
        wait_for("the end of the directory", LIMIT, || {
            Ok((!host.node().path(to).exists()).then_some(()))
        })?;
    }
    host.node().run(&["rm", "-f", "/run/firn-hold"])?;
    let output = client.wait_with_output()?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

pub fn an_interrupted_checkpoint_leaves_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "to-int", 1)?], |[host]| {
        let job = counter(host)?;
        for to in ["checkpoint/job", "/srv/image"] {
            for phase in ["inspect", "gpu-checkpoint", "criu-dump"] {
                let output = interrupted(host, to, phase)?;
                ensure!(output.contains("FIRN-INTERRUPTED: "), "{output}");
                ensure!(job.status()? == "RUNNING", "{to}, {phase}: {}", job.status()?);
                job.goes_on(3)?;
                ensure!(!host.has_image("checkpoint/job")? && !host.node().path(to).exists());
                let journal = host.node().path(format!("{BUNDLES}/job/firn-journal"));
                ensure!(!journal.exists(), "a journal is left");
                let lock = host.node().path("/run/firn/commands/default/job");
                ensure!(!lock.exists(), "a lock is left");
                nothing_left(host)?;
            }
        }
        host.firn(&["checkpoint", "job", "checkpoint/job"])?;
        job.goes_on(3)?;
        host.remove_image("checkpoint/job")?;
        job.remove()?;
        host.idle()
    })
}

pub fn a_restore_that_fails_leaves_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "to-rfail", 1)?], |[host]| {
        let job = counter(host)?;
        host.firn(&["checkpoint", "job", "/srv/job.tar", "--exit"])?;
        job.forget()?;
        host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
        let output = failure(host.node().run(&["firn", "restore", "/srv/job.tar"]))?;
        ensure!(output.contains("FIRN-"), "{output}");
        let none = |what: &[&str]| -> Result<()> {
            let list = host.node().run(what)?.stdout;
            ensure!(
                !list.lines().any(|line| line.starts_with("job")),
                "{what:?}: {list}"
            );
            Ok(())
        };
        for list in ["containers", "tasks", "snapshots"] {
            none(&["ctr", list, "list"])?;
        }
        Container::known(host, "job").nothing_left()?;
        nothing_left(host)?;
        host.no_faults()?;
        // A part of the file is no checkpoint.
        host.node()
            .run(&["sh", "-c", "head -c 3000000 /srv/job.tar >/srv/part.tar"])?;
        failure(host.node().run(&["firn", "restore", "/srv/part.tar"]))?;
        nothing_left(host)?;
        host.firn(&["restore", "/srv/job.tar"])?;
        super::copy(host, "job", &host.uuids()[..1])?.remove()?;
        nothing_left(host)?;
        host.idle()
    })
}
