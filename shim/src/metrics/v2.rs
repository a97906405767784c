//! Use and limits on a unified host, as `io.containerd.cgroups.v2.Metrics`.

use std::path::Path;

use containerd_shim_protos::cgroups_v2::metrics::{
    CPUStat, HugeTlbStat, IOEntry, IOStat, MemoryEvents, MemoryStat, Metrics, PSIData, PSIStats, PidsStat,
    RdmaEntry, RdmaStat,
};
use firn_process::cgroup::CgroupError;
use firn_process::cgroup::read::{self, FlatKeyed, NestedLine};
use protobuf::MessageField;
use protobuf::well_known_types::any::Any;

use super::{encoded, number};

const TYPE_URL: &str = "io.containerd.cgroups.v2.Metrics";

/// Has a directory per size of huge pages that the host knows.
pub(super) const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";

/// A controller that is not enabled has no files here. As containerd's shim does, its part is then reported
/// as zero or empty, but that of memory events, which is left out.
pub(super) fn metrics(dir: &Path, huge_pages: &Path) -> Result<Any, CgroupError> {
    let metrics = Metrics {
        pids: MessageField::some(pids(dir)?),
        cpu: cpu(dir)?.into(),
        memory: MessageField::some(memory(dir)?),
        rdma: MessageField::some(rdma(dir)?),
        io: MessageField::some(io(dir)?),
        hugetlb: hugetlb(dir, huge_pages)?,
        memory_events: memory_events(dir)?.into(),
        ..Metrics::default()
    };
    Ok(encoded(TYPE_URL, &metrics))
}

fn pids(dir: &Path) -> Result<PidsStat, CgroupError> {
    Ok(PidsStat {
        current: number(dir, "pids.current")?,
        limit: number(dir, "pids.max")?,
        ..PidsStat::default()
    })
}

fn cpu(dir: &Path) -> Result<Option<CPUStat>, CgroupError> {
    let Some(stat) = FlatKeyed::read(&dir.join("cpu.stat"))? else {
        return Ok(None);
    };
    Ok(Some(CPUStat {
        psi: pressure(dir, "cpu.pressure")?.into(),
        ..from_keys!(CPUStat, stat, {
            usage_usec, user_usec, system_usec, nr_periods, nr_throttled, throttled_usec, nr_bursts,
            burst_usec
        })
    }))
}

fn memory(dir: &Path) -> Result<MemoryStat, CgroupError> {
    let stat = FlatKeyed::read(&dir.join("memory.stat"))?.unwrap_or_default();
    // Kernels since 5.9 count the two kinds apart; the message has one field for both.
    let both = |key: &str| {
        let apart = |kind: &str| stat.get(&format!("{key}_{kind}"));
        stat.find(key)
            .unwrap_or_else(|| apart("anon").saturating_add(apart("file")))
    };
    Ok(MemoryStat {
        workingset_refault: both("workingset_refault"),
        workingset_activate: both("workingset_activate"),
        usage: number(dir, "memory.current")?,
        usage_limit: number(dir, "memory.max")?,
        swap_usage: number(dir, "memory.swap.current")?,
        swap_limit: number(dir, "memory.swap.max")?,
        max_usage: number(dir, "memory.peak")?,
        swap_max_usage: number(dir, "memory.swap.peak")?,
        psi: pressure(dir, "memory.pressure")?.into(),
        ..from_keys!(MemoryStat, stat, {
            anon, file, kernel_stack, slab, sock, shmem, file_mapped, file_dirty, file_writeback, anon_thp,
            inactive_anon, active_anon, inactive_file, active_file, unevictable, slab_reclaimable,
            slab_unreclaimable, pgfault, pgmajfault, workingset_nodereclaim, pgrefill, pgscan, pgsteal,
            pgactivate, pgdeactivate, pglazyfree, pglazyfreed, thp_fault_alloc, thp_collapse_alloc
        })
    })
}

fn memory_events(dir: &Path) -> Result<Option<MemoryEvents>, CgroupError> {
    let events = FlatKeyed::read(&dir.join("memory.events"))?;
    Ok(events
        .map(|events| from_keys!(MemoryEvents, events, { low, high, max, oom, oom_kill, oom_group_kill })))
}

fn io(dir: &Path) -> Result<IOStat, CgroupError> {
    let text = read::text(&dir.join("io.stat"))?.unwrap_or_default();
    let usage = text.lines().filter_map(|line| {
        let line = NestedLine::parse(line)?;
        let (major, minor) = read::device(line.name)?;
        Some(IOEntry {
            major,
            minor,
            ..from_keys!(IOEntry, line, { rbytes, wbytes, rios, wios })
        })
    });
    Ok(IOStat {
        usage: usage.collect(),
        psi: pressure(dir, "io.pressure")?.into(),
        ..IOStat::default()
    })
}

fn hugetlb(dir: &Path, huge_pages: &Path) -> Result<Vec<HugeTlbStat>, CgroupError> {
    let stat = |size: String| {
        let events = FlatKeyed::read(&dir.join(format!("hugetlb.{size}.events")))?.unwrap_or_default();
        Ok(HugeTlbStat {
            current: number(dir, &format!("hugetlb.{size}.current"))?,
            max: number(dir, &format!("hugetlb.{size}.max"))?,
            failcnt: events.get("max"),
            pagesize: size,
            ..HugeTlbStat::default()
        })
    };
    read::page_sizes(huge_pages)?.into_iter().map(stat).collect()
}

fn rdma(dir: &Path) -> Result<RdmaStat, CgroupError> {
    Ok(RdmaStat {
        current: rdma_entries!(dir.join("rdma.current")).unwrap_or_default(),
        limit: rdma_entries!(dir.join("rdma.max")).unwrap_or_default(),
        ..RdmaStat::default()
    })
}

/// Lines `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`; none where the kernel keeps no account of stalls.
fn pressure(dir: &Path, file: &str) -> Result<Option<PSIStats>, CgroupError> {
    let Some(text) = read::text(&dir.join(file))? else {
        return Ok(None);
    };
    let data = |kind: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
        let value = |key: &str| {
            line.split_ascii_whitespace()
                .find_map(|word| word.strip_prefix(key))
        };
        let average = |key: &str| value(key).and_then(|text| text.parse().ok()).unwrap_or_default();
        Some(PSIData {
            avg10: average("avg10="),
            avg60: average("avg60="),
            avg300: average("avg300="),
            total: value("total=").and_then(read::parse_number).unwrap_or_default(),
            ..PSIData::default()
        })
    };
    Ok(Some(PSIStats {
        some: data("some ").into(),
        full: data("full ").into(),
        ..PSIStats::default()
    }))
}
