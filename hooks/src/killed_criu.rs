//! Releases a container whose CRIU was killed in a dump from what CRIU itself ends and removes, also when the
//! dump fails.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result};
use firn_host::{DeletedName, bounded};
use firn_oci::criu_config::had_link_remap;

use crate::network;

/// How long CRIU's log is read.
const READ: Duration = Duration::from_millis(500);

/// Releases the container in `bundle`, whose dump has the log `log`. Its processes, init first, may have
/// ended.
pub fn release(bundle: &Path, log: &Path, pids: &[&str]) -> Result<()> {
    let pids = pids.iter().map(|pid| pid.parse::<i32>());
    let pids = pids.collect::<Result<Vec<_>, _>>().context("this is no pid")?;
    let log = Log::read_in_time(log);
    if log.has_released {
        return Ok(());
    }
    let removed = match had_link_remap(bundle) {
        true => remove_links(&pids),
        false => Ok(()),
    };
    network::release(bundle, &pids, log.run.as_deref()).and(removed)
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

/// What CRIU's log shows of a dump.
#[derive(Debug, Default, PartialEq, Eq)]
struct Log {
    /// How CRIU calls this run.
    run: Option<String>,
    /// CRIU has come to an end, and has released the network before.
    has_released: bool,
}

impl Log {
    /// What the log shows if it is read in time: its file system may be what CRIU has waited for.
    fn read_in_time(path: &Path) -> Self {
        let (send, log) = mpsc::channel();
        let path = path.to_owned();
        std::thread::spawn(move || send.send(Self::read(&path)));
        log.recv_timeout(READ).unwrap_or_default()
    }

    /// A log that is not there shows nothing.
    fn read(path: &Path) -> Self {
        let mut log = Self::default();
        let visit = |line: &[u8]| {
            let line = String::from_utf8_lossy(line);
            if let Some((_, run)) = line.split_once("CRIU run id = ") {
                log.run = Some(run.trim().to_owned());
            }
            log.has_released |= line.contains("Unfreezing tasks into");
            ControlFlow::Continue(())
        };
        drop(bounded::each(path, b'\n', bounded::LINES, visit));
        log
    }
}
