//! The machine's memory and the node's files.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use firn_lab::Built;
use firn_node::Node;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

/// The machine's free memory, held by `memory-pool` of the test workloads until it is needed.
pub(super) struct Pool {
    program: Child,
    answers: BufReader<ChildStdout>,
}

impl Pool {
    pub(super) fn begin(built: &Built) -> Result<Self> {
        let mut command = Command::new(built.program("memory-pool"));
        let mut program = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start memory-pool")?;
        let answers = program.stdout.take().context("memory-pool has no output")?;
        Ok(Self {
            program,
            answers: BufReader::new(answers),
        })
    }

    /// Takes all that is free: what is measured next gets memory that the machine has got from its host.
    pub(super) fn fill(&mut self) -> Result<()> {
        let input = self.program.stdin.as_mut().context("memory-pool has no input")?;
        writeln!(input, "fill").context("ask memory-pool")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        ensure!(answer == "full\n", "memory-pool has ended");
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // It holds nothing but memory.
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// Peak memory of the node: current use and its highest, by cgroup version.
const CGROUPS: [[&str; 2]; 2] = [
    [
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.max_usage_in_bytes",
    ],
    ["/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.peak"],
];

/// What the node's memory grows by, files in memory included.
pub(super) struct Peak {
    highest: File,
    before: f64,
}

impl Peak {
    pub(super) fn begin(node: &Node) -> Result<Self> {
        let files = CGROUPS.map(|files| files.map(|file| node.path(file)));
        let [current, highest] = files
            .into_iter()
            .find(|[_, highest]| highest.exists())
            .context("the node's cgroup does not account memory")?;
        let highest = File::options()
            .read(true)
            .write(true)
            .open(&highest)
            .with_context(|| format!("open {}", highest.display()))?;
        // v1 begins again for all, v2 for this descriptor.
        highest.write_at(b"0", 0).context("reset the peak")?;
        let before = bytes(&File::open(current)?)?;
        Ok(Self { highest, before })
    }

    /// In MiB.
    pub(super) fn end(self) -> Result<f64> {
        Ok((bytes(&self.highest)? - self.before) / f64::from(1 << 20))
    }
}

fn bytes(file: &File) -> Result<f64> {
    let mut text = [0; 32];
    let length = file.read_at(&mut text, 0)?;
    let text = String::from_utf8_lossy(&text[..length]);
    text.trim()
        .parse()
        .with_context(|| format!("no size in {text:?}"))
}

/// What a directory of the node holds, in MiB.
pub(super) fn size(node: &Node, path: &str) -> Result<f64> {
    let printed = node.run(&["du", "-sk", path])?.stdout;
    let kib = printed.split_whitespace().next().context("du prints nothing")?;
    Ok(kib.parse::<f64>()? / 1024.0)
}

/// Lets the page cache forget the files of a directory: what is read next comes from the disk.
pub(super) fn forget(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            forget(&path)?;
        } else {
            let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
            file.sync_all()?;
            posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
        }
    }
    Ok(())
}
