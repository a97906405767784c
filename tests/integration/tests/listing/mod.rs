//! `firn ps`, `status`, `inspect`, `plan`, `audit` and `images`: what they show of containers, of what is in
//! progress, and of checkpoints in every form; what `firn images prune` removes and keeps.

mod images;
mod subjects;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GpuHost, SimGpu, cases, failure, matrix, on};
use firn_node::{Platform, wait_for};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(60);

/// A node with two GPUs.
fn host(platform: Platform, name: &str) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(1), SimGpu::h200(2)])
}

/// Memory of the counter's process.
const MIB: u64 = 8;

fn counter<'h>(host: &'h GpuHost, id: &str, gpu: &str) -> Result<Container<'h>> {
    let job = Container::count(host, id, &[gpu], 1, &[])?;
    job.goes_on(3)?;
    Ok(job)
}

/// What `firn ps` shows of one container.
fn shown(host: &GpuHost, id: &str) -> Result<Value> {
    let all = host.firn(&["ps"])?;
    let found = all["containers"]
        .as_array()
        .and_then(|all| all.iter().find(|one| one["container"] == id));
    found
        .cloned()
        .with_context(|| format!("{id} is missing in {all}"))
}

fn containers_are_shown_with_their_gpus(platform: Platform) -> Result<()> {
    on([host(platform, "li-ps")?], |[host]| {
        let none = host.node().run(&["firn", "ps"])?.stdout;
        ensure!(none.trim() == "no container runs under firn", "{none}");
        let job = counter(host, "job", "1")?;
        // Not of firn.
        let stock = Container::run(
            host,
            "other",
            &["--runtime", "io.containerd.runc.v2"],
            &["sleep", "1000"],
        )?;
        let one = shown(host, "job")?;
        ensure!(
            one["namespace"] == "default" && one["state"] == "running",
            "{one}"
        );
        ensure!(
            one["gpus"] == json!([{"index": 1, "uuid": host.uuids()[1]}]),
            "{one}"
        );
        ensure!(one["gpu_memory"].as_u64() >= Some(MIB << 20), "{one}");
        ensure!(
            shown(host, "other").is_err(),
            "the stock shim's container is shown"
        );
        job.task(&["pause"])?;
        let paused = shown(host, "job")?;
        ensure!(
            paused["state"] == "paused" && paused["resume"] == "ctr tasks resume job",
            "{paused}"
        );
        job.task(&["resume"])?;
        let table = host.node().run(&["firn", "ps"])?.stdout;
        ensure!(
            table.starts_with("CONTAINER  NAMESPACE  STATE    GPUS  GPU MEMORY\njob"),
            "{table}"
        );
        stock.remove()?;
        job.remove()?;
        host.idle()
    })
}

/// The driver copies slowly, and `firn ps --watch` shows it all the time: at the second checkpoint with an
/// estimate by the first.
fn a_checkpoint_is_watched(platform: Platform) -> Result<()> {
    on([host(platform, "li-watch")?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &["--mib", "256"])?;
        job.goes_on(3)?;
        host.fault(&["--call", "checkpoint", "--transfer-ms", "4000"])?;
        let node = host.node();
        let mut watch = node.spawn(&["sh", "-c", "exec timeout 120 firn ps --watch >/srv/watch"])?;
        for image in ["checkpoint/one", "checkpoint/two"] {
            let mut checkpoint = job.begin_checkpoint(image)?;
            ensure!(checkpoint.wait()?.success(), "{image} failed");
        }
        wait_for("the end of it", SOON, || {
            let seen = node.read("/srv/watch")?;
            let last = seen
                .rsplit_once("CONTAINER")
                .map(|(_, last)| last.contains("  running  "));
            Ok(last.unwrap_or(false).then_some(()))
        })?;
        watch.kill()?;
        watch.wait()?;
        let seen = node.read("/srv/watch")?;
        let lines: Vec<&str> = seen
            .lines()
            .filter(|line| line.contains("gpu-checkpoint"))
            .collect();
        ensure!(lines.len() >= 4, "{seen}");
        let (first, last) = (lines[0], lines[lines.len() - 1]);
        ensure!(
            first.contains("  checkpoint  0     2") && first.ends_with("-"),
            "{seen}"
        );
        ensure!(
            last.contains("  checkpoint  0     2") && last.ends_with(" s"),
            "{seen}"
        );
        host.no_faults()?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

fn a_suspended_container_names_what_resumes_it(platform: Platform) -> Result<()> {
    on([host(platform, "li-susp")?], |[host]| {
        let job = counter(host, "job", "0")?;
        host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
        let error = failure(job.checkpoint("checkpoint/job"))?;
        ensure!(error.contains("FIRN-GPU-SUSPENDED"), "{error}");
        let one = shown(host, "job")?;
        ensure!(
            one["state"] == "suspended" && one["resume"] == "ctr tasks resume job",
            "{one}"
        );
        let reason = one["reason"].as_str().context("no reason")?;
        ensure!(
            reason.starts_with("FIRN-") && reason.contains("CUDA_ERROR_UNKNOWN"),
            "{reason}"
        );
        host.no_faults()?;
        // The command is a command.
        host.node()
            .run(&["sh", "-c", one["resume"].as_str().context("no command")?])?;
        job.goes_on(3)?;
        ensure!(shown(host, "job")?["reason"].is_null());
        job.remove()?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        containers_are_shown_with_their_gpus [FORKY, TRIXIE];
        a_checkpoint_is_watched [FORKY];
        a_suspended_container_names_what_resumes_it [FORKY, TRIXIE];
        subjects::every_form_of_a_checkpoint_is_looked_at [FORKY, TRIXIE];
        images::checkpoints_are_listed_measured_and_removed [FORKY, TRIXIE];
        images::what_others_plant_is_no_checkpoint [FORKY, TRIXIE];
    })
}
