//! How much memory the cgroups of a container may still take, with cgroup v1 and v2.
//!
//! The driver copies GPU memory into anonymous memory of the process, which is charged to its cgroup. When a
//! limit is reached, the kernel kills the workload in the middle of its checkpoint.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use firn_host::cgroup_mounts::{Hierarchies, UNIFIED, Version};
use firn_host::{mountinfo, proc_maps};

/// The tightest of the limits that hold for a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    /// The cgroup that it is set on: the container's, or one above.
    pub dir: PathBuf,
    /// Bytes that are left, with caches that the kernel can drop.
    pub left: u64,
}

/// The files of a version: limit, usage, and the lines of memory.stat that count caches.
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
    /// The limit with the least memory left, of the cgroups of these processes and of the cgroups above. A
    /// process that has ended has no limit.
    pub(crate) fn of(pids: &[i32]) -> io::Result<Option<Self>> {
        let mounts = mountinfo::mounted()?;
        let Some(host) = Hierarchies::from_mounts(&mounts, Path::new(UNIFIED)) else {
            return Ok(None);
        };
        let mut known = BTreeSet::new();
        for pid in pids {
            if let Some(cgroups) = proc_maps::read(Path::new("/proc"), *pid, "cgroup")? {
                known.insert(String::from_utf8_lossy(&cgroups).into_owned());
            }
        }
        let limits = known.iter().map(|cgroups| Self::tightest(&host, cgroups));
        let limits: Vec<Option<Self>> = limits.collect::<io::Result<_>>()?;
        Ok(limits.into_iter().flatten().min_by_key(|limit| limit.left))
    }

    /// `cgroups` is the text of /proc/PID/cgroup.
    fn tightest(host: &Hierarchies, cgroups: &str) -> io::Result<Option<Self>> {
        let (files, controller) = match host.version {
            Version::V1 => (V1, "memory"),
            Version::V2 => (V2, ""),
        };
        let mut places = host.of_process(cgroups);
        let Some(place) = places.remove(controller) else {
            return Ok(None);
        };
        let mut tightest: Option<Self> = None;
        for path in place.path.ancestors() {
            let dir = place.mount_point.join(path);
            if let Some(left) = left(&dir, &files)?
                && tightest.as_ref().is_none_or(|limit| left < limit.left)
            {
                tightest = Some(Self { dir, left });
            }
        }
        Ok(tightest)
    }
}

/// Bytes that one cgroup may still take; `None` without a limit.
fn left(dir: &Path, files: &Files) -> io::Result<Option<u64>> {
    // The cgroup or its controller may not exist.
    let text = |name| proc_maps::unless_gone(fs::read_to_string(dir.join(name)));
    let number = |name| -> io::Result<Option<u64>> {
        match text(name)?.as_deref().map(str::trim) {
            None | Some("max" | "-1") => Ok(None),
            Some(number) => number.parse().map(Some).map_err(io::Error::other),
        }
    };
    let Some(limit) = number(files.limit)? else {
        return Ok(None);
    };
    let usage = number(files.usage)?.unwrap_or(0);
    let stat = text("memory.stat")?.unwrap_or_default();
    let caches = stat.lines().filter_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        files
            .caches
            .contains(&name)
            .then(|| bytes.trim().parse::<u64>().ok())?
    });
    let caches = caches.fold(0, u64::saturating_add);
    Ok(Some(limit.saturating_sub(usage.saturating_sub(caches))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_host::mountinfo::MountEntry;

    fn tightest(mounts: &[MountEntry], cgroups: &str, unified: &Path) -> Option<MemoryLimit> {
        let host = Hierarchies::from_mounts(mounts, unified)?;
        MemoryLimit::tightest(&host, cgroups).unwrap()
    }

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
    fn the_tightest_limit_counts_and_caches_can_be_dropped() {
        let root = tempfile::tempdir().unwrap();
        let (pod, own) = (root.path().join("pod"), root.path().join("pod/box"));
        let mounts = [mount(root.path(), "/", "cgroup2", "rw")];
        let tightest = || self::tightest(&mounts, "0::/pod/box\n", root.path());
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
        let of_part = self::tightest(&part, "0::/node/pod/box\n", root.path());
        assert_eq!(of_part.unwrap().left, 0);
    }

    #[test]
    fn v1_counts_the_cgroups_below_too() {
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
        let found = self::tightest(&mounts, cgroups, root.path());
        assert_eq!(found, limit(&own, 550));
        let elsewhere = self::tightest(&mounts[..1], "4:memory:/pod/box\n", root.path());
        assert_eq!(elsewhere.unwrap().left, 1);
        assert_eq!(self::tightest(&mounts, "3:pids:/a\n", root.path()), None);
    }

    #[test]
    fn a_process_that_has_ended_has_no_limit() {
        assert_eq!(MemoryLimit::of(&[i32::MAX]).unwrap(), None);
    }

    #[test]
    fn a_limit_that_cannot_be_read_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let mounts = [mount(root.path(), "/", "cgroup2", "rw")];
        let host = Hierarchies::from_mounts(&mounts, root.path()).unwrap();
        write(&root.path().join("box"), &[("memory.max", "many\n")]);
        assert!(MemoryLimit::tightest(&host, "0::/box\n").is_err());
        fs::remove_file(root.path().join("box/memory.max")).unwrap();
        fs::create_dir(root.path().join("box/memory.max")).unwrap();
        assert!(MemoryLimit::tightest(&host, "0::/box\n").is_err());
    }
}
