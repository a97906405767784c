//! Containers whose programs have firn's library between them and the driver: they are checkpointed,
//! restored, paused and moved as others, and a copy has the library of its source.
//!
//! Needs root.

use anyhow::{Result, ensure};
use firn_lab::{Container, GpuHost, SimGpu, cases, failure, matrix, nothing_left_but_metadata, on};
use firn_node::Platform;
use serde_json::Value;

/// Where a node has the library, and where a container has it.
const INSTALLED: &str = "/usr/local/bin/libfirn_cuda.so";
const INSIDE: &str = "/run/firn-cuda/libfirn_cuda.so";

const ANNOTATED: [&str; 2] = ["--annotation", "firn.dev/cuda=interpose"];

fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu), SimGpu::h200(gpu + 1)])
}

fn job<'h>(host: &'h GpuHost, options: &[&str]) -> Result<Container<'h>> {
    let job = Container::count_with(host, "job", &["0"], 1, options, &[])?;
    job.goes_on(3)?;
    Ok(job)
}

/// The digest of the library that its first process has mapped; none if it has none.
fn mapped(host: &GpuHost, job: &Container<'_>) -> Result<Option<String>> {
    let script = format!(
        "grep -q ' {INSIDE}$' /proc/{pid}/maps && sha256sum </proc/{pid}/root{INSIDE} || true",
        pid = job.pid()?
    );
    let shown = host.node().run(&["sh", "-c", &script])?.stdout;
    Ok(shown.split_whitespace().next().map(str::to_owned))
}

fn digest(host: &GpuHost, file: &str) -> Result<String> {
    let shown = host.node().run(&["sha256sum", file])?.stdout;
    Ok(shown.split_whitespace().next().unwrap_or_default().to_owned())
}

/// The processes with CUDA that the audit calls interposed, of all.
fn audited(host: &GpuHost) -> Result<(usize, usize)> {
    let report = host.firn(&["audit", "job"])?;
    let processes = report["processes"].as_array().into_iter().flatten();
    let cuda: Vec<&Value> = processes.filter(|process| process["cuda"] == true).collect();
    let interposed = cuda.iter().filter(|process| process["interposed"] == true);
    Ok((interposed.count(), cuda.len()))
}

/// A new version of firn comes between checkpoint and restore.
fn a_copy_has_the_library_of_its_source(platform: Platform) -> Result<()> {
    on(
        [host(platform, "ip-a", 1)?, host(platform, "ip-b", 3)?],
        |[a, b]| {
            let source = job(a, &ANNOTATED)?;
            let first = mapped(a, &source)?;
            ensure!(first == Some(digest(a, INSTALLED)?), "{first:?}");
            ensure!(audited(a)? == (1, 1), "the audit sees none");
            let loaded = source.exec(&["sh", "-c", "echo $LD_PRELOAD"])?;
            ensure!(loaded.trim() == INSIDE, "{loaded}");
            let refused = failure(source.exec(&["sh", "-c", &format!("echo >>{INSIDE}")]))?;
            ensure!(refused.contains("Read-only"), "{refused}");

            a.node()
                .run(&["sh", "-c", &format!("echo newer >>{INSTALLED}")])?;
            source.checkpoint("checkpoint/job")?;
            source.goes_on(3)?;
            ensure!(
                mapped(a, &source)? == first,
                "the library of a running container has changed"
            );
            source.remove()?;
            a.idle()?;

            // The other node has another library, and its operator wants it in no container.
            b.node()
                .run(&["sh", "-c", &format!("echo other >>{INSTALLED}")])?;
            b.configure("[cuda]\ninterpose = \"never\"\n")?;
            a.send_image("checkpoint/job", b)?;
            let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
            copy.goes_on(3)?;
            ensure!(mapped(b, &copy)? == first, "the copy has another library");
            ensure!(audited(b)? == (1, 1), "the audit sees none in the copy");
            let loaded = copy.exec(&["sh", "-c", "echo $LD_PRELOAD"])?;
            ensure!(loaded.trim() == INSIDE, "{loaded}");
            copy.checkpoints_again("checkpoint/job")?;
            copy.remove()?;
            b.idle()
        },
    )
}

fn pauses_and_moves_are_as_without(platform: Platform) -> Result<()> {
    on([host(platform, "ip-moves", 1)?], |[host]| {
        let options = [&ANNOTATED[..], &["--annotation", "firn.dev/pause=release-gpu"]].concat();
        let job = job(host, &options)?;
        job.task(&["pause"])?;
        job.task(&["resume"])?;
        job.goes_on(3)?;
        host.node().run(&["firn", "move-gpu", "job", "--gpus", "1"])?;
        let job = job.moved_before();
        job.goes_on(3)?;
        ensure!(audited(host)? == (1, 1), "the audit sees none");
        job.remove()?;
        host.idle()
    })
}

/// The operator decides before the annotation, and a container without GPUs never has it.
fn who_has_it_is_configured(platform: Platform) -> Result<()> {
    on([host(platform, "ip-who", 1)?], |[host]| {
        for (config, options, has_it) in [
            ("", &ANNOTATED[..], true),
            ("", &[], false),
            ("[cuda]\ninterpose = \"always\"\n", &[], true),
            ("[cuda]\ninterpose = \"never\"\n", &ANNOTATED[..], false),
        ] {
            host.configure(config)?;
            let job = job(host, options)?;
            ensure!(mapped(host, &job)?.is_some() == has_it, "{config}{options:?}");
            ensure!(audited(host)?.0 == usize::from(has_it), "{config}{options:?}");
            job.remove()?;
        }
        host.configure("[cuda]\ninterpose = \"always\"\n")?;
        let plain = Container::beat(host, "job", &ANNOTATED, "")?;
        let mounts = plain.exec(&["cat", "/proc/mounts"])?;
        ensure!(!mounts.contains(INSIDE), "{mounts}");
        plain.remove()?;
        host.idle()
    })
}

/// A container that is to have it and cannot is not created, and nothing is left of it.
fn a_node_without_the_library_refuses(platform: Platform) -> Result<()> {
    on([host(platform, "ip-none", 1)?], |[host]| {
        host.node().run(&["mv", INSTALLED, "/tmp/library"])?;
        let output = failure(Container::count_with(host, "job", &["0"], 1, &ANNOTATED, &[]))?;
        ensure!(
            output.contains("FIRN-CUDA-LIBRARY: ") && output.contains("install firn's libfirn_cuda.so"),
            "{output}"
        );
        nothing_left_but_metadata(host, "job")?;
        let job = job(host, &[])?;
        ensure!(mapped(host, &job)?.is_none(), "it has a library");
        job.remove()?;
        host.node().run(&["mv", "/tmp/library", INSTALLED])?;
        host.idle()
    })
}

/// An image whose library is damaged or not there is refused before runc is called.
fn a_damaged_library_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "ip-bad", 1)?], |[host]| {
        let job = job(host, &ANNOTATED)?;
        job.checkpoint_and_exit("/srv/image")?;
        let _ = job.task(&["delete"]);
        host.watch_runc()?;
        let library = "/srv/image/cuda-library.img";
        host.node().run(&["cp", library, "/tmp/library"])?;
        for (damage, code) in [
            (
                format!("printf x | dd of={library} bs=1 seek=100 conv=notrunc"),
                "FIRN-IMAGE-CORRUPT",
            ),
            (format!("rm {library}"), "FIRN-IMAGE-TRUNCATED"),
            (format!("ln -sf /etc/passwd {library}"), "FIRN-IMAGE-"),
        ] {
            host.node().run(&["sh", "-c", &damage])?;
            let restore = ["firn", "restore", "--dir", "/srv/image", "job"];
            let output = failure(host.node().run(&restore))?;
            ensure!(output.contains(code), "{damage}: {output}");
            ensure!(!host.runc_has("restore")?, "runc was called");
            host.node()
                .run(&["cp", "--remove-destination", "/tmp/library", library])?;
        }
        host.node()
            .run(&["firn", "restore", "--dir", "/srv/image", "job"])?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_copy_has_the_library_of_its_source [FORKY, FORKY_V2, TRIXIE];
        pauses_and_moves_are_as_without [FORKY, TRIXIE];
        who_has_it_is_configured [FORKY];
        a_node_without_the_library_refuses [FORKY];
        a_damaged_library_is_refused [FORKY];
    })
}
