//! A host on which cases are tried one after the other, and the container that they are tried on.

use std::cell::{Cell, RefCell};
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use containerd_shim_protos::api::Empty;
use containerd_shim_protos::shim::oci::CheckpointOptions;
use firn_node::{CgroupMode, Platform, Suite, wait_for};

use super::case::{From, Subject};
use super::counting::Counting;
use super::{disk, inject, stalls};
use crate::{
    Archive, Census, Container, GC, GpuHost, NAMES_HOOKS, Pending, SHARES_NOTHING, SimGpu, Task, answer,
};

/// The container.
pub(super) const ID: &str = "job";
/// A good image of such a container, in containerd's store.
pub(super) const TEMPLATE: &str = "checkpoint/template";
/// GPU memory of each counter.
const MIB: usize = 1;
/// What each has in addition in a container that is parked: more than a scene's memory limit leaves.
const RESERVED_MIB: &str = "8";
/// What each has in addition where memory goes into a store: several extents.
const STORED_MIB: &str = "32";
/// Options of a container whose pause gives its GPU free.
pub(super) const RELEASE: [&str; 2] = ["--annotation", "firn.dev/pause=release-gpu"];
/// How long the node may take to come to rest.
const QUIET: Duration = Duration::from_secs(40);
/// How long nobody must be at work: between two workers there is none for a moment.
const REST: Duration = Duration::from_millis(300);

/// Restored containers get the second GPU; deadlines that a hang soon passes and a busy machine does not.
const CONFIG: &str = "[worker]\npath = \"/srv/fault/firn-gpu\"\n[restore]\ngpus = [\"1\"]\n[deadlines]\n";
const SHORT: &str = "look = \"1500ms\"\ndiscover = \"1500ms\"\ngpu-lock = \"1500ms\"\n\
    gpu-checkpoint = \"1500ms\"\n\
    criu-dump = \"4s\"\n\
    criu-restore = \"4s\"\ngpu-restore = \"1500ms\"\ngpu-unlock = \"1500ms\"\nrollback = \"2s\"\n";

/// See the module head.
pub(super) struct Testbed {
    pub host: GpuHost,
    /// The runtime of its containers.
    runtime: &'static str,
    pub subject: Subject,
    /// The template, taken out of containerd, to make images of its kind from.
    template: RefCell<Option<Archive>>,
    images: Cell<usize>,
}

/// A container that counts.
pub(super) struct Job<'t> {
    pub testbed: &'t Testbed,
    pub container: Container<'t>,
    pub counting: Counting,
    /// A pause of it gives its GPU free.
    pub releases: bool,
}

/// A checkpoint that is under way.
pub(super) enum Call {
    Raw(Task, Option<Pending<Empty>>),
    Client(Child),
}

/// What a checkpoint is asked for.
pub(super) struct Asked<'a> {
    pub image: &'a str,
    pub work: Option<String>,
    pub exit: bool,
}

/// Where the template writes its lines, and its copies.
const LOG_OF_TEMPLATE: &str = "/template.log";
/// Where all others do. The template has it, empty: an image of a process that has it open just then is
/// restored over the template's files.
const LOG: &str = "/counter.log";

impl Testbed {
    /// Starts a host and makes the template.
    pub(super) fn new(suite: Suite, subject: Subject, name: &str) -> Result<Self> {
        let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
        let host = GpuHost::for_test(Platform::new(suite, subject.cgroup), name, &gpus)?;
        disk::prepare(&host)?;
        inject::prepare(&host)?;
        if subject.stored {
            disk::prepare_store(&host)?;
        }
        let runtime = host.runtime_for_options()?;
        let testbed = Self {
            host,
            runtime,
            subject,
            template: RefCell::new(None),
            images: Cell::new(0),
        };
        testbed.configure(false)?;
        testbed.host.node().run(&["mkdir", "-p", "/srv/images"])?;
        let mut job = testbed.start()?;
        let empty = format!("{}/{ID}/rootfs{LOG}", crate::BUNDLES);
        testbed.host.node().write(empty, "")?;
        job.container.checkpoint(TEMPLATE)?;
        job.counting.goes_on(2)?;
        job.end()?;
        testbed
            .template
            .replace(Some(Archive::export(&testbed.host, TEMPLATE)?));
        Ok(testbed)
    }

    /// Writes firn's configuration, with short deadlines where something hangs.
    pub(super) fn configure(&self, hangs: bool) -> Result<()> {
        let deadlines = if hangs { SHORT } else { "" };
        let store = if self.subject.stored {
            format!(
                "[images]\nstore = \"{}\"\nbulk = \"store\"\n[hook]\npath = \"{}\"\n",
                disk::STORE,
                inject::HOOK_PATH
            )
        } else {
            String::new()
        };
        self.host.configure(&format!("{store}{CONFIG}{deadlines}"))
    }

    /// The store has all that its checkpoints need, and nothing else once it was cleaned.
    pub(super) fn has_sound_store(&self) -> Result<()> {
        if !self.subject.stored {
            return Ok(());
        }
        let node = self.host.node();
        node.run(&["firn", "store", "verify"])?;
        // What the case itself and a restore by containerd leave is an image that the store keeps memory for.
        node.run(&["sh", "-c", "rm -rf /srv/images/case /tmp/ctrd-checkpoint*"])?;
        let cleaned = node.run(&GC)?.stdout;
        let printed = node.run(&["firn", "store", "ls", "--json"])?.stdout;
        let listed = answer(&["store", "ls"], &printed)?;
        // The memory of an image on a file system that is not mounted any more stays.
        let is_away = |image: &&serde_json::Value| {
            let path = image["image"].as_str().unwrap_or_default();
            let is_ours = [disk::MOUNTS, stalls::POINT]
                .iter()
                .any(|place| path.starts_with(place));
            is_ours && !node.path(path).exists()
        };
        let images = listed["images"].as_array().map_or(&[][..], Vec::as_slice);
        let count = images.iter().filter(|image| !is_away(image)).count();
        ensure!(
            count == 1,
            "the store has more than the template: {cleaned}{printed}"
        );
        let unfinished = node.run(&["ls", "-A", &format!("{}/new", disk::STORE)])?.stdout;
        ensure!(unfinished.is_empty(), "the store has {unfinished}");
        Ok(())
    }

    fn counters(&self) -> usize {
        self.subject.processes
    }

    /// Counts in a new container.
    pub(super) fn start(&self) -> Result<Job<'_>> {
        self.start_with(&[])
    }

    /// The same, with more options of `ctr run`.
    pub(super) fn start_with(&self, more: &[&str]) -> Result<Job<'_>> {
        let hooks: &[&str] = if self.subject.has_hooks() {
            &NAMES_HOOKS
        } else {
            &[]
        };
        let options = [&["--runtime", self.runtime][..], &SHARES_NOTHING, hooks, more].concat();
        let (mib, processes) = (MIB.to_string(), self.counters().to_string());
        let is_template = self.template.borrow().is_none();
        let log = if is_template { LOG_OF_TEMPLATE } else { LOG };
        let releases = more.contains(&RELEASE[1]);
        let mut arguments = vec![
            "--mib",
            &mib,
            "--interval-ms",
            "20",
            "--procs",
            &processes,
            "--out",
            log,
        ];
        if self.subject.stored {
            arguments.extend(["--fixed-mib", STORED_MIB]);
            // Of children CRIU dumps again what firn could not copy.
            if self.subject.processes > 1 {
                arguments.push("--forks=idle");
            }
        }
        if releases {
            arguments.extend(["--reserve-mib", RESERVED_MIB]);
        }
        let counters = self.counters();
        let container = Container::count_with(&self.host, ID, &["0"], counters, &options, &arguments)?;
        let mut job = Job {
            testbed: self,
            container,
            counting: self.counting(log),
            releases,
        };
        job.counting.goes_on(2)?;
        Ok(job)
    }

    fn counting(&self, log: &str) -> Counting {
        Counting::new(&self.host, ID, log, self.counters(), MIB << 20)
    }

    /// A container that was restored from the template counts on, on the second GPU.
    pub(super) fn restored(&self) -> Result<Job<'_>> {
        self.counts_on(self.counting(LOG_OF_TEMPLATE).restored())
    }

    fn counts_on(&self, counting: Counting) -> Result<Job<'_>> {
        let container = Container::known(&self.host, ID).counting(self.counters());
        let mut job = Job {
            testbed: self,
            container,
            counting,
            releases: false,
        };
        let status = job.container.status()?;
        ensure!(status == "RUNNING", "the restored task is {status}");
        // What its source has written may come first.
        job.counting.goes_on(3)?;
        let (used, second) = (job.container.gpus_in_use()?, &self.host.gpus()[1].uuid);
        ensure!(used == [second.clone()], "it uses {used:?}, not {second}");
        Ok(job)
    }

    /// Restores the template, which must work.
    pub(super) fn restores(&self) -> Result<()> {
        Container::restore(&self.host, ID, TEMPLATE, self.counters())?;
        self.restored()?.end()
    }

    /// The image in this directory of the node, of the last container, is complete: one made of it counts on.
    pub(super) fn is_good_image(&self, dir: &str) -> Result<()> {
        ensure!(self.manifest_of(dir), "the image in {dir} has no manifest");
        self.images.set(self.images.get() + 1);
        let (name, from) = (
            format!("checkpoint/case-{}", self.images.get()),
            self.host.node().path(dir),
        );
        let mut template = self.template.borrow_mut();
        let archive = template.as_mut().context("no template")?;
        archive.edit(|to| {
            for entry in std::fs::read_dir(to)? {
                std::fs::remove_file(entry?.path())?;
            }
            for entry in std::fs::read_dir(&from)? {
                let entry = entry?;
                std::fs::copy(entry.path(), to.join(entry.file_name()))?;
            }
            Ok(())
        })?;
        archive.import(&self.host, &name)?;
        let back = || {
            Container::restore(&self.host, ID, &name, self.counters())?;
            self.counts_on(self.counting(LOG))?.end()
        };
        back().with_context(|| format!("restore the image in {dir}"))?;
        self.host.remove_image(&name)
    }

    pub(super) fn manifest_of(&self, dir: &str) -> bool {
        self.host.node().path(dir).join("firn.json").is_file()
    }

    /// What works for a checkpoint or restore.
    pub(super) fn at_work(&self) -> Vec<firn_node::Process> {
        let at_work = |command: &str| matches!(command, "runc" | "criu" | "firn-gpu" | "firn-hook");
        let processes = self.host.node().processes().into_iter();
        processes.filter(|process| at_work(&process.command)).collect()
    }

    /// Waits until neither a checkpoint nor a restore is under way any more.
    pub(super) fn is_quiet(&self) -> Result<()> {
        let (mut left, mut since) = (Vec::new(), None);
        let waited = wait_for("the node to come to rest", QUIET, || {
            left = self.at_work();
            if left.is_empty() {
                Ok((since.get_or_insert_with(Instant::now).elapsed() > REST).then_some(()))
            } else {
                since = None;
                Ok(None)
            }
        });
        ensure!(waited.is_ok(), "still at work: {left:?}");
        Ok(())
    }

    /// Removes what containerd knows of the container; nothing else of it must be left.
    pub(super) fn forget(&self) -> Result<()> {
        // The task is there when the flow has come that far, and the daemon keeps what a killed client has
        // made.
        let _ = self.host.node().run(&["ctr", "tasks", "delete", "--force", ID]);
        let known = self.host.node().run(&["ctr", "containers", "list", "--quiet"])?;
        if known.stdout.lines().any(|id| id == ID) {
            self.host.node().run(&["ctr", "containers", "delete", ID])?;
        }
        crate::nothing_left(&self.host, ID)?;
        self.host.idle()
    }

    /// What is on the node now.
    pub(super) fn census(&self) -> Result<Census> {
        Census::take(&self.host)
    }
}

impl<'t> Job<'t> {
    /// Begins a checkpoint: by the shim's own service, or by `ctr`, which pauses and resumes around it.
    pub(super) fn checkpoint(&self, asked: &Asked<'_>, by_client: bool) -> Result<Call> {
        if by_client {
            let mut command = vec!["ctr", "tasks", "checkpoint", "--image-path", asked.image];
            command.extend(asked.exit.then_some("--exit"));
            command.push(ID);
            return Ok(Call::Client(self.testbed.host.node().spawn(&command)?));
        }
        let mut options = CheckpointOptions::new();
        options.exit = asked.exit;
        options.work_path = asked.work.clone().unwrap_or_default();
        let task = Task::of(&self.testbed.host, ID)?;
        let pending = task.checkpoint(asked.image, &options)?;
        Ok(Call::Raw(task, Some(pending)))
    }

    /// Pauses it, if that is where the checkpoint begins.
    pub(super) fn comes_from(&self, from: From) -> Result<()> {
        match from {
            From::Running => Ok(()),
            From::Paused => self.container.task(&["pause"]).map(drop),
        }
    }

    /// The real state of its freezer, not what anybody remembers.
    pub(super) fn freezer(&self) -> Result<From> {
        let host = &self.testbed.host;
        let v2 = host.node().record().cgroup == CgroupMode::V2;
        let (file, frozen) = if v2 {
            ("cgroup.events", "frozen 1")
        } else {
            ("freezer.state", "FROZEN")
        };
        let cgroups = host.node().remnants(ID)?.cgroups;
        let state = cgroups
            .iter()
            .find_map(|cgroup| std::fs::read_to_string(cgroup.join(file)).ok());
        let state = state.with_context(|| format!("no {file} in {cgroups:?}"))?;
        if state.lines().any(|line| line == frozen) {
            Ok(From::Paused)
        } else {
            Ok(From::Running)
        }
    }

    /// Whether its first process lives.
    pub(super) fn is_alive(&self) -> bool {
        let processes = self.testbed.host.node().processes();
        processes.iter().any(|process| {
            process
                .args
                .first()
                .is_some_and(|program| program == "/bin/gpu-counter")
        })
    }

    /// It is paused, or runs, in every respect: containerd's status, the freezer, what it writes. Runs
    /// afterwards.
    pub(super) fn is(&mut self, state: From) -> Result<()> {
        let expected = match state {
            From::Running => "RUNNING",
            From::Paused => "PAUSED",
        };
        self.container.becomes(expected)?;
        // A thread that sleeps in the kernel stops when it wakes up.
        let frozen = wait_for("the freezer", QUIET, || {
            Ok((self.freezer()? == state).then_some(()))
        });
        ensure!(frozen.is_ok(), "the freezer is {:?}", self.freezer()?);
        self.is_traced_by_nobody()?;
        match state {
            From::Running => self.counting.goes_on(2),
            From::Paused => self.is_resumed(),
        }
    }

    /// It is paused or suspended, for a client to resume; runs afterwards, with all that it had.
    pub(super) fn is_resumed(&mut self) -> Result<()> {
        self.container.becomes("PAUSED")?;
        self.counting.stands_still()?;
        self.container.task(&["resume"])?;
        self.container.becomes("RUNNING")?;
        self.is_traced_by_nobody()?;
        self.counting.goes_on(2)
    }

    pub(super) fn is_traced_by_nobody(&self) -> Result<()> {
        let node = self.testbed.host.node();
        for process in node.processes() {
            if process.command != "gpu-counter" {
                continue;
            }
            // One that was the fault may have ended meanwhile.
            let Ok(status) = node.read(format!("/proc/{}/status", process.pid)) else {
                ensure!(!node.path(format!("/proc/{}", process.pid)).exists(), "no status");
                continue;
            };
            let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:\t"));
            ensure!(tracer == Some("0"), "pid {} is traced by {tracer:?}", process.pid);
        }
        Ok(())
    }

    /// A checkpoint without fault works and costs it nothing.
    pub(super) fn checkpoints(&mut self) -> Result<()> {
        let image = "/srv/images/again";
        let asked = Asked {
            image,
            work: None,
            exit: false,
        };
        let mut call = self.checkpoint(&asked, false)?;
        call.finish()?.map_err(anyhow::Error::msg)?;
        ensure!(self.testbed.manifest_of(image), "no image");
        self.testbed.host.node().run(&["rm", "-r", image])?;
        self.counting.goes_on(2)
    }

    /// Removes it.
    pub(super) fn end(self) -> Result<()> {
        self.container.remove()?;
        self.testbed.host.idle()
    }
}

impl Call {
    /// Whether the answer is there.
    pub(super) fn is_over(&mut self) -> Result<bool> {
        match self {
            Self::Raw(_, pending) => Ok(pending.as_ref().is_none_or(Pending::is_there)),
            Self::Client(child) => Ok(child.try_wait()?.is_some()),
        }
    }

    /// Kills the client.
    pub(super) fn kill(&mut self) -> Result<()> {
        match self {
            Self::Raw(..) => bail!("no client takes part"),
            Self::Client(child) => Ok(child.kill()?),
        }
    }

    /// Waits for the answer that the client got.
    pub(super) fn finish(&mut self) -> Result<Result<(), String>> {
        match self {
            Self::Raw(task, pending) => {
                let pending = pending.take().context("the answer was taken")?;
                Ok(match task.end(pending) {
                    Ok(_) => Ok(()),
                    Err(ttrpc::Error::RpcStatus(status)) => Err(status.message().to_owned()),
                    Err(error) => Err(format!("no answer: {error}")),
                })
            }
            Self::Client(child) => {
                let mut output = String::new();
                if let Some(mut stderr) = child.stderr.take() {
                    std::io::Read::read_to_string(&mut stderr, &mut output)?;
                }
                if child.wait()?.success() {
                    Ok(Ok(()))
                } else {
                    Ok(Err(output.trim().to_owned()))
                }
            }
        }
    }
}
