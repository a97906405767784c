//! An image is the workload's memory: nobody but root reads it, also when its client goes away in the middle,
//! somebody has made the directory before, or puts another one in its place.

mod rescue;

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::shim::oci::CheckpointOptions;
use firn_lab::{
    BUNDLES, Container, FIRN, GpuHost, SimGpu, Task, answer, cases, describe, failure, matrix, on,
};
use firn_node::{Platform, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

/// A script of CRIU's that stands still in one action.
const CRIU: &str = r#"#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = "$(cat /run/hold-criu 2>/dev/null)" ] || exit 0
touch /run/firn-held
while [ -e /run/hold-criu ]; do sleep 0.05; done
"#;

/// Where a checkpoint stands still.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// The shim, before this phase.
    Phase(&'static str),
    /// CRIU, before this action of its script.
    Criu(&'static str),
}

impl Stop {
    fn set(self, host: &GpuHost) -> Result<()> {
        host.node().run(&["rm", "-f", "/run/firn-held"])?;
        match self {
            Self::Phase(phase) => host.node().write("/run/firn-hold", phase),
            Self::Criu(action) => host.node().write("/run/hold-criu", action),
        }
    }

    fn wait_until_reached(host: &GpuHost) -> Result<()> {
        wait_for("the checkpoint to stand still", LIMIT, || {
            Ok(host.node().path("/run/firn-held").exists().then_some(()))
        })
    }

    fn lift(host: &GpuHost) -> Result<()> {
        host.node()
            .run(&["rm", "-f", "/run/firn-hold", "/run/hold-criu"])
            .map(drop)
    }
}

fn host(platform: Platform, name: &str) -> Result<GpuHost> {
    let host = GpuHost::for_test(platform, name, &[SimGpu::h200(1)])?;
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), CRIU)?;
    let script = "/usr/local/bin/hold-criu";
    host.node().install(file.path(), script, 0o755)?;
    host.node()
        .write("/etc/criu/runc.conf", format!("action-script {script}\n"))?;
    Ok(host)
}

fn shell(host: &GpuHost, script: &str) -> Result<String> {
    Ok(host.node().run(&["sh", "-euc", script])?.stdout)
}

/// What of any image a user without rights can read on the node.
fn readable(host: &GpuHost) -> Result<String> {
    let script = "setpriv --reuid 65534 --regid 65534 --clear-groups \
        find /tmp /var /srv /run -path '*/rootfs' -prune -o \
        \\( -name '*.img' -o -name firn.json -o -name descriptors.json -o -name '*dump.log' \\) \
        -readable -print 2>/dev/null || true";
    shell(host, script)
}

/// What lies on the node of any image.
fn left(host: &GpuHost) -> Result<String> {
    shell(
        host,
        "find /tmp /var/lib/firn /srv -name 'ctrd-checkpoint*' -o -name '*.img' 2>/dev/null || true",
    )
}

/// Every file of a directory has mode 600, and itself 700.
fn is_closed(host: &GpuHost, dir: &str) -> Result<()> {
    let dir = host.node().path(dir);
    let mode = |path: &std::path::Path| path.symlink_metadata().map(|metadata| metadata.mode() & 0o7777);
    ensure!(
        mode(&dir)? == 0o700,
        "{} has mode {:o}",
        dir.display(),
        mode(&dir)?
    );
    let mut files = 0;
    for entry in std::fs::read_dir(&dir)? {
        let path = entry?.path();
        ensure!(
            mode(&path)? == 0o600,
            "{} has mode {:o}",
            path.display(),
            mode(&path)?
        );
        files += 1;
    }
    ensure!(files > 5, "{} holds {files} files", dir.display());
    Ok(())
}

/// Interrupts ctr, as Ctrl-C does.
fn interrupt_ctr(host: &GpuHost) -> Result<()> {
    let processes = host.node().processes();
    let ctr = processes.iter().find(|process| process.command == "ctr");
    let pid = ctr.context("no ctr")?.pid.to_string();
    host.node().run(&["kill", "-INT", &pid]).map(drop)
}

/// The transaction of the container is over.
fn is_over(host: &GpuHost, id: &str) -> Result<()> {
    let journal = host.node().path(format!("{BUNDLES}/{id}/firn-journal"));
    wait_for("the end of the checkpoint", LIMIT, || {
        Ok((!journal.exists()).then_some(()))
    })
}

/// ctr is interrupted while a checkpoint stands still: containerd removes its directory, and that is the end
/// of the image.
fn interrupted_at(host: &GpuHost, job: &Container<'_>, stop: Stop) -> Result<()> {
    stop.set(host)?;
    let mut client = host.node().spawn(&[
        "ctr",
        "containers",
        "checkpoint",
        "--rw",
        "--task",
        job.id(),
        "checkpoint/interrupted",
    ])?;
    Stop::wait_until_reached(host)?;
    ensure!(
        readable(host)?.is_empty(),
        "while it is made: {}",
        readable(host)?
    );
    interrupt_ctr(host)?;
    client.wait()?;
    wait_for("the end of containerd's directory", LIMIT, || {
        Ok((!shell(host, "ls /tmp")?.contains("ctrd-checkpoint")).then_some(()))
    })?;
    Stop::lift(host)?;
    is_over(host, job.id())?;
    ensure!(left(host)?.is_empty(), "left: {}", left(host)?);
    ensure!(readable(host)?.is_empty(), "readable: {}", readable(host)?);
    // ctr had paused it, and is gone before it could resume it.
    if job.status()? == "PAUSED" {
        job.task(&["resume"])?;
    }
    job.goes_on(3).map(drop)
}

fn an_interrupted_client_leaves_no_memory_behind(platform: Platform) -> Result<()> {
    on([host(platform, "se-client")?], |[host]| {
        let runtime = ["--runtime", host.runtime_for_options()?];
        let job = Container::count_with(host, "job", &["0"], 1, &runtime, &[])?;
        job.goes_on(3)?;
        for stop in [
            Stop::Phase("inspect"),
            Stop::Phase("gpu-checkpoint"),
            Stop::Phase("criu-dump"),
            Stop::Criu("post-dump"),
            Stop::Phase("gpu-restore"),
        ] {
            interrupted_at(host, &job, stop).with_context(|| format!("{stop:?}"))?;
        }
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

/// A container without GPU, whose checkpoint is the runtime's alone.
fn idle_loop(host: &GpuHost) -> Result<Container<'_>> {
    let script = "while :; do echo x >>/log; sleep 0.05; done";
    Container::run(host, "plain", &["--runtime", FIRN], &["sh", "-c", script])
}

/// Asks the shim itself: ctr makes an image of every checkpoint, whose name has the second in it.
fn checkpoint(host: &GpuHost, job: &Container<'_>, image: &str) -> Result<()> {
    let task = Task::of(host, job.id())?;
    let pending = task.checkpoint(image, &CheckpointOptions::new())?;
    let reported = describe(&task.end(pending), |_| "done".to_owned());
    ensure!(reported == "done", "{reported}");
    Ok(())
}

fn image_files_and_directories_are_roots_alone(platform: Platform) -> Result<()> {
    on([host(platform, "se-files")?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        let plain = idle_loop(host)?;
        job.goes_on(3)?;
        shell(
            host,
            "mkdir -m 755 /srv/empty; mkdir -m 1777 /srv/everybodys; mkdir -m 700 /srv/theirs; \
             chown 65534 /srv/theirs",
        )?;
        for image in ["/srv/empty", "/srv/everybodys", "/srv/theirs", "/srv/new/image"] {
            checkpoint(host, &job, image)?;
            is_closed(host, image)?;
            job.goes_on(2)?;
        }
        checkpoint(host, &plain, "/srv/plain")?;
        is_closed(host, "/srv/plain")?;
        ensure!(readable(host)?.is_empty(), "readable: {}", readable(host)?);

        // A directory that the stock shim would write to is left as open as it is, and no file of the image
        // is.
        shell(host, "mkdir -m 755 /srv/shared; touch /srv/shared/theirs")?;
        checkpoint(host, &plain, "/srv/shared")?;
        ensure!(host.node().path("/srv/shared/pages-1.img").exists(), "no image");
        ensure!(readable(host)?.is_empty(), "readable: {}", readable(host)?);
        // One that holds GPU state is refused there.
        let output = failure(checkpoint(host, &job, "/srv/shared"))?;
        ensure!(
            output.contains("FIRN-IMAGE-OPEN: ") && output.contains("mode 755"),
            "{output}"
        );
        job.goes_on(2)?;

        host.configure("[checkpoint]\nopen-image-dir = \"refuse\"\n")?;
        shell(host, "mkdir -m 750 /srv/refused")?;
        let output = failure(checkpoint(host, &job, "/srv/refused"))?;
        ensure!(
            output.contains("FIRN-IMAGE-OPEN: ") && output.contains("hint: "),
            "{output}"
        );
        let mode = shell(host, "stat -c %a /srv/refused; ls -A /srv/refused")?;
        ensure!(mode == "750\n", "{mode}");
        job.goes_on(2)?;
        plain.remove()?;
        job.remove()?;
        host.idle()
    })
}

/// Somebody puts something else where the image directory was, while CRIU writes.
fn memory_goes_only_into_the_requested_directory(platform: Platform) -> Result<()> {
    on([host(platform, "se-moved")?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let swaps = [
            ("mkdir /srv/image", "mv /srv/image /srv/away; mkdir /srv/image"),
            (
                "mkdir /srv/image",
                "mv /srv/image /srv/away; ln -s /srv/other /srv/image",
            ),
            ("mkdir /srv/image", "rm -r /srv/image"),
            (":", "rm -r /srv/image; mkdir /srv/image"),
            (":", "rm /srv/image/core-1.img"),
        ];
        for (before, swap) in swaps {
            shell(host, &format!("mkdir /srv/other; {before}"))?;
            Stop::Criu("post-dump").set(host)?;
            let task = Task::of(host, "job")?;
            let pending = task.checkpoint("/srv/image", &CheckpointOptions::new())?;
            Stop::wait_until_reached(host)?;
            shell(host, swap)?;
            Stop::lift(host)?;
            let output = describe(&task.end(pending), |_| "done".to_owned());
            ensure!(output.contains("FIRN-IMAGE-GONE: "), "{swap}: {output}");
            ensure!(output.contains("the workload continues"), "{swap}: {output}");
            ensure!(left(host)?.is_empty(), "{swap} left {}", left(host)?);
            job.goes_on(3).context(swap)?;
            shell(host, "rm -rf /srv/*")?;
        }
        job.remove()?;
        host.idle()
    })
}

/// Ends a container with its checkpoint, and deletes its task.
fn ends(host: &GpuHost, job: &Container<'_>, image: &str) -> Result<u64> {
    let mut options = CheckpointOptions::new();
    options.exit = true;
    let before = job.lines()?.reached(1);
    let task = Task::of(host, job.id())?;
    let pending = task.checkpoint(image, &options)?;
    let output = describe(&task.end(pending), |_| "done".to_owned());
    ensure!(output == "done", "{output}");
    job.becomes("STOPPED")?;
    let _ = job.task(&["delete"]);
    Ok(before)
}

/// containerd 1.7 names no image to shims that it does not know: a container that such a shim starts afresh
/// is not let run.
fn started_afresh_by_others(host: &GpuHost) -> Result<()> {
    shell(
        host,
        "cp $(command -v containerd-shim-runc-v2) /usr/local/bin/containerd-shim-other-v2",
    )?;
    let options = ["--runtime", "io.containerd.other.v2"];
    let other = Container::run(
        host,
        "other",
        &options,
        &["sh", "-c", "echo x >>/ran; sleep 1000"],
    )?;
    other.task(&["kill", "--signal", "SIGKILL"])?;
    other.becomes("STOPPED")?;
    let _ = other.task(&["delete"]);
    let output = failure(
        host.node()
            .run(&["firn", "restore", "--dir", "/srv/image", "other"]),
    )?;
    ensure!(
        output.contains("FIRN-RESTORE-CLIENT: ") && output.contains("afresh"),
        "{output}"
    );
    ensure!(other.status().is_err(), "a task is left");
    other.forget()
}

fn a_directory_is_restored_through_containerd(platform: Platform) -> Result<()> {
    on([host(platform, "se-dir")?], |[host]| {
        let node = host.node();
        let restore =
            |more: &[&str]| node.run(&[&["firn", "restore", "--dir", "/srv/image", "job"], more].concat());
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let output = failure(restore(&[]))?;
        ensure!(
            output.contains("FIRN-IMAGE-TRUNCATED: ") || output.contains("cannot find /srv/image"),
            "{output}"
        );
        let before = ends(host, &job, "/srv/image")?;
        for round in 0..2 {
            if round == 0 {
                restore(&["--log", "/srv/log"])?;
            } else {
                let output = restore(&["--json"])?.stdout;
                let reported = answer(&["restore"], &output)?;
                ensure!(
                    reported["container"] == "job" && reported["pid"].as_i64() == Some(job.pid()?.into()),
                    "{output}"
                );
            }
            // The same counter in the same GPU memory, without a step left out.
            let lines = job.goes_on(3)?;
            ensure!(
                lines.0.iter().any(|line| line.iter == before + 1),
                "it was started afresh"
            );
            ensure!(job.gpus_in_use()? == host.uuids());
            // It is a container as any other: also to be refused while it runs.
            let output = failure(restore(&[]))?;
            ensure!(
                output.contains("FIRN-TASK-EXISTS: ") && output.contains("hint: "),
                "{output}"
            );
            if round == 0 {
                shell(host, "rm -r /srv/image")?;
                ends(host, &job, "/srv/image")?;
            }
        }
        if !platform.suite.restores_by_any_runtime() {
            started_afresh_by_others(host)?;
        }
        refusals_are_shown(host, job)
    })
}

/// The shim's refusal is shown unchanged, and no task is left.
fn refusals_are_shown(host: &GpuHost, job: Container<'_>) -> Result<()> {
    let restore = |more: &[&str]| {
        let command = [&["firn", "restore", "--dir", "/srv/image", "job"], more].concat();
        host.node().run(&command)
    };
    ends(host, &job, "/srv/other")?;
    shell(host, "echo x >>/srv/image/core-1.img")?;
    let output = failure(restore(&[]))?;
    ensure!(
        output.contains("FIRN-IMAGE-") && output.matches("hint: ").count() == 1,
        "{output}"
    );
    ensure!(job.status().is_err(), "a task is left");
    job.forget()?;
    let output = failure(restore(&[]))?;
    ensure!(output.contains("FIRN-NO-CONTAINER: "), "{output}");
    let output = failure(restore(&["--address", "/nowhere"]))?;
    ensure!(output.contains("FIRN-CONTAINERD: "), "{output}");
    host.idle()
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        an_interrupted_client_leaves_no_memory_behind [FORKY, TRIXIE];
        image_files_and_directories_are_roots_alone [FORKY, TRIXIE];
        memory_goes_only_into_the_requested_directory [FORKY, TRIXIE];
        a_directory_is_restored_through_containerd [FORKY, TRIXIE];
        rescue::an_image_named_by_an_error_can_be_restored [FORKY, TRIXIE];
        rescue::an_image_outlives_its_killed_shim [FORKY];
        rescue::the_image_of_an_ended_container_outlives_the_client [FORKY];
    })
}
