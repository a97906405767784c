//! What must hold for the metrics of a cgroup, whatever the kernel's files hold.

use std::path::Path;

use containerd_shim_protos::{cgroups, cgroups_v2};
use firn_host::cgroup_mounts::CgroupDir;
use firn_process::cgroup::Cgroup;
use protobuf::Message;

use super::{v1, v2};
use firn_transaction::fuzz::dir;

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
    let controllers = ["hugetlb", "pids", "cpuacct", "cpu", "memory", "blkio", "rdma"];
    let cgroup = Cgroup::of_v1(controllers.map(|name| {
        let place = CgroupDir {
            mount_point: dir.clone(),
            path: "".into(),
        };
        (name.to_owned(), place)
    }));
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
