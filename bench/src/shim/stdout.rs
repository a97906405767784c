//! The rate of output through a shim.
//!
//! An exec writes zeros to its stdout, the shim copies them to a fifo, and this program reads the fifo, as
//! containerd's client would: all three on the same machine. The time is measured from the first byte to the
//! last, so it does not include runc's time for the exec. Reads and writes have 64 KiB each. The shim's CPU
//! time for all of it, including the exec's start and end, does not depend on other load of the machine.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use firn_lab::{IMAGE, Task};
use firn_node::Node;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::process::{Work, shim_of};
use super::{Lab, Readings, Shim};

/// Bytes of a read or write: the capacity of a pipe.
const STEP: usize = 64 << 10;
const STEPS: usize = 300_000_000 / STEP;

/// Fifos in the node: stdout, and stderr, which the stock shim needs too.
const FIFOS: [&str; 2] = ["/run/bench-stdout", "/run/bench-stderr"];

/// 300 MB.
pub(super) fn throughput(lab: &Lab<'_>, shim: Shim) -> Result<Readings> {
    let node = lab.node();
    node.run(&lab.run(shim, &["--detach"], &[IMAGE, "stdout", "sleep", "1000000"]))?;
    for fifo in FIFOS {
        mkfifo(&node.path(fifo), Mode::S_IRWXU).context("make a fifo")?;
    }
    let shim = shim_of(node, "stdout")?;
    let before = Work::of(node, shim)?;
    let rate = rate(lab);
    let work = Work::of(node, shim)?.micros - before.micros;
    for fifo in FIFOS {
        std::fs::remove_file(node.path(fifo)).context("remove a fifo")?;
    }
    node.run(&["ctr", "tasks", "rm", "--force", "stdout"])?;
    node.run(&["ctr", "containers", "rm", "stdout"])?;
    Ok(vec![("stdout", rate?), ("stdout-cpu", work / 1000.0)])
}

/// MB per second of an exec.
fn rate(lab: &Lab<'_>) -> Result<f64> {
    let task = Task::of(lab.host, "stdout")?;
    let (step, steps) = (format!("bs={STEP}"), format!("count={STEPS}"));
    task.exec("writer", &["dd", "if=/dev/zero", &step, &steps], FIFOS)?;
    // A shim may wait for a reader of each.
    let mut unread = File::options();
    unread.read(true).custom_flags(OFlag::O_NONBLOCK.bits());
    let _unread = unread.open(lab.node().path(FIFOS[1])).context("open a fifo")?;
    let started = task.begin_start("writer")?;
    let (bytes, seconds) = read(lab.node())?;
    task.end(started)?;
    let code = task.end(task.wait("writer")?)?.exit_status;
    task.delete("writer")?;
    ensure!(code == 0, "the writer ended with {code}");
    #[expect(clippy::cast_precision_loss, reason = "exact below 2^53")]
    Ok(bytes as f64 / 1e6 / seconds)
}

/// Reads the output. Returns the number of bytes after the first read, and the seconds that they took.
fn read(node: &Node) -> Result<(usize, f64)> {
    // Blocks until the shim opens it for writing.
    let mut fifo = File::open(node.path(FIFOS[0])).context("open the fifo")?;
    let mut buffer = vec![0; STEP];
    let first = fifo.read(&mut buffer).context("read the fifo")?;
    let (begun, mut bytes) = (Instant::now(), 0);
    // Not up to its end: the shim holds the fifo open until the exec is deleted.
    while first + bytes < STEPS * STEP {
        let count = fifo.read(&mut buffer).context("read the fifo")?;
        ensure!(count > 0, "the output ends after {} bytes", first + bytes);
        bytes += count;
    }
    Ok((bytes, begun.elapsed().as_secs_f64()))
}
