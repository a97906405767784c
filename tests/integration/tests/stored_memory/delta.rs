//! A second checkpoint writes what has changed, and needs nothing of the first.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GC, GpuHost, on};
use firn_node::Platform;
use serde_json::Value;

use crate::stored_memory::{STORE, host};

/// GPU memory that changes, and that does not, in MiB. The least that goes into the store is 16.
const CHANGES: &str = "16";
const STAYS: &str = "240";

/// The checkpoints in the store, as `firn store ls` shows them.
fn listed(host: &GpuHost) -> Result<Vec<Value>> {
    let listed = host.firn(&["store", "ls"])?;
    Ok(listed["images"].as_array().context("no list")?.clone())
}

/// Bytes that the last checkpoint has found in the store, and that it has written, by the log.
fn logged(host: &GpuHost, since: usize) -> Result<(u64, u64)> {
    let log = host.log_since(since)?;
    let line = log
        .lines()
        .rfind(|line| line.contains("store_index="))
        .context("no line in the log")?;
    let value = |name: &str| {
        let value = line.split([' ', '"']).find_map(|word| word.strip_prefix(name));
        value
            .with_context(|| format!("no {name} in {line}"))?
            .parse()
            .context("no number")
    };
    Ok((value("reused=")?, value("new=")?))
}

pub fn a_second_checkpoint_writes_what_has_changed(platform: Platform) -> Result<()> {
    on([host(platform, "sm-delta", 1)?], |[host]| {
        host.configure(STORE)?;
        let memory = ["--mib", CHANGES, "--fixed-mib", STAYS];
        let job = Container::count(host, "job", &["0"], 1, &memory)?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/first")?;
        let first = listed(host)?;
        ensure!(first.len() == 1, "{first:?}");
        job.goes_on(3)?;
        let length = host.log_length()?;
        job.checkpoint("checkpoint/second")?;
        let (reused, new) = logged(host, length)?;
        ensure!(
            new > 0 && new * 10 < reused,
            "{new} bytes are new, {reused} were there"
        );
        job.goes_on(3)?;
        job.remove()?;

        // The second does not need the first.
        let second: Vec<Value> = listed(host)?
            .into_iter()
            .filter(|image| image["id"] != first[0]["id"])
            .collect();
        ensure!(second.len() == 1, "{second:?}");
        let node = host.node();
        host.remove_image("checkpoint/first")?;
        // Nobody has stated that it is gone.
        node.run(&["firn", "store", "gc", "--grace", "0s"])?;
        ensure!(listed(host)?.len() == 2, "gc has removed what may be elsewhere");
        node.run(&GC)?;
        let left = listed(host)?;
        ensure!(left.len() == 1 && left[0]["id"] == second[0]["id"], "{left:?}");
        node.run(&["firn", "store", "verify"])?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/second", 1)?;
        // It looks at the memory that stays, too.
        copy.goes_on(3)?;
        copy.remove()?;
        host.idle()
    })
}
