//! Where the cgroup hierarchies of a host are mounted, and where in them a cgroup is.
//!
//! As containerd and runc do, a host counts as unified only when `/sys/fs/cgroup` itself is cgroup2; anything
//! else ("hybrid") is v1.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use crate::mountinfo::MountEntry;

/// Where cgroup2 has to be mounted for a host to count as unified.
pub const UNIFIED: &str = "/sys/fs/cgroup";

/// The kinds of hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

/// The directory of a cgroup in one hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupDir {
    /// Where the hierarchy is mounted.
    pub mount_point: PathBuf,
    /// The cgroup, relative to the mount point.
    pub path: PathBuf,
}

impl CgroupDir {
    /// The directory.
    pub fn dir(&self) -> PathBuf {
        self.mount_point.join(&self.path)
    }

    /// Whether it is the root of the hierarchy, as far as that is mounted.
    pub fn is_root(&self) -> bool {
        self.path.as_os_str().is_empty()
    }
}

/// A mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    mount_point: PathBuf,
    /// The cgroup that is seen at the mount point.
    root: PathBuf,
}

impl Hierarchy {
    /// The place of a cgroup that is named from the root of the hierarchy.
    fn place(&self, absolute: &Path) -> CgroupDir {
        // With a mount of a part of the hierarchy, the part's own path comes first in the kernel's names.
        let below = absolute.strip_prefix(&self.root).unwrap_or(absolute);
        let mut path = PathBuf::new();
        for part in below.components() {
            match part {
                Component::Normal(name) => path.push(name),
                // Never above the mount point.
                Component::ParentDir => {
                    path.pop();
                }
                Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            }
        }
        CgroupDir {
            mount_point: self.mount_point.clone(),
            path,
        }
    }
}

/// The cgroup hierarchies of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchies {
    /// Which of the two kinds of hosts it is.
    pub version: Version,
    /// By controller or `name=...`; the unified hierarchy has an empty name.
    mounts: BTreeMap<String, Hierarchy>,
}

impl Hierarchies {
    /// `unified`: the mount point which makes a host unified. None where no hierarchy could distinguish
    /// containers apart.
    pub fn from_mounts(entries: &[MountEntry], unified: &Path) -> Option<Self> {
        let mut mounts = BTreeMap::new();
        let hierarchy = |entry: &MountEntry| Hierarchy {
            mount_point: entry.mount_point.clone(),
            root: entry.root.clone(),
        };
        // The last mount at a point hides the others.
        let top = entries.iter().rev().find(|entry| entry.mount_point == unified);
        if let Some(entry) = top.filter(|entry| entry.fs_type == "cgroup2") {
            mounts.insert(String::new(), hierarchy(entry));
            return Some(Self {
                version: Version::V2,
                mounts,
            });
        }
        for entry in entries {
            // A node in a node shows the outer one's mounts too; the one below /sys/fs/cgroup is that of the
            // tools.
            let preferred = entry.mount_point.starts_with(unified);
            let names: Vec<&str> = match entry.fs_type.as_str() {
                "cgroup2" => vec![""],
                "cgroup" => entry
                    .super_options
                    .split(',')
                    .filter(|name| !matches!(*name, "rw" | "ro"))
                    .collect(),
                _ => continue,
            };
            for name in names {
                if preferred || !mounts.contains_key(name) {
                    mounts.insert(name.to_owned(), hierarchy(entry));
                }
            }
        }
        if mounts.keys().all(String::is_empty) {
            return None;
        }
        Some(Self {
            version: Version::V1,
            mounts,
        })
    }

    /// The places of a process, by controller; `cgroups` is the text of its /proc/PID/cgroup.
    pub fn of_process(&self, cgroups: &str) -> BTreeMap<String, CgroupDir> {
        let mut places = BTreeMap::new();
        for (names, path) in cgroups.lines().filter_map(membership) {
            for name in names.split(',') {
                if let Some(hierarchy) = self.mounts.get(name) {
                    places.insert(name.to_owned(), hierarchy.place(path));
                }
            }
        }
        places
    }

    /// The places of a cgroup that has this path in every hierarchy.
    pub fn of_path(&self, path: &Path) -> BTreeMap<String, CgroupDir> {
        let places = self.mounts.iter();
        crate::ordered::map_of(places.map(|(name, hierarchy)| (name.clone(), hierarchy.place(path))))
    }
}

/// Controllers and path of a line of /proc/PID/cgroup.
pub fn membership(line: &str) -> Option<(&str, &Path)> {
    let mut fields = line.splitn(3, ':').skip(1);
    let names = fields.next()?;
    // A cgroup that was removed under its last, dying process.
    let path = fields.next()?;
    Some((names, Path::new(path.strip_suffix(" (deleted)").unwrap_or(path))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_of_a_partial_mount_is_not_repeated() {
        let hierarchy = Hierarchy {
            mount_point: "/sys/fs/cgroup/memory".into(),
            root: "/node1".into(),
        };
        assert_eq!(
            hierarchy.place(Path::new("/node1/box")).dir(),
            Path::new("/sys/fs/cgroup/memory/box")
        );
        assert!(hierarchy.place(Path::new("/node1")).is_root());
        assert!(
            hierarchy.place(Path::new("/../..")).is_root(),
            "never above the mount point"
        );
    }
}
