//! How much memory the cgroup of a container may still take, of version 1 and 2.
//!
//! The host memory that the driver copies GPU memory into is anonymous memory of the process itself, and charged like it: where
//! a limit has not the room, the kernel kills the workload in the middle of its checkpoint.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::mountinfo::{self, MountEntry};

/// Where cgroup2 has to be mounted for a host to count as unified, as containerd and runc do.
const UNIFIED: &str = "/sys/fs/cgroup";

/// The tightest of the limits that hold for a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The cgroup that it is set on: the container's, or one above.
    pub dir: PathBuf,
    /// Bytes left below it, those that the kernel can take back from caches included.
    pub left: u64,
}

/// The files of a version: limit, usage, and what of the usage are caches.
struct Files {
    limit: &'static str,
    usage: &'static str,
    caches: &'static [&'static str],
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    caches: &["total_inactive_file", "total_active_file"],
};

const V2: Files = Files {
    limit: "memory.max",
    usage: "memory.current",
    caches: &["inactive_file", "active_file", "slab_reclaimable"],
};

impl MemoryLimit {
    /// The limit with least left for the cgroup of a process, of its own and those above. None without one, and where it
    /// cannot be told.
    pub fn of(pid: i32) -> Option<Self> {
        let mounts = mountinfo::mounted().ok()?;
        let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        Self::tightest(&mounts, &cgroups, Path::new(UNIFIED))
    }

    /// `cgroups` is what /proc/PID/cgroup says.
    fn tightest(mounts: &[MountEntry], cgroups: &str, unified: &Path) -> Option<Self> {
        // The last mount at a point hides the others.
        let top = mounts.iter().rev().find(|mount| mount.mount_point == unified);
        let (mount, files, controller) = match top.filter(|top| top.fs_type == "cgroup2") {
            Some(mount) => (mount, V2, ""),
            None => (of_memory(mounts, unified)?, V1, "memory"),
        };
        let path = cgroups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (names, path) = (fields.next()?, fields.next()?);
            names.split(',').any(|name| name == controller).then_some(path)
        })?;
        // With a mount of a part of the hierarchy, the part's own path comes first in the kernel's names.
        let path = Path::new(path);
        let path = path.strip_prefix(&mount.root).unwrap_or(path);
        let names = path
            .components()
            .filter(|part| matches!(part, Component::Normal(_)));
        let below: PathBuf = names.collect();
        let limits = below.ancestors().filter_map(|part| {
            let dir = mount.mount_point.join(part);
            let left = left(&dir, &files)?;
            Some(Self { dir, left })
        });
        limits.min_by_key(|limit| limit.left)
    }
}

/// The mount of the memory controller of version 1. A node in a node shows the outer one's too; the one below /sys/fs/cgroup
/// is that of the tools.
fn of_memory<'a>(mounts: &'a [MountEntry], unified: &Path) -> Option<&'a MountEntry> {
    let is_of = |mount: &&MountEntry| {
        mount.fs_type == "cgroup" && mount.super_options.split(',').any(|option| option == "memory")
    };
    let preferred = |mount: &&MountEntry| mount.mount_point.starts_with(unified);
    let mut all = mounts.iter().filter(is_of);
    all.clone().rfind(preferred).or_else(|| all.next())
}

/// What one cgroup may still take; none without a limit.
fn left(dir: &Path, files: &Files) -> Option<u64> {
    let number = |name| {
        fs::read_to_string(dir.join(name))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    // The word `max` is no number.
    let limit = number(files.limit)?;
    let usage = number(files.usage).unwrap_or(0);
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let caches = stat.lines().filter_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        files
            .caches
            .contains(&name)
            .then(|| bytes.trim().parse::<u64>().ok())?
    });
    let caches = caches.fold(0, u64::saturating_add);
    Some(limit.saturating_sub(usage.saturating_sub(caches)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(dir).unwrap();
        for (name, text) in files {
            fs::write(dir.join(name), text).unwrap();
        }
    }

    fn mount(point: &Path, root: &str, fs_type: &str, options: &str) -> MountEntry {
        MountEntry {
            root: root.into(),
            mount_point: point.to_owned(),
            fs_type: fs_type.into(),
            super_options: options.into(),
            ..MountEntry::default()
        }
    }

    fn limit(dir: &Path, left: u64) -> Option<MemoryLimit> {
        let dir = dir.to_owned();
        Some(MemoryLimit { dir, left })
    }

    #[test]
    fn the_tightest_limit_counts_and_caches_can_be_taken_back() {
        let root = tempfile::tempdir().unwrap();
        let (pod, own) = (root.path().join("pod"), root.path().join("pod/box"));
        let mounts = [mount(root.path(), "/", "cgroup2", "rw")];
        let tightest = || MemoryLimit::tightest(&mounts, "0::/pod/box\n", root.path());
        assert_eq!(tightest(), None);
        write(&own, &[("memory.max", "max\n"), ("memory.current", "700\n")]);
        assert_eq!(tightest(), None);
        write(
            &own,
            &[
                ("memory.max", "1000\n"),
                ("memory.stat", "anon 400\ninactive_file 200\n"),
            ],
        );
        assert_eq!(tightest(), limit(&own, 500));
        write(&pod, &[("memory.max", "900\n"), ("memory.current", "800\n")]);
        assert_eq!(tightest(), limit(&pod, 100));
        write(&pod, &[("memory.current", "950\n")]);
        assert_eq!(tightest(), limit(&pod, 0), "above its limit");
        write(root.path(), &[("memory.max", "10\n"), ("memory.current", "20\n")]);
        let part = [mount(root.path(), "/node", "cgroup2", "rw")];
        let of_part = MemoryLimit::tightest(&part, "0::/node/pod/box\n", root.path());
        assert_eq!(of_part.unwrap().left, 0);
    }

    #[test]
    fn v1_counts_what_is_below_too() {
        let (root, outer) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let own = root.path().join("memory/pod/box");
        write(
            &own,
            &[
                ("memory.limit_in_bytes", "1000\n"),
                ("memory.usage_in_bytes", "600\n"),
                (
                    "memory.stat",
                    "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n",
                ),
            ],
        );
        write(&outer.path().join("pod/box"), &[("memory.limit_in_bytes", "1\n")]);
        let mounts = [
            mount(outer.path(), "/", "cgroup", "rw,memory"),
            mount(root.path(), "/", "tmpfs", "rw"),
            mount(&root.path().join("memory"), "/node", "cgroup", "rw,memory"),
            mount(&root.path().join("unified"), "/", "cgroup2", "rw"),
        ];
        let cgroups = "9:cpu,cpuacct:/other\n4:memory:/node/pod/box\n0::/elsewhere\n";
        let found = MemoryLimit::tightest(&mounts, cgroups, root.path());
        assert_eq!(found, limit(&own, 550));
        let elsewhere = MemoryLimit::tightest(&mounts[..1], "4:memory:/pod/box\n", root.path());
        assert_eq!(elsewhere.unwrap().left, 1);
        assert_eq!(MemoryLimit::tightest(&mounts, "3:pids:/a\n", root.path()), None);
    }

    #[test]
    fn a_process_that_has_ended_has_none() {
        assert_eq!(MemoryLimit::of(i32::MAX), None);
    }
}
