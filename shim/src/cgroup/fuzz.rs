//! What must hold for cgroups, whatever a spec names and the kernel's files say.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use containerd_shim_protos::{cgroups, cgroups_v2};
use firn_host::cgroup_mounts::{Hierarchies, membership};
use firn_host::mountinfo::MountEntry;
use protobuf::Message;

use super::locate::by_spec;
use super::{Cgroup, Place, Version, v1, v2};
use crate::fuzz::dir;

const MOUNT_POINT: &str = "/sys/fs/cgroup";

/// `cgroupsPath` of a spec, which other calls freeze, kill and remove.
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
        // The second field of a line is a list, the rest a path as the kernel gives it.
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

/// Every file of a cgroup has this content.
pub fn cgroup_files(bytes: &[u8]) {
    const FILES: [&str; 24] = [
        "memory.stat",
        "memory.events",
        "memory.current",
        "memory.pressure",
        "cpu.stat",
        "io.stat",
        "io.pressure",
        "pids.current",
        "pids.max",
        "hugetlb.2MB.current",
        "hugetlb.2MB.events",
        "rdma.current",
        "rdma.max",
        "hugetlb.2MB.usage_in_bytes",
        "cpuacct.stat",
        "cpuacct.usage_percpu",
        "memory.usage_in_bytes",
        "memory.oom_control",
        "blkio.io_serviced_recursive",
        "blkio.throttle.io_serviced_recursive",
        "blkio.throttle.io_service_bytes_recursive",
        "cgroup.procs",
        "cgroup.events",
        "memory.kmem.usage_in_bytes",
    ];
    let dir = dir().join("cgroup");
    std::fs::create_dir_all(&dir).expect("the temporary directory is writable");
    // Numbers stand alone in their files, and one that is none would end the reading at once.
    let number = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    for file in FILES {
        let single = ["current", "max", "usage_in_bytes"]
            .iter()
            .any(|end| file.ends_with(end))
            && !file.starts_with("rdma");
        std::fs::write(dir.join(file), if single { number } else { bytes })
            .expect("the directory is writable");
    }
    std::fs::write(dir.join("cpuacct.usage"), "1").expect("the directory is writable");
    if let Ok(metrics) = v2::metrics(&dir, Path::new(v2::HUGE_PAGES)) {
        let metrics = cgroups_v2::metrics::Metrics::parse_from_bytes(&metrics.value);
        assert!(metrics.is_ok_and(|metrics| metrics.memory.is_some() && metrics.pids.is_some()));
    }
    let place = |_| Place {
        mount_point: dir.clone(),
        path: "".into(),
    };
    let controllers = ["hugetlb", "pids", "cpuacct", "cpu", "memory", "blkio", "rdma"];
    let cgroup = Cgroup {
        version: Version::V1,
        places: BTreeMap::from(controllers.map(|name| (name.to_owned(), place(name)))),
    };
    if let Ok(metrics) = v1::metrics(&cgroup) {
        let metrics = cgroups::metrics::Metrics::parse_from_bytes(&metrics.value);
        assert!(metrics.is_ok_and(|metrics| metrics.cpu.is_some() && metrics.memory.is_some()));
    }
    if let Ok(pids) = cgroup.pids() {
        assert!(
            pids.iter().all(|pid| *pid > 0),
            "{pids:?}: kill(2) would take one for a group"
        );
    }
}
