//! Checkpoints that fail after they have begun: by the driver, by CRIU, by a disk.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{DeleteRequest, DeleteResponse, Empty, ShutdownRequest};
use containerd_shim_protos::shim::oci::CheckpointOptions;
use firn_lab::{COUNTER, Container, GpuHost, SHARES_NOTHING, SimGpu, Task, describe, failure, on};
use firn_node::{Platform, wait_for};

use super::{LIMIT, fails, host};

/// A disturbance of the driver, as `simgpu fault add` takes it, and the code of the checkpoint that it
/// spoils.
type Fault = (&'static str, &'static [&'static str]);

/// Every way in which the driver can fail during a checkpoint.
const CHECKPOINT_FAULTS: &[Fault] = &[
    // A CUDA process that the driver does not report must not be dumped as one without CUDA.
    (
        "FIRN-GPU-DRIVER",
        &["--call", "tid", "--error", "CUDA_ERROR_UNKNOWN"],
    ),
    // The second time it is asked for, after the lock.
    (
        "FIRN-GPU-DRIVER",
        &["--call", "tid", "--error", "CUDA_ERROR_UNKNOWN", "--nth", "2"],
    ),
    (
        "FIRN-GPU-DRIVER",
        &["--call", "checkpoint", "--error", "CUDA_ERROR_UNKNOWN"],
    ),
    ("FIRN-GPU-TIMEOUT", &["--call", "lock", "--hang"]),
    ("FIRN-GPU-TIMEOUT", &["--call", "lock", "--hang", "--after"]),
    (
        "FIRN-GPU-TIMEOUT",
        &["--call", "lock", "--error", "CUDA_ERROR_NOT_READY"],
    ),
    (
        "FIRN-GPU-TIMEOUT",
        &["--call", "checkpoint", "--hang", "--times", "1"],
    ),
    (
        "FIRN-GPU-TIMEOUT",
        &["--call", "checkpoint", "--hang", "--after", "--times", "1"],
    ),
    ("FIRN-WORKER", &["--call", "lock", "--crash", "--times", "1"]),
    (
        "FIRN-WORKER",
        &["--call", "checkpoint", "--crash", "--times", "1"],
    ),
    (
        "FIRN-WORKER",
        &["--call", "checkpoint", "--crash", "--after", "--times", "1"],
    ),
];

/// A process in a chroot that writes to a file all the time, and one that appends to another.
const WRITES: &str = "mkdir -p /jail/bin; cp /bin/busybox /jail/bin
    chroot /jail /bin/busybox sh -c 'while :; do echo x; done >/grows' &
    while :; do echo x; sleep 0.001; done >>/log &";

/// `ctr containers checkpoint` copies the files before the driver can lock anything, and processes run for
/// the lock: the copy of a file that grows then could not be opened.
pub fn a_file_that_outgrows_the_clients_copy_is_named(platform: Platform) -> Result<()> {
    on([host(platform, "rb-grows", 1)?], |[host]| {
        let script = format!("{WRITES} {COUNTER}");
        let job = Container::script(host, "job", &["0"], 1, &[], &script)?;
        job.goes_on(3)?;
        // The writer runs meanwhile also where many others want the CPUs.
        host.fault(&["--call", "lock", "--delay-ms", "1000", "--times", "1"])?;
        let output = fails(&job, host, "FIRN-FILES")?;
        host.no_faults()?;
        ensure!(
            output.contains("(busybox)") && output.contains(" /jail/grows "),
            "{output}"
        );
        // These copy the files afterwards, or leave them to their user.
        host.firn(&["checkpoint", "job", "/srv/job.tar"])?;
        job.task(&["pause"])?;
        job.task(&["checkpoint", "--image-path", "/srv/alone"])?;
        job.task(&["resume"])?;
        job.goes_on(3)?;
        job.remove()?;
        host.firn(&["restore", "/srv/job.tar", "--name", "copy"])?;
        let copy = Container::known(host, "copy").counting(1);
        copy.goes_on(3)?;
        copy.remove()?;
        host.idle()
    })
}

const SHORT: &str = "[deadlines]\ngpu-lock = \"700ms\"\ngpu-checkpoint = \"1s\"\n\
                     gpu-restore = \"1s\"\ngpu-unlock = \"1s\"\n";

pub fn a_driver_that_fails_a_checkpoint_costs_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "rb-driver", 1)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        for (code, fault) in CHECKPOINT_FAULTS {
            // For hangs alone: on a busy machine a call that ends may take longer than this.
            host.configure(if fault.contains(&"--hang") { SHORT } else { "" })?;
            host.fault(fault)?;
            fails(&job, host, code).with_context(|| fault.join(" "))?;
            host.no_faults()?;
        }
        host.configure("")?;
        // A container that its user has paused is paused again.
        job.task(&["pause"])?;
        for fault in [["--call", "lock"], ["--call", "checkpoint"]] {
            host.fault(&[&fault[..], &["--error", "CUDA_ERROR_UNKNOWN"]].concat())?;
            let output = failure(job.task(&["checkpoint"]))?;
            host.no_faults()?;
            ensure!(output.contains("FIRN-GPU-DRIVER:"), "{output}");
            ensure!(job.status()? == "PAUSED", "the task is {}", job.status()?);
            job.stands_still()?;
        }
        job.task(&["resume"])?;
        job.goes_on(3)?;
        // None of them has spoilt anything.
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

pub fn when_one_of_four_processes_fails_all_four_go_on(platform: Platform) -> Result<()> {
    on([host(platform, "rf-four", 1)?], |[host]| {
        let job = Container::count_with(host, "job", &["0"], 4, &SHARES_NOTHING, &["--procs", "4"])?;
        job.goes_on(3)?;
        for call in ["lock", "checkpoint"] {
            let fault = [
                "--call",
                call,
                "--nth",
                "3",
                "--times",
                "1",
                "--error",
                "CUDA_ERROR_UNKNOWN",
            ];
            host.fault(&fault)?;
            fails(&job, host, "FIRN-GPU-DRIVER").context(call)?;
            host.no_faults()?;
        }
        job.remove()?;
        host.idle()
    })
}

pub fn a_failed_gpu_restore_is_tried_again(platform: Platform) -> Result<()> {
    on([host(platform, "rf-again", 1)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        host.fault(&[
            "--call",
            "restore",
            "--times",
            "1",
            "--error",
            "CUDA_ERROR_UNKNOWN",
        ])?;
        job.checkpoint("checkpoint/job")?;
        assert_eq!(job.status()?, "RUNNING");
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// How long the driver copies in these tests.
const COPY: Duration = Duration::from_secs(4);

/// The driver continues with a copy whose caller was cut off, and answers nobody before it is done: that is
/// waited for.
pub fn a_copy_whose_caller_ends_costs_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "rb-copy", 1)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let copy = COPY.as_millis().to_string();
        let slow = ["--transfer-ms", &copy, "--times", "1"];

        // By a deadline, shorter than the copy, as are those of all other calls of the rollback.
        let short = "[deadlines]\ndiscover = \"1s\"\ngpu-checkpoint = \"1s\"\n\
                     gpu-restore = \"1s\"\ngpu-unlock = \"1s\"\n";
        host.configure(short)?;
        host.fault(&[&["--call", "checkpoint"], &slow[..]].concat())?;
        fails(&job, host, "FIRN-GPU-TIMEOUT")?;
        host.no_faults()?;
        host.fault(&[&["--call", "restore"], &slow[..]].concat())?;
        job.checkpoint("checkpoint/slow")?;
        job.goes_on(3)?;
        host.no_faults()?;

        // By the end of firn-gpu.
        host.configure("[deadlines]\ndiscover = \"1s\"\n")?;
        host.fault(&[&["--call", "checkpoint"], &slow[..]].concat())?;
        let task = Task::of(host, job.id())?;
        let pending = task.checkpoint("/tmp/image", &CheckpointOptions::new())?;
        wait_for("the copy", LIMIT, || {
            let seen = host.node().run(&["simgpu", "fault", "list"])?.stdout;
            Ok(seen.contains("\"seen\": 1").then_some(()))
        })?;
        host.node().run(&["pkill", "-9", "-x", "firn-gpu"])?;
        let killed = Instant::now();
        let output = describe(&task.end(pending), |_| "success".to_owned());
        ensure!(output.contains("FIRN-WORKER:"), "{output}");
        ensure!(killed.elapsed() > COPY / 2, "nothing was copied: {output}");
        job.goes_on(3)?;
        host.no_faults()?;
        job.remove()?;
        host.idle()
    })
}

/// The driver does not give the GPU state back: the container is suspended, and its counter stands.
fn suspended<'h>(host: &'h GpuHost) -> Result<Container<'h>> {
    let job = Container::count(host, "job", &["0"], 1, &[])?;
    job.goes_on(3)?;
    host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
    let task = Task::of(host, job.id())?;
    let pending = task.checkpoint("/tmp/image", &CheckpointOptions::new())?;
    let output = describe(&task.end(pending), |_| "success".to_owned());
    ensure!(
        output.contains("FIRN-GPU-SUSPENDED:") && output.contains("/tmp/image is complete"),
        "{output}"
    );
    ensure!(host.node().path("/tmp/image/firn.json").exists(), "no image");
    is_suspended(&job)?;
    host.node().run(&["rm", "-r", "/tmp/image"])?;
    Ok(job)
}

fn is_suspended(job: &Container<'_>) -> Result<()> {
    ensure!(job.status()? == "PAUSED", "the task is {}", job.status()?);
    job.stands_still()
}

pub fn a_suspended_container_goes_on_when_it_is_resumed(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "rb-resumed", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let job = suspended(host)?;
        // While the driver refuses, every client hears so, as often as it asks; ctr asks after every
        // checkpoint.
        for _ in 0..2 {
            let output = failure(job.task(&["resume"]))?;
            ensure!(
                output.contains("FIRN-GPU-SUSPENDED:") && output.contains("CUDA_ERROR_UNKNOWN"),
                "{output}"
            );
            is_suspended(&job)?;
        }
        for refused in [&["checkpoint"][..], &["pause"]] {
            let output = failure(job.task(refused))?;
            ensure!(output.contains("FIRN-GPU-SUSPENDED:"), "{refused:?}: {output}");
        }
        is_suspended(&job)?;
        host.no_faults()?;
        job.task(&["resume"])?;
        ensure!(job.status()? == "RUNNING", "the task is {}", job.status()?);
        job.goes_on(3)?;
        // It is a container as any other again.
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// However a suspended container ends, nothing of it is left.
pub fn a_suspended_container_can_be_ended(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "rb-ended", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let ends: [fn(&GpuHost, &Container<'_>) -> Result<()>; 3] = [
            // From the host, as the kernel does for want of memory.
            |host, job| {
                let pid = job.pid()?.to_string();
                host.node().run(&["kill", "-9", &pid])?;
                // No signal ends what a freezer of cgroup v1 holds; Kill turns that off.
                if host.node().path("/sys/fs/cgroup/freezer").exists() {
                    job.task(&["kill", "--signal", "SIGKILL"])?;
                }
                Ok(())
            },
            |_, job| job.task(&["kill", "--signal", "SIGKILL"]).map(drop),
            // A client may ask the shim for it without a kill.
            |host, job| {
                let mut request = DeleteRequest::new();
                request.id = job.id().to_owned();
                let task = Task::of(host, job.id())?;
                let deleted: DeleteResponse = task.call("Delete", &request)?;
                ensure!(deleted.exit_status == 137, "exit status {}", deleted.exit_status);
                // As containerd would, which has not heard of it.
                let ended: ttrpc::Result<Empty> = task.call("Shutdown", &ShutdownRequest::new());
                drop(ended);
                wait_for("the shim's end", LIMIT, || {
                    Ok(job.status().is_err().then_some(()))
                })
            },
        ];
        for (nth, end) in ends.into_iter().enumerate() {
            let job = suspended(host)?;
            end(host, &job).with_context(|| format!("end {nth}"))?;
            host.no_faults()?;
            wait_for("the end", LIMIT, || {
                Ok((!job.status().is_ok_and(|status| status == "PAUSED")).then_some(()))
            })
            .with_context(|| format!("end {nth}"))?;
            if job.status().is_ok() {
                let deleted = host.node().run(&["ctr", "tasks", "delete", job.id()]);
                deleted.with_context(|| format!("end {nth}"))?;
            }
            job.forget().with_context(|| format!("end {nth}"))?;
        }
        host.idle()
    })
}

/// CRIU dumps no open device: one held by a program without CUDA makes a dump fail after the GPU state was
/// taken. Unless it descends from a CUDA process, it may be about to start CUDA, and is not refused.
pub fn after_a_failed_dump_the_counter_goes_on_or_stays_paused(platform: Platform) -> Result<()> {
    on([host(platform, "rb-dump", 1)?], |[host]| {
        let script = "sh -c 'while :; do sleep 1; done' </dev/nvidiactl & \
                      gpu-counter --out /counter.log --interval-ms 50 --mib 8; :";
        let job = Container::script(host, "job", &["0"], 1, &[], script)?;
        job.goes_on(3)?;
        fails(&job, host, "FIRN-DUMP")?;

        job.task(&["pause"])?;
        let output = failure(job.task(&["checkpoint"]))?;
        assert!(output.contains("FIRN-DUMP:"), "{output}");
        assert_eq!(job.status()?, "PAUSED");
        job.stands_still()?;
        job.task(&["resume"])?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

pub fn a_full_disk_costs_nothing_and_leaves_no_partial_image(platform: Platform) -> Result<()> {
    on([host(platform, "rf-full", 1)?], |[host]| {
        let node = host.node();
        // Too small for the image, which is seen before, and with room for too few files, which CRIU runs
        // into.
        let disks = [
            ("/tmp/small", "size=2m", "FIRN-IMAGE-SPACE:"),
            ("/tmp/few", "nr_inodes=6", "FIRN-DUMP:"),
        ];
        host.watch_runc()?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        for (disk, option, code) in disks {
            node.run(&["mkdir", disk])?;
            node.run(&["mount", "-t", "tmpfs", "-o", option, "tmpfs", disk])?;
            let image = format!("{disk}/image");
            for options in [&["checkpoint"][..], &["checkpoint", "--exit"]] {
                let output = failure(job.task(&[options, &["--image-path", &image]].concat()))?;
                assert!(output.contains(code), "{output}");
                assert!(!node.path(&image).exists(), "half an image is left");
                assert_eq!(job.status()?, "RUNNING");
                job.goes_on(3)?;
            }
            assert_eq!(host.runc_has("checkpoint")?, code == "FIRN-DUMP:");
        }
        job.remove()?;
        host.idle()
    })
}

/// A thin disk takes everything and fails when it is written back: 512 KiB are there of 256 MiB. The manifest
/// fits.
const THIN: &str = "mkdir /tmp/back /tmp/thin; mount -t tmpfs -o size=8m tmpfs /tmp/back
    free=$(losetup --find); free=${free%% *}
    [ -e $free ] || mknod $free b 7 ${free#/dev/loop} || true
    truncate -s 256M /tmp/back/img; loop=$(losetup --find --show /tmp/back/img)
    busybox mke2fs -i 1048576 $loop >/dev/null; mount -t ext2 $loop /tmp/thin; sync -f /tmp/thin
    dd if=/dev/zero of=/tmp/back/fill bs=4k 2>/dev/null || true
    truncate -s -512K /tmp/back/fill";

const TORN_DOWN: &str = "umount /tmp/thin
    losetup --detach $(losetup --noheadings --output NAME --associated /tmp/back/img)
    umount /tmp/back; rmdir /tmp/back /tmp/thin";

pub fn a_disk_that_fails_at_write_back_ends_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "rf-thin", 1)?], |[host]| {
        let node = host.node();
        let shell = |script: &str| node.run(&["sh", "-euc", script]);
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let image = "/tmp/thin/image";
        let by_ctr = ["ctr", "tasks", "checkpoint", "--image-path", image, "job"];
        let ending = [
            "ctr",
            "tasks",
            "checkpoint",
            "--exit",
            "--image-path",
            image,
            "job",
        ];
        let by_firn = ["firn", "checkpoint", "--exit", "job", "/tmp/thin/image/"];
        for command in [&by_ctr[..], &ending, &by_firn] {
            shell(THIN)?;
            let output = failure(node.run(command))?;
            assert!(output.contains("FIRN-DUMP"), "{output}");
            assert!(output.contains("is not on its disk"), "{output}");
            assert!(!node.path(image).exists(), "an image is left that no disk has");
            assert_eq!(job.status()?, "RUNNING");
            job.goes_on(3)?;
            shell(TORN_DOWN)?;
        }
        job.task(&["checkpoint", "--exit", "--image-path", "/tmp/image"])?;
        job.becomes("STOPPED")?;
        job.forget()?;
        host.idle()
    })
}
