//! What this node has to have for a restore as well as its GPUs.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use firn_host::{Problem, ProblemReport};
use firn_preflight::expect_criu;
use nix::sys::statvfs::statvfs;

use crate::daemon::Daemon;
use crate::text;

/// Where containerd has its content, unless it is configured otherwise.
const CONTENT: &str = "/var/lib/containerd";

/// Why a checkpoint finds no room here.
#[derive(Debug, thiserror::Error, Problem)]
pub enum NoRoom {
    #[error(
        "its processes need {} of memory, and this node has {} available, with its swap",
        text::bytes(*needed),
        text::bytes(*left)
    )]
    #[problem("FIRN-HOST-MEMORY", "free memory, or restore it on another node")]
    Memory { needed: u64, left: u64 },
    #[error(
        "its files need {}, and the file system of {} has {} free",
        text::bytes(*needed),
        dir.display(),
        text::bytes(*free)
    )]
    #[problem("FIRN-IMAGE-SPACE", "free space there, or move it to another node")]
    Disk { dir: PathBuf, needed: u64, free: u64 },
}

/// CRIU, where containerd that listens on `socket` starts shims.
pub fn expect_restorer(socket: &Path) -> Result<(), ProblemReport> {
    Ok(expect_criu(&Daemon::find(socket).path)?)
}

/// Room for processes with so much memory.
pub fn expect_memory(needed: u64) -> Result<(), NoRoom> {
    match left(&fs::read_to_string("/proc/meminfo").unwrap_or_default()) {
        Some(left) if left < needed => Err(NoRoom::Memory { needed, left }),
        _ => Ok(()),
    }
}

/// Where containerd that listens on `socket` has its content.
pub fn content(socket: &Path) -> PathBuf {
    let configured = Daemon::find(socket).configuration().ok();
    let root = configured.and_then(|table| Some(PathBuf::from(table.get("root")?.as_str()?)));
    root.unwrap_or_else(|| CONTENT.into())
}

/// Room for a checkpoint of this size that arrives: in containerd's content store, and unpacked in `work`.
pub fn expect_disk(needed: u64, content: &Path, work: &Path) -> Result<(), NoRoom> {
    let mut by_device: BTreeMap<u64, (PathBuf, u64)> = BTreeMap::new();
    for dir in [content, work] {
        let there = dir.ancestors().find(|dir| dir.exists());
        let Some((there, found)) = there.and_then(|dir| Some((dir, fs::metadata(dir).ok()?))) else {
            continue;
        };
        let (_, sum) = by_device.entry(found.dev()).or_insert((there.to_owned(), 0));
        *sum = sum.saturating_add(needed);
    }
    for (dir, needed) in by_device.into_values() {
        let free = statvfs(&dir).map(|found| found.blocks_free().saturating_mul(found.fragment_size()));
        if let Ok(free) = free
            && free < needed
        {
            return Err(NoRoom::Disk { dir, needed, free });
        }
    }
    Ok(())
}

/// Available memory and free swap.
fn left(meminfo: &str) -> Option<u64> {
    let bytes = |name: &str| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = value.split_whitespace().next()?.parse().ok()?;
        Some(kib << 10)
    };
    Some(bytes("MemAvailable:")?.saturating_add(bytes("SwapFree:").unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_swap_are_what_is_left() {
        let text = "MemTotal: 9 kB\nMemAvailable:   2 kB\nSwapFree: 1 kB\n";
        assert_eq!(left(text), Some(3 << 10));
        assert_eq!(left("SwapFree: 1 kB"), None);
        assert!(expect_memory(1).is_ok());
        assert_eq!(expect_memory(u64::MAX).unwrap_err().code(), "FIRN-HOST-MEMORY");
    }

    #[test]
    fn files_on_one_file_system_need_room_together() {
        let dir = tempfile::tempdir().unwrap();
        let unmade = dir.path().join("not/made/yet");
        assert!(expect_disk(1, dir.path(), &unmade).is_ok());
        let none = expect_disk(u64::MAX, dir.path(), &unmade).unwrap_err();
        assert_eq!(none.code(), "FIRN-IMAGE-SPACE");
        let free = statvfs(dir.path()).unwrap();
        let most = free.blocks_free() * free.fragment_size();
        // Each of the two finds room alone.
        assert!(expect_disk(most / 4 * 3, dir.path(), &unmade).is_err());
    }
}
