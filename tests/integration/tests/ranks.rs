//! Jobs of several ranks in one container: processes that compute on a GPU each and talk over TCP. With the
//! annotation `firn.dev/nccl: sockets` such a job is checkpointed and moved with its connections; without it
//! is refused.
//!
//! Needs root.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{BUNDLES, Container, GpuHost, SimGpu, cases, failure, matrix, nothing_left, on};
use firn_node::{Platform, wait_for};

const SOCKETS: [&str; 2] = ["--annotation", "firn.dev/nccl=sockets"];

/// Two ranks, on a GPU each.
const RANKS: [&str; 4] = ["--ranks", "2", "--gpu", "0,1"];

/// A node with two GPUs that no other node has.
fn host(platform: Platform, name: &str, first: u32) -> Result<GpuHost> {
    let gpus = [SimGpu::h200(first), SimGpu::h200(first + 1)];
    GpuHost::for_test(platform, name, &gpus)
}

fn job<'h>(host: &'h GpuHost, options: &[&str]) -> Result<Container<'h>> {
    Container::count_with(host, "job", &["0", "1"], 2, options, &RANKS)
}

/// The ranks of a job over sockets, by way of a shell.
fn launched<'h>(host: &'h GpuHost, before: &str) -> Result<Container<'h>> {
    let launcher =
        format!("{before}; exec gpu-counter --out /counter.log --interval-ms 50 --mib 8 --ranks 2 --gpu 0,1");
    Container::script(host, "job", &["0", "1"], 2, &SOCKETS, &launcher)
}

/// A lock of ranks that wait for each other never ends: all are let go, and it is tried again.
fn ranks_that_wait_for_each_other_are_locked_by_a_retry(platform: Platform) -> Result<()> {
    on([host(platform, "rk-lock", 1)?], |[host]| {
        let job = job(host, &SOCKETS)?;
        job.goes_on(3)?;
        // The driver gives one rank up when its time is over, or keeps no time.
        for late in [&["--error", "CUDA_ERROR_NOT_READY"][..], &["--hang"]] {
            for nth in ["1", "2"] {
                host.fault(&[&["--call", "lock", "--nth", nth, "--times", "2"], late].concat())?;
                let image = format!("checkpoint/{}-{nth}", late.len());
                job.checkpoint(&image).with_context(|| late.join(" "))?;
                host.no_faults()?;
                job.goes_on(3)?;
            }
        }
        // For as long as the deadline lasts.
        host.configure("[deadlines]\ngpu-lock = \"3s\"\n")?;
        host.fault(&["--call", "lock", "--nth", "2", "--error", "CUDA_ERROR_NOT_READY"])?;
        let output = failure(job.checkpoint("checkpoint/never"))?;
        ensure!(output.contains("CUDA_ERROR_NOT_READY"), "{output}");
        host.no_faults()?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// Four ranks, the first of which is slow: the others wait for it on their GPUs, in two sums each.
fn straggling<'h>(host: &'h GpuHost, ms: &str) -> Result<Container<'h>> {
    let ranks = ["--ranks", "4", "--gpu", "0,1,0,1", "--collectives", "2"];
    let arguments = [&ranks[..], &["--interval-ms", "1", "--straggle-ms", ms]].concat();
    Container::count_with(host, "job", &["0", "1"], 4, &SOCKETS, &arguments)
}

fn ranks_with_a_straggler_are_locked_each_time(platform: Platform) -> Result<()> {
    on([host(platform, "rk-slow", 1)?], |[host]| {
        let job = straggling(host, "150")?;
        job.goes_on(3)?;
        for turn in 0..20 {
            let image = format!("checkpoint/{turn}");
            job.checkpoint(&image).with_context(|| format!("turn {turn}"))?;
            job.goes_on(2)?;
        }
        job.remove()?;
        host.idle()
    })
}

fn ranks_that_wait_for_one_that_never_comes_go_on(platform: Platform) -> Result<()> {
    on([host(platform, "rk-never", 1)?], |[host]| {
        host.configure("[deadlines]\ngpu-lock = \"2s\"\n")?;
        let job = straggling(host, "6000")?;
        job.goes_on(1)?;
        let output = failure(job.checkpoint("checkpoint/never"))?;
        ensure!(output.contains("FIRN-GPU-TIMEOUT"), "{output}");
        let timings = host.node().read(format!("{BUNDLES}/job/firn-timings.json"))?;
        ensure!(timings.contains("\"gpu-lock\""), "{timings}");
        job.goes_on(2)?;
        job.remove()?;
        host.idle()
    })
}

/// As NCCL does between its threads: a file in /dev/shm, larger than CRIU takes unasked, which is deleted and
/// stays open.
const DELETED_FILE: &str =
    "yes firn | head -c 4194304 >/dev/shm/nccl-firn; exec 9</dev/shm/nccl-firn; rm /dev/shm/nccl-firn";

/// Checksum of that file, by the descriptor of the container's first process.
fn deleted_file(job: &Container<'_>) -> Result<String> {
    let output = job.exec(&["sh", "-c", "ls -l /proc/1/fd/9; md5sum /proc/1/fd/9"])?;
    ensure!(output.contains("nccl-firn (deleted)"), "not deleted: {output}");
    let sum = output
        .lines()
        .last()
        .and_then(|line| line.split_whitespace().next());
    Ok(sum.context("no checksum")?.to_owned())
}

/// UUIDs of the GPUs that hold memory of rank 0 and of rank 1, as the driver's tool reports.
fn gpus_of_ranks(host: &GpuHost, job: &Container<'_>) -> Result<[String; 2]> {
    let inside = job.lines()?.last();
    let pid_of = |gpu: u32| {
        let key = inside.keys().find(|(_, _, of)| *of == gpu);
        key.map(|(pid, _, _)| *pid).context("no such rank")
    };
    let smi = host.node().run(&["simgpu", "smi"])?.stdout;
    let gpu_of = |gpu: u32| -> Result<String> {
        let inner = pid_of(gpu)?;
        let mut uuid = "";
        for line in smi.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["gpu", _, name, ..] => uuid = name,
                [process, .., memory] if memory != "used=0MiB" => {
                    let Some(pid) = process.strip_prefix("pid=") else {
                        continue;
                    };
                    let status = host.node().run(&["cat", &format!("/proc/{pid}/status")])?.stdout;
                    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
                    if ids.and_then(|ids| ids.split_whitespace().last()) == Some(&*inner.to_string()) {
                        return Ok(uuid.to_owned());
                    }
                }
                _ => {}
            }
        }
        anyhow::bail!("rank {gpu} (pid {inner}) has no memory on any GPU:\n{smi}")
    };
    Ok([gpu_of(0)?, gpu_of(1)?])
}

/// Established connections in the container, each counted at both of its ends.
fn connections(job: &Container<'_>) -> Result<usize> {
    // ctr may lose what a process writes that ends at once.
    let table = wait_for("the table of connections", Duration::from_secs(10), || {
        Ok(Some(job.exec(&["cat", "/proc/net/tcp"])?).filter(|table| !table.is_empty()))
    })?;
    let established = |line: &&str| line.split_whitespace().nth(3) == Some("01");
    Ok(table.lines().filter(established).count())
}

/// Ranks are checkpointed, continue, and are brought back on another node with their GPUs the other way
/// round.
fn ranks_over_sockets_move_with_their_connections(platform: Platform) -> Result<()> {
    on(
        [host(platform, "rk-move-a", 1)?, host(platform, "rk-move-b", 3)?],
        |[a, b]| {
            let source = launched(a, DELETED_FILE)?;
            source.goes_on(3)?;
            let file = deleted_file(&source)?;
            assert_eq!(connections(&source)?, 2);
            assert_eq!(
                gpus_of_ranks(a, &source)?,
                [a.uuids()[0].clone(), a.uuids()[1].clone()]
            );
            let room = source.exec(&["df", "-k", "/dev/shm"])?;
            assert!(room.contains(" 1048576 "), "{room}");

            source.checkpoint("checkpoint/job")?;
            source.goes_on(3)?;
            assert_eq!(connections(&source)?, 2);
            source.remove()?;
            a.idle()?;

            let (from, to) = (a.uuids(), b.uuids());
            let map = [format!("{}={}", from[0], to[1]), format!("{}={}", from[1], to[0])];
            b.configure(&format!("[restore]\ngpu-map = {map:?}\n"))?;
            a.send_image("checkpoint/job", b)?;
            let (copy, _) = Container::restore(b, "job", "checkpoint/job", 2)?;
            copy.goes_on(5)?;
            assert_eq!(connections(&copy)?, 2);
            assert_eq!(gpus_of_ranks(b, &copy)?, [to[1].clone(), to[0].clone()]);
            assert_eq!(deleted_file(&copy)?, file);

            copy.checkpoints_again("checkpoint/job")?;
            copy.remove()?;
            b.idle()
        },
    )
}

// Not on trixie: CRIU 4.1 asks TCP sockets for SO_PASSSEC, which Linux has refused since 6.16.

/// A checkpoint is refused with this code before runc is called, and the job continues with its connections.
fn refused(host: &GpuHost, job: &Container<'_>, code: &str) -> Result<String> {
    let output = failure(job.checkpoint("checkpoint/job"))?;
    ensure!(output.contains(&format!("{code}:")), "not {code} but:\n{output}");
    ensure!(!host.runc_has("checkpoint")?, "runc was called");
    job.goes_on(3)?;
    let ends = connections(job)?;
    ensure!(ends == 2, "{ends} ends of connections");
    Ok(output)
}

fn ranks_that_may_share_memory_are_refused_and_go_on(platform: Platform) -> Result<()> {
    on([host(platform, "rk-r", 1)?], |[host]| {
        host.watch_runc()?;
        let unannounced = job(host, &[])?;
        unannounced.goes_on(3)?;
        let output = refused(host, &unannounced, "FIRN-IPC")?;
        ensure!(
            output.contains("firn.dev/nccl=sockets"),
            "no remedy in:\n{output}"
        );
        unannounced.remove()?;

        // What a launcher takes out of the environment again is seen.
        let launched = launched(host, "unset NCCL_SHM_DISABLE")?;
        launched.goes_on(3)?;
        let output = refused(host, &launched, "FIRN-NCCL")?;
        ensure!(output.contains("without NCCL_SHM_DISABLE=1. hint"), "{output}");
        launched.remove()?;
        host.idle()
    })
}

fn contradicting_nccl_settings_are_refused_at_create(platform: Platform) -> Result<()> {
    on([host(platform, "rk-c", 1)?], |[host]| {
        host.watch_runc()?;
        for (options, named) in [
            (
                [&SOCKETS[..], &["--env", "NCCL_P2P_DISABLE=0"]].concat(),
                "NCCL_P2P_DISABLE=0",
            ),
            (vec!["--annotation", "firn.dev/nccl=shm"], "\"shm\""),
        ] {
            let output = failure(job(host, &options).map(drop))?;
            ensure!(
                output.contains("FIRN-NCCL-SETTING:") && output.contains(named),
                "{output}"
            );
            ensure!(!host.runc_has("create")?, "runc was called");
            host.node().run(&["ctr", "containers", "delete", "job"])?;
            nothing_left(host, "job")?;
        }
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        ranks_that_wait_for_each_other_are_locked_by_a_retry [FORKY];
        ranks_with_a_straggler_are_locked_each_time [FORKY];
        ranks_that_wait_for_one_that_never_comes_go_on [FORKY];
        ranks_over_sockets_move_with_their_connections [FORKY_V2];
        ranks_that_may_share_memory_are_refused_and_go_on [FORKY];
        contradicting_nccl_settings_are_refused_at_create [FORKY];
    })
}
