//! How much memory a cgroup may still take.

use std::path::Path;

use firn_oci::surroundings::MemoryLimit;

use super::read::{self, FlatKeyed, MAX};
use super::{Cgroup, CgroupError, Version};

impl Cgroup {
    /// The limit with least left, of the cgroup and those above. None without memory controller or limit.
    pub(crate) fn memory_limit(&self) -> Result<Option<MemoryLimit>, CgroupError> {
        let name = match self.version {
            Version::V1 => "memory",
            Version::V2 => "",
        };
        let Some(place) = self.places.get(name) else {
            return Ok(None);
        };
        let mut tightest: Option<MemoryLimit> = None;
        for path in place.path.ancestors() {
            let dir = place.mount_point.join(path);
            if let Some(left) = left(&dir, self.version)?
                && tightest.as_ref().is_none_or(|limit| left < limit.left)
            {
                tightest = Some(MemoryLimit { dir, left });
            }
        }
        Ok(tightest)
    }
}

/// What one cgroup may still take; none without a limit.
fn left(dir: &Path, version: Version) -> Result<Option<u64>, CgroupError> {
    let (limit, usage, caches): (_, _, &[&str]) = match version {
        Version::V1 => (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            &["total_inactive_file", "total_active_file"],
        ),
        Version::V2 => (
            "memory.max",
            "memory.current",
            &["inactive_file", "active_file", "slab_reclaimable"],
        ),
    };
    let limit = match read::number(&dir.join(limit))? {
        None | Some(MAX) => return Ok(None),
        Some(limit) => limit,
    };
    let usage = read::number(&dir.join(usage))?.unwrap_or(0);
    let stat = FlatKeyed::read(&dir.join("memory.stat"))?.unwrap_or_default();
    let caches: u64 = caches
        .iter()
        .map(|key| stat.get(key))
        .fold(0, u64::saturating_add);
    Ok(Some(limit.saturating_sub(usage.saturating_sub(caches))))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use super::super::Place;
    use super::*;

    fn cgroup(version: Version, mount_point: &Path) -> Cgroup {
        let name = match version {
            Version::V1 => "memory",
            Version::V2 => "",
        };
        let place = Place {
            mount_point: mount_point.to_owned(),
            path: "pod/box".into(),
        };
        Cgroup {
            version,
            places: BTreeMap::from([(name.to_owned(), place)]),
        }
    }

    fn write(dir: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(dir).unwrap();
        for (name, text) in files {
            fs::write(dir.join(name), text).unwrap();
        }
    }

    #[test]
    fn the_tightest_limit_counts_and_caches_can_be_taken_back() {
        let root = tempfile::tempdir().unwrap();
        let (pod, own) = (root.path().join("pod"), root.path().join("pod/box"));
        let unified = cgroup(Version::V2, root.path());
        assert_eq!(unified.memory_limit().unwrap(), None);
        write(&own, &[("memory.max", "max\n"), ("memory.current", "700\n")]);
        assert_eq!(unified.memory_limit().unwrap(), None);
        write(
            &own,
            &[
                ("memory.max", "1000\n"),
                ("memory.stat", "anon 400\ninactive_file 200\n"),
            ],
        );
        let limit = |dir: &Path, left| {
            let dir = dir.to_owned();
            Some(MemoryLimit { dir, left })
        };
        assert_eq!(unified.memory_limit().unwrap(), limit(&own, 500));
        write(&pod, &[("memory.max", "900\n"), ("memory.current", "800\n")]);
        assert_eq!(unified.memory_limit().unwrap(), limit(&pod, 100));
        write(&pod, &[("memory.current", "950\n")]);
        assert_eq!(unified.memory_limit().unwrap(), limit(&pod, 0), "above its limit");
    }

    #[test]
    fn v1_counts_what_is_below_too() {
        let root = tempfile::tempdir().unwrap();
        let own = root.path().join("pod/box");
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
        let limit = cgroup(Version::V1, root.path()).memory_limit().unwrap();
        assert_eq!(limit, Some(MemoryLimit { dir: own, left: 550 }));
    }
}
