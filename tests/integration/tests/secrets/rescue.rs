//! An image that is complete when its client, its shim or its container ends is kept where root alone finds
//! it.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GpuHost, failure, on};
use firn_node::{Platform, wait_for};

use crate::secrets::{LIMIT, Stop, host, interrupt_ctr, is_closed, is_over, readable, shell};

const RESCUED: &str = "/var/lib/firn/rescue";

/// The counter continues from a rescued image, without a step left out.
fn goes_on_from(host: &GpuHost, job: &Container<'_>, dir: &str, before: u64) -> Result<()> {
    is_closed(host, dir)?;
    host.node().run(&["firn", "restore", "--dir", dir, job.id()])?;
    let lines = job.goes_on(3)?;
    ensure!(
        lines.0.iter().any(|line| line.iter == before + 1),
        "it was started afresh"
    );
    ensure!(job.gpus_in_use()? == host.uuids());
    shell(host, &format!("rm -r {dir}")).map(drop)
}

/// The one image that was rescued.
fn rescued(host: &GpuHost, pattern: &str) -> Result<String> {
    let dirs = shell(host, &format!("echo {pattern}"))?;
    ensure!(
        !dirs.contains('*') && !dirs.trim().contains(' '),
        "rescued: {dirs}"
    );
    Ok(dirs.trim().to_owned())
}

/// What an error of a client names is there when the client has ended, and can be restored.
pub fn an_image_named_by_an_error_can_be_restored(platform: Platform) -> Result<()> {
    on([host(platform, "se-named")?], |[host]| {
        let runtime = ["--runtime", host.runtime_for_options()?];
        let job = Container::count_with(host, "job", &["0"], 1, &runtime, &[])?;
        job.goes_on(3)?;
        // A node's /tmp is a file system of its own: from there the files are copied.
        for root in [RESCUED, "/tmp/rescue"] {
            host.configure(&format!("[checkpoint]\nrescue-dir = \"{root}\"\n"))?;
            host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
            let output = failure(job.checkpoint("checkpoint/job"))?;
            let dir = rescued(host, &format!("{root}/*"))?;
            ensure!(
                output.contains(&format!("the dump in {dir} is complete")),
                "{output}"
            );
            ensure!(
                output.contains(&format!("`firn restore --dir {dir} job`")),
                "{output}"
            );
            ensure!(
                !shell(host, "ls /tmp")?.contains("ctrd-checkpoint"),
                "containerd's is left"
            );
            ensure!(readable(host)?.is_empty(), "readable: {}", readable(host)?);
            job.stands_still()?;
            let before = job.lines()?.reached(1);
            host.no_faults()?;
            let _ = host.node().run(&["ctr", "tasks", "delete", "--force", "job"]);
            goes_on_from(host, &job, &dir, before)?;
        }
        // Nothing is kept of a checkpoint that has done what was asked.
        job.checkpoint("checkpoint/job")?;
        let kept = shell(
            host,
            &format!("ls -A {RESCUED} /tmp/rescue; ls -d /tmp/firn-rescue-* 2>/dev/null || true"),
        )?;
        ensure!(kept == format!("/tmp/rescue:\n\n{RESCUED}:\n"), "{kept}");
        job.remove()?;
        host.idle()
    })
}

/// The shim is killed when the image is complete: containerd ends the container, and removes its directory.
pub fn an_image_outlives_its_killed_shim(platform: Platform) -> Result<()> {
    on([host(platform, "se-sk")?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let logged = host.log_length()?;
        Stop::Phase("gpu-restore").set(host)?;
        let mut client = host.node().spawn(&[
            "ctr",
            "containers",
            "checkpoint",
            "--task",
            "job",
            "checkpoint/job",
        ])?;
        Stop::wait_until_reached(host)?;
        let before = job.lines()?.reached(1);
        host.kill_shim("job")?;
        client.wait()?;
        wait_for("the end of the task", LIMIT, || {
            Ok(job.status().is_err().then_some(()))
        })?;
        Stop::lift(host)?;
        let dir = rescued(host, "/tmp/firn-rescue-*")?;
        let reported = format!("in {dir} is complete and can be restored");
        wait_for("containerd to log the output of delete", LIMIT, || {
            Ok(host.log_since(logged)?.contains(&reported).then_some(()))
        })?;
        goes_on_from(host, &job, &dir, before)?;
        job.remove()?;
        host.idle()
    })
}

/// A client that asks for the container's end with its checkpoint goes away when all is done but the answer.
pub fn the_image_of_an_ended_container_outlives_the_client(platform: Platform) -> Result<()> {
    on([host(platform, "se-ex")?], |[host]| {
        // Before the image is on its disk, and when the container is about to end.
        for phase in ["sync", "end"] {
            let job = Container::count(host, "job", &["0"], 1, &[])?;
            job.goes_on(3)?;
            Stop::Phase(phase).set(host)?;
            let mut client = host
                .node()
                .spawn(&["ctr", "tasks", "checkpoint", "--exit", "job"])?;
            Stop::wait_until_reached(host)?;
            let before = job.lines()?.reached(1);
            interrupt_ctr(host)?;
            client.wait()?;
            wait_for("the end of containerd's directory", LIMIT, || {
                Ok((!shell(host, "ls /tmp")?.contains("ctrd-checkpoint")).then_some(()))
            })?;
            Stop::lift(host)?;
            is_over(host, "job")?;
            job.becomes("STOPPED")?;
            let _ = job.task(&["delete"]);
            let dir = rescued(host, &format!("{RESCUED}/*")).context(phase)?;
            goes_on_from(host, &job, &dir, before).context(phase)?;
            job.remove()?;
            host.idle()?;
        }
        Ok(())
    })
}
