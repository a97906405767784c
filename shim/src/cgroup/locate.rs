//! Finds cgroups: by a process that is in one, or by the path in a spec when no process is.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use super::{Cgroup, CgroupError, Place, Version};
use crate::mounts::{MountEntry, mounted};

/// Where cgroup2 has to be mounted for a host to count as unified.
const UNIFIED: &str = "/sys/fs/cgroup";

/// Slice of units that name none.
const DEFAULT_SLICE: &str = "system.slice";

/// A mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    mount_point: PathBuf,
    /// The cgroup that is seen at the mount point.
    root: PathBuf,
}

impl Hierarchy {
    /// The place of a cgroup that is named from the root of the hierarchy.
    fn place(&self, absolute: &Path) -> Place {
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
        Place {
            mount_point: self.mount_point.clone(),
            path,
        }
    }
}

/// The cgroup hierarchies of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hierarchies {
    version: Version,
    /// By controller or `name=...`; the unified hierarchy has an empty name.
    mounts: BTreeMap<String, Hierarchy>,
}

impl Hierarchies {
    /// What is mounted on this host, which does not change while containers run.
    pub(super) fn of_host() -> Result<&'static Self, CgroupError> {
        static HOST: OnceLock<Hierarchies> = OnceLock::new();
        if let Some(host) = HOST.get() {
            return Ok(host);
        }
        let mounts = mounted().map_err(|source| CgroupError::Mounts { source })?;
        let host = Self::from_mounts(&mounts, Path::new(UNIFIED))?;
        Ok(HOST.get_or_init(|| host))
    }

    /// `unified`: the mount point which makes a host unified.
    pub(super) fn from_mounts(entries: &[MountEntry], unified: &Path) -> Result<Self, CgroupError> {
        let mut mounts = BTreeMap::new();
        let hierarchy = |entry: &MountEntry| Hierarchy {
            mount_point: entry.mount_point.clone(),
            root: entry.root.clone(),
        };
        // The last mount at a point hides the others.
        let top = entries.iter().rev().find(|entry| entry.mount_point == unified);
        if let Some(entry) = top.filter(|entry| entry.fs_type == "cgroup2") {
            mounts.insert(String::new(), hierarchy(entry));
            return Ok(Self {
                version: Version::V2,
                mounts,
            });
        }
        for entry in entries {
            // A node in a node shows the outer one's mounts too; the one below /sys/fs/cgroup is that of the tools.
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
            return Err(CgroupError::NoHierarchy);
        }
        Ok(Self {
            version: Version::V1,
            mounts,
        })
    }

    /// The cgroup that a process is in.
    pub(super) fn of_pid(&self, pid: i32) -> Result<Cgroup, CgroupError> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup"));
        let text = text.map_err(|source| CgroupError::Process { pid, source })?;
        let mut places = BTreeMap::new();
        for (names, path) in text.lines().filter_map(membership) {
            for name in names.split(',') {
                if let Some(hierarchy) = self.mounts.get(name) {
                    places.insert(name.to_owned(), hierarchy.place(path));
                }
            }
        }
        Ok(Cgroup {
            version: self.version,
            places,
        })
    }

    /// The cgroup that a spec's `cgroupsPath` names, whether it exists or not.
    ///
    /// A path that the runtime takes as relative lies below the cgroup of its caller, which is this process.
    pub(super) fn by_spec(&self, cgroups_path: &str, id: &str, systemd: bool) -> Result<Cgroup, CgroupError> {
        let path = match (cgroups_path, systemd) {
            ("", true) => unit_path(DEFAULT_SLICE, "runc", id),
            ("", false) => PathBuf::from(id),
            (path, true) => {
                let mut parts = path.splitn(3, ':');
                let (Some(slice), Some(prefix), Some(name)) = (parts.next(), parts.next(), parts.next())
                else {
                    return Err(CgroupError::SystemdPath {
                        path: path.to_owned(),
                    });
                };
                unit_path(if slice.is_empty() { DEFAULT_SLICE } else { slice }, prefix, name)
            }
            (path, false) => PathBuf::from(path),
        };
        let own = if path.is_absolute() {
            None
        } else {
            Some(self.of_pid(own_pid())?)
        };
        let places = self.mounts.iter().map(|(name, hierarchy)| {
            let mut place = hierarchy.place(&path);
            if let Some(own) = own.as_ref().and_then(|own| own.places.get(name)) {
                place.path = own.path.join(&place.path);
            }
            (name.clone(), place)
        });
        Ok(Cgroup {
            version: self.version,
            places: places.collect(),
        })
    }
}

/// This process, as cgroup files number it.
pub(super) fn own_pid() -> i32 {
    nix::unistd::getpid().as_raw()
}

/// Controllers and path of a line of /proc/PID/cgroup.
pub(super) fn membership(line: &str) -> Option<(&str, &Path)> {
    let mut fields = line.splitn(3, ':').skip(1);
    let names = fields.next()?;
    // A cgroup that was removed under its last, dying process.
    let path = fields.next()?;
    Some((names, Path::new(path.strip_suffix(" (deleted)").unwrap_or(path))))
}

/// `a-b.slice` lies in `a.slice`; a unit that is a slice itself has no scope.
fn unit_path(slice: &str, prefix: &str, name: &str) -> PathBuf {
    let mut path = PathBuf::from("/");
    let mut push_slice = |slice: &str| {
        let stem = slice.strip_suffix(".slice").unwrap_or(slice);
        let ends = stem.match_indices('-').map(|(at, _)| at).chain([stem.len()]);
        // `-.slice` is the root.
        for end in ends.filter(|_| stem != "-") {
            path.push(format!("{}.slice", &stem[..end]));
        }
    };
    push_slice(slice);
    match name.strip_suffix(".slice") {
        Some(_) => path.push(name),
        None if prefix.is_empty() => path.push(format!("{name}.scope")),
        None => path.push(format!("{prefix}-{name}.scope")),
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(mount_point: &str, root: &str, fs_type: &str, options: &str) -> MountEntry {
        MountEntry {
            root: root.into(),
            mount_point: mount_point.into(),
            fs_type: fs_type.into(),
            super_options: options.into(),
            ..MountEntry::default()
        }
    }

    fn hierarchies(entries: &[MountEntry]) -> Hierarchies {
        Hierarchies::from_mounts(entries, Path::new(UNIFIED)).unwrap()
    }

    fn dirs(cgroup: &Cgroup) -> Vec<(&str, String)> {
        cgroup
            .places
            .iter()
            .map(|(name, place)| (name.as_str(), place.dir().display().to_string()))
            .collect()
    }

    #[test]
    fn only_cgroup2_at_the_top_makes_a_unified_host() {
        let unified = hierarchies(&[entry("/sys/fs/cgroup", "/", "cgroup2", "rw")]);
        assert_eq!(
            dirs(&unified.by_spec("/k8s.io/box", "box", false).unwrap()),
            [("", "/sys/fs/cgroup/k8s.io/box".into())]
        );
        let hybrid = hierarchies(&[
            entry("/sys/fs/cgroup", "/", "tmpfs", "rw"),
            entry("/sys/fs/cgroup/cpu,cpuacct", "/", "cgroup", "rw,cpu,cpuacct"),
            entry("/sys/fs/cgroup/unified", "/", "cgroup2", "rw"),
            entry("/elsewhere/cpu", "/", "cgroup", "rw,cpu,cpuacct"),
        ]);
        assert_eq!(
            dirs(&hybrid.by_spec("/../a/c/../b", "box", false).unwrap()),
            [
                ("", "/sys/fs/cgroup/unified/a/b".into()),
                ("cpu", "/sys/fs/cgroup/cpu,cpuacct/a/b".into()),
                ("cpuacct", "/sys/fs/cgroup/cpu,cpuacct/a/b".into()),
            ]
        );
        assert!(matches!(
            Hierarchies::from_mounts(&[], Path::new(UNIFIED)),
            Err(CgroupError::NoHierarchy)
        ));
    }

    #[test]
    fn systemd_paths_nest_slices() {
        let unified = hierarchies(&[entry("/sys/fs/cgroup", "/", "cgroup2", "rw")]);
        let dir = |path: &str| {
            unified
                .by_spec(path, "box", true)
                .map(|cgroup| cgroup.primary_dir())
        };
        assert_eq!(
            dir("kubepods-burstable-pod1.slice:cri-containerd:box").unwrap(),
            Path::new(
                "/sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/\
                 cri-containerd-box.scope"
            )
        );
        assert_eq!(
            dir(":x:box").unwrap(),
            Path::new("/sys/fs/cgroup/system.slice/x-box.scope")
        );
        assert_eq!(
            dir("-.slice::box").unwrap(),
            Path::new("/sys/fs/cgroup/box.scope")
        );
        assert_eq!(
            dir("").unwrap(),
            Path::new("/sys/fs/cgroup/system.slice/runc-box.scope")
        );
        assert!(matches!(dir("/plain/path"), Err(CgroupError::SystemdPath { .. })));
    }

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
    }
}
