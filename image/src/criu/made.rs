//! The tasks that CRIU has made, compared with the spec while they are stopped. CRIU read the image; this
//! reads the kernel.

use std::fs;
use std::io;
use std::path::PathBuf;

use super::seccomp::{Filters, Seccomp};
use super::tasks::{Allowed, Core, Creds, Thread};
use super::{Host, ImageFault, mounts, namespaces, numbers};
use firn_host::mountinfo::{self, MountEntry};
use firn_host::procfs;
use firn_oci::Spec;

/// Compares the processes `pids` of a container, of which `init` is the first. Processes that have ended are
/// skipped.
pub fn check(spec: &Spec, init: i32, pids: &[i32], host: &Host) -> Result<(), ImageFault> {
    let allowed = Allowed::by(spec, host)?;
    namespaces::check_made_map(spec, init)?;
    let known = firn_host::ordered::set_of(pids.iter().copied());
    for &pid in pids {
        process(spec, &allowed, init, pid, host)?;
        // One that has ended is in no list of the unified hierarchy.
        let is_other = |child: &i32| !known.contains(child) && procfs::is_alive(*child);
        let other = children(pid).into_iter().find(is_other);
        if let Some(child) = other {
            let name = format!("process {child}");
            let own = "the container's own";
            return Err(ImageFault::exceeds(name, "its cgroup", "another", own));
        }
    }
    let (name, entries) = mounts_of(init)?;
    mounts::check_made(spec, &name, &entries, host)
}

/// Bind mounts, and the root, of the container whose first process is `init` that are less restricted than
/// its spec demands, because CRIU lost their flags, and the flags that they must have.
pub fn loosened(spec: &Spec, init: i32) -> Result<Vec<(PathBuf, u32)>, ImageFault> {
    let (name, entries) = mounts_of(init)?;
    let host = Host::of(init).map_err(|error| ImageFault::unreadable(&name, &error))?;
    mounts::loosened(spec, &entries, &host)
}

/// The name of the list, and the mounts.
fn mounts_of(init: i32) -> Result<(String, Vec<MountEntry>), ImageFault> {
    let name = format!("/proc/{init}/mountinfo");
    match mountinfo::of_process(init) {
        Ok(entries) => Ok((name, entries)),
        Err(source) => Err(ImageFault::unreadable(&name, &source)),
    }
}

fn process(spec: &Spec, allowed: &Allowed<'_>, init: i32, pid: i32, host: &Host) -> Result<(), ImageFault> {
    let name = format!("process {pid}");
    let unreadable = |source| ImageFault::unreadable(&name, &source);
    if thread_of(spec, pid, pid).map_err(unreadable)?.is_none() {
        return Ok(());
    }
    let inner = u32::try_from(pid).unwrap_or_default();
    allowed.task(&name, inner, &core(pid).map_err(unreadable)?)?;
    namespaces::check_made(spec, init, pid, host)?;
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_err(unreadable)?;
    let tids = threads.filter_map(|thread| thread.ok()?.file_name().to_str()?.parse::<i32>().ok());
    for tid in tids {
        if let Some(thread) = thread_of(spec, pid, tid).map_err(unreadable)? {
            let (tid, filters) = (tid.unsigned_abs(), Filters::of_kernel());
            allowed.thread(&name, tid, Some(&thread), &filters, false)?;
        }
    }
    Ok(())
}

fn children(pid: i32) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    let lists = threads
        .flatten()
        .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| numbers(&list)).collect()
}

/// What /proc shows of a process, in the form of a core of the image without its thread.
fn core(pid: i32) -> io::Result<Core> {
    let limits = read(&format!("/proc/{pid}/limits"))?;
    // The first is the heading; in each, the name takes 25 columns.
    let limits = limits.lines().skip(1).map(|line| {
        let mut words = line.get(25..).unwrap_or_default().split_whitespace();
        let mut limit = || {
            words
                .next()
                .and_then(|word| word.parse().ok())
                .unwrap_or(u64::MAX)
        };
        [limit(), limit()]
    });
    Ok(Core {
        state: None,
        rlimits: Some(limits.collect()),
        oom_score_adj: read(&format!("/proc/{pid}/oom_score_adj"))?.trim().parse().ok(),
        thread: None,
    })
}

/// What /proc shows of a thread. None for one that has ended.
fn thread_of(spec: &Spec, pid: i32, tid: i32) -> io::Result<Option<Thread>> {
    let dir = format!("/proc/{pid}/task/{tid}");
    let status = read(&format!("{dir}/status"))?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim()
    };
    if field("State:").starts_with(['Z', 'X']) {
        return Ok(None);
    }
    let set = |name| u64::from_str_radix(field(name), 16).unwrap_or(u64::MAX);
    let ids = |name, kind| {
        let ids = numbers(field(name)).into_iter();
        ids.map(|id| inner(spec, kind, id)).collect::<Vec<u32>>()
    };
    // Without a security module there is nothing to read.
    let label = fs::read(format!("{dir}/attr/current")).unwrap_or_default();
    Ok(Some(Thread {
        policy: 0,
        cgroups: None,
        seccomp: Seccomp {
            mode: field("Seccomp:").parse().unwrap_or(0),
            filter: Some(0),
        },
        creds: Creds {
            users: ids("Uid:", "uid").try_into().unwrap_or([u32::MAX; 4]),
            groups: [ids("Gid:", "gid"), ids("Groups:", "gid")].concat(),
            capabilities: [
                ("inheritable", set("CapInh:")),
                ("permitted", set("CapPrm:")),
                ("effective", set("CapEff:")),
                ("bounding", set("CapBnd:")),
                ("ambient", set("CapAmb:")),
            ],
            label: label_of(&label),
            no_new_privs: field("NoNewPrivs:") == "1",
        },
    }))
}

/// A label without the mode that `AppArmor` adds to it. A label that confines nothing is none.
fn label_of(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let text = text.trim_end_matches(['\0', '\n']);
    match text.split_once(" (").map_or(text, |(name, _)| name) {
        "unconfined" => String::new(),
        name => name.to_owned(),
    }
}

/// The id in a user namespace that the spec makes; one that is not in its map is none that the spec allows.
fn inner(spec: &Spec, kind: &str, id: u32) -> u32 {
    if !spec.makes_user_namespace() {
        return id;
    }
    let map = spec.id_map(kind).unwrap_or_default();
    let found = map.iter().find_map(|[first, lower, count]| {
        let at = id.checked_sub(*lower).filter(|at| at < count)?;
        first.checked_add(at)
    });
    found.unwrap_or(u32::MAX)
}

/// Names in it may be any bytes.
fn read(path: &str) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

#[cfg(test)]
mod tests;
