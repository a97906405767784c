//! The main job: a counter in GPU memory goes on after a checkpoint, and on another GPU after a restore.
//!
//! Needs root. Every story is told with `ctr` on real containerd, runc and CRIU; only the driver is simulated.

use std::time::Duration;

use anyhow::{Context, Result};
use firn_lab::{Container, FIRN, GpuHost, SHARES_NOTHING, STOCK, SimGpu, on};
use firn_node::{Cgroup, Suite, wait_for};

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
    options: &[],
    arguments: &["--gpu", "0,1"],
};
const TWO_THREADS: Job = Job {
    gpus: &["0"],
    counters: 2,
    options: &[],
    arguments: &["--threads", "2"],
};

/// A node with two GPUs that no other node has.
fn host(suite: Suite, cgroup: Cgroup, name: &str, first: u32) -> Result<GpuHost> {
    let gpus = [SimGpu::h200(first), SimGpu::h200(first + 1)];
    GpuHost::for_test(suite, cgroup, name, &gpus)
}

/// Two nodes whose GPUs have nothing in common.
fn pair(suite: Suite, cgroup: Cgroup, name: &str) -> Result<[GpuHost; 2]> {
    Ok([
        host(suite, cgroup, &format!("{name}-a"), 1)?,
        host(suite, cgroup, &format!("{name}-b"), 3)?,
    ])
}

/// UUIDs of the GPUs that a job gets on this node.
fn expected(host: &GpuHost, job: &Job) -> Vec<String> {
    host.uuids()[..job.gpus.len()].to_vec()
}

/// The whole way: the source goes on after its checkpoint, the copy goes on on other GPUs of another node.
fn moves(suite: Suite, cgroup: Cgroup, name: &str, job: &Job) -> Result<()> {
    on(pair(suite, cgroup, name)?, |[a, b]| {
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
        b.idle()
    })
}

/// A process that only watches GPUs, by NVML, is known to the driver. It shares no memory, and moves with the one beside it.
#[test]
fn a_monitor_moves_with_the_process_beside_it() -> Result<()> {
    let sees = |job: &Container<'_>| -> Result<()> {
        let lines = || -> Result<usize> { Ok(job.exec(&["cat", "/dev/shm/monitor.log"])?.lines().count()) };
        let before = lines()?;
        wait_for("the monitor to go on", Duration::from_secs(30), || {
            Ok((lines()? > before + 2).then_some(()))
        })
    };
    on(pair(Suite::Forky, Cgroup::Auto, "mv-mon")?, |[a, b]| {
        let grant = a.ctr_gpu_options(&["0"])?;
        let mut options = vec!["--runtime", FIRN];
        options.extend(grant.iter().map(String::as_str));
        let script = "gpu-sample nvml >/dev/shm/monitor.log & exec gpu-counter --out /counter.log --interval-ms 50 --mib 8";
        let source = Container::run(a, "job", &options, &["sh", "-c", script])?.counting(1);
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

#[test]
fn a_process_moves_to_another_gpu_on_forky() -> Result<()> {
    moves(Suite::Forky, Cgroup::Auto, "mv-f1", &ONE)
}

#[test]
fn a_process_moves_to_another_gpu_on_trixie() -> Result<()> {
    moves(Suite::Trixie, Cgroup::Auto, "mv-t1", &ONE)
}

#[test]
fn a_process_moves_to_another_gpu_on_forky_with_cgroup_v2() -> Result<()> {
    moves(Suite::Forky, Cgroup::V2, "mv-f1v2", &ONE)
}

#[test]
fn a_process_moves_to_another_gpu_on_trixie_with_cgroup_v2() -> Result<()> {
    moves(Suite::Trixie, Cgroup::V2, "mv-t1v2", &ONE)
}

#[test]
fn four_processes_move_on_forky() -> Result<()> {
    moves(Suite::Forky, Cgroup::Auto, "mv-f4", &FOUR_PROCESSES)
}

#[test]
fn four_processes_move_on_trixie() -> Result<()> {
    moves(Suite::Trixie, Cgroup::Auto, "mv-t4", &FOUR_PROCESSES)
}

#[test]
fn a_process_on_two_gpus_moves_on_forky() -> Result<()> {
    moves(Suite::Forky, Cgroup::Auto, "mv-f2", &TWO_GPUS)
}

#[test]
fn a_process_on_two_gpus_moves_on_trixie() -> Result<()> {
    moves(Suite::Trixie, Cgroup::Auto, "mv-t2", &TWO_GPUS)
}

#[test]
fn two_threads_of_a_process_move() -> Result<()> {
    moves(Suite::Forky, Cgroup::Auto, "mv-f2t", &TWO_THREADS)
}

/// What a user does with a container, done with one that was restored under another id; then it moves back.
fn restored_is_ordinary(suite: Suite, name: &str) -> Result<()> {
    on(pair(suite, Cgroup::Auto, name)?, |[a, b]| {
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

        // containerd 1.7 leaves the task out of an image whose spec its store has already, and reports success.
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

#[test]
fn a_restored_container_is_ordinary_and_moves_back_on_forky() -> Result<()> {
    restored_is_ordinary(Suite::Forky, "mv-fo")
}

#[test]
fn a_restored_container_is_ordinary_and_moves_back_on_trixie() -> Result<()> {
    restored_is_ordinary(Suite::Trixie, "mv-to")
}

/// A container that its user has paused is checkpointed and stays paused, and goes on when it is resumed.
fn paused_stays_paused(suite: Suite, cgroup: Cgroup, name: &str) -> Result<()> {
    on([host(suite, cgroup, name, 1)?], |[host]| {
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

#[test]
fn a_paused_container_stays_paused_on_forky() -> Result<()> {
    paused_stays_paused(Suite::Forky, Cgroup::Auto, "mv-fp")
}

#[test]
fn a_paused_container_stays_paused_on_trixie_with_cgroup_v2() -> Result<()> {
    paused_stays_paused(Suite::Trixie, Cgroup::V2, "mv-tp")
}

/// ctr 1.7 tells only containerd's own runtime that the container is to end: there firn stands in under its name.
fn runtime_of_exit(suite: Suite) -> &'static str {
    match suite {
        Suite::Trixie => STOCK,
        Suite::Forky => FIRN,
    }
}

/// A checkpoint that ends the container leaves a complete image in a directory, and a free GPU.
fn ends_with_its_checkpoint(suite: Suite, cgroup: Cgroup, name: &str, job: &Job) -> Result<()> {
    on([host(suite, cgroup, name, 1)?], |[host]| {
        host.drop_in()?;
        let runtime = runtime_of_exit(suite);
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
        host.idle()?;
        for file in ["inventory.img", "pstree.img", "firn.json"] {
            let path = host.node().path(format!("/tmp/image/{file}"));
            assert!(path.metadata().is_ok_and(|file| file.len() > 0), "no {file}");
        }
        Ok(())
    })
}

#[test]
fn a_container_ends_with_its_checkpoint_on_forky() -> Result<()> {
    ends_with_its_checkpoint(Suite::Forky, Cgroup::V2, "mv-fe", &FOUR_PROCESSES)
}

#[test]
fn a_container_ends_with_its_checkpoint_on_trixie() -> Result<()> {
    ends_with_its_checkpoint(Suite::Trixie, Cgroup::Auto, "mv-te", &ONE)
}

/// The image of a container that ended with its checkpoint is restored: on the same node, then on another.
fn restored_after_exit(suite: Suite, name: &str, job: &Job) -> Result<()> {
    on(pair(suite, Cgroup::Auto, name)?, |[a, b]| {
        let runtime = runtime_of_exit(suite);
        a.drop_in()?;
        b.drop_in()?;
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

#[test]
fn a_container_that_ended_is_restored_here_and_elsewhere_on_forky() -> Result<()> {
    restored_after_exit(Suite::Forky, "mv-fx", &ONE)
}

#[test]
fn a_container_that_ended_is_restored_here_and_elsewhere_on_trixie() -> Result<()> {
    restored_after_exit(Suite::Trixie, "mv-tx", &TWO_GPUS)
}

/// `ctr containers restore` gives the copy the cgroup of its source; while that runs, the copy gets one of its own.
fn beside_its_source(suite: Suite, cgroup: Cgroup, name: &str) -> Result<()> {
    on([host(suite, cgroup, name, 1)?], |[host]| {
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

#[test]
fn a_copy_runs_beside_its_source_on_forky_with_cgroup_v2() -> Result<()> {
    beside_its_source(Suite::Forky, Cgroup::V2, "mv-fb")
}

#[test]
fn a_copy_runs_beside_its_source_on_trixie() -> Result<()> {
    beside_its_source(Suite::Trixie, Cgroup::Auto, "mv-tb")
}
