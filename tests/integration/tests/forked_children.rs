//! Children that were forked from a CUDA process keep its GPUs open and mapped, and use no CUDA themselves:
//! data loaders and compile workers of PyTorch. They move with their parent, by firn's plugin for CRIU.
//!
//! Needs root.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use firn_lab::{Container, GpuHost, SimGpu, cases, failure, matrix, nothing_left, on};
use firn_node::Platform;

const PLUGIN: &str = "/usr/local/bin/libfirn_criu.so";

/// What the children of the first process have of NVIDIA's nodes: descriptors with the device's number, and
/// names of mapped files.
const HELD: &str = "for p in /proc/[0-9]*; do grep -q '^PPid:[[:space:]]*1$' $p/status || continue; \
    for f in $p/fd/*; do name=$(readlink $f); case $name in /dev/nvidia*) \
    echo \"fd ${f##*/} $name $(stat -L -c %t:%T $f)\";; esac; done; \
    sed -n 's:.* \\(/[^ ]*\\).*:mapped \\1:p' $p/maps | grep -e nvidia -e zero | sort -u; done";

/// A node with one GPU that no other node has.
fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
}

fn job<'h>(host: &'h GpuHost, habit: &str) -> Result<Container<'h>> {
    let job = Container::count(host, "job", &["0"], 1, &[habit])?;
    job.goes_on(3)?;
    Ok(job)
}

fn held(job: &Container<'_>, of: &str) -> Result<Vec<String>> {
    let held = job.exec(&["sh", "-c", HELD])?;
    Ok(held
        .lines()
        .filter(|line| line.starts_with(of))
        .map(str::to_owned)
        .collect())
}

/// The child of a restored job has the same descriptors, of this node's devices, and of the mappings zeroed
/// memory.
fn has_nodes_of(copy: &Container<'_>, host: &GpuHost, source: &[String]) -> Result<()> {
    let numbers = |all: &[String]| -> Vec<String> {
        let of = |line: &String| line.split(' ').nth(1).unwrap_or_default().to_owned();
        all.iter().map(of).collect()
    };
    let open = held(copy, "fd ")?;
    ensure!(numbers(&open) == numbers(source), "{open:?}, not {source:?}");
    for line in &open {
        let words: Vec<&str> = line.split(' ').collect();
        let device = host.node().run(&["stat", "-c", "%t:%T", words[2]])?.stdout;
        ensure!(device.trim() == words[3], "{line} is not {device} of its node");
    }
    let mapped = held(copy, "mapped ")?;
    ensure!(
        mapped.iter().all(|file| file.contains("zero")) && !mapped.is_empty(),
        "{mapped:?}"
    );
    Ok(())
}

fn children_move_with_their_parent(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "fc-a", 1)?, host(platform, "fc-b", 2)?];
    on(hosts, |[a, b]| {
        let source = job(a, "--fork")?;
        let before = held(&source, "")?;
        let open = held(&source, "fd ")?;
        ensure!(open.len() >= 3, "the child has only {open:?}");
        ensure!(before.len() > open.len(), "the child has nothing mapped");
        let audit = a.node().run(&["firn", "audit", "job", "--json"])?.stdout;
        ensure!(audit.contains("inherited_gpus"), "{audit}");
        source.checkpoint("checkpoint/job")?;
        source.goes_on(3)?;
        let after = held(&source, "")?;
        ensure!(after == before, "in the source {before:?} became {after:?}");
        source.remove()?;
        a.idle()?;

        a.send_image("checkpoint/job", b)?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        has_nodes_of(&copy, b, &open)?;
        copy.checkpoints_again("checkpoint/job")?;
        copy.remove()?;
        b.idle()
    })
}

fn a_node_without_the_plugin_refuses(platform: Platform) -> Result<()> {
    on([host(platform, "fc-none", 1)?], |[host]| {
        host.watch_runc()?;
        let job = job(host, "--fork")?;
        host.node().run(&["mv", PLUGIN, "/tmp/plugin"])?;
        let output = failure(job.checkpoint("checkpoint/job"))?;
        ensure!(
            output.contains("FIRN-CRIU-PLUGIN:") && output.contains("(gpu-counter)"),
            "{output}"
        );
        ensure!(!host.runc_has("checkpoint")?, "runc was called");
        let audit = host.node().run(&["sh", "-c", "firn audit job || true"])?.stdout;
        ensure!(audit.contains("FIRN-CRIU-PLUGIN"), "{audit}");
        job.goes_on(3)?;
        host.node().run(&["mv", "/tmp/plugin", PLUGIN])?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;

        host.node().run(&["mv", PLUGIN, "/tmp/plugin"])?;
        let output = failure(Container::restore(host, "job", "checkpoint/job", 1))?;
        ensure!(output.contains("FIRN-CRIU-PLUGIN:"), "{output}");
        // ctr leaves the snapshot of a container that it could not start.
        host.node()
            .run(&["sh", "-c", "ctr containers rm job; ctr snapshots rm job; true"])?;
        nothing_left(host, "job")?;
        host.node().run(&["mv", "/tmp/plugin", PLUGIN])?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        copy.remove()?;
        host.idle()
    })
}

/// A child that has opened a node itself may use the driver: it is not known to have inherited all.
fn a_child_that_has_opened_a_gpu_itself_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "fc-own", 1)?], |[host]| {
        host.watch_runc()?;
        let job = job(host, "--fork-and-open")?;
        let output = failure(job.checkpoint("checkpoint/job"))?;
        ensure!(
            output.contains("FIRN-GPU-FD:") && output.contains("(gpu-counter)"),
            "{output}"
        );
        ensure!(!host.runc_has("checkpoint")?, "runc was called");
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

fn main() -> ExitCode {
    matrix::run(&cases! {
        children_move_with_their_parent [FORKY, TRIXIE];
        a_node_without_the_plugin_refuses [FORKY];
        a_child_that_has_opened_a_gpu_itself_is_refused [FORKY];
    })
}
