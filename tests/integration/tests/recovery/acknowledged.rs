//! A SIGKILL that is acknowledged kills, wherever a restore or a checkpoint is: the processes are gone,
//! whoever waits hears of an exit, and what is left can be deleted.
//!
//! The shim of tests stands still at every phase and at the failpoints between them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use firn_lab::{CommandOutput, Container, Events, GpuHost, NAMES_HOOKS, Task, nothing_left, on};
use firn_node::{Platform, wait_for};

use super::{AT_ONCE, IMAGE, LIMIT, checkpoint, count, host, idle_loop};

const HOLD: &str = "/run/firn-hold";
const HELD: &str = "/run/firn-held";

/// Points of the restore of a container with a GPU, in their order. Until the last but one Start fails.
const RESTORE: &[&str] = &[
    "restore-begun",
    "restore-journalled",
    "criu-restore",
    "restore-stopped",
    "dev-repair",
    "gpu-restore",
    "continue",
    "restore-continued",
    "restore-worker-gone",
    "restore-restored",
    "restore-connected",
    COMMITTED,
];

const COMMITTED: &str = "restore-committed";

/// Points of one without.
const RESTORE_PLAIN: &[&str] = &[
    "restore-begun",
    "restore-running",
    "restore-restored",
    "restore-connected",
    COMMITTED,
];

/// Points of the checkpoint of a container with a GPU that runs on.
const CHECKPOINT: &[&str] = &[
    "inspect",
    "gpu-lock",
    "gpu-checkpoint",
    "criu-dump",
    "gpu-restore",
    "checkpoint-transacted",
    "checkpoint-worker-gone",
    "checkpoint-ended",
];

/// Hooks of the job that are called at a checkpoint, and at a restore.
const CHECKPOINT_HOOKS: &[&str] = &["prepare", "resumed"];
const RESTORE_HOOKS: &[&str] = &["restored"];

/// Points of one that ends. It has ended at the last two.
const CHECKPOINT_EXIT: &[&str] = &["criu-dump", "sync", "end", "finish-killed", "finish-deleted"];

/// Points of a dump without GPU, and those after one that has failed.
const DUMP: &[&str] = &["criu-dump", "dump-left", "dump-tidied", "dump-over"];
const DUMP_FAILED: &[&str] = &["dump-left", "dump-reset", "dump-tidied"];

pub fn hold(host: &GpuHost, point: &str) -> Result<()> {
    host.node().run(&["rm", "-f", HELD])?;
    host.node().write(HOLD, point)
}

pub fn wait_until_held(host: &GpuHost) -> Result<()> {
    wait_for("the point", LIMIT, || {
        Ok(host.node().path(HELD).exists().then_some(()))
    })
}

pub fn go_on(host: &GpuHost) -> Result<()> {
    host.node().run(&["rm", "-f", HOLD]).map(drop)
}

/// Kills "job" at the point, and makes sure that it has ended as one that was killed.
fn kill_at(host: &GpuHost, events: &mut Events, exits: &mut usize) -> Result<()> {
    let task = Task::of(host, "job")?;
    let wait = task.wait("").map_err(|error| anyhow::anyhow!("wait: {error}"))?;
    let begun = Instant::now();
    task.kill("", 9, false)
        .map_err(|error| anyhow::anyhow!("kill: {error}"))?;
    go_on(host)?;
    let ended = task.end(wait);
    let ended = ended.map_err(|error| anyhow::anyhow!("nobody hears of the end: {error}"))?;
    ensure!(ended.exit_status == 137, "it ended with {}", ended.exit_status);
    ensure!(begun.elapsed() < AT_ONCE, "only after {:?}", begun.elapsed());
    *exits += 1;
    events.wait_for("job", "/tasks/exit", *exits)
}

/// Deletes what was killed.
fn delete(host: &GpuHost) -> Result<()> {
    // It warns of the exit code by its own.
    let job = Container::known(host, "job");
    job.becomes("STOPPED")?;
    job.exit_code()?;
    host.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(host, "job")?;
    host.idle()
}

fn restores(host: &GpuHost, points: &[&str]) -> Result<()> {
    let (mut events, mut exits) = (host.watch_events()?, 0);
    for &point in points {
        let each = || {
            hold(host, point)?;
            let client = Container::begin_restore(host, "job", "checkpoint/job")?;
            wait_until_held(host)?;
            kill_at(host, &mut events, &mut exits)?;
            let stderr = CommandOutput::wait(client)?.stderr;
            ensure!(
                point == COMMITTED || stderr.contains("FIRN-ENDED:"),
                "ctr restore prints: {stderr:?}"
            );
            delete(host)
        };
        let mut each = each;
        each().with_context(|| format!("restore, killed at {point}"))?;
    }
    Ok(())
}

fn checkpoints(
    host: &GpuHost,
    points: &[&str],
    exit: bool,
    paused: bool,
    begin: fn(&GpuHost) -> Result<Container<'_>>,
) -> Result<()> {
    let (mut events, mut exits) = (host.watch_events()?, 0);
    for &point in points {
        let mut each = || {
            let job = begin(host)?;
            if paused {
                job.task(&["pause"])?;
            }
            hold(host, point)?;
            let task = Task::of(host, "job")?;
            let pending = checkpoint(&task, exit)?;
            wait_until_held(host)?;
            kill_at(host, &mut events, &mut exits)?;
            // As it ends: it may have been done before.
            let _ = task.end(pending);
            delete(host)?;
            host.node().run(&["rm", "-rf", IMAGE]).map(drop)
        };
        each().with_context(|| format!("checkpoint, killed at {point}, exit {exit}, paused {paused}"))?;
    }
    Ok(())
}

/// A checkpoint that has ended its container when it is killed, or is about to: there is nobody to signal,
/// and the exit is published.
fn ended_by_checkpoint(host: &GpuHost, point: &str) -> Result<()> {
    let (job, mut events) = (count(host)?, host.watch_events()?);
    hold(host, point)?;
    let task = Task::of(host, "job")?;
    let pending = checkpoint(&task, true)?;
    wait_until_held(host)?;
    let _ = task.kill("", 9, false);
    go_on(host)?;
    let ended = task.end(pending);
    ended.map_err(|error| anyhow::anyhow!("the checkpoint returns: {error}"))?;
    events.wait_for("job", "/tasks/exit", 1)?;
    job.becomes("STOPPED")?;
    delete(host)?;
    host.node().run(&["rm", "-r", IMAGE]).map(drop)
}

fn with_gpu(host: &GpuHost) -> Result<()> {
    let job = count(host)?;
    job.checkpoint("checkpoint/job")?;
    job.remove()?;
    restores(host, RESTORE)?;
    let (job, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
    job.goes_on(2)?;
    job.remove()?;
    host.remove_image("checkpoint/job")?;
    checkpoints(host, CHECKPOINT, false, false, count)?;
    checkpoints(host, &CHECKPOINT_EXIT[..2], true, false, count)?;
    for point in &CHECKPOINT_EXIT[2..] {
        ended_by_checkpoint(host, point).with_context(|| format!("killed at {point}"))?;
    }
    checkpoints(
        host,
        &["gpu-checkpoint", "gpu-restore", "checkpoint-transacted"],
        false,
        true,
        count,
    )
}

fn with_hooks(host: &GpuHost) -> Result<()> {
    fn begin(host: &GpuHost) -> Result<Container<'_>> {
        let job = Container::count_with(host, "job", &["0"], 1, &NAMES_HOOKS, &[])?;
        job.goes_on(2)?;
        Ok(job)
    }
    let job = begin(host)?;
    job.checkpoint("checkpoint/job")?;
    job.remove()?;
    restores(host, RESTORE_HOOKS)?;
    host.remove_image("checkpoint/job")?;
    checkpoints(host, CHECKPOINT_HOOKS, false, false, begin)
}

fn without_gpu(host: &GpuHost) -> Result<()> {
    let job = idle_loop(host)?;
    job.checkpoint("checkpoint/job")?;
    job.remove()?;
    restores(host, RESTORE_PLAIN)?;
    host.remove_image("checkpoint/job")?;
    checkpoints(host, DUMP, false, false, idle_loop)?;
    checkpoints(host, DUMP, false, true, idle_loop)?;
    host.node().write("/run/fail-runc", "checkpoint")?;
    checkpoints(host, DUMP_FAILED, false, false, idle_loop)?;
    checkpoints(host, DUMP_FAILED, false, true, idle_loop)?;
    host.node().run(&["rm", "/run/fail-runc"]).map(drop)
}

pub fn a_kill_that_is_acknowledged_kills_at_every_point(platform: Platform) -> Result<()> {
    on([host(platform, "rc-acknowledged", 1)?], |[host]| {
        with_gpu(host)?;
        with_hooks(host)?;
        without_gpu(host)
    })
}

/// Every failpoint between the phases is in the tables above.
pub fn every_failpoint_of_the_shim_is_tried() -> Result<()> {
    let tables = [
        RESTORE,
        RESTORE_PLAIN,
        CHECKPOINT,
        CHECKPOINT_EXIT,
        DUMP,
        DUMP_FAILED,
    ];
    let tried: BTreeSet<&str> = tables.into_iter().flatten().copied().collect();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../transaction/src");
    let mut found = 0;
    for_each_file(&sources, &mut |text| {
        for (at, call) in text.match_indices("point(\"") {
            let name = text[at + call.len()..].split('"').next().unwrap_or_default();
            ensure!(tried.contains(name), "nobody kills at {name}");
            found += 1;
        }
        Ok(())
    })?;
    ensure!(found > 10, "the failpoints are not found any more");
    Ok(())
}

fn for_each_file(dir: &Path, act: &mut impl FnMut(&str) -> Result<()>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            for_each_file(&path, act)?;
        } else {
            act(&fs::read_to_string(path)?)?;
        }
    }
    Ok(())
}
