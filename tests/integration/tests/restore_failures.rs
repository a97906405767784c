//! What cannot be restored is refused with its code before runc is called, and a restore that fails later
//! leaves nothing: no process, mount, cgroup or state, and an image that can be used again.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use firn_lab::{Archive, Container, DRIVER, GpuHost, SimGpu, cases, failure, matrix, nothing_left, on};
use firn_node::{CgroupMode, Platform};
use serde_json::{Value, json};

/// A node with one GPU that no other node has.
fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
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
fn expect_refused(host: &GpuHost, image: &str, code: &str) -> Result<()> {
    let output = failure(Container::restore(host, "job", image, 1).map(drop))?;
    ensure!(output.contains(&format!("{code}:")), "not {code} but:\n{output}");
    ensure!(output.contains("hint: "), "no hint in:\n{output}");
    ensure!(
        !host.runc_has("restore")? && !host.runc_has("create")?,
        "runc was called"
    );
    host.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(host, "job")?;
    host.idle()
}

/// The image restores and the counter continues.
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
    ("an unknown need", "FIRN-MANIFEST-NEEDS", |dir| {
        let path = dir.join("firn.json");
        let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        manifest["needs"] = json!(["nvidia", "a-disk-on-the-moon"]);
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

fn damaged_images_are_refused_before_runc_is_called(platform: Platform) -> Result<()> {
    let hosts = [
        host(platform, "rf-damaged-a", 1)?,
        host(platform, "rf-damaged-b", 2)?,
    ];
    on(hosts, |[a, b]| {
        b.watch_runc()?;
        image(a, b, &[])?;
        for (number, (what, code, damage)) in DAMAGES.iter().enumerate() {
            let name = format!("checkpoint/damaged-{number}");
            let mut archive = Archive::export(a, "checkpoint/job")?;
            archive.edit(damage)?;
            archive.import(b, &name)?;
            expect_refused(b, &name, code).with_context(|| (*what).to_owned())?;
        }
        restores(b, "checkpoint/job")
    })
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

fn unfit_nodes_refuse_before_runc_is_called(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "rf-unfit-a", 1)?, host(platform, "rf-unfit-b", 2)?];
    on(hosts, |[a, b]| {
        b.watch_runc()?;
        image(a, b, &[])?;
        for target in targets() {
            b.replace_gpus(&(target.gpus)(), target.driver)?;
            b.configure(&target.configuration)?;
            expect_refused(b, "checkpoint/job", target.code).context(target.what)?;
        }
        b.configure("")?;
        b.replace_gpus(&[SimGpu::h200(2)], DRIVER)?;
        restores(b, "checkpoint/job")
    })
}

fn too_few_gpus_are_refused_before_runc_is_called(platform: Platform) -> Result<()> {
    let two = [SimGpu::h200(1), SimGpu::h200(2)];
    let a = GpuHost::for_test(platform, "rf-few-a", &two)?;
    on([a, host(platform, "rf-few-b", 3)?], |[a, b]| {
        b.watch_runc()?;
        let owner = ["--annotation", "firn.dev/peer-access=none"];
        let job = Container::count_with(a, "job", &["0", "1"], 2, &owner, &["--gpu", "0,1"])?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        a.send_image("checkpoint/job", b)?;
        // The spec of the source asks for a /dev/nvidia1, which this node does not have.
        expect_refused(b, "checkpoint/job", "FIRN-GRANT-UNRESOLVED")?;
        b.configure("[restore]\ngpus = [\"0\"]\n")?;
        expect_refused(b, "checkpoint/job", "FIRN-GPU-COUNT")
    })
}

fn a_missing_mount_source_is_refused_before_runc_is_called(platform: Platform) -> Result<()> {
    on(
        [host(platform, "rf-mnt-a", 1)?, host(platform, "rf-mnt-b", 2)?],
        |[a, b]| {
            b.watch_runc()?;
            a.node().run(&["mkdir", "/srv/data"])?;
            image(
                a,
                b,
                &["--mount", "type=bind,src=/srv/data,dst=/data,options=rbind:ro"],
            )?;
            expect_refused(b, "checkpoint/job", "FIRN-MOUNT-SOURCE-MISSING")?;
            b.node().run(&["mkdir", "/srv/data"])?;
            restores(b, "checkpoint/job")
        },
    )
}

/// A disturbance of the driver, as `simgpu fault add` takes it, and the code of the restore that it spoils.
type Fault = (&'static str, &'static [&'static str]);

const SHORT: &str =
    "[deadlines]\ngpu-lock = \"700ms\"\ngpu-checkpoint = \"1s\"\ngpu-restore = \"1s\"\ngpu-unlock = \"1s\"\n";

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
fn a_driver_that_fails_a_restore_leaves_nothing(platform: Platform) -> Result<()> {
    on(
        [
            host(platform, "rf-driver-a", 1)?,
            host(platform, "rf-driver-b", 2)?,
        ],
        |[a, b]| {
            b.watch_runc()?;
            image(a, b, &[])?;
            for (code, fault) in RESTORE_FAULTS {
                // For hangs alone: on a busy machine a call that ends may take longer than this.
                b.configure(if fault.contains(&"--hang") { SHORT } else { "" })?;
                b.fault(fault)?;
                let output = failure(Container::restore(b, "job", "checkpoint/job", 1).map(drop))?;
                b.no_faults()?;
                ensure!(output.contains(&format!("{code}:")), "not {code} but:\n{output}");
                ensure!(b.runc_has("restore")?, "runc was not called");
                expect_gone(b, "job").with_context(|| fault.join(" "))?;
            }
            b.configure("")?;
            restores(b, "checkpoint/job")
        },
    )
}

/// Removes what a failed `ctr containers restore` leaves in containerd, and makes sure that nothing else is
/// left.
fn expect_gone(host: &GpuHost, id: &str) -> Result<()> {
    // The task is there when it failed at its start, and not when it failed before.
    let _ = host.node().run(&["ctr", "tasks", "delete", "--force", id]);
    host.node().run(&["ctr", "containers", "delete", id])?;
    nothing_left(host, id)?;
    host.idle()
}

fn a_gpu_denied_by_the_cgroup_fails_the_restore(platform: Platform) -> Result<()> {
    on(
        [host(platform, "rf-deny-a", 1)?, host(platform, "rf-deny-b", 2)?],
        |[a, b]| {
            b.needs_device_rules()?;
            image(a, b, &[])?;
            // As if another program had closed the container's devices right after runc.
            let deny = "#!/bin/sh\n/usr/sbin/runc \"$@\" || exit\ncase \" $* \" in *' restore '*) \
                    echo a >/sys/fs/cgroup/devices/default/job/devices.deny;; esac\n";
            b.replace_runc(deny)?;
            let output = failure(Container::restore(b, "job", "checkpoint/job", 1).map(drop))?;
            assert!(output.contains("FIRN-GPU-DRIVER:"), "{output}");
            expect_gone(b, "job")?;
            b.watch_runc()?;
            restores(b, "checkpoint/job")
        },
    )
}

/// Next to the counter a loop that adds a line to /beats at each turn; its pid is in /pid.
const BEATING: &str = "(while :; do echo x >>/beats; sleep 0.05; done) & echo $! >/pid; \
                       exec /bin/gpu-counter --out /counter.log --interval-ms 50 --mib 8";

/// The counter continues and the loop is stopped, from this number of beats on.
fn only_the_counter_goes_on(job: &Container<'_>, from: usize) -> Result<()> {
    job.goes_on(3)?;
    let stat = job.exec(&["sh", "-c", "cat /proc/$(cat /pid)/stat"])?;
    ensure!(stat.contains(") T "), "not stopped: {stat}");
    ensure!(job.beats() == from, "{} beats after {from}", job.beats());
    Ok(())
}

/// A process that a signal has stopped is so after the dump and after the restore, which continues the
/// others. A v1 freezer keeps it from being dumped: refused, and nothing is changed.
fn a_stopped_process_stays_stopped(platform: Platform) -> Result<()> {
    on(
        [GpuHost::for_test(platform, "rf-stopped", &[SimGpu::h200(1)])?],
        |[host]| {
            let job = Container::script(host, "job", &["0"], 1, &[], BEATING)?;
            job.goes_on(3)?;
            job.beats_on()?;
            job.exec(&["sh", "-c", "kill -STOP $(cat /pid)"])?;
            let stopped = job.beats();
            only_the_counter_goes_on(&job, stopped).context("before the dump")?;
            if host.node().record().cgroup == CgroupMode::V1 {
                let output = failure(job.checkpoint("checkpoint/job"))?;
                ensure!(output.contains("FIRN-STOPPED: "), "{output}");
                only_the_counter_goes_on(&job, stopped).context("after the refusal")?;
                job.remove()?;
                return host.idle();
            }
            job.checkpoint("checkpoint/job")?;
            only_the_counter_goes_on(&job, stopped).context("after the dump")?;
            job.remove()?;
            let (job, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
            only_the_counter_goes_on(&job, stopped).context("after the restore")?;
            job.exec(&["sh", "-c", "kill -CONT $(cat /pid)"])?;
            job.beats_on()?;
            job.remove()?;
            host.idle()
        },
    )
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        damaged_images_are_refused_before_runc_is_called [FORKY, TRIXIE];
        unfit_nodes_refuse_before_runc_is_called [FORKY, TRIXIE];
        too_few_gpus_are_refused_before_runc_is_called [FORKY];
        a_missing_mount_source_is_refused_before_runc_is_called [FORKY];
        a_driver_that_fails_a_restore_leaves_nothing [FORKY, FORKY_V2, TRIXIE];
        a_gpu_denied_by_the_cgroup_fails_the_restore [FORKY];
        a_stopped_process_stays_stopped [FORKY, FORKY_V2, TRIXIE];
    })
}
