//! A container in the lab, driven by `ctr`.

use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use firn_node::{Remnants, wait_for};
use serde_json::Value;

use crate::{Archive, FIRN, GpuHost, IMAGE, LOG, Lines};

/// How long a step of a workload may take.
const STEP: Duration = Duration::from_secs(60);

/// How long a node may take to be rid of what a container had.
const GONE: Duration = Duration::from_secs(30);

/// Where containerd keeps bundles.
pub const BUNDLES: &str = "/run/containerd/io.containerd.runtime.v2.task/default";

/// A container on a node.
pub struct Container<'h> {
    host: &'h GpuHost,
    id: String,
    counters: usize,
    /// How often its log was carried into an image before the dump that goes with it.
    carried: usize,
}

fn checkpoint_command<'a>(id: &'a str, image: &'a str) -> [&'a str; 7] {
    ["ctr", "containers", "checkpoint", "--rw", "--task", id, image]
}

fn restore_command<'a>(id: &'a str, image: &'a str) -> [&'a str; 7] {
    ["ctr", "containers", "restore", "--rw", "--live", id, image]
}

/// What a checkpoint and restore took.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    /// As the client saw it.
    pub took: Duration,
}

impl<'h> Container<'h> {
    /// Runs gpu-counter under firn on these GPUs (`0`, `all`, a UUID), `counters` lines per iteration.
    pub fn count(
        host: &'h GpuHost,
        id: &str,
        gpus: &[&str],
        counters: usize,
        arguments: &[&str],
    ) -> Result<Self> {
        Self::count_with(host, id, gpus, counters, &[], arguments)
    }

    /// As [`Container::count`], with more options of `ctr run`; a later `--runtime` replaces firn.
    pub fn count_with(
        host: &'h GpuHost,
        id: &str,
        gpus: &[&str],
        counters: usize,
        options: &[&str],
        arguments: &[&str],
    ) -> Result<Self> {
        let grant = host.ctr_gpu_options(gpus)?;
        let mut given = vec!["--runtime", FIRN];
        given.extend(grant.iter().map(String::as_str));
        given.extend(options);
        let mut command = vec![
            "/bin/gpu-counter",
            "--out",
            LOG,
            "--interval-ms",
            "50",
            "--mib",
            "8",
        ];
        command.extend(arguments);
        Ok(Self::run(host, id, &given, &command)?.counting(counters))
    }

    /// A shell script with these GPUs, whose gpu-counter writes `counters` lines per iteration; [`COUNTER`]
    /// starts one.
    pub fn script(
        host: &'h GpuHost,
        id: &str,
        gpus: &[&str],
        counters: usize,
        options: &[&str],
        script: &str,
    ) -> Result<Self> {
        let grant = host.ctr_gpu_options(gpus)?;
        let grant: Vec<&str> = grant.iter().map(String::as_str).collect();
        let options = [&["--runtime", FIRN], &grant[..], options].concat();
        Ok(Self::run(host, id, &options, &["sh", "-c", script])?.counting(counters))
    }

    /// Adds a line to /beats twenty times a second, without a GPU. Waits until it does.
    pub fn beat(host: &'h GpuHost, id: &str, options: &[&str], before: &str) -> Result<Self> {
        let script = format!("{before}while :; do echo x >>/beats; sleep 0.05; done");
        let options = [&["--runtime", FIRN], options].concat();
        let container = Self::run(host, id, &options, &["sh", "-c", &script])?;
        container.beats_on()?;
        Ok(container)
    }

    /// Characters in its /beats.
    pub fn beats(&self) -> usize {
        let beats = self
            .host
            .node()
            .read(format!("{BUNDLES}/{}/rootfs/beats", self.id));
        beats.map_or(0, |beats| beats.len())
    }

    /// Waits until /beats grows.
    pub fn beats_on(&self) -> Result<()> {
        let before = self.beats();
        wait_for(&format!("{} to write to /beats", self.id), STEP, || {
            Ok((self.beats() > before).then_some(()))
        })
    }

    /// Any other container.
    pub fn run(host: &'h GpuHost, id: &str, options: &[&str], command: &[&str]) -> Result<Self> {
        let start = [
            &["ctr", "run", "--detach"],
            host.limits(),
            options,
            &[IMAGE, id],
            command,
        ];
        host.node().run(&start.concat())?;
        Ok(Self::new(host, id))
    }

    /// A container that another client has made, or makes.
    pub fn known(host: &'h GpuHost, id: &str) -> Self {
        Self::new(host, id)
    }

    fn new(host: &'h GpuHost, id: &str) -> Self {
        Self {
            host,
            id: id.to_owned(),
            counters: 0,
            carried: 0,
        }
    }

    /// Declares that it writes gpu-counter's lines, `counters` per iteration, to the usual file.
    pub fn counting(self, counters: usize) -> Self {
        Self { counters, ..self }
    }

    /// Declares that its log has been in an image once more than in the one it was restored from.
    pub fn moved_before(mut self) -> Self {
        self.carried += 1;
        self
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Checkpoints the task and the root file system into `image`; the container continues.
    pub fn checkpoint(&self, image: &str) -> Result<Move> {
        let begun = Instant::now();
        let checkpoint = self.host.node().run(&checkpoint_command(&self.id, image));
        checkpoint.with_context(|| self.criu_errors())?;
        let took = begun.elapsed();
        Archive::check(self.host, image).context("read by the documents")?;
        Ok(Move { took })
    }

    /// Begins [`Container::checkpoint`]. Gives the client.
    pub fn begin_checkpoint(&self, image: &str) -> Result<Child> {
        self.host.node().spawn(&checkpoint_command(&self.id, image))
    }

    /// The errors in CRIU's log of its last checkpoint, for the message of a test that fails.
    fn criu_errors(&self) -> String {
        let log = self
            .host
            .node()
            .read(format!("{BUNDLES}/{}/criu-dump.log", self.id));
        let log = log.unwrap_or_default();
        let errors = log.lines().filter(|line| line.contains("Error"));
        format!("CRIU's log: {}", errors.collect::<Vec<_>>().join(" | "))
    }

    /// Checkpoints a container that was restored from `image`, which goes: with it, containerd 1.7 would
    /// leave the task out. What was restored is what can be checkpointed and continues.
    pub fn checkpoints_again(&self, image: &str) -> Result<()> {
        self.host.remove_image(image)?;
        self.checkpoint("checkpoint/again")?;
        self.goes_on(3)?;
        self.host.remove_image("checkpoint/again")
    }

    /// Checkpoints the task into a directory of the node; the container ends.
    pub fn checkpoint_and_exit(&self, dir: &str) -> Result<Move> {
        let begun = Instant::now();
        self.call(&["checkpoint", "--exit", "--image-path", dir])?;
        let took = begun.elapsed();
        self.remove_made_images()?;
        Ok(Move { took })
    }

    /// Under another name than the stock runtime's, ctr makes an image too, without the task, and reports
    /// success. It has the second in its name: the next one of that second would fail.
    fn remove_made_images(&self) -> Result<()> {
        let made = format!("containerd.io/checkpoint/{}:", self.id);
        let node = self.host.node();
        let images = node.run(&["ctr", "images", "list", "--quiet"])?.stdout;
        let mut images = images.lines().filter(|name| name.starts_with(&made));
        images.try_for_each(|name| self.host.remove_image(name))
    }

    /// Checkpoints the task into containerd's content store; the container ends. Gives the image that
    /// `restore` takes.
    ///
    /// What `ctr tasks checkpoint` leaves in the content store lacks only annotations, which are added.
    pub fn checkpoint_and_exit_to(&self, image: &str, runtime: &str) -> Result<()> {
        let name = self.task(&["checkpoint", "--exit"])?;
        let mut archive = Archive::export(self.host, name.trim())?;
        archive.describe(IMAGE, runtime);
        self.host.remove_image(name.trim())?;
        archive.import(self.host, image)
    }

    /// Begins to restore `image` as a container with this id. Gives the client.
    pub fn begin_restore(host: &GpuHost, id: &str, image: &str) -> Result<Child> {
        host.node().spawn(&restore_command(id, image))
    }

    /// Restores `image` as a container with this id.
    pub fn restore(host: &'h GpuHost, id: &str, image: &str, counters: usize) -> Result<(Self, Move)> {
        let begun = Instant::now();
        host.node().run(&restore_command(id, image))?;
        let container = Self {
            counters,
            carried: 1,
            ..Self::new(host, id)
        };
        Ok((
            container,
            Move {
                took: begun.elapsed(),
            },
        ))
    }

    /// The lines that the counters have written so far.
    pub fn lines(&self) -> Result<Lines> {
        let log = self
            .host
            .node()
            .path(format!("{BUNDLES}/{}/rootfs{LOG}", self.id));
        match std::fs::read_to_string(&log) {
            Ok(text) => Ok(Lines::parse(&text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Lines::default()),
            Err(error) => Err(error).with_context(|| format!("read {}", log.display())),
        }
    }

    /// Waits until all counters have gone `more` iterations further than they are, all of them right.
    pub fn goes_on(&self, more: u64) -> Result<Lines> {
        let from = self.lines()?.reached(self.counters);
        let waited = wait_for(
            &format!("{more} iterations of {} after {from}", self.id),
            STEP,
            || {
                let lines = self.lines()?;
                if let Some(fault) = lines.fault_if_carried(self.carried) {
                    bail!("{}: {fault}", self.id);
                }
                Ok((lines.reached(self.counters) >= from + more).then_some(lines))
            },
        );
        waited.with_context(|| format!("status {:?}", self.status()))
    }

    /// Task status as containerd reports it: RUNNING, PAUSED, STOPPED.
    pub fn status(&self) -> Result<String> {
        self.listed(2)
    }

    /// Pid of its init, as the node's processes are numbered.
    pub fn pid(&self) -> Result<i32> {
        Ok(self.listed(1)?.parse()?)
    }

    /// A column of `ctr tasks list`.
    fn listed(&self, column: usize) -> Result<String> {
        let table = self.host.node().run(&["ctr", "tasks", "list"])?.stdout;
        let rows = table
            .lines()
            .map(|row| row.split_whitespace().collect::<Vec<_>>());
        let row = rows.into_iter().find(|row| row.first() == Some(&&*self.id));
        let field = row.and_then(|row| row.get(column).map(|field| (*field).to_owned()));
        field.with_context(|| format!("no task {} in:\n{table}", self.id))
    }

    /// A subcommand of `ctr tasks` on it; options go before its id.
    pub fn task(&self, words: &[&str]) -> Result<String> {
        let printed = self.call(words)?;
        if words.contains(&"--image-path") {
            self.remove_made_images()?;
        }
        Ok(printed)
    }

    fn call(&self, words: &[&str]) -> Result<String> {
        let argv = [&["ctr", "tasks"], words, &[&self.id]].concat();
        Ok(self.host.node().run(&argv)?.stdout)
    }

    /// Pids of its processes, as the node's processes are numbered.
    pub fn pids(&self) -> Result<Vec<String>> {
        let table = self.task(&["ps"])?;
        let rows = table.lines().skip(1);
        Ok(rows
            .filter_map(|row| Some(row.split_whitespace().next()?.to_owned()))
            .collect())
    }

    /// Runs a program in it and gives its output.
    pub fn exec(&self, command: &[&str]) -> Result<String> {
        let output = self.host.exec(&self.id, "probe", command)?;
        ensure!(output.is_ok(), "{} in {}: {output}", command.join(" "), self.id);
        Ok(output.stdout)
    }

    /// Waits until it has this status.
    pub fn becomes(&self, status: &str) -> Result<()> {
        wait_for(&format!("{} to be {status}", self.id), STEP, || {
            Ok((self.status()? == status).then_some(()))
        })
    }

    /// Waits a little and makes sure that it does not continue meanwhile.
    pub fn stands_still(&self) -> Result<()> {
        let before = self.lines()?.0.len();
        // A span, not a condition: nothing must happen in it. Four steps of the counter.
        std::thread::sleep(Duration::from_millis(200));
        let after = self.lines()?.0.len();
        ensure!(
            before == after,
            "{} continued from line {before} to {after}",
            self.id
        );
        Ok(())
    }

    /// UUIDs of the GPUs that hold memory of the container's processes, as the driver's tool reports.
    pub fn gpus_in_use(&self) -> Result<Vec<String>> {
        gpus_used_by(self.host, &self.pids()?)
    }

    /// The shim's timings of the last checkpoint or restore: phases and milliseconds.
    pub fn timings(&self) -> Result<Vec<(String, f64)>> {
        let text = self
            .host
            .node()
            .read(format!("{BUNDLES}/{}/firn-timings.json", self.id))?;
        let timings: Value = serde_json::from_str(&text)?;
        let phases = timings["phases"].as_array().context("no phases")?;
        Ok(phases
            .iter()
            .filter_map(|phase| Some((phase["name"].as_str()?.to_owned(), phase["ms"].as_f64()?)))
            .collect())
    }

    /// Kills and removes it, and makes sure that nothing is left of it.
    pub fn remove(self) -> Result<()> {
        // Stopped already, or never started: both are fine here, and what follows distinguishes them.
        let _ = self.task(&["kill", "--signal", "SIGKILL"]);
        wait_for(&format!("end of {}", self.id), STEP, || {
            Ok(self
                .status()
                .map_or(true, |status| status == "STOPPED")
                .then_some(()))
        })?;
        let _ = self.task(&["delete"]);
        self.forget()
    }

    /// Deletes the task, which has ended, and gives its exit code, of which `ctr tasks delete` warns unless
    /// it is 0.
    pub fn exit_code(&self) -> Result<i32> {
        let output = self
            .host
            .node()
            .run(&["ctr", "tasks", "delete", &self.id])?
            .stderr;
        match output.split_once("non-zero exit code ") {
            None => Ok(0),
            Some((_, code)) => {
                let digits = code.split(|c: char| !c.is_ascii_digit()).next();
                digits
                    .and_then(|digits| digits.parse().ok())
                    .with_context(|| format!("no code in {output:?}"))
            }
        }
    }

    /// Removes what containerd still knows of a container without task, and makes sure that nothing is left
    /// of it.
    pub fn forget(self) -> Result<()> {
        self.host.node().run(&["ctr", "containers", "delete", &self.id])?;
        self.nothing_left()
    }

    /// Waits until nothing is left of the container on the node.
    pub fn nothing_left(&self) -> Result<()> {
        nothing_left(self.host, &self.id)
    }
}

/// UUIDs of the GPUs that hold memory of these processes, as the driver's tool reports.
pub(crate) fn gpus_used_by(host: &GpuHost, pids: &[String]) -> Result<Vec<String>> {
    let smi = host.node().run(&["simgpu", "smi"])?.stdout;
    let (mut uuid, mut used) = (String::new(), Vec::new());
    for line in smi.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["gpu", _, name, ..] => uuid = name.to_owned(),
            [process, .., memory] => {
                let pid = process.strip_prefix("pid=");
                let own = pid.is_some_and(|pid| pids.iter().any(|own| own == pid));
                // A process opens all GPUs that it may see, also those on which it has no memory.
                if own && memory != "used=0MiB" && used.last() != Some(&uuid) {
                    used.push(uuid.clone());
                }
            }
            _ => {}
        }
    }
    Ok(used)
}

/// As [`nothing_left`], once what `ctr` leaves of a container that it could not start, its metadata or its
/// snapshot, is removed.
pub fn nothing_left_but_metadata(host: &GpuHost, id: &str) -> Result<()> {
    let script = format!("ctr containers rm {id}; ctr snapshots rm {id}; true");
    host.node().run(&["sh", "-c", &script])?;
    nothing_left(host, id)
}

/// Waits until nothing is left of a container on a node: processes, mounts, cgroups, state directories.
pub fn nothing_left(host: &GpuHost, id: &str) -> Result<()> {
    let mut last = Remnants::default();
    let waited = wait_for(&format!("nothing of {id}"), GONE, || {
        last = host.node().remnants(id)?;
        Ok(last.is_empty().then_some(()))
    });
    ensure!(waited.is_ok(), "left of {id}:\n{last}");
    Ok(())
}
