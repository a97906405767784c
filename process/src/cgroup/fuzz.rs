//! Properties of the cgroup paths of a spec, for arbitrary input.

use std::path::{Component, Path};

use firn_host::cgroup_mounts::{CgroupDir, Hierarchies, Version, membership};
use firn_host::mountinfo::MountEntry;

use super::Cgroup;
use super::locate::by_spec;

const MOUNT_POINT: &str = "/sys/fs/cgroup";

impl Cgroup {
    /// A cgroup of v1 with a directory for each controller.
    pub fn of_v1(places: impl IntoIterator<Item = (String, CgroupDir)>) -> Self {
        Self {
            version: Version::V1,
            places: places.into_iter().collect(),
        }
    }
}

/// `cgroupsPath` of a spec: the shim freezes, kills and removes this cgroup.
pub fn cgroups_path(bytes: &[u8]) {
    let Ok(path) = std::str::from_utf8(bytes) else {
        return;
    };
    let entry = |point: &str, root: &str, fs_type: &str| MountEntry {
        root: root.into(),
        mount_point: point.into(),
        fs_type: fs_type.into(),
        super_options: "rw,freezer".into(),
        ..MountEntry::default()
    };
    for entries in [
        vec![entry(MOUNT_POINT, "/", "cgroup2")],
        vec![
            entry("/sys/fs/cgroup/freezer", "/node1", "cgroup"),
            entry("/sys/fs/cgroup/unified", "/", "cgroup2"),
        ],
    ] {
        let host = Hierarchies::from_mounts(&entries, Path::new(MOUNT_POINT)).expect("there is a hierarchy");
        for systemd in [false, true] {
            if let Ok(cgroup) = by_spec(&host, path, "c1", systemd) {
                is_below(&cgroup, &entries);
            }
        }
        // The second field of a line is a list, the third is a path in the kernel's form.
        for (_, path) in path.lines().filter_map(membership) {
            let path = path.to_str().expect("it was text");
            if let Ok(cgroup) = by_spec(&host, path, "c1", false) {
                is_below(&cgroup, &entries);
            }
        }
    }
}

fn is_below(cgroup: &Cgroup, entries: &[MountEntry]) {
    for place in cgroup.places.values() {
        let dir = place.dir();
        assert!(
            entries.iter().any(|entry| dir.starts_with(&entry.mount_point)),
            "{} is in no hierarchy",
            dir.display()
        );
        assert!(
            dir.components().all(|part| part != Component::ParentDir),
            "{}",
            dir.display()
        );
        assert_eq!(place.is_root(), dir == place.mount_point);
    }
}
