//! Who is killed on a node, and what is done to a container's /dev.

use anyhow::{Context, Result};
use firn_node::Node;

/// Leaves the /dev of a restored container, run in it, without nodes of GPUs and without a free inode.
const FILL_DEV: &str = "set -e; rm -f /dev/nvidia[0-9]; mount -t tmpfs -o remount,nr_inodes=200 tmpfs /dev
    i=0; while touch /dev/fill$i; do i=$((i + 1)); [ $i -lt 200 ]; done 2>/dev/null";

pub(super) fn fill_dev(node: &Node) -> Result<()> {
    let processes = node.processes();
    let task = processes.iter().find(|process| process.command == "gpu-counter");
    let pid = task.context("no restored task")?.pid.to_string();
    let shell = ["nsenter", "--target", &pid, "--mount", "/bin/sh", "-c", FILL_DEV];
    node.run(&shell).map(drop)
}

/// Kills the last of the processes that count; false when there are none.
pub(super) fn kill_counter(node: &Node) -> Result<bool> {
    let processes = node.processes();
    let counters = processes
        .iter()
        .filter(|process| process.command == "gpu-counter");
    let last = counters.map(|process| process.pid).max();
    kill(node, |process| Some(process.pid) == last)
}

/// Kills them; false when there are none.
pub(super) fn kill(node: &Node, who: impl Fn(&firn_node::Process) -> bool) -> Result<bool> {
    let pids: Vec<String> = node
        .processes()
        .iter()
        .filter(|process| who(process))
        .map(|process| process.pid.to_string())
        .collect();
    if pids.is_empty() {
        return Ok(false);
    }
    // One of several may end on its own account.
    let kill = format!("kill -KILL {} || true", pids.join(" "));
    node.run(&["sh", "-c", &kill]).map(|_| true)
}
