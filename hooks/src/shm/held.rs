//! Which files processes have open or mapped.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use firn_host::{FileId, mountinfo, proc_maps, procfs};
use nix::sys::stat::{major, minor};

/// Files of one file system that processes have, each with whether they have it by a name that is there.
pub type Held = HashMap<FileId, bool>;

/// The processes in a cgroup and below, as far as this process sees them; none if it is not there.
pub fn pids_below(cgroup: &Path) -> Vec<i32> {
    let procs = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let mut pids: Vec<i32> = procs.lines().filter_map(|line| line.parse().ok()).collect();
    let children = fs::read_dir(cgroup).into_iter().flatten().flatten();
    for child in children.filter(|child| child.file_type().is_ok_and(|kind| kind.is_dir())) {
        pids.extend(pids_below(&child.path()));
    }
    pids
}

/// Those of these processes. A process that has ended has none.
pub fn held_by(pids: &[i32], device: u64) -> Held {
    let mut held = Held::new();
    let mut add = |file, is_named: bool| *held.entry(file).or_default() |= is_named;
    let number = format!("{}:{}", major(device), minor(device));
    // Of all of them: a process may have got a descriptor from another container.
    let mut mounts = HashSet::new();
    for &pid in pids {
        let all = mountinfo::of_process(pid).unwrap_or_default().into_iter();
        mounts.extend(all.filter(|mount| mount.device == number).map(|mount| mount.id));
    }
    for &pid in pids {
        let _ended = proc_maps::each(Path::new("/proc"), pid, |mapping| {
            if mapping.file.is_on(device) {
                add(mapping.file, !mapping.path.ends_with(b" (deleted)"));
            }
            ControlFlow::Continue(())
        });
        let fds = fs::read_dir(format!("/proc/{pid}/fd"));
        for entry in fds.into_iter().flatten().flatten() {
            let fd = entry.file_name().to_str().and_then(|name| name.parse().ok());
            // Order matters: a file server may not answer for the attributes of a file.
            let mount = fd.and_then(|fd| procfs::mount_of(pid, fd));
            if mount.is_some_and(|mount| mounts.contains(&mount))
                && let Ok(metadata) = fs::metadata(entry.path())
            {
                let is_file = metadata.is_file() || metadata.file_type().is_fifo();
                add(FileId::of(&metadata), is_file && metadata.nlink() > 0);
            }
        }
    }
    held
}
