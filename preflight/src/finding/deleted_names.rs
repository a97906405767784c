//! Files with a deleted name and another one: CRIU refers to them by links that it makes (`link-remap`).
//!
//! The links are in a checkpoint only where it has the files themselves: in the container's own tmpfs, and in
//! its pod's /dev/shm. CRIU removes them at the end of the dump, so nothing else that is copied to another
//! node has them. A container with such a file elsewhere is refused, as CRIU would at its end, unless its
//! user wants links there.

use std::path::{Path, PathBuf};

use firn_host::mountinfo::{self, MountEntry};
use firn_host::{DeletedName, procfs};

use crate::Refusal;

/// File systems of the kernel's own objects, on which CRIU makes no link.
const OBJECTS: [&str; 11] = [
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "mqueue",
    "proc",
    "securityfs",
    "sysfs",
    "tracefs",
];

/// Whether CRIU has to make links: there are files with a deleted name and another one, and all are in the
/// tmpfs mounts `tmpfs`. `init` is the first process of the container; `users_links`: CRIU makes links
/// everywhere, by its user's configuration.
pub(super) fn inspect(
    init: i32,
    dumped: &[i32],
    tmpfs: &[PathBuf],
    users_links: bool,
) -> Result<bool, Refusal> {
    let mut linked = Vec::new();
    for &pid in dumped {
        let files = DeletedName::of_process(pid);
        if files.is_empty() {
            continue;
        }
        // Those of init, too: a process with another root directory sees only the mounts below it.
        let mounts = [pid, init].map(|pid| mountinfo::of_process(pid).unwrap_or_default());
        let mounts = mounts.concat();
        for file in files {
            match is_in_image(&file, &mounts, tmpfs) {
                None => {}
                Some(false) if users_links => return Ok(false),
                Some(false) => {
                    return Err(Refusal::DeletedName {
                        pid: file.pid,
                        comm: procfs::comm(file.pid),
                        path: file.path,
                    });
                }
                Some(true) => linked.push(file),
            }
        }
    }
    match linked
        .iter()
        .find_map(|file| Some((file, link_in_the_way(file)?)))
    {
        None => Ok(!linked.is_empty()),
        Some((file, path)) => Err(Refusal::CriuLink {
            pid: file.pid,
            comm: procfs::comm(file.pid),
            path,
        }),
    }
}

/// None for a file of which CRIU makes no link: on no mount of the container, as the kernel's rings for
/// asynchronous I/O; or of a process that has ended, below /proc.
fn is_in_image(file: &DeletedName, mounts: &[MountEntry], tmpfs: &[PathBuf]) -> Option<bool> {
    let mount = mounts.iter().find(|mount| mount.id == file.mount)?;
    if OBJECTS.contains(&mount.fs_type.as_str()) {
        return None;
    }
    let is_tmpfs = mount.fs_type == "tmpfs" && mount.root == Path::new("/");
    Some(is_tmpfs && tmpfs.contains(&mount.mount_point))
}

/// A link that seems to be CRIU's: after a dump in which CRIU was killed, firn could not distinguish it from
/// those of that dump.
fn link_in_the_way(file: &DeletedName) -> Option<PathBuf> {
    // Where the directory cannot be looked at, CRIU makes no link either.
    let links = file.criu_links().ok()?;
    Some(links.dir.join(links.names.first()?))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::process::{Command, Stdio};

    use super::*;

    /// A child has the file: other tests look at this process, too. It ends with its standard input.
    #[test]
    fn only_files_in_the_containers_own_tmpfs_are_in_the_image() {
        let dir = tempfile::tempdir().unwrap();
        let (deleted, other) = (dir.path().join("deleted"), dir.path().join("other"));
        let file = File::create(&deleted).unwrap();
        // Nothing but the child keeps it.
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(file).spawn();
        let mut child = child.unwrap();
        fs::hard_link(&deleted, &other).unwrap();
        fs::remove_file(&deleted).unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let its = DeletedName::of_process(pid).into_iter();
        let its: Vec<_> = its.filter(|file| file.path == deleted).collect();
        let mount = |id, root: &str, fs_type: &str| MountEntry {
            id,
            root: root.into(),
            mount_point: "/dev/shm".into(),
            fs_type: fs_type.into(),
            ..MountEntry::default()
        };
        let id = its[0].mount;
        let tmpfs = ["/dev".into(), "/dev/shm".into()];
        let is_in = |mount, tmpfs: &[PathBuf]| is_in_image(&its[0], &[mount], tmpfs);
        assert_eq!(is_in(mount(id, "/", "tmpfs"), &tmpfs), Some(true));
        let bind = is_in(mount(id, "/", "tmpfs"), &tmpfs[..1]);
        assert_eq!(bind, Some(false), "a tmpfs of the host");
        assert_eq!(is_in(mount(id, "/part", "tmpfs"), &tmpfs), Some(false));
        assert_eq!(is_in(mount(id, "/", "overlay"), &tmpfs), Some(false));
        assert_eq!(is_in(mount(id + 1, "/", "tmpfs"), &tmpfs), None);
        assert_eq!(is_in(mount(id, "/", "proc"), &tmpfs), None);
        assert!(
            !inspect(pid, &[pid], &tmpfs, true).unwrap(),
            "it is on no such mount"
        );
        assert!(!inspect(pid, &[i32::MAX], &tmpfs, false).unwrap());
        let refusal = inspect(pid, &[pid], &tmpfs, false).unwrap_err();
        assert!(
            refusal.to_string().contains(&*deleted.to_string_lossy()),
            "{refusal}"
        );
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
