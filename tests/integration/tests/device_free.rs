//! Jobs that let go of every device before a checkpoint: their copies continue with other devices, or with
//! none.
//!
//! Needs root.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{
    BUNDLES, Container, FIRN, GpuHost, Lines, SimGpu, cases, failure, matrix, nothing_left_but_metadata, on,
};
use firn_node::{Platform, wait_for};
use firn_workloads::counter::checksum;
use serde_json::Value;

/// Where the job writes: in a tmpfs, which is in the checkpoint, so that no line is lost.
const LOG: &str = "/dev/shm/lines";

/// The size of its state.
const STATE: usize = 1 << 20;

const ASSERTED: [&str; 2] = ["--annotation", "firn.dev/gpu=released-by-hook"];

const HOOKS: [&str; 8] = [
    "--annotation",
    "firn.dev/hook-prepare=exec: /bin/device-free release",
    "--annotation",
    "firn.dev/hook-resumed=exec: /bin/device-free take",
    "--annotation",
    "firn.dev/hook-restored=exec: /bin/device-free take",
    "--annotation",
    "firn.dev/hook-failed=exec: /bin/device-free take",
];

const JOB: [&str; 3] = ["/bin/device-free", "--out", LOG];

/// What computes where there is no GPU.
const CPU: &str = "cpu";

const WAIT: Duration = Duration::from_secs(60);

/// Removes the driver's libraries from a node.
const REMOVE: &str = "cd /usr/lib/x86_64-linux-gnu && rm libcuda.so* libnvidia-ml.so*";

fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
}

/// A node with two GPUs of another model, whose driver is another version: none of the files of the first.
fn other_host(platform: Platform, name: &str) -> Result<GpuHost> {
    let gpus = [7, 8].map(|gpu| SimGpu::h200(gpu).model("NVIDIA B200").memory(2048));
    let mut host = host(platform, name, 6)?;
    host.node().run(&["sh", "-c", REMOVE])?;
    host.replace_gpus(&gpus, "590.44.01")?;
    Ok(host)
}

/// The job with these options.
fn job<'h>(host: &'h GpuHost, options: &[&str], arguments: &[&str]) -> Result<Container<'h>> {
    let options = [&["--runtime", FIRN], &ASSERTED[..], &HOOKS, options].concat();
    Container::run(host, "job", &options, &[&JOB[..], arguments].concat())
}

fn with_gpus<'h>(host: &'h GpuHost, gpus: &[&str], arguments: &[&str]) -> Result<Container<'h>> {
    let grant = host.ctr_gpu_options(gpus)?;
    job(
        host,
        &grant.iter().map(String::as_str).collect::<Vec<_>>(),
        arguments,
    )
}

/// Restores the directory into a container of these devices, which has no annotation of its own and has run
/// before.
fn restored<'h>(host: &'h GpuHost, id: &str, options: &[&str], dir: &str) -> Result<Container<'h>> {
    let options = [&["--runtime", FIRN], options].concat();
    let container = Container::run(host, id, &options, &JOB)?;
    container.task(&["kill", "--signal", "SIGKILL"])?;
    container.becomes("STOPPED")?;
    container.exit_code()?;
    host.node().run(&["firn", "restore", id, "--dir", dir])?;
    Ok(container)
}

/// Makes a directory of one node one of the other.
fn send(from: &GpuHost, dir: &str, to: &GpuHost) -> Result<()> {
    let (source, target) = (from.node().path(dir), to.node().path(dir));
    let copied = std::process::Command::new("cp")
        .arg("-a")
        .args([&source, &target])
        .status()?;
    ensure!(copied.success(), "cannot copy {dir}");
    Ok(())
}

fn lines(job: &Container<'_>) -> Result<Lines> {
    Ok(Lines::parse(&job.exec(&["cat", LOG])?))
}

/// Waits until the job has computed three times on this device, and checks every value that it has computed
/// so far: none is left out, repeated or wrong.
fn computes_on(job: &Container<'_>, device: &str) -> Result<()> {
    let before = lines(job)?.0.len();
    wait_for(&format!("{} to compute on {device}", job.id()), WAIT, || {
        let lines = lines(job)?;
        if let Some(fault) = lines.fault() {
            anyhow::bail!("{fault}");
        }
        for (line, iter) in lines.0.iter().zip(0..) {
            let expected = checksum(STATE, iter).to_string();
            ensure!(
                line.iter == u64::from(iter) && line.checksum == expected,
                "{line:?}"
            );
        }
        let last = lines
            .0
            .iter()
            .skip(before)
            .rev()
            .take_while(|line| line.uuid == device);
        Ok((last.count() >= 3).then_some(()))
    })
}

/// Names of nodes of accelerators in its /dev.
fn nodes(job: &Container<'_>) -> Result<String> {
    let list = "cd /dev; ls -d nvidia* dri/* kfd accel/* 2>/dev/null | sort | tr '\\n' ' '";
    Ok(job.exec(&["sh", "-c", list])?.trim().to_owned())
}

fn facts(job: &Container<'_>) -> Result<Value> {
    Ok(serde_json::from_str(
        &job.exec(&["cat", "/run/firn/restore.json"])?,
    )?)
}

/// From a GPU to none, and from there to a GPU of another model with another driver. No value differs from
/// those of a job that is never moved.
fn a_job_goes_on_without_a_gpu_and_with_another(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "df-a", 1)?, other_host(platform, "df-b")?];
    on(hosts, |[a, b]| {
        let (gpu, other) = (a.uuids().remove(0), b.uuids().remove(1));
        let source = with_gpus(a, &["0"], &[])?;
        computes_on(&source, &gpu)?;
        let audit = a.node().run(&["firn", "audit", "job"])?.stdout;
        ensure!(
            audit.contains("device-free, for any device or none: the hook prepare has to release")
                && audit.contains("(device-free) has: /dev/nvidia"),
            "{audit}"
        );
        a.watch_runc()?;
        source.checkpoint_and_exit("/run/first")?;
        source.remove()?;
        a.idle()?;
        let shown = a.node().run(&["firn", "inspect", "/run/first"])?.stdout;
        ensure!(shown.contains("device-free") && shown.contains(&gpu), "{shown}");

        let without = restored(a, "without", &[], "/run/first")?;
        computes_on(&without, CPU)?;
        assert_eq!(nodes(&without)?, "");
        let known = facts(&without)?;
        ensure!(
            known["gpus"][0]["old"]["uuid"] == *gpu && known["gpus"][0]["new"].is_null(),
            "{known}"
        );
        without.task(&["checkpoint", "--image-path", "/run/second"])?;
        computes_on(&without, CPU)?;
        without.checkpoint_and_exit("/run/third")?;
        without.remove()?;

        send(a, "/run/third", b)?;
        let grant = b.ctr_gpu_options(&["1"])?;
        let grant: Vec<&str> = grant.iter().map(String::as_str).collect();
        let with = restored(b, "with", &grant, "/run/third")?;
        computes_on(&with, &other)?;
        // The driver's library makes nodes for all GPUs of the node, as the real one does.
        ensure!(nodes(&with)?.contains("nvidia1 nvidiactl"), "{}", nodes(&with)?);
        let known = facts(&with)?;
        ensure!(
            known["gpus"][0]["new"]["uuid"] == *other && known["gpus"][0]["old"].is_null(),
            "{known}"
        );
        let used: Vec<String> = lines(&with)?.0.into_iter().map(|line| line.uuid).collect();
        let mut devices = used.clone();
        devices.dedup();
        assert_eq!(devices, [&gpu, CPU, &other]);
        with.task(&["checkpoint", "--image-path", "/run/fourth"])?;
        computes_on(&with, &other)?;
        with.remove()?;
        b.idle()
    })
}

/// A job that began without a GPU has none of the driver's files in its checkpoint.
fn a_job_that_began_without_a_gpu_gets_the_targets_driver(platform: Platform) -> Result<()> {
    on([host(platform, "df-born", 1)?], |[host]| {
        let source = job(host, &[], &[])?;
        computes_on(&source, CPU)?;
        source.checkpoint_and_exit("/run/image")?;
        source.remove()?;
        let grant = host.ctr_gpu_options(&["0"])?;
        let grant: Vec<&str> = grant.iter().map(String::as_str).collect();
        let copy = restored(host, "copy", &grant, "/run/image")?;
        computes_on(&copy, &host.uuids()[0])?;
        // The driver's libraries are as the spec has them.
        let written = copy.exec(&[
            "sh",
            "-c",
            "echo x >/usr/lib/x86_64-linux-gnu/libcuda.so.1; echo $?",
        ])?;
        ensure!(written.trim() != "0", "{written}");
        copy.checkpoint_and_exit("/run/again")?;
        copy.remove()?;
        let without = restored(host, "without", &[], "/run/again")?;
        computes_on(&without, CPU)?;
        without.remove()?;
        host.idle()
    })
}

/// By the client's own commands, which give the copy the source's spec, to a node without the driver.
fn a_copy_of_the_sources_spec_gets_what_the_node_has(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "df-ca", 1)?, host(platform, "df-cb", 2)?];
    on(hosts, |[a, b]| {
        let source = with_gpus(a, &["0"], &[])?;
        let gpu = a.uuids().remove(0);
        computes_on(&source, &gpu)?;
        source.checkpoint("checkpoint/job")?;
        computes_on(&source, &gpu)?;
        let used: Vec<String> = lines(&source)?.0.into_iter().map(|line| line.uuid).collect();
        ensure!(used.iter().any(|device| device == CPU), "the hook was not called");
        source.remove()?;
        a.send_image("checkpoint/job", b)?;
        b.node().run(&["simgpu", "teardown"])?;
        b.node().run(&["sh", "-c", REMOVE])?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 0)?;
        computes_on(&copy, CPU)?;
        assert_eq!(nodes(&copy)?, "");
        b.remove_image("checkpoint/job")?;
        copy.checkpoint("checkpoint/again")?;
        computes_on(&copy, CPU)?;
        copy.remove()?;
        a.idle()
    })
}

/// A checkpoint is refused for this, before runc is called; the job continues on its GPU.
fn expect_refused(job: &Container<'_>, host: &GpuHost, named: &[&str]) -> Result<()> {
    let output = failure(job.checkpoint("checkpoint/never"))?;
    for part in [&["FIRN-GPU-HELD:", "after the hook prepare", "hint: "], named].concat() {
        ensure!(output.contains(part), "no {part} in:\n{output}");
    }
    ensure!(!host.runc_has("checkpoint")?, "runc was called");
    ensure!(job.status()? == "RUNNING", "the task is {}", job.status()?);
    Ok(())
}

fn a_hook_that_has_not_let_go_is_refused_by_process_and_node(platform: Platform) -> Result<()> {
    on([host(platform, "df-held", 1)?], |[host]| {
        host.watch_runc()?;
        let gpu = host.uuids().remove(0);
        let keeps = with_gpus(host, &["0"], &["--keeps"])?;
        computes_on(&keeps, &gpu)?;
        expect_refused(&keeps, host, &["(device-free)", "/dev/nvidia", "open"])?;
        computes_on(&keeps, &gpu)?;
        keeps.remove()?;

        // The job has let go, and a process that was started in its container has not.
        let options = ["--annotation", "firn.dev/exec=omit"];
        let grant = host.ctr_gpu_options(&["0"])?;
        let grant: Vec<&str> = grant.iter().map(String::as_str).collect();
        let others = job(host, &[&grant[..], &options].concat(), &[])?;
        computes_on(&others, &gpu)?;
        let exec = ["ctr", "tasks", "exec", "--exec-id", "other", "--detach", "job"];
        let other = ["sh", "-c", "exec 3</dev/nvidia0; echo >/opened; exec sleep 1000"];
        host.node().run(&[&exec[..], &other].concat())?;
        let opened = host.node().path(format!("{BUNDLES}/job/rootfs/opened"));
        wait_for("the exec to open it", WAIT, || Ok(opened.exists().then_some(())))?;
        expect_refused(&others, host, &["(sleep)", "/dev/nvidia0 open"])?;
        // The hook `failed` was called.
        computes_on(&others, &gpu)?;
        others.remove()?;
        host.idle()
    })
}

/// A runc that fails every dump.
const FAILING: &str =
    "#!/bin/sh\ncase \" $* \" in *' checkpoint '*) exit 1;; esac\nexec /usr/sbin/runc \"$@\"\n";

fn a_dump_that_fails_leaves_the_job_on_its_device(platform: Platform) -> Result<()> {
    on([host(platform, "df-fail", 1)?], |[host]| {
        for gpus in [&["0"][..], &[]] {
            let device = gpus.first().map_or(CPU.to_owned(), |_| host.uuids().remove(0));
            let job = with_gpus(host, gpus, &[])?;
            computes_on(&job, &device)?;
            host.replace_runc(FAILING)?;
            let output = failure(job.checkpoint("checkpoint/never"))?;
            ensure!(output.contains("FIRN-"), "{output}");
            computes_on(&job, &device)?;
            host.replace_runc("#!/bin/sh\nexec /usr/sbin/runc \"$@\"\n")?;
            job.checkpoint_and_exit("/run/image")?;
            job.remove()?;
            host.node().run(&["rm", "-r", "/run/image"])?;
        }
        host.idle()
    })
}

fn without_a_prepare_hook_the_assertion_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "df-no", 1)?], |[host]| {
        let output = failure(Container::count_with(host, "wrong", &["0"], 1, &ASSERTED, &[]))?;
        for part in [
            "FIRN-HOOK-SETTING",
            "firn.dev/gpu=released-by-hook",
            "firn.dev/hook-prepare",
        ] {
            ensure!(output.contains(part), "no {part} in:\n{output}");
        }
        nothing_left_but_metadata(host, "wrong")?;
        // Other containers of a pod have its annotation, too.
        let other = Container::beat(host, "other", &ASSERTED, "")?;
        other.checkpoint("checkpoint/other")?;
        other.beats_on()?;
        other.remove()?;
        host.idle()
    })
}

const ACCEL: &str = "/dev/accel/accel0";
const RENDER: &str = "/dev/dri/renderD128";

/// Nodes of these names, which open /dev/null or what has this minor number.
fn other_vendors(host: &GpuHost, nodes: &[&str], minor: &str) -> Result<()> {
    host.node().run(&["mkdir", "-p", "/dev/accel", "/dev/dri"])?;
    for path in nodes {
        host.node().run(&["mknod", "-m", "666", path, "c", "1", minor])?;
    }
    Ok(())
}

/// A job in a container with another vendor's accelerator, which a child of its has open until the hook.
fn with_accelerator(host: &GpuHost) -> Result<Container<'_>> {
    let take = format!("sh -c 'exec 3<{ACCEL}; exec sleep 1000' & echo $! >/dev/shm/child");
    let script = format!(
        "printf '#!/bin/sh\\nkill $(cat /dev/shm/child)\\nwhile kill -0 $(cat /dev/shm/child) 2>/dev/null; \
         do sleep 0.05; done\\n' >/dev/shm/release; {take}; trap : CHLD; \
         while :; do wait; echo x >>/beats; sleep 0.05; done"
    );
    let options = [
        &["--runtime", FIRN, "--device", ACCEL, "--device", RENDER],
        &ASSERTED[..],
        &["--annotation", "firn.dev/hook-prepare=exec: sh /dev/shm/release"],
    ];
    Container::run(host, "job", &options.concat(), &["sh", "-c", &script])
}

fn devices_of_other_vendors_come_and_go(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "df-va", 1)?, host(platform, "df-vb", 2)?];
    on(hosts, |[a, b]| {
        other_vendors(a, &[ACCEL, RENDER], "3")?;
        other_vendors(b, &[ACCEL], "5")?;
        let source = with_accelerator(a)?;
        wait_for("the child", WAIT, || {
            Ok(source.exec(&["cat", "/dev/shm/child"]).ok().map(drop))
        })?;
        source.checkpoint("checkpoint/job").context("after the hook")?;
        source.beats_on()?;
        source.remove()?;
        a.send_image("checkpoint/job", b)?;
        // Here the accelerator has another number, and there is no node for graphics.
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 0)?;
        copy.beats_on()?;
        assert_eq!(nodes(&copy)?, "accel/accel0");
        assert_eq!(copy.exec(&["stat", "-c", "%t:%T", ACCEL])?.trim(), "1:5");
        copy.remove()?;
        b.idle()?;

        // From another vendor's to NVIDIA's and back.
        let from = with_gpus(a, &["0"], &[])?;
        computes_on(&from, &a.uuids()[0])?;
        from.checkpoint_and_exit("/run/image")?;
        from.remove()?;
        let other = restored(a, "other", &["--device", ACCEL], "/run/image")?;
        computes_on(&other, CPU)?;
        assert_eq!(nodes(&other)?, "accel/accel0");
        other.remove()?;
        a.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_job_goes_on_without_a_gpu_and_with_another [FORKY, FORKY_V2];
        a_job_that_began_without_a_gpu_gets_the_targets_driver [FORKY, FORKY_V2];
        a_copy_of_the_sources_spec_gets_what_the_node_has [FORKY];
        a_hook_that_has_not_let_go_is_refused_by_process_and_node [FORKY];
        a_dump_that_fails_leaves_the_job_on_its_device [FORKY];
        without_a_prepare_hook_the_assertion_is_refused [FORKY];
        devices_of_other_vendors_come_and_go [FORKY];
    })
}
