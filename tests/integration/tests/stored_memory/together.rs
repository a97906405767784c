//! Two containers and gc use one store at the same time.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GC, GpuHost, SimGpu, StallFs, on};
use firn_node::{Platform, wait_for};

use crate::stored_memory::STORE;

/// How long the copies may take to begin.
const SOON: Duration = Duration::from_secs(30);

const JOBS: [&str; 2] = ["one", "two"];

/// Memory in MiB that changes between two checkpoints, and that stays.
const CHANGES: &str = "40";
const STAYS: u64 = 160;
/// MiB of two pieces of the store.
const ENDS: u64 = 8;

/// Bytes that the last checkpoint of a container has found in the store, by the log.
fn reused(host: &GpuHost, id: &str) -> Result<u64> {
    let (log, of) = (host.log_since(0)?, format!("container={id} store_index="));
    let line = log
        .lines()
        .rfind(|line| line.contains(&of))
        .context("no line in the log")?;
    let value = line
        .split([' ', '"'])
        .find_map(|word| word.strip_prefix("reused="));
    value
        .context("no reused= in the line")?
        .parse()
        .context("no number")
}

/// Whether firn ps shows that both are copied.
fn are_copied(host: &GpuHost) -> Result<bool> {
    let shown = host.firn(&["ps"])?;
    let all = shown["containers"].as_array().context("no list")?;
    let copied = all
        .iter()
        .map(|one| &one["transaction"])
        .filter(|one| one["phase"] == "copy-memory" && one["of"].as_u64() > Some(0));
    Ok(copied.count() == JOBS.len())
}

pub fn two_checkpoints_and_gc_share_a_store(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "sm-two", &[SimGpu::h200(1), SimGpu::h200(2)])?;
    on([host], |[host]| {
        let store = StallFs::mount(host, "/srv/store")?;
        host.configure(STORE)?;
        let (node, stays) = (host.node(), STAYS.to_string());
        let start =
            |(id, gpu)| Container::count(host, id, &[gpu], 1, &["--mib", CHANGES, "--fixed-mib", &stays]);
        let jobs = JOBS
            .into_iter()
            .zip(["0", "1"])
            .map(start)
            .collect::<Result<Vec<_>>>()?;
        jobs.iter().try_for_each(|job| job.goes_on(3).map(drop))?;
        // Makes the store, and leaves memory of which gc removes what changes, and the next checkpoint needs
        // what stays.
        jobs[0].checkpoint("checkpoint/early")?;
        host.remove_image("checkpoint/early")?;

        store.stall(&["write"])?;
        let image = |id: &str| format!("checkpoint/{id}");
        let checkpoint = |job: &Container<'_>| job.begin_checkpoint(&image(job.id()));
        let mut clients = jobs.iter().map(checkpoint).collect::<Result<Vec<_>>>()?;
        wait_for("both copies", SOON, || Ok(are_copied(host)?.then_some(())))?;
        let mut gc = node.spawn(&GC)?;
        store.go_on()?;
        for client in &mut clients {
            ensure!(client.wait()?.success(), "a checkpoint failed");
        }
        ensure!(gc.wait()?.success(), "gc failed");
        let reused = reused(host, JOBS[0])?;
        // The pieces at both ends have memory that changes, too.
        ensure!(
            reused >= (STAYS - ENDS) << 20,
            "only {reused} bytes were there already"
        );
        for job in jobs {
            job.goes_on(3)?;
            job.remove()?;
        }
        node.run(&["firn", "store", "verify"])?;
        // Those that were being made stay.
        let kept = node.run(&["ls", "/srv/store/images"])?.stdout;
        ensure!(kept.lines().count() == JOBS.len(), "gc has kept {kept}");
        let left = node.run(&["ls", "-A", "/srv/store/new"])?.stdout;
        ensure!(left.is_empty(), "left in the store: {left}");
        for id in JOBS {
            let (copy, _) = Container::restore(host, id, &image(id), 1)?;
            copy.goes_on(3)?;
            copy.remove()?;
        }
        host.idle()
    })
}
