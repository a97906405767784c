//! What cannot be checkpointed or restored is refused with its code, and what fails is undone: the workload goes on as
//! before, or, after a restore, nothing is left and the image can be used again.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{Archive, BUNDLES, Container, DRIVER, FIRN, GpuHost, SimGpu, nothing_left, on};
use firn_node::{Cgroup, Suite, wait_for};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(30);

/// A node with one GPU that no other node has.
fn host(suite: Suite, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(suite, Cgroup::Auto, name, &[SimGpu::h200(gpu)])
}

/// What ctr said when it failed.
fn failure<T>(done: Result<T>) -> Result<String> {
    match done {
        Ok(_) => anyhow::bail!("ctr reported success"),
        Err(error) => Ok(format!("{error:#}")),
    }
}

/// A checkpoint of a running counter fails with this code, leaves no image, and the counter goes on.
fn fails(job: &Container<'_>, host: &GpuHost, code: &str) -> Result<()> {
    let said = failure(job.checkpoint("checkpoint/failed"))?;
    ensure!(said.contains(&format!("{code}:")), "not {code} but:\n{said}");
    ensure!(said.contains("hint: "), "no hint in:\n{said}");
    ensure!(!host.has_image("checkpoint/failed")?, "there is an image");
    ensure!(job.status()? == "RUNNING", "the task is {}", job.status()?);
    job.goes_on(3)?;
    Ok(())
}

fn managed_memory(suite: Suite, name: &str) -> Result<()> {
    on([host(suite, name, 1)?], |[host]| {
        host.watch_runc()?;
        let job = Container::count(host, "job", &["0"], 1, &["--managed"])?;
        job.goes_on(3)?;
        fails(&job, host, "FIRN-UVM")?;
        assert!(!host.runc_has("checkpoint")?, "runc was called");
        job.remove()?;
        host.idle()
    })
}

#[test]
fn managed_memory_is_refused_before_any_side_effect_on_forky() -> Result<()> {
    managed_memory(Suite::Forky, "rf-uvmf")
}

#[test]
fn managed_memory_is_refused_before_any_side_effect_on_trixie() -> Result<()> {
    managed_memory(Suite::Trixie, "rf-uvmt")
}

#[test]
fn a_cuda_process_that_was_started_by_exec_is_refused() -> Result<()> {
    on([host(Suite::Forky, "rf-exec", 1)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let exec = ["tasks", "exec", "--detach", "--exec-id", "second", "job"];
        let counter = [
            "/bin/gpu-counter",
            "--mib",
            "8",
            "--out",
            "/second.log",
            "--interval-ms",
            "50",
        ];
        host.node().run(&[&["ctr"], &exec[..], &counter].concat())?;
        let log = host.node().path(format!("{BUNDLES}/job/rootfs/second.log"));
        wait_for("the second counter", LIMIT, || Ok(log.exists().then_some(())))?;
        fails(&job, host, "FIRN-EXEC")?;
        host.node().run(&[
            "ctr",
            "tasks",
            "kill",
            "--exec-id",
            "second",
            "--signal",
            "SIGKILL",
            "job",
        ])?;
        wait_for("its end", LIMIT, || Ok((job.pids()?.len() == 1).then_some(())))?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// A disturbance of the driver, as `simgpu fault add` takes it, and the code of the checkpoint that it spoils.
type Fault = (&'static str, &'static [&'static str]);

/// Every way in which the driver can fail during a checkpoint.
const CHECKPOINT_FAULTS: &[Fault] = &[
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
        let job = Container::count(host, "job", &["0"], 4, &["--procs", "4"])?;
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

/// CRIU dumps no open device: one held by a program without CUDA makes a dump fail after the GPU state was taken.
fn dump_fails(suite: Suite, name: &str) -> Result<()> {
    on([host(suite, name, 1)?], |[host]| {
        let options = host.ctr_gpu_options(&["0"])?;
        let mut options: Vec<&str> = options.iter().map(String::as_str).collect();
        options.extend(["--runtime", FIRN]);
        let script = "sh -c 'while :; do sleep 1; done' </dev/nvidiactl & \
                      exec gpu-counter --out /counter.log --interval-ms 50 --mib 8";
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
        node.run(&["mkdir", "/tmp/small"])?;
        node.run(&["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", "/tmp/small"])?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        for options in [&["checkpoint"][..], &["checkpoint", "--exit"]] {
            let said = failure(job.task(&[options, &["--image-path", "/tmp/small/image"]].concat()))?;
            assert!(said.contains("FIRN-DUMP:"), "{said}");
            assert!(!node.path("/tmp/small/image").exists(), "half an image is left");
            assert_eq!(job.status()?, "RUNNING");
            job.goes_on(3)?;
        }
        job.remove()?;
        host.idle()
    })
}

/// A checkpoint image of a counter on GPU 0, made on `source` and sent to `target`.
fn image(source: &GpuHost, target: &GpuHost, options: &[&str]) -> Result<()> {
    let job = Container::count_with(source, "job", &["0"], 1, options, &[])?;
    job.goes_on(3)?;
    job.checkpoint("checkpoint/job")?;
    job.remove()?;
    source.send_image("checkpoint/job", target).map(drop)
}

/// A restore of this image is refused with this code: before runc is called, and nothing is left.
fn refused(host: &GpuHost, image: &str, code: &str) -> Result<()> {
    let said = failure(Container::restore(host, "job", image, 1).map(drop))?;
    ensure!(said.contains(&format!("{code}:")), "not {code} but:\n{said}");
    ensure!(said.contains("hint: "), "no hint in:\n{said}");
    ensure!(
        !host.runc_has("restore")? && !host.runc_has("create")?,
        "runc was called"
    );
    host.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(host, "job")?;
    host.idle()
}

/// The image restores and the counter goes on.
fn restores(host: &GpuHost, image: &str) -> Result<()> {
    let (job, _) = Container::restore(host, "job", image, 1)?;
    job.goes_on(3)?;
    job.remove()?;
    host.idle()
}

/// What is done to an image directory.
type Damage = fn(&Path) -> Result<()>;

const DAMAGES: &[(&str, &str, Damage)] = &[
    ("no manifest", "FIRN-MANIFEST-MISSING", |dir| {
        Ok(std::fs::remove_file(dir.join("firn.json"))?)
    }),
    ("half a manifest", "FIRN-MANIFEST-CORRUPT", |dir| {
        let text = std::fs::read(dir.join("firn.json"))?;
        Ok(std::fs::write(dir.join("firn.json"), &text[..text.len() / 2])?)
    }),
    ("another GPU in the manifest", "FIRN-MANIFEST-CORRUPT", |dir| {
        let text = std::fs::read_to_string(dir.join("firn.json"))?;
        let uuid = &SimGpu::h200(1).uuid;
        ensure!(text.contains(uuid), "no {uuid} in the manifest");
        Ok(std::fs::write(
            dir.join("firn.json"),
            text.replace(uuid, &SimGpu::h200(9).uuid),
        )?)
    }),
    ("a manifest of the future", "FIRN-MANIFEST-VERSION", |dir| {
        let path = dir.join("firn.json");
        let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        manifest["major"] = json!(1000);
        Ok(std::fs::write(path, manifest.to_string())?)
    }),
    ("a huge manifest", "FIRN-MANIFEST-TOO-LARGE", |dir| {
        Ok(std::fs::write(dir.join("firn.json"), vec![b' '; 64 << 20])?)
    }),
    ("a manifest that is a link", "FIRN-MANIFEST-UNREADABLE", |dir| {
        std::fs::rename(dir.join("firn.json"), dir.join("other.json"))?;
        Ok(std::os::unix::fs::symlink("other.json", dir.join("firn.json"))?)
    }),
    ("half the pages", "FIRN-IMAGE-TRUNCATED", |dir| {
        let pages = std::fs::OpenOptions::new()
            .write(true)
            .open(largest(dir, "pages-")?)?;
        Ok(pages.set_len(pages.metadata()?.len() / 2)?)
    }),
    ("no pages", "FIRN-IMAGE-TRUNCATED", |dir| {
        Ok(std::fs::remove_file(largest(dir, "pages-")?)?)
    }),
    ("a changed core", "FIRN-IMAGE-CORRUPT", |dir| {
        let path = largest(dir, "core-")?;
        let mut core = std::fs::read(&path)?;
        let middle = core.len() / 2;
        core[middle] ^= 1;
        Ok(std::fs::write(path, core)?)
    }),
];

/// The largest file of the image whose name begins so.
fn largest(dir: &Path, prefix: &str) -> Result<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir)?.flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    let largest = named.max_by_key(|entry| entry.metadata().map_or(0, |meta| meta.len()));
    Ok(largest
        .with_context(|| format!("no {prefix} in the image"))?
        .path())
}

fn damaged_images(suite: Suite, name: &str) -> Result<()> {
    let hosts = [
        host(suite, &format!("{name}-a"), 1)?,
        host(suite, &format!("{name}-b"), 2)?,
    ];
    on(hosts, |[a, b]| {
        b.watch_runc()?;
        image(a, b, &[])?;
        for (number, (what, code, damage)) in DAMAGES.iter().enumerate() {
            let name = format!("checkpoint/damaged-{number}");
            let mut archive = Archive::export(a, "checkpoint/job")?;
            archive.edit(damage)?;
            archive.import(b, &name)?;
            refused(b, &name, code).with_context(|| (*what).to_owned())?;
        }
        restores(b, "checkpoint/job")
    })
}

#[test]
fn damaged_images_are_refused_before_runc_is_called_on_forky() -> Result<()> {
    damaged_images(Suite::Forky, "rf-dmf")
}

#[test]
fn damaged_images_are_refused_before_runc_is_called_on_trixie() -> Result<()> {
    damaged_images(Suite::Trixie, "rf-dmt")
}

/// GPUs and driver of a node that cannot take the image, and its configuration.
struct Target {
    what: &'static str,
    code: &'static str,
    gpus: fn() -> Vec<SimGpu>,
    driver: &'static str,
    configuration: String,
}

fn targets() -> Vec<Target> {
    let one = || vec![SimGpu::h200(2)];
    let target = |what, code, gpus: fn() -> Vec<SimGpu>| Target {
        what,
        code,
        gpus,
        driver: DRIVER,
        configuration: String::new(),
    };
    let configured = |what, code, configuration: String| Target {
        configuration,
        ..target(what, code, one)
    };
    let map = |pairs: &[(u32, u32)]| {
        let pairs = pairs
            .iter()
            .map(|(old, new)| format!("{}={}", SimGpu::h200(*old).uuid, SimGpu::h200(*new).uuid));
        format!("[restore]\ngpu-map = {:?}\n", pairs.collect::<Vec<_>>())
    };
    vec![
        target("a smaller GPU", "FIRN-GPU-MEMORY", || {
            vec![SimGpu::h200(2).memory(512)]
        }),
        target("another model", "FIRN-GPU-MODEL", || {
            vec![SimGpu::h200(2).model("NVIDIA A100-SXM4-80GB")]
        }),
        target("a divided GPU", "FIRN-GPU-MIG", || vec![SimGpu::h200(2).mig()]),
        Target {
            driver: "580.95.05",
            ..target("another driver", "FIRN-DRIVER-VERSION", one)
        },
        configured(
            "a GPU that is not there",
            "FIRN-GPU-UNKNOWN",
            "[restore]\ngpus = [\"7\"]\n".to_owned(),
        ),
        configured(
            "a map to a GPU that is not there",
            "FIRN-GPU-UNKNOWN",
            map(&[(1, 9)]),
        ),
        configured("a map to a GPU that is not granted", "FIRN-MAP-UNKNOWN-TARGET", {
            map(&[(1, 9)]) + &format!("gpus = [{:?}]\n", SimGpu::h200(2).uuid)
        }),
        configured(
            "a key that does not exist",
            "FIRN-CONFIG-INVALID",
            "[restore]\ngpu = [\"0\"]\n".to_owned(),
        ),
        configured(
            "a worker that is not there",
            "FIRN-PROGRAM-MISSING",
            "[worker]\npath = \"/none\"\n".to_owned(),
        ),
    ]
}

fn unfit_targets(suite: Suite, name: &str) -> Result<()> {
    let hosts = [
        host(suite, &format!("{name}-a"), 1)?,
        host(suite, &format!("{name}-b"), 2)?,
    ];
    on(hosts, |[a, b]| {
        b.watch_runc()?;
        image(a, b, &[])?;
        for target in targets() {
            b.replace_gpus(&(target.gpus)(), target.driver)?;
            b.configure(&target.configuration)?;
            refused(b, "checkpoint/job", target.code).context(target.what)?;
        }
        b.configure("")?;
        b.replace_gpus(&[SimGpu::h200(2)], DRIVER)?;
        restores(b, "checkpoint/job")
    })
}

#[test]
fn nodes_that_do_not_fit_refuse_before_runc_is_called_on_forky() -> Result<()> {
    unfit_targets(Suite::Forky, "rf-unf")
}

#[test]
fn nodes_that_do_not_fit_refuse_before_runc_is_called_on_trixie() -> Result<()> {
    unfit_targets(Suite::Trixie, "rf-unt")
}

#[test]
fn too_few_gpus_are_refused_before_runc_is_called() -> Result<()> {
    let two = [SimGpu::h200(1), SimGpu::h200(2)];
    let a = GpuHost::for_test(Suite::Forky, Cgroup::Auto, "rf-few-a", &two)?;
    on([a, host(Suite::Forky, "rf-few-b", 3)?], |[a, b]| {
        b.watch_runc()?;
        let job = Container::count(a, "job", &["0", "1"], 2, &["--gpu", "0,1"])?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        a.send_image("checkpoint/job", b)?;
        // The spec of the source asks for a /dev/nvidia1, which this node does not have.
        refused(b, "checkpoint/job", "FIRN-GRANT-UNRESOLVED")?;
        b.configure("[restore]\ngpus = [\"0\"]\n")?;
        refused(b, "checkpoint/job", "FIRN-GPU-COUNT")
    })
}

#[test]
fn a_missing_mount_source_is_refused_before_runc_is_called() -> Result<()> {
    on(
        [
            host(Suite::Forky, "rf-mnt-a", 1)?,
            host(Suite::Forky, "rf-mnt-b", 2)?,
        ],
        |[a, b]| {
            b.watch_runc()?;
            a.node().run(&["mkdir", "/srv/data"])?;
            image(
                a,
                b,
                &["--mount", "type=bind,src=/srv/data,dst=/data,options=rbind:ro"],
            )?;
            refused(b, "checkpoint/job", "FIRN-MOUNT-SOURCE-MISSING")?;
            b.node().run(&["mkdir", "/srv/data"])?;
            restores(b, "checkpoint/job")
        },
    )
}

/// Every way in which the driver can fail during a restore.
const RESTORE_FAULTS: &[Fault] = &[
    (
        "FIRN-GPU-DRIVER",
        &["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"],
    ),
    (
        "FIRN-GPU-UNSUPPORTED",
        &["--call", "restore", "--error", "CUDA_ERROR_NOT_SUPPORTED"],
    ),
    ("FIRN-GPU-TIMEOUT", &["--call", "restore", "--hang"]),
    ("FIRN-WORKER", &["--call", "restore", "--crash"]),
    ("FIRN-WORKER", &["--call", "restore", "--crash", "--after"]),
    (
        "FIRN-GPU-DRIVER",
        &["--call", "unlock", "--error", "CUDA_ERROR_UNKNOWN"],
    ),
];

/// A restore that fails after runc was called leaves nothing, and the image can be used again.
fn restore_faults(suite: Suite, cgroup: Cgroup, name: &str) -> Result<()> {
    let start = |name: String, gpu| {
        let gpus = [SimGpu::h200(gpu)];
        GpuHost::for_test(suite, cgroup, &name, &gpus)
    };
    on(
        [start(format!("{name}-a"), 1)?, start(format!("{name}-b"), 2)?],
        |[a, b]| {
            b.watch_runc()?;
            b.configure(SHORT)?;
            image(a, b, &[])?;
            for (code, fault) in RESTORE_FAULTS {
                b.fault(fault)?;
                let said = failure(Container::restore(b, "job", "checkpoint/job", 1).map(drop))?;
                b.no_faults()?;
                ensure!(said.contains(&format!("{code}:")), "not {code} but:\n{said}");
                ensure!(b.runc_has("restore")?, "runc was not called");
                gone(b, "job").with_context(|| fault.join(" "))?;
            }
            restores(b, "checkpoint/job")
        },
    )
}

/// Removes what a failed `ctr containers restore` leaves in containerd, and makes sure that nothing else is left.
fn gone(host: &GpuHost, id: &str) -> Result<()> {
    // The task is there when it failed at its start, and not when it failed before.
    let _ = host.node().run(&["ctr", "tasks", "delete", "--force", id]);
    host.node().run(&["ctr", "containers", "delete", id])?;
    nothing_left(host, id)?;
    host.idle()
}

#[test]
fn a_driver_that_fails_a_restore_leaves_nothing_on_forky() -> Result<()> {
    restore_faults(Suite::Forky, Cgroup::Auto, "rf-rff")
}

#[test]
fn a_driver_that_fails_a_restore_leaves_nothing_on_forky_with_cgroup_v2() -> Result<()> {
    restore_faults(Suite::Forky, Cgroup::V2, "rf-rff2")
}

#[test]
fn a_driver_that_fails_a_restore_leaves_nothing_on_trixie() -> Result<()> {
    restore_faults(Suite::Trixie, Cgroup::Auto, "rf-rft")
}

#[test]
fn a_gpu_that_the_cgroup_denies_fails_the_restore_and_leaves_nothing() -> Result<()> {
    on(
        [
            host(Suite::Forky, "rf-deny-a", 1)?,
            host(Suite::Forky, "rf-deny-b", 2)?,
        ],
        |[a, b]| {
            if !b.has_device_rules() {
                return Ok(());
            }
            image(a, b, &[])?;
            // As if another program had closed the container's devices right after runc.
            let deny = "#!/bin/sh\n/usr/sbin/runc \"$@\" || exit\ncase \" $* \" in *' restore '*) \
                    echo a >/sys/fs/cgroup/devices/default/job/devices.deny;; esac\n";
            b.replace_runc(deny)?;
            let said = failure(Container::restore(b, "job", "checkpoint/job", 1).map(drop))?;
            assert!(said.contains("FIRN-GPU-DRIVER:"), "{said}");
            gone(b, "job")?;
            b.watch_runc()?;
            restores(b, "checkpoint/job")
        },
    )
}
