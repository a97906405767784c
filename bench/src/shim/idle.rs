//! Shims whose containers sleep: their memory and CPU time.

use std::thread;
use std::time::Duration;

use anyhow::Result;
use firn_lab::{IMAGE, Task};

use super::crowd;
use super::process::{Memory, Work, shim_of};
use super::{Lab, Progress, Record, Shim};

/// Shims of each kind at a time.
pub(super) const SINGLE: u32 = 5;
/// Pods of each kind at a time.
pub(super) const PODS: u32 = 3;

/// Shims of each kind that have run execs before.
pub(super) const USED: u32 = 2;
/// Execs that each of them has run.
const EXECS: u32 = 250;

/// How long the shims are idle before the measurement. It matters for memory: Go releases it only after a
/// while.
const REST: Duration = Duration::from_secs(10);

/// How long their CPU time is measured.
const SPAN: Duration = Duration::from_secs(20);

/// A shim that does nothing, and the containers that it serves.
struct Idle {
    shim: Shim,
    pid: i32,
    ids: Vec<String>,
}

/// Steps of a measurement: starts, and two spans of time.
pub(super) const fn steps(count: u32) -> u32 {
    2 * count + 2
}

/// Shims with one container each.
pub(super) fn single(lab: &Lab<'_>, record: &mut Record, progress: &mut Progress) -> Result<()> {
    measure(lab, record, progress, SINGLE, |shim, number| {
        let id = format!("idle-{}-{number}", shim.short());
        lab.node()
            .run(&lab.run(shim, &["--detach"], &[IMAGE, &id, "sleep", "1000000"]))?;
        Ok(vec![id])
    })
}

/// Shims of pods.
pub(super) fn pods(lab: &Lab<'_>, record: &mut Record, progress: &mut Progress) -> Result<()> {
    measure(lab, record, progress, PODS, |shim, number| {
        crowd::pod(lab, shim, &format!("pod-{}-{number}", shim.short()))
    })
}

/// Shims that have run execs and made a checkpoint: the memory that they keep.
pub(super) fn after_execs(lab: &Lab<'_>, record: &mut Record, progress: &mut Progress) -> Result<()> {
    measure(lab, record, progress, USED, |shim, number| {
        let id = format!("used-{}-{number}", shim.short());
        let node = lab.node();
        node.run(&lab.run(shim, &["--detach"], &[IMAGE, &id, "sleep", "1000000"]))?;
        let task = Task::of(lab.host, &id)?;
        for number in 0..EXECS {
            let exec = format!("exec-{number}");
            task.exec(&exec, &["true"], ["", ""])?;
            task.end(task.begin_start(&exec)?)?;
            task.end(task.wait(&exec)?)?;
            task.delete(&exec)?;
        }
        let image = "localhost/used:latest";
        node.run(&["ctr", "containers", "checkpoint", "--rw", "--task", &id, image])?;
        node.run(&["ctr", "images", "remove", "--sync", image])?;
        Ok(vec![id])
    })
}

fn measure(
    lab: &Lab<'_>,
    record: &mut Record,
    progress: &mut Progress,
    count: u32,
    start: impl Fn(Shim, u32) -> Result<Vec<String>>,
) -> Result<()> {
    // Memory, then work.
    let [rss, pss, private, cpu, switches] = std::array::from_fn(|at| record.cases[at].0);
    let node = lab.node();
    let mut idle = Vec::new();
    for number in 0..count {
        for shim in Shim::in_turn(number) {
            let ids = start(shim, number)?;
            // The shim has the id of the first container, which started it.
            let pid = shim_of(node, &ids[0])?;
            idle.push(Idle { shim, pid, ids });
            progress.step();
        }
    }
    thread::sleep(REST);
    progress.step();
    let before: Vec<Work> = idle
        .iter()
        .map(|idle| Work::of(node, idle.pid))
        .collect::<Result<_>>()?;
    thread::sleep(SPAN);
    progress.step();
    for (idle, before) in idle.iter().zip(before) {
        let work = Work::of(node, idle.pid)?;
        record.add(cpu, idle.shim, per_second(work.micros - before.micros));
        record.add(switches, idle.shim, per_second(work.switches - before.switches));
    }
    for idle in &idle {
        let memory = Memory::of(node, idle.pid)?;
        record.add(rss, idle.shim, memory.rss);
        record.add(pss, idle.shim, memory.pss);
        record.add(private, idle.shim, memory.private);
    }
    for idle in &idle {
        crowd::remove(node, idle.shim, &idle.ids)?;
    }
    Ok(())
}

fn per_second(count: f64) -> f64 {
    // The share of a thread that has ended is missing.
    count.max(0.0) / SPAN.as_secs_f64()
}
