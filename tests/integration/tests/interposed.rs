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

/// A pause is by the driver alone, and so is a move to a GPU that the container did not have. For an exchange
/// of its GPUs the library takes the memory out, and firn-gpu copies it.
fn memory_moves_by_the_library(platform: Platform) -> Result<()> {
    on([host(platform, "ip-moves", 1)?], |[host]| {
        let options = [&ANNOTATED[..], &["--annotation", "firn.dev/pause=release-gpu"]].concat();
        let one = job(host, &options)?;
        one.task(&["pause"])?;
        one.task(&["resume"])?;
        one.goes_on(3)?;
        ensure!(!is_detached(&one)?, "a pause by the library");
        host.node().run(&["firn", "move-gpu", "job", "--gpus", "1"])?;
        let one = one.moved_before();
        one.goes_on(3)?;
        ensure!(!is_detached(&one)?, "another GPU by the library");
        one.remove()?;

        let job = on_first_of_two(host)?;
        for uuid in host.uuids().iter().rev().chain(host.uuids().iter().rev()) {
            exchange(host)?;
            job.goes_on(3)?;
            ensure!(is_detached(&job)?, "a move by the driver");
            ensure!(job.gpus_in_use()? == [uuid.clone()], "it is not on {uuid}");
            ensure!(audited(host)? == (1, 1), "the audit sees none");
        }
        ensure!(host.gpu_memory()?[1] == 0, "memory is left on the old GPU");
        ensure!(pieces_held(host)? == 0, "the shim keeps memory");
        // What was moved is checkpointed as before.
        job.checkpoints_again("checkpoint/job")?;
        job.remove()?;
        host.idle()
    })
}

/// A job with memory on the first of its two GPUs.
fn on_first_of_two(host: &GpuHost) -> Result<Container<'_>> {
    let job = Container::count_with(host, "job", &["0", "1"], 1, &ANNOTATED, &["--gpu", "0"])?;
    job.goes_on(3)?;
    Ok(job)
}

fn exchange(host: &GpuHost) -> Result<()> {
    let pairs = exchanged(host);
    host.node()
        .run(&["firn", "move-gpu", "job", "--gpus", &pairs])
        .map(drop)
}

/// Whether the last transaction took memory out and put it back.
fn is_detached(job: &Container<'_>) -> Result<bool> {
    let phases: Vec<String> = job.timings()?.into_iter().map(|(name, _)| name).collect();
    Ok(phases.iter().any(|phase| phase == "gpu-attach"))
}

/// Descriptors of GPU memory that the job's shim has.
fn pieces_held(host: &GpuHost) -> Result<usize> {
    let list = format!("ls -l /proc/{}/fd", host.shim_of("job")?.pid);
    let listed = host.node().run(&["sh", "-c", &list])?.stdout;
    Ok(listed.matches("memfd:simgpu").count())
}

/// The driver fails in each of its calls while the memory is out: the job continues where it was.
fn a_move_that_fails_puts_memory_back(platform: Platform) -> Result<()> {
    on([host(platform, "ip-back", 1)?], |[host]| {
        let job = on_first_of_two(host)?;
        let before = host.uuids()[..1].to_vec();
        for call in ["lock", "checkpoint", "restore"] {
            let times = if call == "restore" { "2" } else { "1" };
            let error = ["--error", "CUDA_ERROR_UNKNOWN", "--times", times];
            host.fault(&[&["--call", call][..], &error].concat())?;
            let output = failure(exchange(host))?;
            ensure!(output.contains("FIRN-"), "{output}");
            host.no_faults()?;
            job.goes_on(3)?;
            ensure!(is_detached(&job)?, "a move by the driver");
            ensure!(job.status()? == "RUNNING", "after {call}");
            ensure!(job.gpus_in_use()? == before, "after {call}");
        }
        exchange(host)?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// Its driver cannot restore it on either GPU: it stays parked with its memory in firn's hands, is not
/// checkpointed, and continues when it is resumed.
fn a_job_whose_memory_is_out_is_resumed(platform: Platform) -> Result<()> {
    on([host(platform, "ip-out", 1)?], |[host]| {
        let job = on_first_of_two(host)?;
        host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
        let output = failure(exchange(host))?;
        ensure!(output.contains("FIRN-"), "{output}");
        ensure!(job.status()? == "PAUSED", "it runs without its memory");
        job.stands_still()?;
        let refused = failure(job.task(&["checkpoint"]))?;
        ensure!(refused.contains("FIRN-GPU-SPLIT"), "{refused}");
        host.no_faults()?;
        job.task(&["resume"])?;
        job.goes_on(3)?;
        ensure!(job.gpus_in_use()? == host.uuids()[..1], "it has not come back");
        job.checkpoints_again("checkpoint/job")?;
        job.remove()?;
        host.idle()
    })
}

/// Each of the two GPUs in the other one's place.
fn exchanged(host: &GpuHost) -> String {
    let uuids = host.uuids();
    format!("{0}={1},{1}={0}", uuids[0], uuids[1])
}

/// What the driver alone loses is moved: a process on two GPUs whose owner asserts nothing. Its checkpoint is
/// by the driver, and refused as before; so is the move of one without the library.
fn a_process_on_two_gpus_exchanges_them(platform: Platform) -> Result<()> {
    on([host(platform, "ip-two", 1)?], |[host]| {
        let arguments = ["--gpu", "0,1"];
        let plain = Container::count_with(host, "job", &["0", "1"], 2, &[], &arguments)?;
        plain.goes_on(3)?;
        let refused = failure(exchange(host))?;
        ensure!(refused.contains("FIRN-PEER"), "{refused}");
        plain.goes_on(3)?;
        plain.remove()?;

        let job = Container::count_with(host, "job", &["0", "1"], 2, &ANNOTATED, &arguments)?;
        job.goes_on(3)?;
        for _ in 0..2 {
            exchange(host)?;
            job.goes_on(3)?;
            ensure!(is_detached(&job)?, "a move by the driver");
            ensure!(job.gpus_in_use()?.len() == 2, "{:?}", job.gpus_in_use()?);
        }
        let refused = failure(job.task(&["checkpoint"]))?;
        ensure!(refused.contains("FIRN-PEER"), "{refused}");
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// Where the library cannot take memory out the driver moves it, if it can: a process without the library.
fn what_the_library_cannot_take_the_driver_moves(platform: Platform) -> Result<()> {
    on([host(platform, "ip-less", 1)?], |[host]| {
        let script = |gpus: &str| {
            let counter = format!("gpu-counter --gpu {gpus} --out /counter.log --interval-ms 50 --mib 8");
            format!("unset LD_PRELOAD; exec {counter}")
        };
        let job = Container::script(host, "job", &["0"], 1, &ANNOTATED, &script("0"))?;
        job.goes_on(3)?;
        host.node().run(&["firn", "move-gpu", "job", "--gpus", "1"])?;
        let job = job.moved_before();
        job.goes_on(3)?;
        ensure!(!is_detached(&job)?, "a process without the library");
        job.remove()?;

        let job = Container::script(host, "job", &["0", "1"], 2, &ANNOTATED, &script("0,1"))?;
        job.goes_on(3)?;
        let refused = failure(
            host.node()
                .run(&["firn", "move-gpu", "job", "--gpus", &exchanged(host)]),
        )?;
        ensure!(refused.contains("FIRN-PEER"), "{refused}");
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// One that ends while its memory is out leaves none.
fn a_job_that_ends_meanwhile_leaves_no_memory(platform: Platform) -> Result<()> {
    on([host(platform, "ip-end", 1)?], |[host]| {
        let job = on_first_of_two(host)?;
        host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
        failure(exchange(host))?;
        host.no_faults()?;
        ensure!(pieces_held(host)? > 0, "nobody keeps the memory");
        job.task(&["kill", "--signal", "SIGKILL"])?;
        job.becomes("STOPPED")?;
        ensure!(pieces_held(host)? == 0, "the shim keeps memory");
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
        memory_moves_by_the_library [FORKY, FORKY_V2, TRIXIE];
        a_move_that_fails_puts_memory_back [FORKY];
        a_job_whose_memory_is_out_is_resumed [FORKY];
        a_job_that_ends_meanwhile_leaves_no_memory [FORKY];
        a_process_on_two_gpus_exchanges_them [FORKY];
        what_the_library_cannot_take_the_driver_moves [FORKY];
        who_has_it_is_configured [FORKY];
        a_node_without_the_library_refuses [FORKY];
        a_damaged_library_is_refused [FORKY];
    })
}
