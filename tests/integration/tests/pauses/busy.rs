//! Resumes and moves onto GPUs that another container has.

use std::process::Child;

use anyhow::{Result, ensure};
use firn_lab::{Container, GpuHost, on};
use firn_node::{Platform, wait_for};

use super::{RELEASE, counter, error_of, firn, host, info, park, runs_on};

/// How long a call may take to come to its wait, and a wait to end.
const STEP: std::time::Duration = std::time::Duration::from_secs(30);

/// A job on a GPU, with the annotation `firn.dev/gpu-busy`.
fn run<'h>(host: &'h GpuHost, id: &str, gpu: &str, busy: &str) -> Result<Container<'h>> {
    let busy = format!("firn.dev/gpu-busy={busy}");
    let options = [&RELEASE[..], &["--annotation", &busy]].concat();
    let job = Container::count_with(host, id, &[gpu], 1, &options, &[])?;
    job.goes_on(2)?;
    Ok(job)
}

/// Starts a command, and returns once it waits for GPUs.
fn begin_wait(host: &GpuHost, command: &[&str]) -> Result<Child> {
    let before = host.log_length()?;
    let child = host.node().spawn(command)?;
    wait_for("a wait for GPUs", STEP, || {
        let waits = host
            .log_since(before)?
            .contains("waits for the GPUs of container");
        Ok(waits.then_some(()))
    })?;
    Ok(child)
}

/// What a command that was started printed, and whether it succeeded.
fn end(child: Child) -> Result<(bool, String)> {
    let output = child.wait_with_output()?;
    Ok((
        output.status.success(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    ))
}

/// Pauses it while others use their GPUs.
fn park_with_others(container: &Container<'_>) -> Result<()> {
    container.task(&["pause"])?;
    assert_eq!(container.status()?, "PAUSED");
    container.stands_still()
}

/// What happens if another container has the GPU.
pub fn a_resume_waits_or_goes_elsewhere_or_shares(platform: Platform) -> Result<()> {
    on([host(platform, "pa-busy")?], |[host]| {
        let waits = run(host, "waits", "0", "wait")?;
        park(host, &waits)?;
        let goes = run(host, "goes", "0", "elsewhere")?;
        park(host, &goes)?;
        let holder = counter(host, "holder", "0")?;

        let mut resume = host.node().spawn(&["ctr", "tasks", "resume", "waits"])?;
        waits.stands_still()?;
        host.configure("[restore]\ngpus = [\"0\", \"2\"]\n")?;
        goes.task(&["resume"])?;
        runs_on(host, &goes, 2)?;
        holder.goes_on(2)?;
        assert_eq!(waits.status()?, "PAUSED");
        holder.task(&["pause"])?;
        ensure!(resume.wait()?.success());
        runs_on(host, &waits, 0)?;

        let refused = error_of(host, &["firn", "resume", "holder"])?;
        ensure!(refused.contains("FIRN-GPU-BUSY"), "{refused}");
        let (code, refused) = host.firn_shows(&["resume", "holder"])?;
        let paused = serde_json::json!([{ "id": "holder", "namespace": "default", "state": "paused" }]);
        ensure!(
            code == Some(3)
                && refused["failure"]["code"] == "FIRN-GPU-BUSY"
                && refused["containers"] == paused,
            "{refused}"
        );
        let resumed = host.firn(&["resume", "holder", "--busy", "share"])?;
        ensure!(resumed["gpus"] == "same", "{resumed}");
        runs_on(host, &holder, 0)?;
        waits.goes_on(2)?;
        // They have it together now: none is in the other's way.
        for _ in 0..2 {
            waits.task(&["pause"])?;
            waits.task(&["resume"])?;
        }
        waits.goes_on(2)?;
        for job in [waits, goes, holder] {
            job.remove()?;
        }
        host.idle()
    })
}

/// A parked container that waits for its GPU is checkpointed, and resumed onto another one. Once `gpu-wait`
/// has passed, a resume fails.
pub fn others_work_on_a_container_that_waits(platform: Platform) -> Result<()> {
    on([host(platform, "pa-meanwhile")?], |[host]| {
        let waits = run(host, "waits", "0", "wait")?;
        park(host, &waits)?;
        let holder = counter(host, "holder", "0")?;
        let resume = begin_wait(host, &["ctr", "tasks", "resume", "waits"])?;
        assert_eq!(waits.status()?, "PAUSED");
        let exec = error_of(host, &["ctr", "tasks", "exec", "--exec-id", "e", "waits", "true"])?;
        ensure!(exec.contains("paused"), "{exec}");
        waits.task(&["checkpoint", "--image-path", "/root/image"])?;
        ensure!(!info(host, "waits")?.contains("the last resume failed"));

        // One that wants the same waits, too; one that wants another GPU gets it, and both are content.
        let again = begin_wait(host, &["firn", "resume", "waits"])?;
        firn(host, &["resume", "waits", "--gpus", "1"])?;
        for child in [resume, again] {
            let (succeeded, printed) = end(child)?;
            ensure!(succeeded, "{printed}");
        }
        runs_on(host, &waits, 1)?;
        holder.goes_on(2)?;

        host.configure("[deadlines]\ngpu-wait = \"1s\"\n")?;
        park_with_others(&waits)?;
        holder.remove()?;
        let holder = counter(host, "holder", "1")?;
        let late = error_of(host, &["ctr", "tasks", "resume", "waits"])?;
        ensure!(late.contains("FIRN-GPU-BUSY"), "{late}");
        ensure!(late.contains("container holder of namespace default"), "{late}");
        ensure!(info(host, "waits")?.contains("the last resume failed"));
        assert_eq!(waits.status()?, "PAUSED");
        holder.remove()?;
        waits.task(&["resume"])?;
        runs_on(host, &waits, 1)?;
        waits.remove()?;
        host.idle()
    })
}

/// A kill ends the wait, and the container can be deleted.
pub fn a_container_that_waits_can_end(platform: Platform) -> Result<()> {
    on([host(platform, "pa-give-up")?], |[host]| {
        let waits = run(host, "waits", "0", "wait")?;
        park(host, &waits)?;
        let holder = counter(host, "holder", "0")?;
        let resume = begin_wait(host, &["ctr", "tasks", "resume", "waits"])?;
        waits.task(&["kill", "--signal", "SIGKILL"])?;
        waits.becomes("STOPPED")?;
        let (succeeded, printed) = end(resume)?;
        ensure!(!succeeded && printed.contains("FIRN-ENDED"), "{printed}");
        waits.remove()?;
        holder.goes_on(2)?;
        holder.remove()?;
        host.idle()
    })
}

/// It runs and takes an exec until the GPUs are free. If it is paused meanwhile, it stays paused.
pub fn a_move_that_waits_lets_it_run(platform: Platform) -> Result<()> {
    on([host(platform, "pa-later")?], |[host]| {
        let job = run(host, "job", "0", "wait")?;
        let holder = counter(host, "holder", "1")?;
        let order = ["firn", "move-gpu", "job", "--gpus", "1"];
        let moves = begin_wait(host, &order)?;
        assert_eq!(job.status()?, "RUNNING");
        job.goes_on(2)?;
        job.exec(&["true"])?;
        park_with_others(&job)?;
        let (succeeded, printed) = end(moves)?;
        ensure!(
            !succeeded && printed.contains("cannot pause a paused"),
            "{printed}"
        );
        assert_eq!(job.status()?, "PAUSED");
        job.task(&["resume"])?;
        runs_on(host, &job, 0)?;

        let moves = begin_wait(host, &order)?;
        holder.task(&["pause"])?;
        let (succeeded, printed) = end(moves)?;
        ensure!(succeeded, "{printed}");
        runs_on(host, &job, 1)?;
        job.remove()?;
        holder.remove()?;
        host.idle()
    })
}
