//! Checkpoints that fail after they have begun: by the driver, by CRIU, by a disk.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, FIRN, SHARES_NOTHING, failure, on};
use firn_node::Suite;

use super::{fails, host};

/// A disturbance of the driver, as `simgpu fault add` takes it, and the code of the checkpoint that it spoils.
type Fault = (&'static str, &'static [&'static str]);

/// Every way in which the driver can fail during a checkpoint.
const CHECKPOINT_FAULTS: &[Fault] = &[
    // A CUDA process that the driver does not tell of must not be dumped as one without CUDA.
    (
        "FIRN-GPU-DRIVER",
        &["--call", "tid", "--error", "CUDA_ERROR_UNKNOWN"],
    ),
    // The second time it is asked for, after the lock.
    (
        "FIRN-GPU-DRIVER",
        &["--call", "tid", "--error", "CUDA_ERROR_UNKNOWN", "--nth", "2"],
    ),
    // Memory that cannot be checkpointed and shows no sign: the driver tells after the lock.
    (
        "FIRN-GPU-UNSUPPORTED",
        &["--call", "checkpoint", "--error", "CUDA_ERROR_NOT_SUPPORTED"],
    ),
    (
        "FIRN-GPU-DRIVER",
        &["--call", "checkpoint", "--error", "CUDA_ERROR_UNKNOWN"],
    ),
    ("FIRN-GPU-TIMEOUT", &["--call", "lock", "--hang"]),
    ("FIRN-GPU-TIMEOUT", &["--call", "lock", "--hang", "--after"]),
    (
        "FIRN-GPU-DRIVER",
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

const SHORT: &str = "[deadlines]\nlock = \"700ms\"\ncheckpoint = \"1s\"\nrestore = \"1s\"\nunlock = \"1s\"\n";

fn checkpoint_faults(suite: Suite, name: &str) -> Result<()> {
    on([host(suite, name, 1)?], |[host]| {
        host.configure(SHORT)?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        for (code, fault) in CHECKPOINT_FAULTS {
            host.fault(fault)?;
            fails(&job, host, code).with_context(|| fault.join(" "))?;
            host.no_faults()?;
        }
        // A container that its user has paused is paused again.
        job.task(&["pause"])?;
        for fault in [["--call", "lock"], ["--call", "checkpoint"]] {
            host.fault(&[&fault[..], &["--error", "CUDA_ERROR_UNKNOWN"]].concat())?;
            let said = failure(job.task(&["checkpoint"]))?;
            host.no_faults()?;
            ensure!(said.contains("FIRN-GPU-DRIVER:"), "{said}");
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

#[test]
fn a_driver_that_fails_a_checkpoint_costs_nothing_on_forky() -> Result<()> {
    checkpoint_faults(Suite::Forky, "rf-cff")
}

#[test]
fn a_driver_that_fails_a_checkpoint_costs_nothing_on_trixie() -> Result<()> {
    checkpoint_faults(Suite::Trixie, "rf-cft")
}

#[test]
fn when_one_of_four_processes_fails_all_four_go_on() -> Result<()> {
    on([host(Suite::Forky, "rf-four", 1)?], |[host]| {
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

#[test]
fn gpu_state_that_the_driver_gives_back_at_the_second_try_is_not_lost() -> Result<()> {
    on([host(Suite::Forky, "rf-again", 1)?], |[host]| {
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

#[test]
fn a_container_that_lost_its_gpu_state_never_runs_again_and_its_image_is_named() -> Result<()> {
    on([host(Suite::Forky, "rf-lost", 1)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
        let said = failure(job.task(&["checkpoint", "--image-path", "/tmp/image"]))?;
        assert!(
            said.contains("FIRN-GPU-LOST:") && said.contains("/tmp/image is complete"),
            "{said}"
        );
        job.stands_still()?;
        assert!(host.node().path("/tmp/image/firn.json").exists());
        // Also when the client resumes it, as ctr does after every checkpoint.
        let _ = job.task(&["resume"]);
        job.stands_still()?;
        job.remove()?;
        host.idle()
    })
}

/// CRIU dumps no open device: one held by a program without CUDA makes a dump fail after the GPU state was taken. Unless it
/// descends from a CUDA process, it may be about to start CUDA, and is not refused.
fn dump_fails(suite: Suite, name: &str) -> Result<()> {
    on([host(suite, name, 1)?], |[host]| {
        let options = host.ctr_gpu_options(&["0"])?;
        let mut options: Vec<&str> = options.iter().map(String::as_str).collect();
        options.extend(["--runtime", FIRN]);
        let script = "sh -c 'while :; do sleep 1; done' </dev/nvidiactl & \
                      gpu-counter --out /counter.log --interval-ms 50 --mib 8; :";
        let job = Container::run(host, "job", &options, &["sh", "-c", script])?.counting(1);
        job.goes_on(3)?;
        fails(&job, host, "FIRN-DUMP")?;

        job.task(&["pause"])?;
        let said = failure(job.task(&["checkpoint"]))?;
        assert!(said.contains("FIRN-DUMP:"), "{said}");
        assert_eq!(job.status()?, "PAUSED");
        job.stands_still()?;
        job.task(&["resume"])?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

#[test]
fn after_a_failed_dump_the_counter_goes_on_or_stays_paused_on_forky() -> Result<()> {
    dump_fails(Suite::Forky, "rf-dpf")
}

#[test]
fn after_a_failed_dump_the_counter_goes_on_or_stays_paused_on_trixie() -> Result<()> {
    dump_fails(Suite::Trixie, "rf-dpt")
}

#[test]
fn a_full_disk_costs_nothing_and_leaves_no_half_an_image() -> Result<()> {
    on([host(Suite::Forky, "rf-full", 1)?], |[host]| {
        let node = host.node();
        // Too small for the image, which is seen before, and with room for too few files, which CRIU runs into.
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
                let said = failure(job.task(&[options, &["--image-path", &image]].concat()))?;
                assert!(said.contains(code), "{said}");
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
