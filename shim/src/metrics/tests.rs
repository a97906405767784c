//! The metrics of a container.

use firn_host::Absent;
use std::collections::BTreeMap;
use std::fs;

use containerd_shim_protos::{cgroups, cgroups_v2};
use firn_host::cgroup_mounts::CgroupDir;
use firn_process::cgroup::read;
use firn_process::cgroup::testing::{LIMIT, Scratch, fake, until};
use firn_process::reaper::Reaper;
use protobuf::Message as _;
use tempfile::TempDir;

use super::*;

/// A unified cgroup made of plain files.
fn fake_unified(files: &[(&str, &str)]) -> (TempDir, Cgroup) {
    fake(Version::V2, files)
}

#[tokio::test]
async fn v1_metrics_are_those_of_the_kernel() {
    let reaper = Reaper::start().unwrap();
    let Some(scratch) = Scratch::v1() else {
        return eprintln!("skipped: needs root and cgroup v1");
    };
    let memory = scratch.cgroup.dir("memory").unwrap();
    read::write(&memory.join("memory.limit_in_bytes"), "64M").unwrap();
    read::write(&scratch.cgroup.dir("pids").unwrap().join("pids.max"), "77").unwrap();
    let _child = scratch.spawn(&reaper, "", "while :; do /bin/true; done");
    let metrics = || {
        let any = of(&scratch.cgroup).unwrap();
        assert_eq!(any.type_url, "io.containerd.cgroups.v1.Metrics");
        cgroups::metrics::Metrics::parse_from_bytes(&any.value).unwrap()
    };
    let counted = |metrics: &cgroups::metrics::Metrics| {
        // The kernel sums up page faults with a delay.
        metrics.cpu.usage.user > 50_000_000 && metrics.memory.total_pg_fault > 0
    };
    until("time in user mode and page faults", || counted(&metrics())).await;
    let metrics = metrics();
    let cpu = &metrics.cpu.usage;
    assert!(cpu.total >= cpu.user / 2 && cpu.total < 60_000_000_000, "{cpu:?}");
    // The CPUs keep counting while they are read one by one.
    let sum: u64 = cpu.per_cpu.iter().sum();
    assert!(sum >= cpu.total && sum < cpu.total * 2, "{cpu:?}");
    assert_eq!(metrics.memory.usage.limit, 64 << 20);
    assert!(
        (1..64 << 20).contains(&metrics.memory.usage.usage),
        "{:?}",
        metrics.memory.usage
    );
    assert!(metrics.memory.usage.max >= metrics.memory.usage.usage);
    assert_eq!(metrics.memory.hierarchical_memory_limit, 64 << 20);
    assert!((1..=2).contains(&metrics.pids.current), "{:?}", metrics.pids);
    assert_eq!(metrics.pids.limit, 77);
    assert!(metrics.memory_oom_control.is_some());

    scratch.cgroup.kill_all(LIMIT).await.unwrap();
    scratch.cgroup.remove(LIMIT).await.unwrap();
    assert!(of(&scratch.cgroup).unwrap_err().is_absent());
    assert!(scratch.cgroup.pids().unwrap().is_empty());
}

/// v1 hierarchies made of plain files, for controllers that few hosts have.
#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn v1_devices_and_huge_pages_are_read() {
    let dir = TempDir::new().unwrap();
    let mut places = BTreeMap::new();
    for (name, files) in [
        (
            "blkio",
            &[
                (
                    "blkio.throttle.io_serviced_recursive",
                    "8:0 Read 3\n8:0 Write 4\n259:1 Read 5\nTotal 12\n",
                ),
                (
                    "blkio.throttle.io_service_bytes_recursive",
                    "8:0 Read 4096\nTotal 4096\n",
                ),
                ("blkio.io_serviced_recursive", "Total 0\n"),
            ][..],
        ),
        (
            "hugetlb",
            &[
                ("hugetlb.2MB.usage_in_bytes", "4194304\n"),
                ("hugetlb.2MB.max_usage_in_bytes", "6291456\n"),
                ("hugetlb.2MB.failcnt", "7\n"),
                ("hugetlb.2MB.rsvd.usage_in_bytes", "1\n"),
            ],
        ),
        (
            "rdma",
            &[
                ("rdma.current", "mlx5_0 hca_handle=2 hca_object=20\n"),
                ("rdma.max", "mlx5_0 hca_handle=max hca_object=2000\n"),
            ],
        ),
        ("pids", &[("pids.current", "5\n"), ("pids.max", "max\n")]),
        ("freezer", &[]),
    ] {
        let path = dir.path().join(name).join("box");
        fs::create_dir_all(&path).unwrap();
        for (file, text) in files {
            fs::write(path.join(file), text).unwrap();
        }
        places.insert(
            name.to_owned(),
            CgroupDir {
                mount_point: dir.path().join(name),
                path: "box".into(),
            },
        );
    }
    let any = of(&Cgroup::of_v1(places)).unwrap();
    let metrics = cgroups::metrics::Metrics::parse_from_bytes(&any.value).unwrap();
    let serviced: Vec<_> = metrics
        .blkio
        .io_serviced_recursive
        .iter()
        .map(|e| (e.major, e.op.as_str(), e.value))
        .collect();
    assert_eq!(serviced, [(8, "Read", 3), (8, "Write", 4), (259, "Read", 5)]);
    assert_eq!(metrics.blkio.io_service_bytes_recursive[0].value, 4096);
    let huge = &metrics.hugetlb;
    assert_eq!(huge.len(), 1, "{huge:?}");
    assert_eq!(
        (
            huge[0].pagesize.as_str(),
            huge[0].usage,
            huge[0].max,
            huge[0].failcnt
        ),
        ("2MB", 4 << 20, 6 << 20, 7)
    );
    assert_eq!(metrics.rdma.current[0].hca_objects, 20);
    assert_eq!(
        (
            metrics.rdma.limit[0].hca_handles,
            metrics.rdma.limit[0].hca_objects
        ),
        (u32::MAX, 2000)
    );
    assert_eq!((metrics.pids.current, metrics.pids.limit), (5, 0));
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn v2_use_and_limits_are_read() {
    let (_dir, cgroup) = fake_unified(&[
        ("pids.current", "5\n"),
        ("pids.max", "max\n"),
        (
            "cpu.stat",
            "usage_usec 300\nuser_usec 200\nsystem_usec 100\n\
             nr_periods 4\nnr_throttled 3\nthrottled_usec 9\n",
        ),
        (
            "cpu.pressure",
            "some avg10=1.50 avg60=0.00 avg300=0.00 total=42\n\
             full avg10=0.25 avg60=0.00 avg300=0.00 total=7\n",
        ),
        ("memory.current", "1000\n"),
        ("memory.peak", "3000\n"),
        ("memory.max", "4096\n"),
        ("memory.swap.current", "0\n"),
        ("memory.swap.max", "max\n"),
        (
            "memory.stat",
            "anon 11\nfile 12\nworkingset_refault_anon 1\nworkingset_refault_file 2\npgmajfault 13\n",
        ),
        (
            "memory.events",
            "low 0\nhigh 1\nmax 2\noom 3\noom_kill 4\noom_group_kill 5\n",
        ),
        ("io.stat", "8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6\n"),
        ("hugetlb.1GB.current", "1073741824\n"),
        ("hugetlb.1GB.max", "max\n"),
        ("hugetlb.1GB.events", "max 6\n"),
        ("rdma.current", "mlx5_0 hca_handle=2 hca_object=20\n"),
        ("rdma.max", "mlx5_0 hca_handle=max hca_object=2000\n"),
    ]);
    let host = TempDir::new().unwrap();
    fs::create_dir(host.path().join("hugepages-1048576kB")).unwrap();
    let any = v2::metrics(&cgroup.primary_dir(), host.path()).unwrap();
    assert_eq!(any.type_url, "io.containerd.cgroups.v2.Metrics");
    let metrics = cgroups_v2::metrics::Metrics::parse_from_bytes(&any.value).unwrap();
    assert_eq!((metrics.pids.current, metrics.pids.limit), (5, u64::MAX));
    assert_eq!(
        (
            metrics.cpu.usage_usec,
            metrics.cpu.nr_throttled,
            metrics.cpu.throttled_usec
        ),
        (300, 3, 9)
    );
    assert_eq!(
        (metrics.cpu.psi.some.total, metrics.cpu.psi.full.avg10),
        (42, 0.25)
    );
    let memory = &metrics.memory;
    assert_eq!(
        (memory.usage, memory.usage_limit, memory.max_usage),
        (1000, 4096, 3000)
    );
    assert_eq!(
        (memory.swap_limit, memory.workingset_refault, memory.pgmajfault),
        (u64::MAX, 3, 13)
    );
    assert_eq!(
        (
            metrics.memory_events.oom_kill,
            metrics.memory_events.oom_group_kill
        ),
        (4, 5)
    );
    let io = &metrics.io.usage[0];
    assert_eq!(
        (io.major, io.rbytes, io.wbytes, io.rios, io.wios),
        (8, 1, 2, 3, 4)
    );
    let huge = &metrics.hugetlb[0];
    assert_eq!(
        (huge.pagesize.as_str(), huge.current, huge.max, huge.failcnt),
        ("1GB", 1 << 30, u64::MAX, 6)
    );
    assert_eq!(metrics.rdma.limit[0].hca_handles, u32::MAX);
}

#[test]
fn controllers_that_are_not_enabled_are_reported_as_by_containerd() {
    let (_dir, cgroup) = fake_unified(&[("cgroup.events", "populated 0\n")]);
    let metrics = cgroups_v2::metrics::Metrics::parse_from_bytes(&of(&cgroup).unwrap().value).unwrap();
    assert_eq!(
        (metrics.memory.unwrap().usage, metrics.pids.unwrap().current),
        (0, 0)
    );
    assert!(metrics.rdma.current.is_empty() && metrics.io.usage.is_empty());
    assert!(metrics.rdma.is_some() && metrics.io.is_some() && metrics.memory_events.is_none());
}

#[test]
fn huge_pages_are_named_as_cgroup_files_are() {
    let host = TempDir::new().unwrap();
    for name in [
        "hugepages-64kB",
        "hugepages-2048kB",
        "hugepages-16777216kB",
        "other",
    ] {
        fs::create_dir(host.path().join(name)).unwrap();
    }
    let mut sizes = read::page_sizes(host.path()).unwrap();
    sizes.sort();
    assert_eq!(sizes, ["16GB", "2MB", "64KB"]);
}

#[test]
fn a_malformed_number_is_reported_with_its_file() {
    let (_dir, cgroup) = fake_unified(&[("pids.current", "many\n")]);
    let error = of(&cgroup).unwrap_err();
    assert!(error.to_string().ends_with("box/pids.current"), "{error}");
    assert!(!error.is_absent());
}
