//! A pause gives the GPUs free, a resume takes them or others, and a running container moves to other GPUs.
//!
//! Needs root. Every story uses `ctr` and `firn` on real containerd, runc and CRIU; only the driver is
//! simulated.

mod busy;

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use firn_lab::{COUNTER, Container, GpuHost, SHARES_NOTHING, STOCK, SimGpu, cases, matrix, on};
use firn_node::{Platform, wait_for};

const RELEASE: [&str; 2] = ["--annotation", "firn.dev/pause=release-gpu"];

fn host(platform: Platform, name: &str) -> Result<GpuHost> {
    GpuHost::for_test(
        platform,
        name,
        &[SimGpu::h200(1), SimGpu::h200(2), SimGpu::h200(3)],
    )
}

/// A node whose GPUs no other node has.
fn other_host(platform: Platform, name: &str) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(4)])
}

fn counter<'h>(host: &'h GpuHost, id: &str, gpu: &str) -> Result<Container<'h>> {
    let counter = Container::count_with(host, id, &[gpu], 1, &RELEASE, &[])?;
    counter.goes_on(2)?;
    Ok(counter)
}

/// Pauses it, and sees that its GPUs are free.
fn park(host: &GpuHost, container: &Container<'_>) -> Result<()> {
    container.task(&["pause"])?;
    assert_eq!(container.status()?, "PAUSED");
    container.stands_still()?;
    ensure!(
        host.gpu_memory()?.iter().all(|mib| *mib == 0),
        "memory is in use: {:?}",
        host.gpu_memory()?
    );
    Ok(())
}

fn firn(host: &GpuHost, words: &[&str]) -> Result<String> {
    Ok(host.node().run(&[&["firn"], words].concat())?.stdout)
}

/// The error of a command that must fail.
fn error_of(host: &GpuHost, command: &[&str]) -> Result<String> {
    match host.node().run(command) {
        Ok(_) => bail!("{command:?} did not fail"),
        Err(error) => Ok(error.to_string()),
    }
}

/// Sees that a command fails with these words in its error.
fn expect_refused(host: &GpuHost, command: &[&str], words: &[&str]) -> Result<()> {
    let error = error_of(host, command)?;
    for word in words {
        ensure!(error.contains(word), "{word}: {error}");
    }
    Ok(())
}

fn runs_on(host: &GpuHost, container: &Container<'_>, gpu: usize) -> Result<()> {
    assert_eq!(container.goes_on(3)?.fault(), None);
    assert_eq!(container.gpus_in_use()?, [host.uuids()[gpu].clone()]);
    assert_eq!(container.status()?, "RUNNING");
    Ok(())
}

/// What containerd has of a container.
fn info(host: &GpuHost, id: &str) -> Result<String> {
    Ok(host.node().run(&["ctr", "containers", "info", id])?.stdout)
}

fn a_pause_gives_the_gpu_free(platform: Platform) -> Result<()> {
    on([host(platform, "pa-free")?], |[host]| {
        let job = counter(host, "job", "0")?;
        let pid = job.pid()?;
        park(host, &job)?;
        let parked = info(host, "job")?;
        ensure!(parked.contains("firn.dev/parked"), "{parked}");
        ensure!(parked.contains("MiB of GPU-"), "{parked}");

        let other = counter(host, "other", "0")?;
        let refused = error_of(host, &["ctr", "tasks", "resume", "job"])?;
        ensure!(refused.contains("FIRN-GPU-BUSY"), "{refused}");
        ensure!(
            refused.contains("container other of namespace default"),
            "{refused}"
        );
        ensure!(refused.contains("it stays paused"), "{refused}");
        assert_eq!(job.status()?, "PAUSED");
        let failed = info(host, "job")?;
        ensure!(failed.contains("the last resume failed"), "{failed}");
        other.goes_on(2)?;

        other.remove()?;
        job.task(&["resume"])?;
        runs_on(host, &job, 0)?;
        assert_eq!(job.pid()?, pid);
        ensure!(!info(host, "job")?.contains("firn.dev/parked"));
        job.remove()?;
        host.idle()
    })
}

fn a_paused_container_is_resumed_on_another_gpu(platform: Platform) -> Result<()> {
    on([host(platform, "pa-other")?], |[host]| {
        let job = counter(host, "job", "0")?;
        let pid = job.pid()?;
        for gpu in [1, 2, 1, 0, 0, 2] {
            park(host, &job)?;
            firn(host, &["resume", "job", "--gpus", &gpu.to_string()])?;
            runs_on(host, &job, gpu)?;
        }
        assert_eq!(job.pid()?, pid);
        let nodes = job.exec(&["ls", "/dev"])?;
        ensure!(nodes.contains("nvidia2") && !nodes.contains("nvidia0"), "{nodes}");
        let spec = info(host, "job")?;
        ensure!(
            spec.contains("/dev/nvidia2") && !spec.contains("/dev/nvidia0"),
            "{spec}"
        );
        job.remove()?;
        host.idle()
    })
}

/// The owner's word for a process on two GPUs.
const NO_PEER_ACCESS: [&str; 2] = ["--annotation", "firn.dev/peer-access=none"];

fn a_running_container_moves(platform: Platform) -> Result<()> {
    on([host(platform, "pa-move")?], |[host]| {
        let job = Container::count_with(host, "job", &["0", "1"], 2, &NO_PEER_ACCESS, &["--gpu", "0,1"])?;
        job.goes_on(2)?;
        let pid = job.pid()?;
        let uuids = host.uuids();
        for (gpus, expected) in [("1,2", [1, 2]), ("0,1", [0, 1]), ("2,0", [0, 2])] {
            let printed = firn(host, &["move-gpu", "job", "--gpus", gpus])?;
            ensure!(printed.starts_with("job continues, after "), "{printed}");
            assert_eq!(job.goes_on(3)?.fault(), None);
            let expected = expected.map(|gpu| uuids[gpu].clone());
            assert_eq!(job.gpus_in_use()?, expected, "--gpus {gpus}");
        }
        let swap = format!("{}={},{}={}", uuids[0], uuids[2], uuids[2], uuids[0]);
        let moved = host.firn(&["move-gpu", "job", "--gpus", &swap])?;
        ensure!(moved["container"] == "job" && moved["gpus"] == swap, "{moved}");
        assert_eq!(job.goes_on(3)?.fault(), None);
        assert_eq!(job.pid()?, pid);
        job.remove()?;
        host.idle()
    })
}

/// A parked container is checkpointed without the driver, and stays parked.
fn a_parked_container_is_checkpointed(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "pa-dump-a")?, other_host(platform, "pa-dump-b")?];
    on(hosts, |[a, b]| {
        let job = counter(a, "job", "0")?;
        // The client pauses it, checkpoints it and resumes it.
        job.checkpoint("checkpoint/first")?;
        a.remove_image("checkpoint/first")?;
        runs_on(a, &job, 0)?;

        park(a, &job)?;
        let driver = a.node().run(&["simgpu", "smi"])?.stdout;
        job.task(&["checkpoint", "--image-path", "/root/image"])?;
        assert_eq!(a.node().run(&["simgpu", "smi"])?.stdout, driver);
        assert_eq!(job.status()?, "PAUSED");
        job.stands_still()?;
        a.node().run(&["firn", "inspect", "/root/image"])?;

        // A dump that fails leaves it as it is.
        let refused = error_of(
            a,
            &["ctr", "tasks", "checkpoint", "--image-path", "/proc/self", "job"],
        )?;
        ensure!(refused.contains("FIRN-"), "{refused}");
        assert_eq!(job.status()?, "PAUSED");
        job.stands_still()?;

        firn(a, &["resume", "job", "--gpus", "1"])?;
        runs_on(a, &job, 1)?;
        park(a, &job)?;
        let exited = job.checkpoint_and_exit_to("checkpoint/last", a.runtime_for_options()?);
        exited?;
        job.becomes("STOPPED")?;
        job.remove()?;
        a.idle()?;

        a.send_image("checkpoint/last", b)?;
        b.configure("[restore]\ngpus = [\"0\"]\n")?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/last", 1)?;
        assert_eq!(copy.goes_on(3)?.fault(), None);
        copy.remove()?;
        b.idle()
    })
}

/// The pause of firn's own command keeps the GPU: somebody who takes it meanwhile is in nobody's way.
fn a_command_of_firn_gives_no_gpu_free(platform: Platform) -> Result<()> {
    on([host(platform, "pa-command")?], |[host]| {
        let job = counter(host, "job", "0")?;
        let node = host.node();
        // The shim waits there.
        node.write("/run/firn-hold", "criu-dump")?;
        let mut checkpoint = node.spawn(&["firn", "checkpoint", "job", "/root/checkpoint"])?;
        wait_for("the dump", Duration::from_secs(60), || {
            Ok(node.path("/run/firn-held").exists().then_some(()))
        })?;
        let taken = counter(host, "taken", "0")?;
        let label = node.run(&["ctr", "containers", "info", "job"])?.stdout;
        node.run(&["rm", "/run/firn-hold"])?;
        ensure!(checkpoint.wait()?.success(), "the checkpoint failed");
        node.run(&["rm", "/run/firn-held"])?;
        ensure!(!label.contains("firn.dev/parked"), "it was parked: {label}");
        job.goes_on(2)?;
        taken.goes_on(2)?;
        for job in [taken, job] {
            job.remove()?;
        }
        host.idle()
    })
}

/// containerd 1.7 writes the checkpoint of a task into its content store.
fn a_parked_container_is_checkpointed_into_an_image(platform: Platform) -> Result<()> {
    on([host(platform, "pa-image")?], |[host]| {
        let job = counter(host, "job", "0")?;
        park(host, &job)?;
        job.task(&["checkpoint"])?;
        assert_eq!(job.status()?, "PAUSED");
        job.stands_still()?;
        job.task(&["resume"])?;
        runs_on(host, &job, 0)?;
        job.remove()?;
        host.idle()
    })
}

/// It can be killed and deleted, and nothing of it is left, also in containerd's metadata, where its client
/// has a label, too. containerd may be restarted meanwhile.
fn a_parked_container_ends(platform: Platform) -> Result<()> {
    on([host(platform, "pa-end")?], |[host]| {
        let job = counter(host, "job", "0")?;
        let owned = || {
            host.node()
                .run(&["ctr", "containers", "label", "job", "owner=me"])
        };
        owned()?;
        let label_is = |parked: bool| -> Result<()> {
            let info = info(host, "job")?;
            ensure!(info.contains("firn.dev/parked") == parked, "{info}");
            ensure!(info.contains("\"owner\": \"me\""), "{info}");
            Ok(())
        };
        park(host, &job)?;
        label_is(true)?;
        host.node().restart_containerd()?;
        assert_eq!(job.status()?, "PAUSED");
        job.task(&["resume"])?;
        runs_on(host, &job, 0)?;
        park(host, &job)?;
        job.task(&["kill", "--signal", "SIGKILL"])?;
        job.becomes("STOPPED")?;
        job.exit_code()?;
        label_is(false)?;
        host.idle()?;
        let leases = host.node().run(&["ls", "/run/firn/leases"])?.stdout;
        ensure!(leases.trim().is_empty(), "{leases}");

        job.forget()?;

        let job = counter(host, "job", "1")?;
        owned()?;
        park(host, &job)?;
        host.kill_shim("job")?;
        host.idle()?;
        // Nobody removes the label for a shim that is killed, but the next start.
        label_is(true)?;
        job.task(&["start", "--detach"])?;
        label_is(false)?;
        assert_eq!(job.status()?, "RUNNING");
        job.remove()?;
        host.idle()
    })
}

/// Four processes on GPU 0.
fn four<'h>(host: &'h GpuHost) -> Result<Container<'h>> {
    let options = [&SHARES_NOTHING[..], &RELEASE].concat();
    let words = ["--procs", "4", "--mib", "32"];
    let job = Container::count_with(host, "job", &["0"], 4, &options, &words)?;
    job.goes_on(2)?;
    Ok(job)
}

/// The driver fails at the n-th call from now on, so many times.
fn driver_fails(host: &GpuHost, call: &str, nth: &str, times: &str) -> Result<()> {
    let rule = ["--call", call, "--nth", nth, "--times", times];
    host.fault(&[&rule[..], &["--error", "CUDA_ERROR_UNKNOWN"]].concat())
}

/// The GPU has room for the four processes and little more: those that still have their memory are in the way
/// of none of the others.
fn a_failed_pause_costs_nothing(platform: Platform) -> Result<()> {
    let tight = [SimGpu::h200(1).memory(4 * 38)];
    on([GpuHost::for_test(platform, "pa-fail", &tight)?], |[host]| {
        let job = four(host)?;
        for (call, nth) in [("lock", "2"), ("checkpoint", "3")] {
            driver_fails(host, call, nth, "1")?;
            let failed = error_of(host, &["ctr", "tasks", "pause", "job"])?;
            ensure!(
                failed.contains("FIRN-GPU-DRIVER: pause of container job failed"),
                "{failed}"
            );
            ensure!(failed.contains("the workload continues"), "{failed}");
            host.no_faults()?;
            runs_on(host, &job, 0)?;
        }
        job.remove()?;
        host.idle()
    })
}

/// Two of four processes are restored, then the driver fails for good: all of it is parked again.
fn a_failed_resume_leaves_it_parked(platform: Platform) -> Result<()> {
    on([host(platform, "pa-again")?], |[host]| {
        let job = four(host)?;
        park(host, &job)?;
        let elsewhere = ["firn", "resume", "job", "--gpus", "1"];
        for command in [&["ctr", "tasks", "resume", "job"][..], &elsewhere] {
            driver_fails(host, "restore", "3", "1000")?;
            let failed = error_of(host, command)?;
            ensure!(
                failed.contains("FIRN-GPU-DRIVER: resume of container job failed"),
                "{failed}"
            );
            host.no_faults()?;
            assert_eq!(job.status()?, "PAUSED");
            job.stands_still()?;
            assert_eq!(host.gpu_memory()?, [0, 0, 0], "a GPU is not free");
            ensure!(
                info(host, "job")?.contains("/dev/nvidia0"),
                "the spec has another GPU"
            );
        }
        let split = error_of(host, &["ctr", "tasks", "checkpoint", "job"])?;
        ensure!(split.contains("FIRN-GPU-SPLIT"), "{split}");
        firn(host, &["resume", "job", "--gpus", "2"])?;
        runs_on(host, &job, 2)?;
        job.remove()?;
        host.idle()
    })
}

fn a_failed_move_goes_back(platform: Platform) -> Result<()> {
    on([host(platform, "pa-back")?], |[host]| {
        let job = four(host)?;
        driver_fails(host, "restore", "3", "4")?;
        let failed = error_of(host, &["firn", "move-gpu", "job", "--gpus", "2"])?;
        ensure!(
            failed.contains("move of container job failed, the workload continues"),
            "{failed}"
        );
        host.no_faults()?;
        runs_on(host, &job, 0)?;
        firn(host, &["move-gpu", "job", "--gpus", "2"])?;
        runs_on(host, &job, 2)?;
        job.remove()?;
        host.idle()
    })
}

/// What a pause or move cannot do is refused by name, and the container runs on.
fn what_cannot_be_parked_or_moved_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "pa-refuse")?], |[host]| {
        let refuse = |command: &[&str], words: &[&str]| expect_refused(host, command, words);
        let two = Container::count_with(host, "two", &["0"], 2, &RELEASE, &["--procs", "2"])?;
        two.goes_on(2)?;
        refuse(
            &["ctr", "tasks", "pause", "two"],
            &["FIRN-IPC: cannot pause container two", "firn.dev/ipc=none"],
        )?;
        assert_eq!(two.status()?, "RUNNING");
        two.goes_on(2)?;
        two.remove()?;

        let odd = ["--annotation", "firn.dev/pause=release"];
        let odd = Container::count_with(host, "odd", &["0"], 1, &odd, &[])?;
        odd.goes_on(2)?;
        refuse(
            &["ctr", "tasks", "pause", "odd"],
            &["FIRN-PAUSE-SETTING", "\"release\""],
        )?;
        odd.goes_on(2)?;
        refuse(
            &["firn", "move-gpu", "odd", "--gpus", "7"],
            &["FIRN-GPU-UNKNOWN", "7"],
        )?;
        refuse(&["firn", "move-gpu", "odd", "--gpus", "1,2"], &["FIRN-GPU-COUNT"])?;
        refuse(
            &["firn", "move-gpu", "none", "--gpus", "1"],
            &["FIRN-NO-CONTAINER"],
        )?;
        odd.goes_on(2)?;
        odd.remove()?;

        let grant = host.ctr_gpu_options(&["0"])?;
        let grant: Vec<&str> = grant.iter().map(String::as_str).collect();
        let stock = [&["--runtime", STOCK], &grant[..]].concat();
        let stock = Container::run(host, "stock", &stock, &["sleep", "1000"])?;
        refuse(
            &["firn", "move-gpu", "stock", "--gpus", "1"],
            &["FIRN-MOVE-CLIENT"],
        )?;
        stock.remove()?;
        host.idle()
    })
}

/// Device rules close nothing that is open.
fn a_gpu_that_a_process_keeps_open_is_not_taken(platform: Platform) -> Result<()> {
    on([host(platform, "pa-kept")?], |[host]| {
        let refuse = |command: &[&str], words: &[&str]| expect_refused(host, command, words);
        // Under another name.
        let script = "cp -a /dev/nvidia0 /keep; sleep 1000 </keep & exec /bin/gpu-counter --out /counter.log \
                      --interval-ms 50 --mib 8";
        let keeps = Container::script(host, "keeps", &["0"], 1, &RELEASE, script)?;
        keeps.goes_on(2)?;
        refuse(
            &["firn", "move-gpu", "keeps", "--gpus", "1"],
            &["FIRN-GPU-KEPT", "(sleep)", "the workload continues"],
        )?;
        runs_on(host, &keeps, 0)?;
        keeps.task(&["pause"])?;
        refuse(
            &["firn", "resume", "keeps", "--gpus", "1"],
            &["FIRN-GPU-KEPT", "it stays paused"],
        )?;
        keeps.task(&["resume"])?;
        runs_on(host, &keeps, 0)?;
        keeps.remove()?;
        host.idle()
    })
}

/// Notes what it is called with.
const HOOK: &str = "cat >/hook <<'E'\n#!/bin/sh\n\
    echo \"$FIRN_HOOK $FIRN_OPERATION $FIRN_OLD_GPUS>$FIRN_NEW_GPUS\" >>/calls\nE\n\
    chmod +x /hook\n";

/// The hooks of the job, by the operation that calls them.
fn hooks_are_called_at_a_pause_and_a_move(platform: Platform) -> Result<()> {
    on([host(platform, "pa-hooks")?], |[host]| {
        let hooks = ["prepare", "resumed", "failed"].map(|name| format!("firn.dev/hook-{name}=exec: /hook"));
        let named = hooks.iter().flat_map(|hook| ["--annotation", hook]);
        let options: Vec<&str> = RELEASE.into_iter().chain(named).collect();
        let script = format!("{HOOK}{COUNTER}");
        let job = Container::script(host, "job", &["0"], 1, &options, &script)?;
        job.goes_on(2)?;
        park(host, &job)?;
        firn(host, &["resume", "job", "--gpus", "1"])?;
        firn(host, &["move-gpu", "job", "--gpus", "0"])?;
        driver_fails(host, "checkpoint", "1", "1")?;
        error_of(host, &["ctr", "tasks", "pause", "job"])?;
        host.no_faults()?;
        runs_on(host, &job, 0)?;
        let uuids = host.uuids();
        let [zero, one] = [&*uuids[0], &*uuids[1]];
        let expected = [
            format!("prepare pause {zero}>"),
            format!("resumed resume {zero}>{one}"),
            format!("prepare move {one}>"),
            format!("resumed move {one}>{zero}"),
            format!("prepare pause {zero}>"),
            format!("failed pause {zero}>"),
        ];
        let calls = job.exec(&["cat", "/calls"])?;
        assert_eq!(calls.lines().collect::<Vec<_>>(), expected);
        job.remove()?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_pause_gives_the_gpu_free [FORKY, TRIXIE_V2];
        a_paused_container_is_resumed_on_another_gpu [FORKY, FORKY_V2];
        a_running_container_moves [FORKY, FORKY_V2];
        a_parked_container_is_checkpointed [FORKY, FORKY_V2];
        a_command_of_firn_gives_no_gpu_free [FORKY_V2, TRIXIE];
        a_parked_container_is_checkpointed_into_an_image [TRIXIE];
        a_parked_container_ends [FORKY, FORKY_V2];
        busy::a_resume_waits_or_goes_elsewhere_or_shares [FORKY_V2];
        busy::others_work_on_a_container_that_waits [FORKY, FORKY_V2];
        busy::a_container_that_waits_can_end [FORKY, FORKY_V2];
        busy::a_move_that_waits_lets_it_run [FORKY, FORKY_V2];
        a_failed_pause_costs_nothing [FORKY];
        a_failed_resume_leaves_it_parked [FORKY, TRIXIE_V2];
        a_failed_move_goes_back [FORKY, FORKY_V2];
        what_cannot_be_parked_or_moved_is_refused [FORKY];
        a_gpu_that_a_process_keeps_open_is_not_taken [FORKY, FORKY_V2];
        hooks_are_called_at_a_pause_and_a_move [TRIXIE];
    })
}
