//! The program that holds the memory: `memory-hog` of the test workloads.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{BUNDLES, Container};
use firn_node::{Node, wait_for};
use serde_json::Value;

use super::{Lab, Memory, Way};

/// Its container.
pub(super) const ID: &str = "hog";
/// What it writes to.
const LINES: &str = "memory.log";
/// How long it may take to fill or to verify its memory.
const LIMIT: Duration = Duration::from_secs(120);

/// Starts it and waits until its memory is filled. Gives its container and its checksum.
pub(super) fn start<'h>(lab: &'h Lab, way: Way, memory: Memory) -> Result<(Container<'h>, String)> {
    let grant = match way {
        Way::Stock => Vec::new(),
        _ => lab.host.ctr_gpu_options(&["0"])?,
    };
    let mut options = vec!["--runtime", way.runtime()];
    options.extend(grant.iter().map(String::as_str));
    let (mib, out) = (memory.mib.to_string(), format!("/{LINES}"));
    let mut command = vec!["/bin/memory-hog", "--mib", &mib, "--fill", memory.fill];
    command.extend(memory.huge.then_some("--huge"));
    command.push(&out);
    let container = Container::run(&lab.host, ID, &options, &command)?;
    let sum = next_line(&in_bundle(lab.node(), BUNDLES, ID), 0)?;
    let sum = sum
        .strip_prefix("ready ")
        .with_context(|| format!("it writes {sum:?}"))?;
    Ok((container, sum.to_owned()))
}

/// Its lines, in the bundle of its container or of a copy.
pub(super) fn in_bundle(node: &Node, bundles: &str, id: &str) -> PathBuf {
    node.path(format!("{bundles}/{id}/rootfs/{LINES}"))
}

/// Makes sure that all of the memory has this checksum. `ask` sends SIGUSR1.
pub(super) fn verify(lines: &PathBuf, sum: &str, ask: impl FnOnce() -> Result<()>) -> Result<()> {
    let before = fs::read_to_string(lines).unwrap_or_default().lines().count();
    ask()?;
    let verdict = next_line(lines, before)?;
    ensure!(
        verdict == format!("OK {sum}"),
        "the memory is not as it was: {verdict}"
    );
    Ok(())
}

/// The line after so many.
fn next_line(lines: &PathBuf, before: usize) -> Result<String> {
    wait_for("a line of memory-hog", LIMIT, || {
        let text = fs::read_to_string(lines).unwrap_or_default();
        // A line is there once it has its end.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        Ok(whole.lines().nth(before).map(str::to_owned))
    })
}

/// The phases of firn's last transaction with a container of this bundle.
pub(super) fn phases(node: &Node, bundles: &str, id: &str) -> Result<Vec<(String, f64)>> {
    let text = node.read(format!("{bundles}/{id}/firn-timings.json"))?;
    let timings: Value = serde_json::from_str(&text)?;
    let phases = timings["phases"].as_array().context("no phases")?;
    let total = ("total", &timings["total_ms"]);
    let named = phases
        .iter()
        .map(|phase| (phase["name"].as_str().unwrap_or_default(), &phase["ms"]));
    let all = named.chain([total]);
    Ok(all
        .filter_map(|(name, ms)| Some((name.to_owned(), ms.as_f64()?)))
        .collect())
}
