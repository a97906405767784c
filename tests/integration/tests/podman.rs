//! podman over firn-runc: containers with GPUs go on from its checkpoints, also on other GPUs; what fails or
//! is killed leaves them running; the rest is as with runc.
//!
//! Needs root.

use std::process::{Child, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use firn_documents::{Page, root};
use firn_lab::{GpuHost, IMAGE, Lines, SimGpu, cases, matrix, on};
use firn_node::{CgroupMode, Platform, wait_for};

const LIMIT: Duration = Duration::from_secs(60);
const PACKAGES: &[&str] = &["conmon", "netavark", "podman"];
const FIRN_RUNC: &str = "/usr/local/bin/firn-runc";
const ARCHIVE: &str = "/root/job.tar.gz";

/// podman's tests of the kernel want to make whiteouts, which a test node may not: no overlays.
const STORAGE: &str = "[storage]\ndriver = \"vfs\"\ngraphroot = \"/var/lib/containerd/podman\"\n\
                       runroot = \"/run/containers/storage\"\n";
/// No limit for pids: cgroup v2 of a host that has v1, too, lacks the controller.
const CONTAINERS: &str = "[containers]\npids_limit = 0\n[engine]\ncgroup_manager = \"cgroupfs\"\n\
                          events_logger = \"file\"\n\
                          runtime_supports_json = [\"crun\", \"runc\", \"firn-runc\"]\n\
                          [engine.runtimes]\nfirn-runc = [\"/usr/local/bin/firn-runc\"]\n";

fn host(platform: Platform, name: &str, gpus: u32) -> Result<GpuHost> {
    let gpus: Vec<SimGpu> = (1..=gpus).map(SimGpu::h200).collect();
    let host = GpuHost::for_test_with(platform, name, &gpus, PACKAGES)?;
    let node = host.node();
    node.write("/etc/containers/storage.conf", STORAGE)?;
    node.write("/etc/containers/containers.conf", CONTAINERS)?;
    node.run(&["ctr", "images", "export", "--local", "/root/image.tar", IMAGE])?;
    let loaded = Podman(&host).run(&["load", "--input", "/root/image.tar"])?;
    let loaded = loaded.rsplit(": ").next().context(loaded.clone())?.trim();
    Podman(&host).run(&["tag", loaded, IMAGE])?;
    Ok(host)
}

/// podman on a node.
#[derive(Clone, Copy)]
struct Podman<'h>(&'h GpuHost);

impl Podman<'_> {
    fn run(self, words: &[&str]) -> Result<String> {
        Ok(self.0.node().run(&[&["podman"], words].concat())?.stdout)
    }

    /// What it prints when it fails.
    fn fails(self, words: &[&str]) -> Result<String> {
        let output = self.0.node().command("podman").args(words).output()?;
        ensure!(!output.status.success(), "{words:?} did not fail");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Starts a counter on a GPU.
    fn count(self, name: &str, gpu: &str) -> Result<()> {
        let device = format!("nvidia.com/gpu={gpu}");
        let run = [
            "--runtime",
            "firn-runc",
            "run",
            "--detach",
            "--network",
            "none",
            "--name",
            name,
        ];
        let job = [
            "--device",
            &device,
            IMAGE,
            "/bin/gpu-counter",
            "--interval-ms",
            "50",
            "--mib",
            "8",
        ];
        self.run(&[&run[..], &job].concat())?;
        self.goes_on(name, 3).map(drop)
    }

    fn lines(self, name: &str) -> Result<Lines> {
        Ok(Lines::parse(&self.run(&["logs", name])?))
    }

    /// Waits for more iterations of the counter, all of them right. Gives the number of the first.
    fn goes_on(self, name: &str, more: u64) -> Result<u64> {
        let from = self.lines(name)?.reached(1);
        wait_for(
            &format!("{more} iterations of {name} after {from}"),
            LIMIT,
            || {
                let lines = self.lines(name)?;
                if let Some(fault) = lines.fault_if_carried(0) {
                    bail!("{name}: {fault}");
                }
                Ok((lines.reached(1) >= from + more).then_some(()))
            },
        )?;
        Ok(from)
    }

    /// Uses GPU memory of these GPUs and of no others.
    fn uses(self, gpus: &[usize]) -> Result<()> {
        let shown = self.0.node().run(&["simgpu", "smi"])?.stdout;
        let used = shown.lines().filter(|line| line.starts_with("gpu "));
        let used: Vec<usize> = (0..)
            .zip(used)
            .filter(|(_, line)| !line.contains(" used=0MiB"))
            .map(|(n, _)| n)
            .collect();
        ensure!(used == gpus, "in use: {used:?} instead of {gpus:?}");
        Ok(())
    }

    fn checkpoint(self, options: &[&str], name: &str) -> Result<String> {
        let begin = [
            "container",
            "checkpoint",
            "--compress",
            "gzip",
            "--export",
            ARCHIVE,
        ];
        self.run(&[&begin[..], options, &[name]].concat())
    }

    /// Begins a checkpoint that hangs in the driver.
    fn hang(self, name: &str) -> Result<Child> {
        self.0.fault(&["--call", "checkpoint", "--hang"])?;
        let mut command = self.0.node().command("podman");
        command.args(["container", "checkpoint", "--export", ARCHIVE, name]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        wait_for("firn-gpu to hang", LIMIT, || {
            let begun = self.is_noted() && self.is_locked()?;
            Ok(begun.then_some(()))
        })?;
        Ok(child)
    }

    fn is_locked(self) -> Result<bool> {
        Ok(self.0.node().run(&["simgpu", "smi"])?.stdout.contains("state=1"))
    }

    fn processes(self, name: &str) -> Vec<String> {
        let processes = self.0.node().processes().into_iter();
        let named = processes.filter(|process| process.command == name);
        named.map(|process| process.pid.to_string()).collect()
    }

    /// Kills the processes of firn-runc: the transaction's alone, or the called one, too.
    fn kill(self, both: bool) -> Result<()> {
        let processes = self.0.node().processes().into_iter();
        let is_meant = |name: &String| name == "firn-runc" || both && name == FIRN_RUNC;
        let found = processes.filter(|process| process.args.first().is_some_and(is_meant));
        let pids: Vec<String> = found.map(|process| process.pid.to_string()).collect();
        ensure!(pids.len() == if both { 2 } else { 1 }, "{pids:?}");
        let pids: Vec<&str> = pids.iter().map(String::as_str).collect();
        self.0.node().run(&[&["kill", "-KILL"], &pids[..]].concat())?;
        self.0.no_faults()
    }

    /// Whether firn-runc has a note of an open transaction. podman itself waits for the end of its call.
    fn is_noted(self) -> bool {
        !self.notes().is_empty()
    }

    /// The ids of containers with such a note.
    fn notes(self) -> Vec<String> {
        let notes = std::fs::read_dir(self.0.node().path("/run/firn/runc/run/runc"));
        let notes = notes.into_iter().flatten().flatten();
        notes
            .map(|note| note.file_name().to_string_lossy().into_owned())
            .collect()
    }

    /// Nothing of a checkpoint is there: no archive, image, journal or note.
    fn no_checkpoint(self, name: &str) -> Result<()> {
        let bundle = self.run(&["inspect", "--format", "{{.StaticDir}}", name])?;
        let bundle = self.0.node().path(bundle.trim());
        for left in ["checkpoint", "firn-journal"] {
            ensure!(
                !bundle.join(left).exists(),
                "{left} is left in {}",
                bundle.display()
            );
        }
        ensure!(!self.0.node().path(ARCHIVE).exists(), "{ARCHIVE} is left");
        ensure!(!self.is_noted(), "the note is left");
        ensure!(self.processes("firn-gpu").is_empty(), "firn-gpu is left");
        Ok(())
    }

    /// Removes all containers. Nothing of them is left.
    fn clear(self) -> Result<()> {
        self.run(&["rm", "--all", "--force", "--time", "0"])?;
        wait_for("the end of everything", LIMIT, || {
            let left = ["conmon", "gpu-counter", "firn-runc", "firn-gpu", "criu"];
            Ok(left
                .iter()
                .all(|name| self.processes(name).is_empty())
                .then_some(()))
        })?;
        self.uses(&[])
    }
}

/// A counter goes on in the container, in one that is restored from the archive, and on the GPU that the node
/// gives it, under its own name and next to itself.
fn a_counter_goes_on_and_moves(platform: Platform) -> Result<()> {
    on([host(platform, "po-move", 2)?], |[node]| {
        let podman = Podman(node);
        podman.count("job", "0")?;
        podman.checkpoint(&["--leave-running"], "job")?;
        podman.goes_on("job", 3)?;
        podman.checkpoint(&[], "job")?;
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
        // What was restored can be checkpointed. The node has the choice of the GPU.
        podman.checkpoint(&[], "job")?;
        podman.run(&["rm", "job"])?;
        node.configure("[restore]\ngpus = [\"1\"]\n")?;
        podman.run(&["container", "restore", "--import", ARCHIVE])?;
        podman.goes_on("job", 3)?;
        podman.uses(&[1])?;
        node.configure("[restore]\ngpus = [\"0\"]\n")?;
        let copy = ["container", "restore", "--import", ARCHIVE, "--name", "copy"];
        if node.node().record().cgroup == CgroupMode::V2 {
            // podman gives it a cgroup namespace there, and CRIU puts it into its source's cgroup.
            let error = podman.fails(&copy)?;
            ensure!(error.contains("FIRN-IMAGE-PRIVILEGE: "), "{error}");
            podman.goes_on("job", 3)?;
            podman.uses(&[1])?;
            return podman.clear();
        }
        podman.run(&copy)?;
        podman.goes_on("copy", 3)?;
        podman.goes_on("job", 3)?;
        podman.uses(&[0, 1])?;
        // Within podman's own storage.
        podman.run(&["container", "checkpoint", "copy"])?;
        podman.run(&["container", "restore", "copy"])?;
        podman.goes_on("copy", 3)?;
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
                error.contains("FIRN-GPU-DRIVER: ") && error.contains("the workload goes on"),
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
        ensure!(podman.processes("gpu-counter").is_empty(), "a process is left");
        // podman keeps a container that could not be restored.
        podman.run(&["rm", "--force", "job"])?;
        podman.run(&["container", "restore", "--import", ARCHIVE])?;
        podman.goes_on("job", 3)?;
        podman.clear()
    })
}

/// Whoever is killed: the container goes on, by the process that is left or by the next call for it. A call
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
        for call in [
            &["exec", "job", "true"][..],
            &["container", "checkpoint", "--leave-running", "job"],
        ] {
            let client = podman.hang("job")?;
            podman.kill(true)?;
            ensure!(
                !client.wait_with_output()?.status.success(),
                "the client reports success"
            );
            ensure!(
                podman.is_noted() && podman.is_locked()?,
                "somebody else has rolled it back"
            );
            podman.run(call)?;
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
        node.no_faults()?;
        podman.run(&["exec", "job", "true"])?;
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
                let is_restored = podman.processes("gpu-counter").len() == 1;
                Ok(
                    (podman.is_noted() && is_restored && podman.processes("firn-gpu").len() == 1)
                        .then_some(()),
                )
            })?;
            podman.kill(both)?;
            if both {
                // conmon reads from a pipe that the restored process has, and podman waits for conmon. For a
                // container that it has not restored podman does not call its runtime.
                client.kill()?;
                client.wait()?;
                let id = podman.notes().pop().context("there is no note")?;
                node.node().run(&[FIRN_RUNC, "delete", "--force", &id])?;
            } else {
                let output = client.wait_with_output()?;
                let error = String::from_utf8_lossy(&output.stderr);
                ensure!(error.contains("FIRN-RUNC-KILLED: "), "{error}");
            }
            ensure!(!podman.is_noted(), "the note is left");
            ensure!(podman.processes("gpu-counter").is_empty(), "a process is left");
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

/// What a client sees of a container without GPU, with this runtime.
fn day(podman: Podman<'_>, runtime: &str) -> Result<Vec<String>> {
    let mut seen = Vec::new();
    let count = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.1; done";
    let run = ["--runtime", runtime, "run", "--network", "none"];
    let made = ["--detach", "--name", "day", IMAGE, "sh", "-c", count];
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

/// Containers without GPU, and all that firn-runc does not do itself, are as with runc.
fn without_gpu_it_is_runc(platform: Platform) -> Result<()> {
    on([host(platform, "po-day", 0)?], |[node]| {
        let podman = Podman(node);
        let shown = day(podman, "runc")?;
        assert_eq!(day(podman, "firn-runc")?, shown);
        let failed: Vec<&String> = shown.iter().filter(|line| !line.contains("Some(0)")).collect();
        assert_eq!(failed.len(), 3, "{failed:?}");
        for words in [
            &["--version"][..],
            &["--help"],
            &["features"],
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
        podman.clear()
    })
}

fn main() -> ExitCode {
    matrix::run(&cases! {
        a_counter_goes_on_and_moves [FORKY, TRIXIE, TRIXIE_V2];
        a_failed_checkpoint_costs_nothing [FORKY, TRIXIE];
        a_failed_restore_leaves_nothing [FORKY, TRIXIE];
        a_killed_checkpoint_is_rolled_back [FORKY, TRIXIE];
        a_killed_restore_leaves_nothing [FORKY, TRIXIE];
        a_suspended_container_goes_on [TRIXIE];
        the_pages_commands_work [FORKY];
        without_gpu_it_is_runc [FORKY, TRIXIE];
    })
}
