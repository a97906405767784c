//! The phases of checkpoints and restores among containerd's events.

use anyhow::{Result, ensure};
use firn_lab::{Container, Events, StallFs, failure, on};
use firn_node::Platform;

use crate::stored_memory::progress::FAILING;
use crate::stored_memory::{MIB, STORE, host, job};

/// These are among the lines, in this order.
fn follow_each_other(lines: &[String], topic: &str, events: &[&str]) -> Result<()> {
    let mut left = lines.iter();
    for event in events {
        let line = format!(" {topic} {{\"event\":\"{event}\",\"name\":\"job\"");
        ensure!(
            left.any(|seen| seen.contains(&line)),
            "no {event} of {topic} in its place: {lines:#?}"
        );
    }
    Ok(())
}

pub fn containerd_shows_the_phases(platform: Platform) -> Result<()> {
    on([host(platform, "sm-events", 1)?], |[host]| {
        let store = StallFs::mount(host, "/srv/store")?;
        host.configure(STORE)?;
        let job = job(host, &[])?;
        let mut events = host.watch_events()?;
        job.checkpoint("checkpoint/first")?;
        let phases = [
            "gpu-lock",
            "gpu-checkpoint",
            "criu-dump",
            "copy-memory",
            "manifest",
            "gpu-restore",
            "gpu-unlock",
            "done",
        ];
        let lines = events.until("\"event\":\"done\"")?;
        follow_each_other(&lines, "/firn/checkpoint", &phases)?;

        is_shown_while_it_copies(&store, &job, &mut events)?;

        host.replace_runc(FAILING)?;
        failure(job.checkpoint("checkpoint/none").map(drop))?;
        host.node().run(&["rm", "/usr/local/sbin/runc"])?;
        let lines = events.until("\"event\":\"failed")?;
        let phases = ["criu-dump", "rollback", "failed: FIRN-DUMP"];
        follow_each_other(&lines, "/firn/checkpoint", &phases)?;
        job.remove()?;
        host.idle()?;

        let (copy, _) = Container::restore(host, "job", "checkpoint/first", 1)?;
        let lines = events.until("/firn/restore {\"event\":\"done\"")?;
        // Both at the same time.
        for phase in ["compare", "dev-repair"] {
            let phases = [
                "criu-restore",
                phase,
                "fill-memory",
                "gpu-restore",
                "gpu-unlock",
                "continue",
                "done",
            ];
            follow_each_other(&lines, "/firn/restore", &phases)?;
        }
        // Everything else is there as before.
        ensure!(
            lines.iter().any(|line| line.contains(" /tasks/create ")),
            "{lines:#?}"
        );
        copy.remove()?;
        host.idle()
    })
}

/// Bytes come with a copy that takes long.
fn is_shown_while_it_copies(store: &StallFs<'_>, job: &Container<'_>, events: &mut Events) -> Result<()> {
    store.stall(&["write"])?;
    let mut checkpoint = job.begin_checkpoint("checkpoint/job")?;
    let copied = events.until("\"event\":\"copy-memory\"")?;
    store.go_on()?;
    ensure!(checkpoint.wait()?.success(), "the checkpoint failed");
    events.until("\"event\":\"done\"")?;
    let line = copied.last().map_or("", String::as_str);
    let (_, total) = line.split_once("\"total\":").unwrap_or_default();
    let total: u64 = total.trim_end_matches(['}', '\n']).parse()?;
    ensure!(total >= MIB << 20, "{line}");
    job.goes_on(3).map(drop)
}
