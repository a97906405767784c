//! The main job: a counter in GPU memory continues after a checkpoint, and on another GPU after a restore.
//!
//! Needs root. Every story uses `ctr` on real containerd, runc and CRIU; only the driver is simulated.

use std::time::Duration;

use anyhow::{Context, Result};
use firn_image::manifest::Manifest;
use firn_lab::{Claims, Container, FIRN, GpuHost, SHARES_NOTHING, SimGpu, cases, matrix, on};
use firn_node::{Platform, Suite, wait_for};

/// What is moved.
struct Job {
    gpus: &'static [&'static str],
    counters: usize,
    options: &'static [&'static str],
    arguments: &'static [&'static str],
}

const ONE: Job = Job {
    gpus: &["0"],
    counters: 1,
    options: &[],
    arguments: &[],
};
const FOUR_PROCESSES: Job = Job {
    gpus: &["0"],
    counters: 4,
    options: &SHARES_NOTHING,
    arguments: &["--procs", "4"],
};
const TWO_GPUS: Job = Job {
    gpus: &["0", "1"],
    counters: 2,
    options: &["--annotation", "firn.dev/peer-access=none"],
    arguments: &["--gpu", "0,1"],
};
const TWO_THREADS: Job = Job {
    gpus: &["0"],
    counters: 2,
    options: &[],
    arguments: &["--threads", "2"],
};

/// A node with two GPUs that no other node has.
fn host(platform: Platform, name: &str, first: u32) -> Result<GpuHost> {
    let gpus = [SimGpu::h200(first), SimGpu::h200(first + 1)];
    GpuHost::for_test(platform, name, &gpus)
}

/// Two nodes whose GPUs have nothing in common.
fn pair(platform: Platform, name: &str) -> Result<[GpuHost; 2]> {
    Ok([
        host(platform, &format!("{name}-a"), 1)?,
        host(platform, &format!("{name}-b"), 3)?,
    ])
}

/// UUIDs of the GPUs that a job gets on this node.
fn expected(host: &GpuHost, job: &Job) -> Vec<String> {
    host.uuids()[..job.gpus.len()].to_vec()
}

/// The whole way: the source continues after its checkpoint, the copy continues on other GPUs of another
/// node.
fn moves(platform: Platform, name: &str, job: &Job) -> Result<()> {
    on(pair(platform, name)?, |[a, b]| {
        let source = Container::count_with(a, "job", job.gpus, job.counters, job.options, job.arguments)?;
        let before = source.goes_on(3)?;
        assert_eq!(source.gpus_in_use()?, expected(a, job));

        source.checkpoint("checkpoint/job")?;
        source.goes_on(3)?;
        assert_eq!(source.status()?, "RUNNING");
        assert_eq!(
            source.gpus_in_use()?,
            expected(a, job),
            "memory is not back where it was"
        );
        source.remove()?;
        a.idle()?;

        a.send_image("checkpoint/job", b)?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", job.counters)?;
        let after = copy.goes_on(5)?;
        let carried = before.reached(job.counters);
        assert!(
            after.0.iter().any(|line| line.iter < carried),
            "the copy's log does not begin at the source"
        );
        assert_eq!(
            copy.gpus_in_use()?,
            expected(b, job),
            "memory is not on the target's GPUs"
        );
        assert_eq!(copy.status()?, "RUNNING");
        copy.remove()?;
        let claims = Claims::of_ctr(a, FIRN)?;
        claims.works("`containers checkpoint --task`, the container continues")?;
        claims.works("`containers restore`, on another node and GPU")?;
        b.idle()
    })
}

/// A process that only watches GPUs, by NVML, is known to the driver. It shares no memory, and moves with the
/// CUDA process.
fn an_nvml_monitor_moves_with_the_cuda_process(platform: Platform) -> Result<()> {
    let sees = |job: &Container<'_>| -> Result<()> {
        let lines = || -> Result<usize> { Ok(job.exec(&["cat", "/dev/shm/monitor.log"])?.lines().count()) };
        let before = lines()?;
        wait_for("the monitor to continue", Duration::from_secs(30), || {
            Ok((lines()? > before + 2).then_some(()))
        })
    };
    on(pair(platform, "mv-mon")?, |[a, b]| {
        let script = "gpu-sample nvml >/dev/shm/monitor.log & exec gpu-counter --out /counter.log \
                      --interval-ms 50 --mib 8";
        let source = Container::script(a, "job", &["0"], 1, &[], script)?;
        source.goes_on(3)?;
        sees(&source)?;
        source.checkpoint("checkpoint/job")?;
        source.goes_on(3)?;
        sees(&source)?;
        source.remove()?;
        a.idle()?;

        a.send_image("checkpoint/job", b)?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        sees(&copy)?;
        assert_eq!(copy.gpus_in_use()?, expected(b, &ONE));
        copy.remove()?;
        b.idle()
    })
}

fn a_process_moves_to_another_gpu(platform: Platform) -> Result<()> {
    moves(platform, "mv-one", &ONE)
}

fn four_processes_move(platform: Platform) -> Result<()> {
    moves(platform, "mv-four", &FOUR_PROCESSES)
}

fn a_process_on_two_gpus_moves(platform: Platform) -> Result<()> {
    moves(platform, "mv-gpus", &TWO_GPUS)
}

fn two_threads_of_a_process_move(platform: Platform) -> Result<()> {
    moves(platform, "mv-threads", &TWO_THREADS)
}

/// What a user does with a container, done with one that was restored under another id; then it moves back.
fn a_restored_container_is_ordinary_and_moves_back(platform: Platform) -> Result<()> {
    on(pair(platform, "mv-back")?, |[a, b]| {
        let source = Container::count(a, "job", ONE.gpus, 1, &[])?;
        source.goes_on(3)?;
        source.checkpoint("checkpoint/job")?;
        source.remove()?;
        a.send_image("checkpoint/job", b)?;

        let (copy, _) = Container::restore(b, "copy", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        assert!(copy.exec(&["cat", "/proc/1/comm"])?.contains("gpu-counter"));
        let nodes = copy.exec(&["ls", "/dev"])?;
        assert!(nodes.contains("nvidia0") && !nodes.contains("nvidia1"), "{nodes}");
        assert_eq!(copy.pids()?, [copy.pid()?.to_string()]);
        let metrics = copy.task(&["metrics"])?;
        assert!(
            metrics.contains("pids.current") || metrics.contains("pids"),
            "{metrics}"
        );
        copy.task(&["pause"])?;
        copy.stands_still()?;
        copy.task(&["resume"])?;
        copy.goes_on(3)?;

        // containerd 1.7 leaves the task out of an image whose spec its store has already, and reports
        // success.
        b.remove_image("checkpoint/job")?;
        copy.checkpoint("checkpoint/copy")?;
        copy.goes_on(3)?;
        copy.task(&["kill", "--signal", "SIGKILL"])?;
        copy.becomes("STOPPED")?;
        assert_eq!(copy.exit_code()?, 128 + 9);
        copy.forget()?;
        b.idle()?;

        a.remove_image("checkpoint/job")?;
        b.send_image("checkpoint/copy", a)?;
        let (back, _) = Container::restore(a, "back", "checkpoint/copy", 1)?;
        let back = back.moved_before();
        back.goes_on(3)?;
        assert_eq!(back.gpus_in_use()?, expected(a, &ONE));
        back.remove()?;
        a.idle()
    })
}

/// A container that its user has paused is checkpointed and stays paused, and continues when it is resumed.
fn a_paused_container_stays_paused(platform: Platform) -> Result<()> {
    on([host(platform, "mv-paused", 1)?], |[host]| {
        let job = Container::count(host, "job", ONE.gpus, 1, &[])?;
        job.goes_on(3)?;
        job.task(&["pause"])?;
        job.task(&["checkpoint"])?;
        assert_eq!(job.status()?, "PAUSED");
        job.stands_still()?;
        assert_eq!(job.gpus_in_use()?, expected(host, &ONE));
        job.task(&["resume"])?;
        assert_eq!(job.status()?, "RUNNING");
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// A checkpoint that ends the container leaves a complete image in a directory, and a free GPU.
fn a_container_ends_with_its_checkpoint(platform: Platform) -> Result<()> {
    on([host(platform, "mv-end", 1)?], |[host]| {
        let job = match platform.suite {
            Suite::Forky => &FOUR_PROCESSES,
            Suite::Trixie | Suite::Noble => &ONE,
        };
        let runtime = host.runtime_for_options()?;
        let source = Container::count_with(
            host,
            "job",
            job.gpus,
            job.counters,
            &[job.options, &["--runtime", runtime]].concat(),
            job.arguments,
        )?;
        source.goes_on(3)?;
        source.checkpoint_and_exit("/tmp/image")?;
        source.becomes("STOPPED")?;
        assert_eq!(source.exit_code()?, 128 + 9);
        source.forget()?;
        Claims::of_ctr(host, runtime)?.works("`tasks checkpoint --exit`")?;
        host.idle()?;
        // Every file that the manifest lists, by its checksum.
        let image = host.node().path("/tmp/image");
        let manifest = Manifest::read(&image)?.context("no manifest")?;
        assert_eq!(manifest.processes.len(), job.counters);
        Ok(manifest.verify_images(&image).map(drop)?)
    })
}

/// The image of a container that ended with its checkpoint is restored: on the same node, then on another.
fn a_container_that_ended_is_restored_here_and_elsewhere(platform: Platform) -> Result<()> {
    on(pair(platform, "mv-ended")?, |[a, b]| {
        let job = match platform.suite {
            Suite::Forky => &ONE,
            Suite::Trixie | Suite::Noble => &TWO_GPUS,
        };
        let runtime = a.runtime_for_options()?;
        b.runtime_for_options()?;
        let source = Container::count_with(
            a,
            "job",
            job.gpus,
            job.counters,
            &[job.options, &["--runtime", runtime]].concat(),
            job.arguments,
        )?;
        source.goes_on(3)?;
        source.checkpoint_and_exit_to("checkpoint/job", runtime)?;
        source.becomes("STOPPED")?;
        let last = source.lines()?.reached(job.counters);
        source.remove()?;
        a.idle()?;

        let (here, _) = Container::restore(a, "job", "checkpoint/job", job.counters)?;
        let lines = here.goes_on(3)?;
        // This image was copied after the dump: not one iteration is missing.
        assert_eq!(lines.fault(), None);
        assert!(lines.reached(job.counters) >= last + 3);
        assert_eq!(here.gpus_in_use()?, expected(a, job));
        here.remove()?;
        a.idle()?;

        a.send_image("checkpoint/job", b)?;
        let (there, _) = Container::restore(b, "job", "checkpoint/job", job.counters)?;
        assert_eq!(there.goes_on(3)?.fault(), None);
        assert_eq!(there.gpus_in_use()?, expected(b, job));
        there.remove()?;
        b.idle()
    })
    .context("a container that ended with its checkpoint")
}

/// `ctr containers restore` gives the copy the cgroup of its source; while that runs, the copy gets one of
/// its own.
fn a_copy_runs_next_to_its_source(platform: Platform) -> Result<()> {
    on([host(platform, "mv-copy", 1)?], |[host]| {
        let source = Container::count(host, "job", ONE.gpus, 1, &[])?;
        source.goes_on(3)?;
        source.checkpoint("checkpoint/job")?;
        let (copy, _) = Container::restore(host, "copy", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        source.task(&["pause"])?;
        source.stands_still()?;
        copy.goes_on(3)?;
        source.task(&["resume"])?;
        copy.remove()?;
        source.goes_on(3)?;
        source.remove()?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        an_nvml_monitor_moves_with_the_cuda_process [FORKY];
        a_process_moves_to_another_gpu [FORKY, TRIXIE, FORKY_V2, TRIXIE_V2];
        four_processes_move [FORKY, TRIXIE];
        a_process_on_two_gpus_moves [FORKY, TRIXIE];
        two_threads_of_a_process_move [FORKY];
        a_restored_container_is_ordinary_and_moves_back [FORKY, TRIXIE];
        a_paused_container_stays_paused [FORKY, TRIXIE_V2];
        a_container_ends_with_its_checkpoint [FORKY_V2, TRIXIE];
        a_container_that_ended_is_restored_here_and_elsewhere [FORKY, TRIXIE];
        a_copy_runs_next_to_its_source [FORKY_V2, TRIXIE];
    })
}
