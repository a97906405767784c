//! Use and limits on a v1 host, as `io.containerd.cgroups.v1.Metrics`.

use std::collections::HashMap;
use std::path::Path;

use containerd_shim_protos::cgroups::metrics::{
    BlkIOEntry, BlkIOStat, CPUStat, CPUUsage, HugetlbStat, MemoryEntry, MemoryOomControl, MemoryStat,
    Metrics, PidsStat, RdmaEntry, RdmaStat, Throttle,
};
use firn_process::cgroup::read::{self, FlatKeyed, NestedLine};
use firn_process::cgroup::{Cgroup, CgroupError};
use protobuf::well_known_types::any::Any;
use rustix::param::clock_ticks_per_second;

use super::{encoded, number};

const TYPE_URL: &str = "io.containerd.cgroups.v1.Metrics";

/// Names block devices by their numbers.
const PARTITIONS: &str = "/proc/partitions";

/// A controller that is not mounted, or in which there is no such cgroup, has no part in the message.
pub(super) fn metrics(cgroup: &Cgroup) -> Result<Any, CgroupError> {
    let metrics = Metrics {
        hugetlb: part(cgroup, "hugetlb", hugetlb)?.unwrap_or_default(),
        pids: part(cgroup, "pids", pids)?.into(),
        cpu: cpu(cgroup)?.into(),
        memory: part(cgroup, "memory", memory)?.into(),
        memory_oom_control: part(cgroup, "memory", oom_control)?.into(),
        blkio: part(cgroup, "blkio", blkio)?.into(),
        rdma: part(cgroup, "rdma", rdma)?.into(),
        ..Metrics::default()
    };
    Ok(encoded(TYPE_URL, &metrics))
}

fn part<T>(
    cgroup: &Cgroup,
    controller: &str,
    read: impl FnOnce(&Path) -> Result<Option<T>, CgroupError>,
) -> Result<Option<T>, CgroupError> {
    cgroup.dir(controller).map_or(Ok(None), |dir| read(&dir))
}

fn hugetlb(dir: &Path) -> Result<Option<Vec<HugetlbStat>>, CgroupError> {
    let stat = |size: String| {
        let number = |what: &str| number(dir, &format!("hugetlb.{size}.{what}"));
        Ok(HugetlbStat {
            usage: number("usage_in_bytes")?,
            max: number("max_usage_in_bytes")?,
            failcnt: number("failcnt")?,
            pagesize: size.clone(),
            ..HugetlbStat::default()
        })
    };
    let sizes = read::hugetlb_sizes(dir, "usage_in_bytes")?;
    sizes.into_iter().map(stat).collect::<Result<_, _>>().map(Some)
}

fn pids(dir: &Path) -> Result<Option<PidsStat>, CgroupError> {
    let Some(current) = read::number(&dir.join("pids.current"))? else {
        return Ok(None);
    };
    // In this message no limit is 0.
    let limit = read::number(&dir.join("pids.max"))?
        .filter(|limit| *limit != read::MAX)
        .unwrap_or_default();
    Ok(Some(PidsStat {
        current,
        limit,
        ..PidsStat::default()
    }))
}

fn cpu(cgroup: &Cgroup) -> Result<Option<CPUStat>, CgroupError> {
    let usage = part(cgroup, "cpuacct", cpu_usage)?;
    let throttling = part(cgroup, "cpu", |dir| FlatKeyed::read(&dir.join("cpu.stat")))?.map(|stat| {
        from_keys!(Throttle, stat, {
            periods = "nr_periods", throttled_periods = "nr_throttled", throttled_time
        })
    });
    let any = usage.is_some() || throttling.is_some();
    Ok(any.then(|| CPUStat {
        usage: usage.into(),
        throttling: throttling.into(),
        ..CPUStat::default()
    }))
}

fn cpu_usage(dir: &Path) -> Result<Option<CPUUsage>, CgroupError> {
    let Some(total) = read::number(&dir.join("cpuacct.usage"))? else {
        return Ok(None);
    };
    let stat = FlatKeyed::read(&dir.join("cpuacct.stat"))?.unwrap_or_default();
    let per_cpu = read::text(&dir.join("cpuacct.usage_percpu"))?.unwrap_or_default();
    let nanoseconds = |ticks: u64| ticks.saturating_mul(1_000_000_000 / clock_ticks_per_second());
    Ok(Some(CPUUsage {
        total,
        kernel: nanoseconds(stat.get("system")),
        user: nanoseconds(stat.get("user")),
        per_cpu: per_cpu
            .split_ascii_whitespace()
            .filter_map(read::parse_number)
            .collect(),
        ..CPUUsage::default()
    }))
}

fn memory(dir: &Path) -> Result<Option<MemoryStat>, CgroupError> {
    let Some(stat) = FlatKeyed::read(&dir.join("memory.stat"))? else {
        return Ok(None);
    };
    Ok(Some(MemoryStat {
        usage: memory_entry(dir, "memory")?.into(),
        swap: memory_entry(dir, "memory.memsw")?.into(),
        kernel: memory_entry(dir, "memory.kmem")?.into(),
        kernel_tcp: memory_entry(dir, "memory.kmem.tcp")?.into(),
        ..from_keys!(MemoryStat, stat, {
            cache, rss, rss_huge, mapped_file, dirty, writeback, pg_pg_in = "pgpgin", pg_pg_out = "pgpgout",
            pg_fault = "pgfault", pg_maj_fault = "pgmajfault", inactive_anon, active_anon, inactive_file,
            active_file, unevictable, hierarchical_memory_limit,
            hierarchical_swap_limit = "hierarchical_memsw_limit", total_cache, total_rss, total_rss_huge,
            total_mapped_file, total_dirty, total_writeback, total_pg_pg_in = "total_pgpgin",
            total_pg_pg_out = "total_pgpgout", total_pg_fault = "total_pgfault",
            total_pg_maj_fault = "total_pgmajfault", total_inactive_anon, total_active_anon,
            total_inactive_file, total_active_file, total_unevictable
        })
    }))
}

/// None where the kernel does not account it.
fn memory_entry(dir: &Path, prefix: &str) -> Result<Option<MemoryEntry>, CgroupError> {
    let Some(usage) = read::number(&dir.join(format!("{prefix}.usage_in_bytes")))? else {
        return Ok(None);
    };
    let number = |what: &str| number(dir, &format!("{prefix}.{what}"));
    Ok(Some(MemoryEntry {
        limit: number("limit_in_bytes")?,
        usage,
        max: number("max_usage_in_bytes")?,
        failcnt: number("failcnt")?,
        ..MemoryEntry::default()
    }))
}

fn oom_control(dir: &Path) -> Result<Option<MemoryOomControl>, CgroupError> {
    let control = FlatKeyed::read(&dir.join("memory.oom_control"))?;
    Ok(control
        .map(|control| from_keys!(MemoryOomControl, control, { oom_kill_disable, under_oom, oom_kill })))
}

/// The I/O scheduler that a device uses decides which files count: CFQ's and BFQ's where they have anything,
/// otherwise those of the throttling layer.
fn blkio(dir: &Path) -> Result<Option<BlkIOStat>, CgroupError> {
    let devices = device_names(&read::text(Path::new(PARTITIONS))?.unwrap_or_default());
    let entries = |prefix: &str, name: &str| {
        let path = dir.join(format!("blkio.{prefix}{name}_recursive"));
        Ok::<_, CgroupError>(blkio_entries(&read::text(&path)?.unwrap_or_default(), &devices))
    };
    for prefix in ["", "bfq."] {
        let stat = BlkIOStat {
            io_service_bytes_recursive: entries(prefix, "io_service_bytes")?,
            io_serviced_recursive: entries(prefix, "io_serviced")?,
            io_queued_recursive: entries(prefix, "io_queued")?,
            io_service_time_recursive: entries(prefix, "io_service_time")?,
            io_wait_time_recursive: entries(prefix, "io_wait_time")?,
            io_merged_recursive: entries(prefix, "io_merged")?,
            io_time_recursive: entries(prefix, "time")?,
            sectors_recursive: entries(prefix, "sectors")?,
            ..BlkIOStat::default()
        };
        if !stat.io_serviced_recursive.is_empty() {
            return Ok(Some(stat));
        }
    }
    Ok(Some(BlkIOStat {
        io_service_bytes_recursive: entries("throttle.", "io_service_bytes")?,
        io_serviced_recursive: entries("throttle.", "io_serviced")?,
        ..BlkIOStat::default()
    }))
}

/// Lines `8:0 Read 4096` or `8:0 4096`; the total over all devices has none and is left out.
fn blkio_entries(text: &str, devices: &HashMap<(u64, u64), String>) -> Vec<BlkIOEntry> {
    let entry = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (major, minor) = read::device(words.next()?)?;
        let second = words.next()?;
        let (op, value) = words.next().map_or(("", second), |value| (second, value));
        Some(BlkIOEntry {
            op: op.to_owned(),
            device: devices.get(&(major, minor)).cloned().unwrap_or_default(),
            major,
            minor,
            value: read::parse_number(value)?,
            ..BlkIOEntry::default()
        })
    };
    text.lines().filter_map(entry).collect()
}

/// From lines `8 0 1024 sda`.
fn device_names(partitions: &str) -> HashMap<(u64, u64), String> {
    let device = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let numbers = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some((numbers, format!("/dev/{}", words.nth(1)?)))
    };
    partitions.lines().filter_map(device).collect()
}

fn rdma(dir: &Path) -> Result<Option<RdmaStat>, CgroupError> {
    let current = rdma_entries!(dir.join("rdma.current"));
    let (Some(current), Some(limit)) = (current, rdma_entries!(dir.join("rdma.max"))) else {
        return Ok(None);
    };
    Ok(Some(RdmaStat {
        current,
        limit,
        ..RdmaStat::default()
    }))
}
