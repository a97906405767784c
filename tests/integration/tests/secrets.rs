//! An image is the workload's memory: nobody but root reads it, also when its client goes away in the middle, somebody has made
//! the directory before, or puts another one in its place.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::shim::oci::CheckpointOptions;
use firn_lab::{BUNDLES, Container, FIRN, GpuHost, SimGpu, Task, failure, on, told};
use firn_node::{Cgroup, Suite, wait_for};

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

    fn reached(host: &GpuHost) -> Result<()> {
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

fn host(suite: Suite, name: &str) -> Result<GpuHost> {
    let host = GpuHost::for_test(suite, Cgroup::Auto, name, &[SimGpu::h200(1)])?;
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
        \\( -name '*.img' -o -name firn.json -o -name descriptors.json -o -name '*dump.log' \\) -readable -print 2>/dev/null || true";
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

/// ctr is interrupted while a checkpoint stands still: containerd removes its directory, and that is the end of the image.
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
    Stop::reached(host)?;
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

fn interrupted(suite: Suite, name: &str) -> Result<()> {
    on([host(suite, name)?], |[host]| {
        // ctr 1.7 asks under another name than the stock runtime's for nothing but a dump with the container's end.
        if suite == Suite::Trixie {
            host.drop_in()?;
        }
        let runtime: &[&str] = match suite {
            Suite::Trixie => &["--runtime", "io.containerd.runc.v2"],
            Suite::Forky => &[],
        };
        let job = Container::count_with(host, "job", &["0"], 1, runtime, &[])?;
        job.goes_on(3)?;
        for stop in [
            Stop::Phase("inspect"),
            Stop::Phase("take"),
            Stop::Phase("dump"),
            Stop::Criu("post-dump"),
            Stop::Phase("give-back"),
        ] {
            interrupted_at(host, &job, stop).with_context(|| format!("{stop:?}"))?;
        }
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.remove()?;
        host.idle()
    })
}

#[test]
fn an_interrupted_client_leaves_no_memory_behind_on_forky() -> Result<()> {
    interrupted(Suite::Forky, "se-if")
}

#[test]
fn an_interrupted_client_leaves_no_memory_behind_on_trixie() -> Result<()> {
    interrupted(Suite::Trixie, "se-it")
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
    let told = told(&task.end(pending), |_| "done".to_owned());
    ensure!(told == "done", "{told}");
    Ok(())
}

fn files(suite: Suite, name: &str) -> Result<()> {
    on([host(suite, name)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        let plain = idle_loop(host)?;
        job.goes_on(3)?;
        shell(
            host,
            "mkdir -m 755 /srv/empty; mkdir -m 1777 /srv/everybodys; mkdir -m 700 /srv/theirs; chown 65534 /srv/theirs",
        )?;
        for image in ["/srv/empty", "/srv/everybodys", "/srv/theirs", "/srv/new/image"] {
            checkpoint(host, &job, image)?;
            is_closed(host, image)?;
            job.goes_on(2)?;
        }
        checkpoint(host, &plain, "/srv/plain")?;
        is_closed(host, "/srv/plain")?;
        ensure!(readable(host)?.is_empty(), "readable: {}", readable(host)?);

        // A directory that the stock shim would write to is left as open as it is, and no file of the image is.
        shell(host, "mkdir -m 755 /srv/shared; touch /srv/shared/theirs")?;
        checkpoint(host, &plain, "/srv/shared")?;
        ensure!(host.node().path("/srv/shared/pages-1.img").exists(), "no image");
        ensure!(readable(host)?.is_empty(), "readable: {}", readable(host)?);
        // One that holds GPU state is refused there.
        let said = failure(checkpoint(host, &job, "/srv/shared"))?;
        ensure!(
            said.contains("FIRN-IMAGE-OPEN: ") && said.contains("mode 755"),
            "{said}"
        );
        job.goes_on(2)?;

        host.configure("[checkpoint]\nopen-image-dir = \"refuse\"\n")?;
        shell(host, "mkdir -m 750 /srv/refused")?;
        let said = failure(checkpoint(host, &job, "/srv/refused"))?;
        ensure!(
            said.contains("FIRN-IMAGE-OPEN: ") && said.contains("hint: "),
            "{said}"
        );
        let mode = shell(host, "stat -c %a /srv/refused; ls -A /srv/refused")?;
        ensure!(mode == "750\n", "{mode}");
        job.goes_on(2)?;
        plain.remove()?;
        job.remove()?;
        host.idle()
    })
}

#[test]
fn directories_and_files_of_images_are_roots_alone_on_forky() -> Result<()> {
    files(Suite::Forky, "se-ff")
}

#[test]
fn directories_and_files_of_images_are_roots_alone_on_trixie() -> Result<()> {
    files(Suite::Trixie, "se-ft")
}

/// Somebody puts something else where the image directory was, while CRIU writes.
fn replaced(suite: Suite, name: &str) -> Result<()> {
    on([host(suite, name)?], |[host]| {
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
            Stop::reached(host)?;
            shell(host, swap)?;
            Stop::lift(host)?;
            let said = told(&task.end(pending), |_| "done".to_owned());
            ensure!(said.contains("FIRN-IMAGE-GONE: "), "{swap}: {said}");
            ensure!(said.contains("the workload goes on"), "{swap}: {said}");
            ensure!(left(host)?.is_empty(), "{swap} left {}", left(host)?);
            job.goes_on(3).context(swap)?;
            shell(host, "rm -rf /srv/*")?;
        }
        job.remove()?;
        host.idle()
    })
}

#[test]
fn memory_goes_nowhere_but_into_the_directory_that_was_asked_for_on_forky() -> Result<()> {
    replaced(Suite::Forky, "se-rf")
}

#[test]
fn memory_goes_nowhere_but_into_the_directory_that_was_asked_for_on_trixie() -> Result<()> {
    replaced(Suite::Trixie, "se-rt")
}

/// Ends a container with its checkpoint, and deletes its task.
fn ends(host: &GpuHost, job: &Container<'_>, image: &str) -> Result<u64> {
    let mut options = CheckpointOptions::new();
    options.exit = true;
    let before = job.lines()?.reached(1);
    let task = Task::of(host, job.id())?;
    let pending = task.checkpoint(image, &options)?;
    let said = told(&task.end(pending), |_| "done".to_owned());
    ensure!(said == "done", "{said}");
    job.becomes("STOPPED")?;
    let _ = job.task(&["delete"]);
    Ok(before)
}

/// containerd 1.7 names no image to shims that it does not know: a container that such a shim starts afresh is not let run.
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
    let said = failure(
        host.node()
            .run(&["firn", "restore", "--dir", "/srv/image", "other"]),
    )?;
    ensure!(
        said.contains("FIRN-RESTORE-CLIENT: ") && said.contains("afresh"),
        "{said}"
    );
    ensure!(other.status().is_err(), "a task is left");
    other.forget()
}

fn restored(suite: Suite, name: &str) -> Result<()> {
    on([host(suite, name)?], |[host]| {
        let node = host.node();
        let restore =
            |more: &[&str]| node.run(&[&["firn", "restore", "--dir", "/srv/image", "job"], more].concat());
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let said = failure(restore(&[]))?;
        ensure!(
            said.contains("FIRN-IMAGE-TRUNCATED: ") || said.contains("cannot find /srv/image"),
            "{said}"
        );
        let before = ends(host, &job, "/srv/image")?;
        for round in 0..2 {
            if round == 0 {
                restore(&["--log", "/srv/log"])?;
            } else {
                let said = restore(&["--json"])?.stdout;
                let told: serde_json::Value = serde_json::from_str(&said)?;
                ensure!(
                    told["container"] == "job" && told["pid"].as_i64() == Some(job.pid()?.into()),
                    "{said}"
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
            let said = failure(restore(&[]))?;
            ensure!(
                said.contains("FIRN-TASK-EXISTS: ") && said.contains("hint: "),
                "{said}"
            );
            if round == 0 {
                shell(host, "rm -r /srv/image")?;
                ends(host, &job, "/srv/image")?;
            }
        }
        if suite == Suite::Trixie {
            started_afresh_by_others(host)?;
        }
        // What the shim refuses is shown as it says it, and no task is left.
        ends(host, &job, "/srv/other")?;
        shell(host, "echo x >>/srv/image/core-1.img")?;
        let said = failure(restore(&[]))?;
        ensure!(
            said.contains("FIRN-IMAGE-") && said.matches("hint: ").count() == 1,
            "{said}"
        );
        ensure!(job.status().is_err(), "a task is left");
        job.forget()?;
        let said = failure(restore(&[]))?;
        ensure!(said.contains("FIRN-NO-CONTAINER: "), "{said}");
        let said = failure(restore(&["--address", "/nowhere"]))?;
        ensure!(said.contains("FIRN-CONTAINERD: "), "{said}");
        host.idle()
    })
}

#[test]
fn a_directory_is_restored_through_containerd_on_forky() -> Result<()> {
    restored(Suite::Forky, "se-df")
}

#[test]
fn a_directory_is_restored_through_containerd_on_trixie() -> Result<()> {
    restored(Suite::Trixie, "se-dt")
}

const RESCUED: &str = "/var/lib/firn/rescue";

/// The counter goes on from a rescued image, without a step left out.
fn goes_on_from(host: &GpuHost, job: &Container<'_>, dir: &str, before: u64) -> Result<()> {
    is_closed(host, dir)?;
    host.node().run(&["firn", "restore", "--dir", dir, job.id()])?;
    let lines = job.goes_on(3)?;
    ensure!(
        lines.0.iter().any(|line| line.iter == before + 1),
        "it was started afresh"
    );
    ensure!(job.gpus_in_use()? == host.uuids());
    shell(host, &format!("rm -r {dir}")).map(drop)
}

/// The one image that was rescued.
fn rescued(host: &GpuHost, pattern: &str) -> Result<String> {
    let dirs = shell(host, &format!("echo {pattern}"))?;
    ensure!(
        !dirs.contains('*') && !dirs.trim().contains(' '),
        "rescued: {dirs}"
    );
    Ok(dirs.trim().to_owned())
}

/// What an error of a client names is there when the client has ended, and can be restored.
fn named(suite: Suite, name: &str) -> Result<()> {
    on([host(suite, name)?], |[host]| {
        if suite == Suite::Trixie {
            host.drop_in()?;
        }
        // Under the stock shim's name ctr 1.7 asks for a dump that the container survives.
        let runtime: &[&str] = match suite {
            Suite::Trixie => &["--runtime", "io.containerd.runc.v2"],
            Suite::Forky => &[],
        };
        let job = Container::count_with(host, "job", &["0"], 1, runtime, &[])?;
        job.goes_on(3)?;
        // A node's /tmp is a file system of its own: from there the files are copied.
        for root in [RESCUED, "/tmp/rescue"] {
            host.configure(&format!("[checkpoint]\nrescue-dir = \"{root}\"\n"))?;
            host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
            let said = failure(job.checkpoint("checkpoint/job"))?;
            let dir = rescued(host, &format!("{root}/*"))?;
            ensure!(said.contains(&format!("the dump in {dir} is complete")), "{said}");
            ensure!(
                said.contains(&format!("`firn restore --dir {dir} job`")),
                "{said}"
            );
            ensure!(
                !shell(host, "ls /tmp")?.contains("ctrd-checkpoint"),
                "containerd's is left"
            );
            ensure!(readable(host)?.is_empty(), "readable: {}", readable(host)?);
            job.stands_still()?;
            let before = job.lines()?.reached(1);
            host.no_faults()?;
            let _ = host.node().run(&["ctr", "tasks", "delete", "--force", "job"]);
            goes_on_from(host, &job, &dir, before)?;
        }
        // Nothing is kept of a checkpoint that has done what was asked.
        job.checkpoint("checkpoint/job")?;
        let kept = shell(
            host,
            &format!("ls -A {RESCUED} /tmp/rescue; ls -d /tmp/firn-rescue-* 2>/dev/null || true"),
        )?;
        ensure!(kept == format!("/tmp/rescue:\n\n{RESCUED}:\n"), "{kept}");
        job.remove()?;
        host.idle()
    })
}

#[test]
fn an_image_that_an_error_names_is_there_and_can_be_restored_on_forky() -> Result<()> {
    named(Suite::Forky, "se-nf")
}

#[test]
fn an_image_that_an_error_names_is_there_and_can_be_restored_on_trixie() -> Result<()> {
    named(Suite::Trixie, "se-nt")
}

/// The shim is killed when the image is complete: containerd ends the container, and removes its directory.
#[test]
fn an_image_outlives_a_shim_that_is_killed() -> Result<()> {
    on([host(Suite::Forky, "se-sk")?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        let logged = host.log_length()?;
        Stop::Phase("give-back").set(host)?;
        let mut client = host.node().spawn(&[
            "ctr",
            "containers",
            "checkpoint",
            "--task",
            "job",
            "checkpoint/job",
        ])?;
        Stop::reached(host)?;
        let before = job.lines()?.reached(1);
        let shims = host.node().processes();
        let shim = shims
            .iter()
            .find(|process| process.command.starts_with("containerd-shim"));
        let pid = shim.context("no shim")?.pid.to_string();
        host.node().run(&["kill", "-KILL", &pid])?;
        client.wait()?;
        wait_for("the end of the task", LIMIT, || {
            Ok(job.status().is_err().then_some(()))
        })?;
        Stop::lift(host)?;
        let dir = rescued(host, "/tmp/firn-rescue-*")?;
        let told = format!("in {dir} is complete and can be restored");
        wait_for("containerd to log what delete says", LIMIT, || {
            Ok(host.log_since(logged)?.contains(&told).then_some(()))
        })?;
        goes_on_from(host, &job, &dir, before)?;
        job.remove()?;
        host.idle()
    })
}

/// A client that asks for the container's end with its checkpoint goes away when all is done but the answer.
#[test]
fn a_container_that_has_ended_with_its_checkpoint_is_not_lost_with_its_client() -> Result<()> {
    on([host(Suite::Forky, "se-ex")?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        Stop::Phase("finish").set(host)?;
        let mut client = host
            .node()
            .spawn(&["ctr", "tasks", "checkpoint", "--exit", "job"])?;
        Stop::reached(host)?;
        let before = job.lines()?.reached(1);
        interrupt_ctr(host)?;
        client.wait()?;
        wait_for("the end of containerd's directory", LIMIT, || {
            Ok((!shell(host, "ls /tmp")?.contains("ctrd-checkpoint")).then_some(()))
        })?;
        Stop::lift(host)?;
        is_over(host, "job")?;
        job.becomes("STOPPED")?;
        let _ = job.task(&["delete"]);
        goes_on_from(host, &job, &rescued(host, &format!("{RESCUED}/*"))?, before)?;
        job.remove()?;
        host.idle()
    })
}
