//! The demo on two test nodes: run, checkpoint, move, restore.
//!
//! Each command is printed as it is run. The counter writes its lines to a directory that is mounted from the
//! node and is no part of the checkpoint, so the lines on the second node were written after the restore.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use firn_lab::{Built, FIRN, GpuHost, IMAGE, Line, Lines, Profile, SimGpu};
use firn_node::{Output, Suite, wait_for};
use nix::sys::stat::{major, minor};

use crate::figures::{Figures, Step, gpu, ms};
use crate::printer::{Printer, shown};
use crate::proof::Proof;

const JOB: &str = "job";
const CHECKPOINT: &str = "checkpoint/job";
const FILE: &str = "/tmp/job.tar";
const DIR: &str = "/srv/job";
const LOG: &str = "/srv/job/counter.log";
const MOUNT: &str = "type=bind,src=/srv/job,dst=/srv/job,options=rbind:rw";
const TIMINGS: &str = "/run/containerd/io.containerd.runtime.v2.task/default/job/firn-timings.json";

/// Deadline of a few iterations of the counter.
const COUNTING: Duration = Duration::from_secs(60);

/// Lines of a log that are shown after a failure.
const LOG_SHOWN: usize = 12;

/// Iterations to wait for before the checkpoint, after it, and after the restore.
const ENOUGH: usize = 10;

/// The two nodes.
pub(crate) struct Nodes {
    a: GpuHost,
    b: GpuHost,
}

impl Nodes {
    pub(crate) const NAMES: [&str; 2] = ["demo-a", "demo-b"];

    /// Builds firn and starts both.
    pub(crate) fn start(suite: Suite, printer: &Printer) -> Result<Self> {
        printer.line("building firn, the simulated driver and the workload");
        let built = Built::build(Profile::Dev)?;
        let start = |name, gpus: [u32; 2]| {
            let gpus = gpus.map(SimGpu::h200);
            GpuHost::start(&built, suite, name, &gpus)
        };
        let [a, b] = Self::NAMES;
        printer.step(
            &format!("starting two {suite} nodes with two simulated GPUs each"),
            || {
                Ok(Self {
                    a: start(a, [0xa0, 0xa1])?,
                    b: start(b, [0xb0, 0xb1])?,
                })
            },
        )
    }

    /// Leaves the nodes running when this program ends.
    pub(crate) fn leave(self) -> Result<()> {
        self.a.leave()?;
        self.b.leave()
    }

    /// Runs the demo and returns its figures.
    pub(crate) fn demo(&self, printer: &Printer) -> Result<Figures> {
        let begun = Instant::now();
        let (a, b) = (On::new('A', &self.a, printer), On::new('B', &self.b, printer));
        let tools = a.tools()?;
        printer.line(&format!("\nBoth nodes run {}.", tools.join(", ")));
        for on in [&a, &b] {
            on.show_gpus()?;
            std::fs::create_dir_all(on.host.node().path(DIR)).context("make the counter's directory")?;
        }

        printer.title("A container computes in GPU memory on node A");
        let (before, source_gpu) = a.start()?;
        printer.title("It is checkpointed while it runs, and runs on");
        let (checkpoint, source) = a.checkpoint()?;
        printer.title("It ends on node A, and the checkpoint goes to node B");
        let (image_bytes, move_ms) = a.move_to(&b)?;
        printer.title("It is restored on node B, onto the GPU that the node's configuration names");
        let target = self.b.gpus().get(1).context("node B has two GPUs")?;
        let (restore, restored, target_gpu) = b.restore(target)?;

        let proof = Proof::of(&before, &source, &restored)?;
        ensure!(
            source_gpu == self.a.gpus()[0].uuid && target_gpu == target.uuid,
            "the memory was on {source_gpu} and is on {target_gpu}, not on {}",
            target.uuid
        );
        Ok(Figures {
            suite: self.a.node().record().suite.as_str(),
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

    /// The end of containerd's logs, to print after a failure.
    pub(crate) fn logs(&self) -> String {
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

/// A node with the letter that the output uses.
struct On<'n> {
    letter: char,
    host: &'n GpuHost,
    printer: &'n Printer,
}

impl<'n> On<'n> {
    fn new(letter: char, host: &'n GpuHost, printer: &'n Printer) -> Self {
        Self {
            letter,
            host,
            printer,
        }
    }

    fn show_gpus(&self) -> Result<()> {
        for (index, described) in self.host.gpus().iter().map(gpu).enumerate() {
            let path = format!("/dev/nvidia{index}");
            let device = self.host.node().path(&path).metadata()?.rdev();
            let (major, minor) = (major(device), minor(device));
            let letter = self.letter;
            self.printer.line(&format!(
                "Node {letter}: {path} is device {major}:{minor}, {described}"
            ));
        }
        Ok(())
    }

    /// Starts the counter. Returns a line of it, and its GPU.
    fn start(&self) -> Result<(Line, String)> {
        let grant = self.host.ctr_gpu_options(&["0"])?;
        let grant: Vec<&str> = grant.iter().map(String::as_str).collect();
        let runtime = ["ctr", "run", "--detach", "--runtime", FIRN];
        let counter = ["/bin/gpu-counter", "--interval-ms", "50", "--out", LOG];
        let mount = ["--mount", MOUNT, IMAGE, JOB];
        self.run(&[&runtime, self.host.limits(), &grant, &mount, &counter[..]].concat())?;
        let line = last(&self.count_to(ENOUGH)?)?;
        self.show_line(&line);
        Ok((line, self.gpu_in_use()?))
    }

    /// Checkpoints the counter. Returns the figures, and its lines until some time later.
    fn checkpoint(&self) -> Result<(Step, Lines)> {
        let (_, took) = self.run(&[
            "ctr",
            "containers",
            "checkpoint",
            "--rw",
            "--task",
            JOB,
            CHECKPOINT,
        ])?;
        let checkpoint = self.step(took)?;
        self.printer.line(checkpoint.table().trim_end());
        let so_far = self.lines()?.0.len();
        let source = self.count_to(so_far + ENOUGH)?;
        self.show_line(&last(&source)?);
        Ok((checkpoint, source))
    }

    /// Ends the counter and copies the checkpoint. Returns its bytes, and the milliseconds that the copy
    /// took.
    fn move_to(&self, target: &Self) -> Result<(u64, f64)> {
        self.run(&["ctr", "tasks", "rm", "--force", JOB])?;
        self.run(&["ctr", "containers", "rm", JOB])?;
        let begun = Instant::now();
        // Without these two options ctr 2.1 takes the parts of a checkpoint image for platforms, and fails.
        let options = ["--local", "--skip-manifest-json"];
        self.run(&[&["ctr", "images", "export"], &options[..], &[FILE, CHECKPOINT]].concat())?;
        let tar = self.host.node().path(FILE);
        let bytes = tar.metadata().context("look at the image")?.len();
        let size = mib(bytes);
        self.printer.line(&format!(
            "    $ scp node-a:{FILE} node-b:{FILE}       ({size:.1} MiB)"
        ));
        target.host.node().install(&tar, FILE, 0o600)?;
        target.run(&["ctr", "images", "import", "--local", "--no-unpack", FILE])?;
        Ok((bytes, ms(begun.elapsed())))
    }

    /// Restores the counter onto a GPU. Returns the figures, its lines since then, and the GPU that it uses.
    fn restore(&self, target: &SimGpu) -> Result<(Step, Lines, String)> {
        let gpus = format!("[restore]\ngpus = [\"{}\"]\n", target.uuid);
        self.put("/etc/firn/config.toml", &gpus)?;
        let (_, took) = self.run(&["ctr", "containers", "restore", "--rw", "--live", JOB, CHECKPOINT])?;
        let restore = self.step(took)?;
        self.printer.line(restore.table().trim_end());
        let restored = self.count_to(ENOUGH)?;
        self.show_line(&last(&restored)?);
        Ok((restore, restored, self.gpu_in_use()?))
    }

    /// Prints a command and runs it. Returns its output and how long it took.
    fn run(&self, argv: &[&str]) -> Result<(Output, Duration)> {
        self.printer
            .line(&format!("    {}# {}", self.letter, shown(argv)));
        let begun = Instant::now();
        let output = self.host.node().run(argv)?;
        Ok((output, begun.elapsed()))
    }

    /// Prints and writes a file.
    fn put(&self, path: &str, text: &str) -> Result<()> {
        self.printer
            .line(&format!("    {}# cat > {path} <<EOF\n{text}EOF", self.letter));
        self.host.node().write(path, text)
    }

    /// Versions of the programs in the node.
    fn tools(&self) -> Result<Vec<String>> {
        let first = |program| -> Result<String> {
            let output = self.host.node().run(&[program, "--version"])?.stdout;
            let line = output.lines().next().unwrap_or_default();
            // `containerd github.com/containerd/containerd 1.7.24~ds1 ...`, `runc version 1.3`,
            // `Version: 4.2`.
            let version = line
                .split_whitespace()
                .find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
            Ok(format!("{program} {}", version.unwrap_or(line)))
        };
        ["containerd", "runc", "criu"].into_iter().map(first).collect()
    }

    /// The counter's lines on this node; none at first.
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
        self.printer.line(&format!(
            "      the counter: iteration {}, all of its memory correct, checksum {}",
            line.iter, line.checksum
        ));
    }

    /// The GPU that holds the counter's memory, by `simgpu smi`.
    fn gpu_in_use(&self) -> Result<String> {
        let (smi, _) = self.run(&["simgpu", "smi"])?;
        let used = in_use(&smi.stdout);
        ensure!(
            used.len() == 1,
            "the memory is on {} GPUs:\n{}",
            used.len(),
            smi.stdout
        );
        self.printer.line(&format!("      its memory is on {}", used[0]));
        Ok(used[0].to_owned())
    }

    fn step(&self, client: Duration) -> Result<Step> {
        let text = self.host.node().read(TIMINGS)?;
        let shim = serde_json::from_str(&text).with_context(|| format!("{TIMINGS} is not valid"))?;
        Ok(Step {
            client_ms: ms(client),
            shim,
        })
    }
}

fn last(lines: &Lines) -> Result<Line> {
    lines.0.last().cloned().context("the counter has printed nothing")
}

/// UUIDs of the GPUs that hold memory of a process, from the output of `simgpu smi`.
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
