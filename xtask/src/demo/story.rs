//! The demo on two test nodes: run, checkpoint, move, restore, told as it goes.
//!
//! Every command that is shown is the one that is run. The counter writes its lines to a directory that both nodes
//! have, each its own, so that what is in it on the second node was written after the restore.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use firn_lab::{Built, FIRN, GpuHost, IMAGE, Line, Lines, Profile, SimGpu};
use firn_node::{Output, Suite, wait_for};
use nix::sys::stat::{major, minor};

use super::account::{Account, Step, gpu, ms};
use super::proof::Proof;
use super::voice::{Voice, shown};

const JOB: &str = "job";
const CHECKPOINT: &str = "checkpoint/job";
const FILE: &str = "/tmp/job.tar";
const DIR: &str = "/srv/job";
const LOG: &str = "/srv/job/counter.log";
const MOUNT: &str = "type=bind,src=/srv/job,dst=/srv/job,options=rbind:rw";
const ACCOUNT: &str = "/run/containerd/io.containerd.runtime.v2.task/default/job/firn-account.json";

/// How long a counter may take for a few iterations.
const COUNTING: Duration = Duration::from_secs(60);

/// Lines of a log that are shown when the story went wrong.
const LOG_SHOWN: usize = 12;

/// Iterations that are waited for before the checkpoint, after it, and after the restore.
const ENOUGH: usize = 10;

/// The two nodes.
pub(super) struct Nodes {
    a: GpuHost,
    b: GpuHost,
}

impl Nodes {
    pub(super) const NAMES: [&str; 2] = ["demo-a", "demo-b"];

    /// Builds firn and starts both.
    pub(super) fn start(suite: Suite, voice: &Voice) -> Result<Self> {
        voice.say("building firn, the simulated driver and the workload");
        let built = Built::build(Profile::Dev)?;
        let start = |name, gpus: [u32; 2]| {
            let gpus = gpus.map(SimGpu::h200);
            GpuHost::start(&built, suite, name, &gpus)
        };
        let [a, b] = Self::NAMES;
        voice.working(
            &format!("starting two {suite} nodes with two simulated GPUs each"),
            || {
                Ok(Self {
                    a: start(a, [0xa0, 0xa1])?,
                    b: start(b, [0xb0, 0xb1])?,
                })
            },
        )
    }

    /// Lets them run on after this program.
    pub(super) fn leave(self) -> Result<()> {
        self.a.leave()?;
        self.b.leave()
    }

    /// Tells the story; an error means that it did not end well.
    pub(super) fn story(&self, voice: &Voice) -> Result<Account> {
        let begun = Instant::now();
        let (a, b) = (On::new('A', &self.a, voice), On::new('B', &self.b, voice));
        let tools = a.tools()?;
        voice.say(&format!("\nBoth nodes run {}.", tools.join(", ")));
        for on in [&a, &b] {
            for (index, described) in on.host.gpus().iter().map(gpu).enumerate() {
                let path = format!("/dev/nvidia{index}");
                let device = on.host.node().path(&path).metadata()?.rdev();
                let (major, minor) = (major(device), minor(device));
                voice.say(&format!(
                    "Node {}: {path} is device {major}:{minor}, {described}",
                    on.letter
                ));
            }
        }

        voice.title("A container computes in GPU memory on node A");
        for on in [&a, &b] {
            std::fs::create_dir_all(on.host.node().path(DIR)).context("make the counter's directory")?;
        }
        let grant = a.host.ctr_gpu_options(&["0"])?;
        let grant: Vec<&str> = grant.iter().map(String::as_str).collect();
        let options = [
            &["--runtime", FIRN][..],
            a.host.limits(),
            &grant,
            &["--mount", MOUNT],
        ]
        .concat();
        let counter = ["/bin/gpu-counter", "--interval-ms", "50", "--out", LOG];
        a.run(&[&["ctr", "run", "--detach"][..], &options, &[IMAGE, JOB], &counter].concat())?;
        let before = last(&a.count_to(ENOUGH)?)?;
        a.show_line(&before);
        let source_gpu = a.gpu_in_use()?;

        voice.title("It is checkpointed while it runs; it goes on afterwards");
        let (_, took) = a.run(&[
            "ctr",
            "containers",
            "checkpoint",
            "--rw",
            "--task",
            JOB,
            CHECKPOINT,
        ])?;
        let checkpoint = a.step(took)?;
        voice.say(checkpoint.table().trim_end());
        let so_far = a.lines()?.0.len();
        let source = a.count_to(so_far + ENOUGH)?;
        a.show_line(&last(&source)?);

        voice.title("It ends on node A, and the checkpoint goes to node B");
        a.run(&["ctr", "tasks", "rm", "--force", JOB])?;
        a.run(&["ctr", "containers", "rm", JOB])?;
        let moved = Instant::now();
        // ctr 2.1 takes the parts of a checkpoint image for platforms, and fails, without these two options.
        a.run(&[
            "ctr",
            "images",
            "export",
            "--local",
            "--skip-manifest-json",
            FILE,
            CHECKPOINT,
        ])?;
        let tar = a.host.node().path(FILE);
        let image_bytes = tar.metadata().context("look at the image")?.len();
        voice.say(&format!(
            "    $ scp node-a:{FILE} node-b:{FILE}       ({:.1} MiB)",
            mib(image_bytes)
        ));
        b.host.node().install(&tar, FILE, 0o600)?;
        b.run(&["ctr", "images", "import", "--local", "--no-unpack", FILE])?;
        let move_ms = ms(moved.elapsed());

        voice.title("It is restored on node B, onto the GPU that the node's configuration names");
        let target = self.b.gpus().get(1).context("node B has two GPUs")?;
        b.put(
            "/etc/firn/config.toml",
            &format!("[restore]\ngpus = [\"{}\"]\n", target.uuid),
        )?;
        let (_, took) = b.run(&["ctr", "containers", "restore", "--rw", "--live", JOB, CHECKPOINT])?;
        let restore = b.step(took)?;
        voice.say(restore.table().trim_end());
        let restored = b.count_to(ENOUGH)?;
        b.show_line(&last(&restored)?);
        let target_gpu = b.gpu_in_use()?;

        let proof = Proof::of(&before, &source, &restored)?;
        ensure!(
            source_gpu == self.a.gpus()[0].uuid && target_gpu == target.uuid,
            "the memory was on {source_gpu} and is on {target_gpu}, not on {}",
            target.uuid
        );
        Ok(Account {
            suite: a.host.node().record().suite.as_str(),
            tools,
            source_gpu,
            target_gpu,
            checkpoint,
            image_bytes,
            move_ms,
            restore,
            proof,
            total_s: begun.elapsed().as_secs_f64(),
        })
    }

    /// The end of containerd's logs, for when the story went wrong.
    pub(super) fn logs(&self) -> String {
        let tail = |host: &GpuHost| {
            let log = host.log();
            let (head, lines) = log.split_once('\n').unwrap_or((&log, ""));
            let lines: Vec<&str> = lines.lines().collect();
            format!(
                "{head}\n{}\n",
                lines[lines.len().saturating_sub(LOG_SHOWN)..].join("\n")
            )
        };
        tail(&self.a) + &tail(&self.b)
    }
}

/// A node of the story.
struct On<'n> {
    letter: char,
    host: &'n GpuHost,
    voice: &'n Voice,
}

impl<'n> On<'n> {
    fn new(letter: char, host: &'n GpuHost, voice: &'n Voice) -> Self {
        Self { letter, host, voice }
    }

    /// Shows a command, runs it, and gives what it printed and how long it took.
    fn run(&self, argv: &[&str]) -> Result<(Output, Duration)> {
        self.voice.say(&format!("    {}# {}", self.letter, shown(argv)));
        let begun = Instant::now();
        let output = self.host.node().run(argv)?;
        Ok((output, begun.elapsed()))
    }

    /// Shows and writes a file.
    fn put(&self, path: &str, text: &str) -> Result<()> {
        self.voice
            .say(&format!("    {}# cat > {path} <<EOF\n{text}EOF", self.letter));
        self.host.node().write(path, text)
    }

    /// Versions of what is in the node.
    fn tools(&self) -> Result<Vec<String>> {
        let first = |program| -> Result<String> {
            let said = self.host.node().run(&[program, "--version"])?.stdout;
            let line = said.lines().next().unwrap_or_default();
            // `containerd github.com/containerd/containerd 1.7.24~ds1 ...`, `runc version 1.3`, `Version: 4.2`.
            let version = line
                .split_whitespace()
                .find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
            Ok(format!("{program} {}", version.unwrap_or(line)))
        };
        ["containerd", "runc", "criu"].into_iter().map(first).collect()
    }

    /// What the counter has written on this node; nothing at first.
    fn lines(&self) -> Result<Lines> {
        let log = self.host.node().path(LOG);
        match std::fs::read_to_string(&log) {
            Ok(text) => Ok(Lines::parse(&text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Lines::default()),
            Err(error) => Err(error).with_context(|| format!("read {}", log.display())),
        }
    }

    /// Waits until the counter has written so many lines on this node.
    fn count_to(&self, count: usize) -> Result<Lines> {
        wait_for(&format!("{count} lines of the counter"), COUNTING, || {
            let lines = self.lines()?;
            Ok((lines.0.len() >= count).then_some(lines))
        })
    }

    fn show_line(&self, line: &Line) {
        self.voice.say(&format!(
            "      the counter: iteration {}, all of its memory right, checksum {}",
            line.iter, line.checksum
        ));
    }

    /// The GPU that holds the counter's memory, as the driver tells.
    fn gpu_in_use(&self) -> Result<String> {
        let (smi, _) = self.run(&["simgpu", "smi"])?;
        let used = in_use(&smi.stdout);
        ensure!(
            used.len() == 1,
            "the memory is on {} GPUs:\n{}",
            used.len(),
            smi.stdout
        );
        self.voice.say(&format!("      its memory is on {}", used[0]));
        Ok(used[0].to_owned())
    }

    fn step(&self, client: Duration) -> Result<Step> {
        let text = self.host.node().read(ACCOUNT)?;
        let shim = serde_json::from_str(&text).with_context(|| format!("{ACCOUNT} is not valid"))?;
        Ok(Step {
            client_ms: ms(client),
            shim,
        })
    }
}

fn last(lines: &Lines) -> Result<Line> {
    lines.0.last().cloned().context("the counter has printed nothing")
}

/// UUIDs of the GPUs of which a process has memory, from what `simgpu smi` prints.
fn in_use(smi: &str) -> Vec<&str> {
    let (mut uuid, mut used) = ("", Vec::new());
    for line in smi.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("gpu") => uuid = words.nth(1).unwrap_or_default(),
            Some(word)
                if word.starts_with("pid=") && !line.ends_with(" used=0MiB") && !used.contains(&uuid) =>
            {
                used.push(uuid);
            }
            _ => {}
        }
    }
    used
}

fn mib(bytes: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
    let mib = bytes as f64 / f64::from(1 << 20);
    mib
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gpus_with_memory_of_a_process_are_in_use() {
        let smi = "driver 580.1 cuda 13000\n\
                   gpu 0 GPU-a NVIDIA H200 0000:17:00.0 minor=0 node=7:1 used=0MiB total=1024MiB\n\
                   \x20 pid=12 gpu-counter state=running used=0MiB\n\
                   gpu 1 GPU-b NVIDIA H200 0000:18:00.0 minor=1 node=7:2 used=64MiB total=1024MiB\n\
                   \x20 pid=12 gpu-counter state=running used=64MiB\n\
                   \x20 pid=13 gpu-counter state=running used=64MiB\n";
        assert_eq!(in_use(smi), ["GPU-b"]);
    }
}
