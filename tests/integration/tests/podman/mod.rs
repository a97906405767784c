//! podman over firn-runc: containers with GPUs continue from its checkpoints, also on other GPUs; what fails
//! or is killed leaves them running; the rest is as with runc.
//!
//! Needs root.

mod client;

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use firn_documents::{Page, root};
use firn_lab::{GpuHost, IMAGE, Outcome, cases, matrix, on, saw_object};
use firn_node::{CgroupMode, Platform, wait_for};
use serde_json::Value;

use crate::objects::logs::{self, Reached};
use crate::objects::table::movable;
use client::{ARCHIVE, FIRN_RUNC, LIMIT, Podman, host};

/// Operations in the table of clients.
const COPY: &str = "`container restore --import --name`, next to its source";
const DAY: &str = "without a GPU: `run`, `exec`, `top`, `pause`, `update`, `kill`, `wait`, `start`, `stop`, \
                   `container checkpoint`, `container restore`";
const NO_COPY: &str = "refused, unless the source has `--cgroupns host` ([why](podman.md#limits))";

/// A counter continues in the container, in one that is restored from the archive, and on the GPU that the
/// node gives it, under its own name and next to itself.
fn a_counter_goes_on_and_moves(platform: Platform) -> Result<()> {
    on([host(platform, "po-move", 2)?], |[node]| {
        let podman = Podman(node);
        podman.count("job", "0")?;
        let claims = podman.claims()?;
        podman.checkpoint(&["--leave-running"], "job")?;
        podman.goes_on("job", 3)?;
        claims.works("`container checkpoint --export --leave-running`")?;
        podman.checkpoint(&[], "job")?;
        claims.works("`container checkpoint --export`")?;
        let reached = podman.lines("job")?.reached(1);
        let state = [
            "inspect",
            "--format",
            "{{.State.Status}} {{.State.Checkpointed}}",
            "job",
        ];
        assert_eq!(podman.run(&state)?, "exited true\n");
        podman.uses(&[])?;
        podman.run(&["rm", "job"])?;
        podman.run(&["container", "restore", "--import", ARCHIVE])?;
        let from = podman.goes_on("job", 3)?;
        ensure!(from >= reached, "it began again: {from} after {reached}");
        podman.uses(&[0])?;
        claims.works("`container restore --import`")?;
        // What was restored can be checkpointed. The node has the choice of the GPU.
        podman.checkpoint(&[], "job")?;
        podman.run(&["rm", "job"])?;
        node.configure("[restore]\ngpus = [\"1\"]\n")?;
        podman.run(&["container", "restore", "--import", ARCHIVE])?;
        podman.goes_on("job", 3)?;
        podman.uses(&[1])?;
        claims.works("`container restore --import`, onto the GPU that the node's configuration names")?;
        node.configure("[restore]\ngpus = [\"0\"]\n")?;
        let copy = ["container", "restore", "--import", ARCHIVE, "--name", "copy"];
        if node.node().record().cgroup == CgroupMode::V2 {
            // podman gives it a cgroup namespace there, and CRIU puts it into its source's cgroup.
            let error = podman.fails(&copy)?;
            ensure!(error.contains("FIRN-IMAGE-PRIVILEGE: "), "{error}");
            podman.goes_on("job", 3)?;
            podman.uses(&[1])?;
            claims.saw(&format!("{COPY}, cgroup v2"), Outcome::Limited(NO_COPY))?;
            return podman.clear();
        }
        podman.run(&copy)?;
        podman.goes_on("copy", 3)?;
        podman.goes_on("job", 3)?;
        podman.uses(&[0, 1])?;
        claims.works(&format!("{COPY}, cgroup v1"))?;
        // Within podman's own storage.
        podman.run(&["container", "checkpoint", "copy"])?;
        podman.run(&["container", "restore", "copy"])?;
        podman.goes_on("copy", 3)?;
        claims.works("`container checkpoint`, `container restore`")?;
        podman.clear()
    })
}

/// All in one container, each with a process of its own.
fn objects_move(platform: Platform) -> Result<()> {
    const WITH_GPU: &str = "with a GPU, of podman";
    on([host(platform, "po-obj", 1)?], |[node]| {
        let (podman, objects) = (Podman(node), movable(platform.suite));
        let script = format!(
            "{} exec /bin/gpu-counter --interval-ms 50 --mib 8",
            logs::start(&objects)
        );
        let add = logs::capabilities(&objects);
        let add = add.iter().flat_map(|capability| ["--cap-add", capability]);
        let run = ["--runtime", "firn-runc", "run", "--detach", "--network", "none"];
        let job = [
            // A process with a filter of its own shows no more than one without.
            "--security-opt",
            "seccomp=unconfined",
            "--name",
            "job",
            "--device",
            "nvidia.com/gpu=0",
            IMAGE,
            "sh",
            "-c",
            &script,
        ];
        let words: Vec<&str> = run.into_iter().chain(add).chain(job).collect();
        podman.run(&words)?;
        podman.goes_on("job", 3)?;
        let show = || podman.run(&["exec", "job", "sh", "-c", logs::SHOW]);
        let before = logs::all_go_on(show, &objects, &Reached::new())?;
        podman.checkpoint(&["--leave-running"], "job")?;
        let before = logs::all_go_on(show, &objects, &before).context("after the checkpoint")?;
        podman.checkpoint(&[], "job")?;
        podman.run(&["rm", "job"])?;
        podman.run(&["container", "restore", "--import", ARCHIVE])?;
        podman.goes_on("job", 3)?;
        logs::all_go_on(show, &objects, &before).context("the copy")?;
        for object in &objects {
            saw_object(object.1, WITH_GPU, "moves")?;
        }
        podman.clear()
    })
}

/// A checkpoint that fails in the driver, or is refused, leaves the container running, and nothing else.
fn a_failed_checkpoint_costs_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "po-fail", 1)?], |[node]| {
        let podman = Podman(node);
        podman.count("job", "0")?;
        for call in ["lock", "checkpoint"] {
            node.fault(&["--call", call, "--error", "CUDA_ERROR_UNKNOWN"])?;
            let error = podman.fails(&["container", "checkpoint", "--export", ARCHIVE, "job"])?;
            ensure!(
                error.contains("FIRN-GPU-DRIVER: ") && error.contains("the workload continues"),
                "{error}"
            );
            node.no_faults()?;
            podman.no_checkpoint("job")?;
            podman.goes_on("job", 3)?;
        }
        let error = podman.fails(&[
            "container",
            "checkpoint",
            "--pre-checkpoint",
            "--export",
            ARCHIVE,
            "job",
        ])?;
        ensure!(
            error.contains("FIRN-RUNC-OPTION: ") && error.contains("--pre-dump"),
            "{error}"
        );
        podman.goes_on("job", 3)?;
        podman.checkpoint(&[], "job")?;
        podman.clear()
    })
}

/// A restore that fails leaves no process, and the archive is as good as before.
fn a_failed_restore_leaves_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "po-back", 1)?], |[node]| {
        let podman = Podman(node);
        podman.count("job", "0")?;
        podman.checkpoint(&[], "job")?;
        podman.run(&["rm", "job"])?;
        node.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
        let error = podman.fails(&["container", "restore", "--import", ARCHIVE])?;
        ensure!(
            error.contains("FIRN-GPU-DRIVER: ") && error.contains("was rolled back"),
            "{error}"
        );
        node.no_faults()?;
        podman.uses(&[])?;
        ensure!(podman.processes("gpu-counter") == 0, "a process is left");
        // podman keeps a container that could not be restored.
        podman.run(&["rm", "--force", "job"])?;
        podman.run(&["container", "restore", "--import", ARCHIVE])?;
        podman.goes_on("job", 3)?;
        podman.clear()
    })
}

/// Whoever is killed: the container continues, by the process that is left or by the next call for it. A call
/// that ends the container ends it.
fn a_killed_checkpoint_is_rolled_back(platform: Platform) -> Result<()> {
    on([host(platform, "po-kill", 1)?], |[node]| {
        let podman = Podman(node);
        podman.count("job", "0")?;
        let client = podman.hang("job")?;
        podman.kill(false)?;
        let output = client.wait_with_output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(
            error.contains("FIRN-RUNC-KILLED: ") && error.contains("is rolled back"),
            "{error}"
        );
        podman.goes_on("job", 3)?;
        podman.no_checkpoint("job")?;
        let id = podman.id("job")?;
        for call in [
            &["podman", "exec", "job", "true"][..],
            &["podman", "container", "checkpoint", "--leave-running", "job"],
            &[FIRN_RUNC, "resume", &id],
        ] {
            let client = podman.hang("job")?;
            for verb in ["pause", "resume"] {
                let error = podman.runtime_fails(&[verb, &id])?;
                ensure!(error.contains("FIRN-BUSY: "), "{verb}: {error}");
            }
            podman.kill(true)?;
            ensure!(
                !client.wait_with_output()?.status.success(),
                "the client reports success"
            );
            ensure!(
                podman.is_noted() && podman.is_locked()?,
                "somebody else has rolled it back"
            );
            node.node().run(call)?;
            ensure!(!podman.is_noted(), "the note is left after {call:?}");
            podman.goes_on("job", 3)?;
        }
        let client = podman.hang("job")?;
        podman.kill(true)?;
        drop(client.wait_with_output()?);
        podman.run(&["kill", "job"])?;
        podman.run(&["wait", "job"])?;
        ensure!(!podman.is_noted(), "the note is left after the kill");
        podman.clear()
    })
}

/// A container whose GPU state cannot be restored stays suspended until the next call for it after the cause
/// has gone.
fn a_suspended_container_goes_on(platform: Platform) -> Result<()> {
    on([host(platform, "po-susp", 1)?], |[node]| {
        let podman = Podman(node);
        podman.count("job", "0")?;
        node.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
        let error = podman.fails(&[
            "container",
            "checkpoint",
            "--leave-running",
            "--export",
            ARCHIVE,
            "job",
        ])?;
        ensure!(error.contains("FIRN-GPU-SUSPENDED: "), "{error}");
        ensure!(podman.is_noted(), "there is no note of it");
        let error = podman.fails(&["container", "checkpoint", "--leave-running", "job"])?;
        ensure!(error.contains("FIRN-GPU-SUSPENDED: "), "{error}");
        let id = podman.id("job")?;
        let error = podman.runtime_fails(&["resume", &id])?;
        ensure!(error.contains("FIRN-GPU-SUSPENDED: "), "{error}");
        let state = node.node().run(&["runc", "state", &id])?.stdout;
        ensure!(
            state.contains("\"paused\""),
            "resumed without its GPU state: {state}"
        );
        node.no_faults()?;
        node.node().run(&[FIRN_RUNC, "resume", &id])?;
        podman.goes_on("job", 3)?;
        ensure!(!podman.is_noted(), "the note is left");
        podman.clear()
    })
}

/// A restore whose process is killed is cleaned up by the called one, and if both are killed, by the next
/// call for the container.
fn a_killed_restore_leaves_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "po-cut", 1)?], |[node]| {
        let podman = Podman(node);
        podman.count("job", "0")?;
        podman.checkpoint(&[], "job")?;
        let import = ["container", "restore", "--import", ARCHIVE];
        for both in [false, true] {
            podman.run(&["rm", "--force", "job"])?;
            node.fault(&["--call", "restore", "--hang"])?;
            let mut command = node.node().command("podman");
            let command = command.args(import).stdout(Stdio::null()).stderr(Stdio::piped());
            let mut client = command.spawn()?;
            wait_for("processes that wait for the driver", LIMIT, || {
                let is_restored = podman.processes("gpu-counter") == 1;
                Ok((podman.is_noted() && is_restored && podman.processes("firn-gpu") == 1).then_some(()))
            })?;
            // conmon, once the restored process is gone, calls firn-runc, which removes the note.
            let id = podman.notes().pop().context("there is no note")?;
            podman.kill(both)?;
            if both {
                // conmon reads from a pipe that the restored process has, and podman waits for conmon. For a
                // container that it has not restored podman does not call its runtime.
                client.kill()?;
                client.wait()?;
                // runc may fail if both delete.
                wait_for("the container's removal", LIMIT, || {
                    let deleted = node.node().run(&[FIRN_RUNC, "delete", "--force", &id]);
                    Ok(deleted.ok())
                })?;
            } else {
                let output = client.wait_with_output()?;
                let error = String::from_utf8_lossy(&output.stderr);
                ensure!(error.contains("FIRN-RUNC-KILLED: "), "{error}");
            }
            ensure!(!podman.is_noted(), "the note is left");
            ensure!(podman.processes("gpu-counter") == 0, "a process is left");
        }
        podman.run(&["rm", "--force", "job"])?;
        podman.run(&import)?;
        podman.goes_on("job", 3)?;
        podman.clear()
    })
}

/// The console blocks of the pages, as they are written, with a counter as the command.
fn the_pages_commands_work(platform: Platform) -> Result<()> {
    on([host(platform, "po-page", 2)?], |[node]| {
        let podman = Podman(node);
        node.node().run(&["mkdir", "-p", "/srv", "/etc/firn"])?;
        for (path, gpu) in [("docs/guide/podman.md", 0), ("examples/podman/README.md", 1)] {
            let text = std::fs::read_to_string(root().join(path))?;
            let page = Page::new(path, text);
            let mut blocks = page.blocks().into_iter();
            let console = blocks.find(|block| block.what.language == "console");
            let lines = console.context("there is no console block")?.what.lines;
            let counter = format!("{IMAGE} /bin/gpu-counter --interval-ms 50 --mib 8");
            let commands: Vec<String> = lines
                .iter()
                .filter_map(|line| line.strip_prefix("# "))
                .map(|line| line.replace("-d --device", "-d --network none --device"))
                .map(|line| line.replace("IMAGE COMMAND", &counter))
                .collect();
            ensure!(commands.len() == lines.len(), "{path}: {lines:?}");
            for command in &commands {
                node.node().run(&["sh", "-euc", &format!("cd /srv; {command}")])?;
                if command.contains(IMAGE) {
                    podman.goes_on("job", 3)?;
                }
            }
            podman.goes_on("job", 3)?;
            podman.uses(&[gpu])?;
            podman.clear()?;
        }
        Ok(())
    })
}

/// firn shows podman's container while it is checkpointed, and afterwards what became of that, as it does for
/// containerd's.
fn firn_shows_what_becomes_of_a_container(platform: Platform) -> Result<()> {
    on([host(platform, "po-hist", 1)?], |[node]| {
        let podman = Podman(node);
        podman.count("job", "0")?;
        let id = podman.run(&["inspect", "--format", "{{.Id}}", "job"])?;
        let client = podman.hang("job")?;
        let shown = node.firn(&["ps"])?["containers"][0].take();
        ensure!(
            shown["container"] == id.trim() && shown["namespace"] == "firn-runc",
            "{shown}"
        );
        ensure!(
            shown["state"] == "checkpoint" && shown["gpus"][0]["uuid"] == node.uuids()[0],
            "{shown}"
        );
        podman.kill(false)?;
        drop(client.wait_with_output()?);
        podman.goes_on("job", 3)?;
        podman.checkpoint(&[], "job")?;
        podman.run(&["rm", "job"])?;
        podman.run(&["container", "restore", "--import", ARCHIVE])?;
        podman.goes_on("job", 3)?;
        let history = node.firn(&["history", id.trim()])?["transactions"].take();
        let known: Vec<&Value> = history.as_array().into_iter().flatten().collect();
        let outcomes: Vec<String> = known
            .iter()
            .map(|entry| format!("{} {}", entry["kind"], entry["outcome"]).replace('"', ""))
            .collect();
        ensure!(
            outcomes == ["checkpoint killed", "checkpoint done", "restore done"],
            "{history}"
        );
        for (entry, bytes) in [(known[1], "gpu_bytes"), (known[2], "image_bytes")] {
            let phases = entry["phases"].as_array().map_or(0, Vec::len);
            ensure!(phases > 3 && entry[bytes].as_u64() >= Some(8 << 20), "{entry}");
        }
        let metrics = node.node().run(&["firn", "metrics"])?.stdout;
        let counted = "firn_transactions_total{kind=\"checkpoint\",outcome=\"done\",code=\"\"} 1";
        ensure!(metrics.contains(counted), "{metrics}");
        podman.clear()
    })
}

/// What a client sees of a container without GPU, with this runtime.
fn day(podman: Podman<'_>, runtime: &str) -> Result<Vec<String>> {
    let mut seen = Vec::new();
    // Its processes hardly ever come and go: `top` would show one, or not, and CRIU meet it between vfork and
    // exec. A sleep that is restored ends at once.
    let stays = "while :; do sleep 60; done";
    let run = ["--runtime", runtime, "run", "--network", "none"];
    let made = ["--detach", "--name", "day", IMAGE, "sh", "-c", stays];
    let ended = ["--rm", IMAGE, "sh", "-c", "echo out; echo err >&2; exit 7"];
    let absent = ["--rm", IMAGE, "no-such-program"];
    let state = [
        "inspect",
        "--format",
        "{{.State.Status}} {{.State.ExitCode}}",
        "day",
    ];
    for words in [
        &[&run[..], &ended].concat()[..],
        &[&run[..], &absent].concat(),
        &[&run[..], &made].concat(),
        &["exec", "day", "sh", "-c", "echo in; exit 5"],
        &["top", "day", "args"],
        &["pause", "day"],
        &state,
        &["unpause", "day"],
        &["container", "checkpoint", "--export", ARCHIVE, "day"],
        &state,
        &["rm", "day"],
        &["container", "restore", "--import", ARCHIVE],
        &state,
        &["update", "--pids-limit", "100", "day"],
        &["kill", "day"],
        &["wait", "day"],
        &["start", "day"],
        &["stop", "--time", "0", "day"],
        &state,
        &["rm", "day"],
    ] {
        let output = podman.0.node().command("podman").args(words).output()?;
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let is_id = stdout.trim().len() == 64;
        let shown = if is_id { "ID" } else { stdout.trim() };
        seen.push(format!("{words:?}: {:?} {shown}", output.status.code()).replace(runtime, "RUNTIME"));
    }
    Ok(seen)
}

/// Whoever calls the runtime learns which annotations are not for pods; all else is as runc prints it.
fn features_name_firns_annotations(node: &GpuHost) -> Result<()> {
    const UNSAFE: &str = "potentiallyUnsafeConfigAnnotations";
    let of = |program: &str| -> Result<Value> {
        Ok(serde_json::from_str(
            &node.node().run(&[program, "features"])?.stdout,
        )?)
    };
    let (mut ours, mut runcs) = (of(FIRN_RUNC)?, of("/usr/sbin/runc")?);
    let named = ours[UNSAFE].take();
    let named = named.as_array().context("no annotations")?;
    for name in ["firn.dev/criu-config", "firn.dev/gpu-map"] {
        ensure!(named.iter().any(|known| known == name), "no {name} in {named:?}");
    }
    let runcs_own = runcs[UNSAFE].take();
    let mut runcs_own = runcs_own.as_array().into_iter().flatten();
    ensure!(
        runcs_own.all(|name| named.contains(name)),
        "one of runc's is missing"
    );
    ensure!(ours == runcs, "{ours} instead of {runcs}");
    Ok(())
}

/// Containers without GPU, and all that firn-runc does not do itself, are as with runc.
fn without_gpu_it_is_runc(platform: Platform) -> Result<()> {
    on([host(platform, "po-day", 0)?], |[node]| {
        let podman = Podman(node);
        let shown = day(podman, "runc")?;
        assert_eq!(day(podman, "firn-runc")?, shown);
        let failed: Vec<&String> = shown.iter().filter(|line| !line.contains("Some(0)")).collect();
        assert_eq!(failed.len(), 3, "{failed:?}");
        podman.claims()?.works(DAY)?;
        for words in [
            &["--version"][..],
            &["--help"],
            &["features", "--help"],
            &["checkpoint", "--help"],
            &["restore", "--lsm-mount-context"],
            &["list"],
            &["state", "absent"],
            &["checkpoint", "absent"],
            &["restore"],
            &["no-such-verb"],
            &["--log-format", "json", "kill", "absent", "9"],
        ] {
            let of = |program: &str| -> Result<String> {
                let output = node.node().command(program).args(words).output()?;
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let shown = format!(
                    "{:?}\n{}{}",
                    output.status.code(),
                    text(&output.stdout),
                    text(&output.stderr)
                );
                // Times of log lines.
                Ok(shown.split('"').filter(|part| !part.starts_with("20")).collect())
            };
            assert_eq!(of(FIRN_RUNC)?, of("/usr/sbin/runc")?, "{words:?}");
        }
        features_name_firns_annotations(node)?;
        podman.clear()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_counter_goes_on_and_moves [FORKY, TRIXIE, TRIXIE_V2];
        objects_move [FORKY, TRIXIE];
        a_failed_checkpoint_costs_nothing [FORKY, TRIXIE];
        a_failed_restore_leaves_nothing [FORKY, TRIXIE];
        a_killed_checkpoint_is_rolled_back [FORKY, TRIXIE];
        a_killed_restore_leaves_nothing [FORKY, TRIXIE];
        a_suspended_container_goes_on [TRIXIE];
        firn_shows_what_becomes_of_a_container [FORKY];
        the_pages_commands_work [FORKY];
        without_gpu_it_is_runc [FORKY, TRIXIE];
    })
    .only_in_all()
}
