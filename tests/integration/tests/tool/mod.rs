//! `firn checkpoint`, `firn restore` and `firn move`: what they make is what ctr makes, and the other way
//! round; what fails or is interrupted leaves nothing, and the container runs.

mod failures;
mod into;
mod lacks;
mod moves;
mod namespaces;
mod output;
mod shell;
mod sshd;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GpuHost, SimGpu, cases, matrix, on};
use firn_node::{Platform, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

/// A node with two GPUs, of which the first is `first`.
fn host(platform: Platform, name: &str, first: u32) -> Result<GpuHost> {
    let gpus = [SimGpu::h200(first), SimGpu::h200(first + 1)];
    GpuHost::for_test(platform, name, &gpus)
}

fn counter(host: &GpuHost) -> Result<Container<'_>> {
    let job = Container::count(host, "job", &["0"], 1, &[])?;
    job.goes_on(3)?;
    Ok(job)
}

/// The counter of a copy continues without a step left out, on these GPUs.
fn copy<'h>(host: &'h GpuHost, id: &str, gpus: &[String]) -> Result<Container<'h>> {
    let copy = Container::known(host, id).counting(1);
    copy.goes_on(3)?;
    let used = copy.gpus_in_use()?;
    ensure!(used == gpus, "{id} is on {used:?}, not on {gpus:?}");
    Ok(copy)
}

/// Nothing of firn's own is left on the node: unpacked images, leases, blobs.
fn nothing_left(host: &GpuHost) -> Result<()> {
    let script = "ls -A /var/lib/firn/restore 2>/dev/null; ls -d /tmp/ctrd-checkpoint* 2>/dev/null; \
                  ctr leases list -q; ctr content active | tail -n +2; \
                  ctr content list | grep -i checkpoint; ctr snapshots list | grep firn; true";
    let left = host.node().run(&["sh", "-c", script])?.stdout;
    ensure!(left.is_empty(), "left: {left}");
    Ok(())
}

/// The blobs that containerd has.
fn blobs(host: &GpuHost) -> Result<String> {
    Ok(host.node().run(&["ctr", "content", "list"])?.stdout)
}

fn a_container_becomes_an_image_and_goes_on(platform: Platform) -> Result<()> {
    on([host(platform, "to-ref", 1)?], |[host]| {
        let before = blobs(host)?;
        let job = counter(host)?;
        let done = host.firn(&["checkpoint", "job", "checkpoint/one"])?;
        ensure!(done["kind"] == "ref" && done["exited"] == false, "{done}");
        ensure!(done["bytes"].as_u64() > Some(8 << 20), "{done}");
        let phases: Vec<&str> = done["phases"]
            .as_array()
            .context("no phases")?
            .iter()
            .filter_map(|phase| phase["name"].as_str())
            .collect();
        for phase in ["pause", "gpu-checkpoint", "criu-dump", "files"] {
            ensure!(phases.contains(&phase), "no {phase} in {phases:?}");
        }
        job.goes_on(3)?;
        // A second one of the same container: containerd 1.7 has its spec already. An attached client deletes
        // the task as soon as it ends.
        let attached = host.node().spawn(&["ctr", "tasks", "attach", "job"])?;
        host.firn(&["checkpoint", "job", "checkpoint/two", "--exit"])?;
        { attached }.wait()?;
        ensure!(job.status().is_err(), "the task is left");
        job.forget()?;
        // ctr takes both.
        for image in ["checkpoint/one", "checkpoint/two"] {
            let (copy, _) = Container::restore(host, "job", image, 1)?;
            copy.goes_on(3)?;
            copy.remove()?;
        }
        for image in ["checkpoint/one", "checkpoint/two"] {
            let done = host.firn(&["restore", image])?;
            ensure!(
                done["container"] == "job" && done["pid"].as_u64() > Some(1),
                "{done}"
            );
            copy(host, "job", &host.uuids()[..1])?.remove()?;
            host.remove_image(image)?;
        }
        let after = blobs(host)?;
        ensure!(
            after.lines().count() <= before.lines().count(),
            "before {before}, after {after}"
        );
        host.node().run(&["sh", "-c", "rm -rf /tmp/ctrd-checkpoint*"])?;
        nothing_left(host)?;
        host.idle()
    })
}

/// By the log and the audit.
fn annotations_without_effect_are_named(platform: Platform) -> Result<()> {
    on([host(platform, "to-note", 1)?], |[host]| {
        let length = host.log_length()?;
        let options = [
            "firn.dev/tcp=Close",
            "firn.dev/pausd=release-gpu",
            "firn.dev/exec=omit",
        ];
        let options = options.map(|annotation| ["--annotation", annotation]).concat();
        let mut events = host.watch_events()?;
        let job = Container::count_with(host, "job", &["0"], 1, &options, &[])?;
        let wrong = "firn.dev/tcp is \"Close\", and can be refuse, close, keep, auto";
        let log = wait_for("the last warning", LIMIT, || {
            let log = host.log_since(length)?;
            Ok(log.contains("annotation firn.dev/tcp is").then_some(log))
        })?;
        let audit = host.node().run(&["firn", "audit", "job"])?;
        for (named, name) in [
            (&log, wrong),
            (&log, "firn.dev/pausd"),
            (&audit.stdout, wrong),
            (&audit.stdout, "firn.dev/pausd is no annotation of firn"),
        ] {
            let is_shown = named.contains(name) || named.contains(&name.replace('"', "\\\""));
            ensure!(is_shown, "no {name}: {named}");
        }
        ensure!(!audit.stdout.contains("firn.dev/exec"), "{}", audit.stdout);
        let lines = events.until("annotation firn.dev/tcp is")?;
        for part in ["firn.dev/pausd", "annotation firn.dev/tcp is"] {
            let is_event = |line: &&String| line.contains(" /firn/create ") && line.contains("warning: ");
            let mut shown = lines.iter().filter(is_event);
            ensure!(
                shown.any(|line| line.contains(part)),
                "no event of {part}: {lines:?}"
            );
        }
        job.remove()?;
        host.idle()
    })
}

fn a_restore_chooses_name_and_gpus(platform: Platform) -> Result<()> {
    on([host(platform, "to-gpus", 1)?], |[host]| {
        let job = counter(host)?;
        // As ctr makes it.
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        let [first, second] = &host.uuids()[..] else {
            anyhow::bail!("two GPUs");
        };
        let plan = host.firn(&[
            "restore",
            "checkpoint/job",
            "--name",
            "twin",
            "--gpus",
            "1",
            "--dry-run",
        ])?;
        let map = &plan["map"][0];
        ensure!(map["old"] == **first && map["new"] == **second, "{plan}");
        ensure!(plan["pid"].is_null(), "{plan}");
        nothing_left_but_images(host)?;
        // While the source runs, under another name.
        host.firn(&["restore", "checkpoint/job", "--name", "twin", "--gpus", "1"])?;
        let twin = Container::known(host, "twin").counting(1).moved_before();
        twin.goes_on(3)?;
        ensure!(twin.gpus_in_use()? == host.uuids()[1..]);
        job.goes_on(3)?;
        // A copy of the copy: its spec has a map of its own.
        host.firn(&["checkpoint", "twin", "checkpoint/twin", "--exit"])?;
        twin.forget()?;
        let map = format!("{second}={first}");
        job.remove()?;
        host.firn(&["restore", "checkpoint/twin", "--gpu-map", &map])?;
        let twin = Container::known(host, "twin").counting(1).moved_before();
        twin.goes_on(3)?;
        ensure!(twin.gpus_in_use()? == host.uuids()[..1]);
        twin.remove()?;
        for image in ["checkpoint/job", "checkpoint/twin"] {
            host.remove_image(image)?;
        }
        host.idle()
    })
}

/// Of restores that were made, or refused: the images alone.
fn nothing_left_but_images(host: &GpuHost) -> Result<()> {
    let script = "ls -A /var/lib/firn/restore 2>/dev/null; ls -d /tmp/ctrd-checkpoint* 2>/dev/null; \
                  ctr leases list -q; ctr snapshots list | grep -E 'firn|twin|copy'; true";
    let left = host.node().run(&["sh", "-c", script])?.stdout;
    ensure!(left.is_empty(), "left: {left}");
    Ok(())
}

fn a_file_goes_to_another_node_and_ctr_imports_it(platform: Platform) -> Result<()> {
    on(
        [host(platform, "to-file-a", 1)?, host(platform, "to-file-b", 3)?],
        |[a, b]| {
            let job = counter(a)?;
            let done = a.firn(&["checkpoint", "job", "/srv/job.tar", "--exit"])?;
            ensure!(done["kind"] == "file", "{done}");
            job.forget()?;
            nothing_left(a)?;
            let file = "/srv/job.tar";
            b.node().install(a.node().path(file), file, 0o600)?;
            b.firn(&["restore", file, "--log", "/srv/log"])?;
            copy(b, "job", &b.uuids()[..1])?.remove()?;
            nothing_left(b)?;
            // Under the name that the file has for it.
            let import = ["ctr", "images", "import", "--local", "--no-unpack", file];
            b.node().run(&import)?;
            let (copied, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
            copied.goes_on(3)?;
            copied.remove()?;
            // What ctr exports.
            let export = ["ctr", "images", "export", "--local", "--skip-manifest-json"];
            b.node()
                .run(&[&export[..], &["/srv/ctr.tar", "checkpoint/job"]].concat())?;
            b.remove_image("checkpoint/job")?;
            // What people make of it, with `./` before each name.
            let again = "mkdir /srv/layout && tar -xf /srv/ctr.tar -C /srv/layout && \
                         tar -C /srv/layout -cf /srv/own.tar .";
            b.node().run(&["sh", "-c", again])?;
            for file in ["/srv/ctr.tar", "/srv/own.tar"] {
                let shown = b.firn(&["inspect", file])?;
                ensure!(shown["failure"].is_null(), "{file}: {shown}");
                b.firn(&["restore", file, "--name", "copy", "--gpus", "1"])?;
                copy(b, "copy", &b.uuids()[1..])?.remove()?;
            }
            a.idle()?;
            b.idle()
        },
    )
}

fn a_directory_is_restored_into_its_container(platform: Platform) -> Result<()> {
    on([host(platform, "to-dir", 1)?], |[host]| {
        let job = counter(host)?;
        let done = host.firn(&["checkpoint", "job", "/srv/image"])?;
        ensure!(
            done["kind"] == "dir" && done["bytes"].as_u64() > Some(8 << 20),
            "{done}"
        );
        job.goes_on(3)?;
        host.node().run(&["test", "-s", "/srv/image/rootfs-diff.tar"])?;
        host.firn(&["checkpoint", "job", "/srv/last", "--exit"])?;
        ensure!(job.status().is_err(), "the task is left");
        let restore = ["restore", "/srv/last", "--name", "job"];
        host.firn(&restore)?;
        job.goes_on(3)?;
        ensure!(job.gpus_in_use()? == host.uuids()[..1]);
        host.firn(&["checkpoint", "job", "/srv/again", "--exit"])?;
        onto_other_gpus(host, &job)?;
        job.remove()?;
        nothing_left(host)?;
        host.idle()
    })
}

/// GPUs are chosen for one restore from a directory; the container keeps its spec.
fn onto_other_gpus(host: &GpuHost, job: &Container<'_>) -> Result<()> {
    let restore = ["restore", "/srv/again", "--name", "job"];
    let with = |more: &[&'static str]| [&restore[..], more].concat();
    let (first, second) = (&host.uuids()[0], &host.uuids()[1]);
    for (more, code) in [
        (&["--gpus", "7"][..], "FIRN-GPU-UNKNOWN"),
        (&["--gpus", "0,1"], "FIRN-GPU-COUNT"),
        (&["--gpu-map", "GPU-1=GPU-2"], "FIRN-MAP-SYNTAX"),
    ] {
        failures::refused(host, &with(more), code)?;
    }
    let known = || host.node().run(&["ctr", "containers", "info", "--spec", "job"]);
    let before = known()?.stdout;
    let plan = host.firn(&with(&["--dry-run"]))?;
    ensure!(
        plan["map"][0]["new"] == **first && plan["pid"].is_null(),
        "{plan}"
    );
    let plan = host.firn(&with(&["--gpus", "1", "--dry-run"]))?;
    ensure!(
        plan["map"][0]["old"] == **first && plan["map"][0]["new"] == **second,
        "{plan}"
    );
    ensure!(job.status().is_err(), "a task is there");
    host.firn(&with(&["--gpus", "1"]))?;
    job.goes_on(3)?;
    ensure!(job.gpus_in_use()? == host.uuids()[1..]);
    host.firn(&["checkpoint", "job", "/srv/second", "--exit"])?;
    // Of the spec's own GPU again.
    let map = format!("{second}={first}");
    host.firn(&["restore", "/srv/second", "--name", "job", "--gpu-map", &map])?;
    job.goes_on(3)?;
    ensure!(job.gpus_in_use()? == host.uuids()[..1]);
    let after = known()?.stdout;
    ensure!(
        before.contains("ociVersion") && before == after,
        "{before} became {after}"
    );
    Ok(())
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_container_becomes_an_image_and_goes_on [FORKY, TRIXIE];
        annotations_without_effect_are_named [FORKY, TRIXIE];
        lacks::ids_of_processes_are_free_on_the_other_node [FORKY, TRIXIE];
        a_restore_chooses_name_and_gpus [FORKY, TRIXIE];
        a_file_goes_to_another_node_and_ctr_imports_it [FORKY, TRIXIE];
        a_directory_is_restored_into_its_container [FORKY, TRIXIE];
        failures::a_gpu_without_room_refuses_a_restore [FORKY, TRIXIE];
        failures::an_image_whose_tag_was_moved_is_not_taken_for_the_base [FORKY];
        failures::what_is_in_the_way_is_refused_before_the_pause [FORKY, TRIXIE];
        failures::a_failure_leaves_nothing_and_the_container_runs [FORKY, TRIXIE];
        failures::an_interrupted_checkpoint_leaves_nothing [FORKY, TRIXIE];
        failures::a_killed_checkpoint_leaves_the_container_running [FORKY, TRIXIE];
        failures::a_restore_that_fails_leaves_nothing [FORKY, TRIXIE];
        failures::layers_of_other_content_make_no_snapshot [FORKY, TRIXIE];
        moves::a_container_moves_to_another_node [FORKY, TRIXIE];
        moves::a_node_that_cannot_take_it_is_refused_before_the_pause [FORKY];
        lacks::what_the_other_node_lacks_is_named_before_the_pause [FORKY];
        lacks::a_container_without_a_gpu_is_looked_at_as_well [FORKY];
        lacks::huge_pages_of_the_other_node_are_counted [FORKY];
        lacks::an_idle_gpu_needs_the_mounts_as_well [FORKY];
        lacks::a_cpu_that_can_do_less_refuses_a_restore [FORKY, TRIXIE];
        moves::a_busy_gpu_is_seen_before_the_pause_and_another_one_chosen [FORKY, TRIXIE];
        moves::a_move_that_fails_there_leaves_the_source_running [FORKY, TRIXIE];
        moves::a_lost_answer_leaves_the_source_paused [FORKY];
        moves::a_killed_move_never_leaves_two [FORKY];
        moves::a_node_that_stalls_holds_nothing [FORKY];
        moves::a_copy_that_dies_after_its_start_costs_nothing [FORKY];
        namespaces::a_container_of_another_namespace_is_as_any_other [FORKY, TRIXIE];
        output::what_a_copy_writes_is_kept [FORKY, TRIXIE];
        into::a_restore_that_fails_costs_a_container_no_file [FORKY, TRIXIE];
        shell::a_shell_proposes_containers_and_checkpoints [FORKY];
        sshd::a_container_moves_over_ssh [FORKY, TRIXIE];
    })
}
