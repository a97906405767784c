//! Which files processes have open or mapped.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use firn_host::{FileId, mountinfo, proc_maps, procfs};
use nix::sys::stat::{major, minor};

/// Files of one file system that processes have, each with whether they have it by a name that is there.
pub type Held = HashMap<FileId, bool>;

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
                add(FileId::of(&metadata), metadata.is_file() && metadata.nlink() > 0);
            }
        }
    }
    held
}
