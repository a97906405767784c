//! Releases a container whose CRIU was killed in a dump from what CRIU itself ends and removes, also when the
//! dump fails.

use std::path::Path;

use anyhow::{Context, Result};
use firn_host::DeletedName;
use firn_oci::criu_config::had_link_remap;

use crate::network;

/// Releases the container in `bundle`. Its processes, init first, may have ended. `run` is how CRIU has
/// called its run; empty if that is unknown.
pub fn release(bundle: &Path, run: &str, pids: &[&str]) -> Result<()> {
    let pids = pids.iter().map(|pid| pid.parse::<i32>());
    let pids = pids.collect::<Result<Vec<_>, _>>().context("this is no pid")?;
    let removed = if had_link_remap(bundle) {
        remove_links(&pids)
    } else {
        Ok(())
    };
    network::release(bundle, &pids, Some(run).filter(|run| !run.is_empty())).and(removed)
}

/// Removes the links that CRIU has made of files with a deleted name. Before the dump there were none.
fn remove_links(pids: &[i32]) -> Result<()> {
    let files = pids.iter().flat_map(|pid| DeletedName::of_process(*pid));
    let remove = |file: DeletedName| {
        let removed = file.criu_links().and_then(|links| links.remove());
        removed.with_context(|| format!("cannot remove CRIU's links of {}", file.path.display()))
    };
    // Order matters: one that fails keeps no other.
    let removed: Vec<_> = files.map(remove).collect();
    removed.into_iter().collect()
}
