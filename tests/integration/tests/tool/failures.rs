//! What is refused, fails or is interrupted.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{BUNDLES, Container, GpuHost, IMAGE, STOCK, failure, on};
use firn_node::{Image, Platform, Process, wait_for};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{LIMIT, copy, counter, host, nothing_left};

/// `firn` with these words is refused with this code, and names a remedy.
pub fn refused(host: &GpuHost, words: &[&str], code: &str) -> Result<String> {
    ends(host, words, 3, code)
}

/// `firn` with these words fails with this code after it has begun, and the container runs.
fn fails(host: &GpuHost, words: &[&str], code: &str) -> Result<()> {
    let output = ends(host, words, 1, code)?;
    ensure!(output.trim_end().ends_with("\nfirn: job runs"), "{output}");
    Ok(())
}

pub fn ends(host: &GpuHost, words: &[&str], status: u8, code: &str) -> Result<String> {
    let output = failure(host.node().run(&[&["firn"], words].concat()))?;
    let is_shown = output.contains(&format!("{code}: ")) && output.matches("hint: ").count() == 1;
    let status = format!("(exit status: {status})");
    ensure!(is_shown && output.contains(&status), "{words:?}: {output}");
    Ok(output)
}

/// How often a task was paused on the node, by containerd's events so far.
fn pauses(host: &GpuHost) -> Result<usize> {
    let log = host.node().read("/srv/events")?;
    Ok(log.matches("/tasks/paused").count())
}

fn watch(host: &GpuHost) -> Result<Child> {
    let watching = host.node().spawn(&["sh", "-c", "exec ctr events >/srv/events"])?;
    wait_for("the watcher", LIMIT, || {
        Ok(host.node().path("/srv/events").exists().then_some(()))
    })?;
    Ok(watching)
}

/// Refused before anything is read or made, with who is there and where there is room.
pub fn a_gpu_without_room_refuses_a_restore(platform: Platform) -> Result<()> {
    on([host(platform, "to-full", 1)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &["--reserve-mib", "540"])?;
        job.goes_on(3)?;
        host.firn(&["checkpoint", "job", "/srv/job.tar"])?;
        let expect = |output: &str| {
            for part in ["container job of namespace default has it", "there is room on"] {
                ensure!(output.contains(part), "{part}: {output}");
            }
            Ok(())
        };
        let restore = ["restore", "/srv/job.tar", "--name", "job2"];
        expect(&refused(host, &restore, "FIRN-GPU-OCCUPIED")?)?;
        let planned = failure(
            host.node()
                .run(&[&["firn"], &restore[..], &["--dry-run"]].concat()),
        )?;
        ensure!(planned.contains("FIRN-GPU-OCCUPIED: "), "{planned}");
        expect(&planned)?;
        Container::known(host, "job2").nothing_left()?;
        job.goes_on(3)?;
        // A second one chooses the free GPU, and a third one finds none.
        host.firn(&[&restore[..], &["--gpus", "auto"]].concat())?;
        let second = copy(host, "job2", &host.uuids()[1..])?;
        let third = ["restore", "/srv/job.tar", "--name", "job3", "--gpus", "auto"];
        let output = refused(host, &third, "FIRN-GPU-OCCUPIED")?;
        ensure!(!output.contains("there is room"), "{output}");
        second.remove()?;
        job.goes_on(3)?;
        job.remove()?;
        host.node().run(&["rm", "/srv/job.tar"])?;
        nothing_left(host)?;
        host.idle()
    })
}

/// The layers of the base are compared, not its name.
pub fn an_image_whose_tag_was_moved_is_not_taken_for_the_base(platform: Platform) -> Result<()> {
    on([host(platform, "to-tag", 1)?], |[host]| {
        let job = counter(host)?;
        host.firn(&["checkpoint", "job", "/srv/job.tar"])?;
        job.remove()?;
        let node = host.node();
        node.run(&["ctr", "images", "tag", IMAGE, "localhost/kept:latest"])?;
        Image::new(IMAGE).import(node)?;
        for dry in [&[][..], &["--dry-run"]] {
            let words = [&["restore", "/srv/job.tar"], dry].concat();
            let output = failure(node.run(&[&["firn"], &words[..]].concat()))?;
            ensure!(output.contains("FIRN-BASE-MOVED: "), "{output}");
            Container::known(host, "job").nothing_left()?;
        }
        node.run(&["ctr", "images", "tag", "--force", "localhost/kept:latest", IMAGE])?;
        node.run(&["ctr", "images", "delete", "localhost/kept:latest"])?;
        host.firn(&["restore", "/srv/job.tar"])?;
        copy(host, "job", &host.uuids()[..1])?.remove()?;
        node.run(&["rm", "/srv/job.tar"])?;
        nothing_left(host)?;
        host.idle()
    })
}

pub fn what_is_in_the_way_is_refused_before_the_pause(platform: Platform) -> Result<()> {
    on([host(platform, "to-way", 1)?], |[host]| {
        let mut watching = watch(host)?;
        let job = counter(host)?;
        job.task(&["pause"])?;
        job.task(&["resume"])?;
        wait_for("the watcher's first event", LIMIT, || {
            Ok((pauses(host)? > 0).then_some(()))
        })?;
        let before = pauses(host)?;
        host.node().run(&[
            "sh",
            "-c",
            "touch /srv/job.tar name; mkdir -p /srv/image/checkpoint",
        ])?;
        let image = firn_lab::IMAGE;
        for (words, code) in [
            (&["checkpoint", "job", image][..], "FIRN-EXISTS"),
            (&["checkpoint", "job", "/srv/job.tar"], "FIRN-EXISTS"),
            (&["checkpoint", "job", "/srv/image"], "FIRN-EXISTS"),
            (&["checkpoint", "job", "/nowhere/job.tar"], "FIRN-FILE"),
            (&["checkpoint", "job", "name"], "FIRN-PLACE"),
            (&["checkpoint", "none", "checkpoint/none"], "FIRN-NO-CONTAINER"),
            (&["restore", image], "FIRN-NO-CHECKPOINT"),
            (&["restore", "checkpoint/none"], "FIRN-NO-IMAGE"),
            (&["restore", "/srv/job.tar"], "FIRN-NO-CHECKPOINT"),
            (&["restore", "/srv/image"], "FIRN-RESTORE-NAME"),
        ] {
            refused(host, words, code)?;
        }
        ensure!(pauses(host)? == before, "the container was paused");
        // What explains does nothing either.
        let explained =
            host.node()
                .run(&["firn", "checkpoint", "job", "/srv/x.tar", "--exit", "--explain"])?;
        ensure!(
            explained
                .stdout
                .starts_with("ctr containers checkpoint --rw --task job checkpoint/job\n")
                && explained
                    .stdout
                    .contains("--skip-manifest-json /srv/x.tar checkpoint/job"),
            "{}",
            explained.stdout
        );
        restores_are_refused(host, &job)?;
        job.task(&["kill", "--signal", "SIGKILL"])?;
        job.becomes("STOPPED")?;
        refused(host, &["checkpoint", "job", "checkpoint/job"], "FIRN-NOT-RUNNING")?;
        job.remove()?;
        watching.kill()?;
        watching.wait()?;
        nothing_left(host)?;
        host.idle()
    })
}

/// What is asked of this node, or of a container that it does not have under firn.
fn restores_are_refused(host: &GpuHost, job: &Container<'_>) -> Result<()> {
    host.firn(&["checkpoint", "job", "checkpoint/job"])?;
    refused(host, &["restore", "checkpoint/job"], "FIRN-EXISTS")?;
    refused(
        host,
        &["restore", "checkpoint/job", "--name", "x", "--gpus", "7"],
        "FIRN-GPU-UNKNOWN",
    )?;
    refused(
        host,
        &["restore", "checkpoint/job", "--name", "x", "--gpus", "0,1"],
        "FIRN-GPU-COUNT",
    )?;
    let program = "/usr/local/bin/firn-gpu";
    host.node().run(&["mv", program, "/srv"])?;
    let output =
        failure(
            host.node()
                .run(&["firn", "restore", "checkpoint/job", "--name", "x", "--gpus", "0"]),
        )?;
    ensure!(output.contains("FIRN-RESTORE-NODE: "), "{output}");
    host.node().run(&["mv", "/srv/firn-gpu", program])?;
    let other = Container::run(host, "other", &["--runtime", STOCK], &["sleep", "600"])?;
    let words = ["checkpoint", "other", "./other"];
    ends(host, &words, 1, "FIRN-CHECKPOINT-CLIENT")?;
    ensure!(other.status()? == "RUNNING");
    other.remove()?;
    job.goes_on(3)?;
    host.remove_image("checkpoint/job")
}

pub fn a_failure_leaves_nothing_and_the_container_runs(platform: Platform) -> Result<()> {
    on([host(platform, "to-fail", 1)?], |[host]| {
        let job = counter(host)?;
        host.fault(&["--call", "checkpoint", "--error", "CUDA_ERROR_UNKNOWN"])?;
        for to in ["checkpoint/job", "/srv/job.tar", "/srv/image"] {
            fails(host, &["checkpoint", "job", to, "--exit"], "FIRN-GPU-DRIVER")?;
            ensure!(job.status()? == "RUNNING", "after {to}: {}", job.status()?);
            job.goes_on(3)?;
            nothing_left(host)?;
            ensure!(
                !host.has_image("checkpoint/job")? && !host.node().path(to).exists(),
                "{to} is left"
            );
        }
        host.no_faults()?;
        // The disk is full once the processes are in the content store.
        let full = "mkdir -p /srv/full && mount -t tmpfs -o size=1m tmpfs /srv/full";
        host.node().run(&["sh", "-c", full])?;
        fails(
            host,
            &["checkpoint", "job", "/srv/full/job.tar", "--exit"],
            "FIRN-FILE",
        )?;
        ensure!(
            !host.node().path("/srv/full/job.tar").exists(),
            "the file is left"
        );
        host.node().run(&["umount", "/srv/full"])?;
        job.goes_on(3)?;
        nothing_left(host)?;
        by_the_shim(host, &job)?;
        job.remove()?;
        host.idle()
    })
}

/// The shim refuses a container that stands still for it, and the command reports what it finds afterwards.
fn by_the_shim(host: &GpuHost, job: &Container<'_>) -> Result<()> {
    let exec = [
        "tasks",
        "exec",
        "--detach",
        "--exec-id",
        "more",
        "job",
        "sleep",
        "600",
    ];
    host.node().run(&[&["ctr"], &exec[..]].concat())?;
    let words = ["checkpoint", "job", "checkpoint/job"];
    let output = refused(host, &words, "FIRN-EXEC")?;
    ensure!(output.trim_end().ends_with("\nfirn: job runs"), "{output}");
    job.goes_on(3)?;
    // A paused container stays paused.
    job.task(&["pause"])?;
    let (code, shown) = host.firn_shows(&words)?;
    let paused = serde_json::json!([{ "id": "job", "namespace": "default", "state": "paused" }]);
    ensure!(
        code == Some(3) && shown["failure"]["code"] == "FIRN-EXEC" && shown["containers"] == paused,
        "{shown}"
    );
    job.task(&["kill", "--exec-id", "more", "--signal", "SIGKILL"])?;
    job.task(&["resume"])?;
    job.goes_on(3)?;
    job.task(&["pause"])?;
    let done = host.node().run(&[&["firn"], &words[..]].concat())?.stdout;
    ensure!(done.contains(". job is paused, as it was, after "), "{done}");
    job.stands_still()?;
    job.task(&["resume"])?;
    job.goes_on(3)?;
    host.remove_image("checkpoint/job")
}

/// Begins a checkpoint, and waits until it stands still in this phase.
fn begun(host: &GpuHost, to: &str, phase: &str) -> Result<Child> {
    host.node().run(&["rm", "-f", "/run/firn-held"])?;
    host.node().write("/run/firn-hold", phase)?;
    let client = host.node().spawn(&["firn", "checkpoint", "job", to, "--exit"])?;
    wait_for("the checkpoint to stand still", LIMIT, || {
        Ok(host.node().path("/run/firn-held").exists().then_some(()))
    })?;
    Ok(client)
}

/// Lets a checkpoint continue that stands still.
fn let_go(host: &GpuHost) -> Result<()> {
    host.node().run(&["rm", "-f", "/run/firn-hold"]).map(drop)
}

/// Sends the one command of firn on the node a signal.
pub fn signal_firn(host: &GpuHost, signal: &str) -> Result<()> {
    let processes = host.node().processes();
    // One that was killed may be a zombie.
    let is_firn = |process: &&Process| process.command == "firn" && !process.args.is_empty();
    let firn = processes.iter().find(is_firn);
    let pid = firn.context("no firn")?.pid.to_string();
    host.node().run(&["kill", signal, &pid]).map(drop)
}

/// Interrupts firn once a checkpoint stands still in this phase.
fn interrupted(host: &GpuHost, to: &str, phase: &str) -> Result<String> {
    let client = begun(host, to, phase)?;
    // It would resume the container under the first one.
    refused(host, &["checkpoint", "job", "/srv/second.tar"], "FIRN-BUSY")?;
    let state = Container::known(host, "job").status()?;
    ensure!(state == "PAUSED", "after a second command: {state}");
    signal_firn(host, "-INT")?;
    if !to.starts_with('/') {
        wait_for("the end of containerd's directory", LIMIT, || {
            let list = host.node().run(&["ls", "/tmp"])?.stdout;
            Ok((!list.contains("ctrd-checkpoint")).then_some(()))
        })?;
    } else {
        wait_for("the end of the directory", LIMIT, || {
            Ok((!host.node().path(to).exists()).then_some(()))
        })?;
    }
    let_go(host)?;
    let output = client.wait_with_output()?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Kills firn once a checkpoint stands still in this phase.
fn kill_firn(host: &GpuHost, to: &str, phase: &str) -> Result<()> {
    let mut client = begun(host, to, phase)?;
    signal_firn(host, "-KILL")?;
    client.wait()?;
    Ok(())
}

/// The shim resumes it, whatever the command was at. It stays paused only for its user.
pub fn a_killed_checkpoint_leaves_the_container_running(platform: Platform) -> Result<()> {
    on([host(platform, "to-kill", 1)?], |[host]| {
        let job = counter(host)?;
        for phase in ["inspect", "gpu-checkpoint", "criu-dump"] {
            kill_firn(host, &format!("/srv/{phase}"), phase)?;
            let_go(host)?;
            job.becomes("RUNNING").context(phase)?;
            job.goes_on(3)?;
        }
        // One that does nothing any more is no dead one.
        let mut client = begun(host, "/srv/late", "criu-dump")?;
        signal_firn(host, "-STOP")?;
        let_go(host)?;
        sleep(WATCHED);
        ensure!(job.status()? == "PAUSED", "{}", job.status()?);
        signal_firn(host, "-KILL")?;
        // nsenter has stopped with its child, and would not see it end.
        client.kill()?;
        client.wait()?;
        job.becomes("RUNNING")?;
        job.goes_on(3)?;
        // The next command may begin before the shim has looked.
        kill_firn(host, "checkpoint/killed", "gpu-checkpoint")?;
        let next = host
            .node()
            .spawn(&["firn", "checkpoint", "job", "/srv/next.tar"])?;
        let_go(host)?;
        let next = next.wait_with_output()?;
        ensure!(next.status.success(), "{next:?}");
        ensure!(job.status()? == "RUNNING", "{}", job.status()?);
        job.goes_on(3)?;
        // What a user has paused stays so, also if that was under a command.
        job.task(&["pause"])?;
        kill_firn(host, "/srv/users", "inspect")?;
        let_go(host)?;
        wait_for("the end of the checkpoint", LIMIT, || {
            let journal = host.node().path(format!("{BUNDLES}/job/firn-journal"));
            Ok((!journal.exists()).then_some(()))
        })?;
        sleep(WATCHED);
        ensure!(job.status()? == "PAUSED", "{}", job.status()?);
        job.stands_still()?;
        job.task(&["resume"])?;
        job.goes_on(3)?;
        job.remove()?;
        host.firn(&["restore", "/srv/next.tar"])?;
        copy(host, "job", &host.uuids()[..1])?.remove()?;
        host.idle()
    })
}

/// A span in which the shim looks several times at a command.
pub const WATCHED: Duration = Duration::from_secs(2);

pub fn an_interrupted_checkpoint_leaves_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "to-int", 1)?], |[host]| {
        let job = counter(host)?;
        for to in ["checkpoint/job", "/srv/image"] {
            for phase in ["inspect", "gpu-checkpoint", "criu-dump"] {
                let output = interrupted(host, to, phase)?;
                ensure!(
                    output.contains("FIRN-INTERRUPTED: ") && output.ends_with("\nfirn: job runs\n"),
                    "{output}"
                );
                ensure!(job.status()? == "RUNNING", "{to}, {phase}: {}", job.status()?);
                job.goes_on(3)?;
                ensure!(!host.has_image("checkpoint/job")? && !host.node().path(to).exists());
                let journal = host.node().path(format!("{BUNDLES}/job/firn-journal"));
                ensure!(!journal.exists(), "a journal is left");
                let lock = host.node().path("/run/firn/commands/default/job");
                ensure!(!lock.exists(), "a lock is left");
                nothing_left(host)?;
            }
        }
        host.firn(&["checkpoint", "job", "checkpoint/job"])?;
        job.goes_on(3)?;
        host.remove_image("checkpoint/job")?;
        job.remove()?;
        host.idle()
    })
}

pub fn a_restore_that_fails_leaves_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "to-rfail", 1)?], |[host]| {
        let job = counter(host)?;
        host.firn(&["checkpoint", "job", "/srv/job.tar", "--exit"])?;
        job.forget()?;
        host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
        let output = failure(host.node().run(&["firn", "restore", "/srv/job.tar"]))?;
        ensure!(output.contains("FIRN-"), "{output}");
        let none = |what: &[&str]| -> Result<()> {
            let list = host.node().run(what)?.stdout;
            ensure!(
                !list.lines().any(|line| line.starts_with("job")),
                "{what:?}: {list}"
            );
            Ok(())
        };
        for list in ["containers", "tasks", "snapshots"] {
            none(&["ctr", list, "list"])?;
        }
        Container::known(host, "job").nothing_left()?;
        nothing_left(host)?;
        host.no_faults()?;
        // A part of the file is no checkpoint.
        host.node()
            .run(&["sh", "-c", "head -c 3000000 /srv/job.tar >/srv/part.tar"])?;
        failure(host.node().run(&["firn", "restore", "/srv/part.tar"]))?;
        nothing_left(host)?;
        host.firn(&["restore", "/srv/job.tar"])?;
        super::copy(host, "job", &host.uuids()[..1])?.remove()?;
        nothing_left(host)?;
        host.idle()
    })
}

/// Gives the image in an archive's layout another diff id of its first layer, and every digest that follows
/// from it. Returns that id.
fn with_another_diff_id(layout: &Path) -> Result<String> {
    let digest = |bytes: &[u8]| {
        let sum = Sha256::digest(bytes);
        let digits: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("sha256:{digits}")
    };
    let blobs = layout.join("blobs/sha256");
    let mut texts = Vec::new();
    for blob in fs::read_dir(&blobs)? {
        let blob = blob?;
        if blob.metadata()?.len() < 1 << 20 {
            texts.extend(fs::read_to_string(blob.path()).ok());
        }
    }
    let config = texts.iter().find(|text| text.contains("\"diff_ids\""));
    let read: Value = serde_json::from_str(config.context("no configuration")?)?;
    let id = read["rootfs"]["diff_ids"][0]
        .as_str()
        .context("no layer")?
        .to_owned();
    let other = format!("sha256:{}", "4711".repeat(16));
    let mut changes = vec![(id.clone(), other.clone())];
    while let Some((old, new)) = changes.pop() {
        let index = layout.join("index.json");
        fs::write(&index, fs::read_to_string(&index)?.replace(&old, &new))?;
        // A layer that is not compressed has its diff id as digest, too, and stays what it is.
        let has_it = |text: &&mut String| text.contains(&old) && (old != id || text.contains("\"diff_ids\""));
        for text in texts.iter_mut().filter(has_it) {
            let before = digest(text.as_bytes());
            *text = text.replace(&old, &new);
            let after = digest(text.as_bytes());
            fs::write(blobs.join(&after["sha256:".len()..]), &*text)?;
            changes.push((before, after));
        }
    }
    Ok(other)
}

/// An archive whose image has layers of other content than its configuration lists: other containers would
/// get that content by the name of the snapshot.
pub fn layers_of_other_content_make_no_snapshot(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "to-diff-a", 1)?, host(platform, "to-diff-b", 3)?];
    on(hosts, |[a, b]| {
        let job = counter(a)?;
        // With the image that the container began with.
        let script = "ctr containers checkpoint --rw --task --image job checkpoint/job && \
                      ctr images export --local --skip-manifest-json /srv/job.tar checkpoint/job && \
                      mkdir /srv/layout && tar -xf /srv/job.tar -C /srv/layout";
        a.node().run(&["sh", "-c", script])?;
        job.remove()?;
        a.remove_image("checkpoint/job")?;
        let id = with_another_diff_id(&a.node().path("/srv/layout"))?;
        a.node()
            .run(&["sh", "-c", "cd /srv/layout && tar -cf /srv/other.tar *"])?;
        for file in ["/srv/job.tar", "/srv/other.tar"] {
            b.node().install(a.node().path(file), file, 0o600)?;
        }
        b.remove_image(firn_lab::IMAGE)?;
        let snapshots = || Ok::<_, anyhow::Error>(b.node().run(&["ctr", "snapshots", "list"])?.stdout);
        let shown = ends(b, &["restore", "/srv/other.tar"], 1, "FIRN-NO-CHECKPOINT")?;
        ensure!(shown.contains(&id), "{shown}");
        ensure!(!snapshots()?.contains(&id), "{}", snapshots()?);
        nothing_left(b)?;
        // The image as it is.
        b.firn(&["restore", "/srv/job.tar"])?;
        b.node().run(&["ctr", "tasks", "delete", "--force", "job"])?;
        a.idle()?;
        b.idle()
    })
}
