//! Mounts that show other owners than their files have (options `uidmap` and `gidmap`). On a thread of their
//! own: see `mounts`.
//!
//! The kernel takes the mapping from a user namespace, which only a process can make. It maps a mount as long
//! as that is not attached, so each is cloned first.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use firn_process::sys;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use super::flags::Options;

/// A user namespace with the maps of a mount.
pub(super) struct Mapping(File);

impl Mapping {
    /// None when the mount maps nothing.
    pub(super) fn of(options: &Options) -> io::Result<Option<Self>> {
        match (&options.users, &options.groups) {
            (None, None) => Ok(None),
            (Some(users), Some(groups)) => Self::new(&lines(users)?, &lines(groups)?).map(Some),
            _ => Err(invalid("uidmap and gidmap go together only")),
        }
    }

    fn new(users: &str, groups: &str) -> io::Result<Self> {
        let child = Child(sys::child_in_user_namespace()?);
        let proc = Path::new("/proc").join(child.0.to_string());
        fs::write(proc.join("uid_map"), users)?;
        fs::write(proc.join("gid_map"), groups)?;
        // Holds the namespace when the child is gone.
        File::open(proc.join("ns/user")).map(Self)
    }

    /// Replaces the mount at `target` by its mapped clone.
    pub(super) fn remount(&self, target: &Path) -> io::Result<()> {
        let mapped = self.clone_of(target)?;
        umount2(target, MntFlags::MNT_DETACH)?;
        attach(&mapped, target)
    }

    /// A clone of what is mounted at `path`, or of the directory there, that is attached nowhere.
    fn clone_of(&self, path: &Path) -> io::Result<OwnedFd> {
        let tree = detached(path)?;
        sys::map_owners(&tree, &self.0)?;
        Ok(tree)
    }

    /// Calls `mount_overlay` where the overlay's layers have the mapping. Gives what it has mounted at
    /// `target`, to be attached there.
    ///
    /// That is in another mount namespace: no one else sees the mapped layers, and they go with it.
    pub(super) fn overlay(
        &self,
        layers: &[PathBuf],
        target: &Path,
        mount_overlay: impl FnOnce() -> io::Result<()> + Send,
    ) -> io::Result<OwnedFd> {
        let apart = || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            // What is mounted here stays here; what is unmounted outside meanwhile goes here too.
            let slave = MsFlags::MS_SLAVE | MsFlags::MS_REC;
            mount(None::<&str>, "/", None::<&str>, slave, None::<&str>)?;
            // Order matters: a layer that lies below another one is cloned before that hides it.
            let mapped: io::Result<Vec<_>> = layers.iter().map(|layer| self.clone_of(layer)).collect();
            for (mapped, layer) in mapped?.iter().zip(layers) {
                attach(mapped, layer)?;
            }
            mount_overlay()?;
            detached(target)
        };
        // A thread of its own, because this one has to attach the overlay where everybody sees it.
        let made = std::thread::scope(|scope| scope.spawn(apart).join());
        made.unwrap_or_else(|_| Err(io::Error::other("the thread that mounts has panicked")))
    }
}

fn detached(path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Ok(open_tree(CWD, path, flags)?)
}

/// Mounts a detached mount.
pub(super) fn attach(tree: &OwnedFd, target: &Path) -> io::Result<()> {
    Ok(move_mount(
        tree,
        c"",
        CWD,
        target,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )?)
}

/// The child that owns a user namespace while it is being set up.
struct Child(Pid);

impl Drop for Child {
    fn drop(&mut self) {
        // Not seen by the reaper, and gone when waited for: neither fails.
        let _ = kill(self.0, Signal::SIGKILL);
        let _ = waitpid(self.0, Some(WaitPidFlag::__WCLONE));
    }
}

/// `inside:outside:count,...` as the kernel reads it.
pub(super) fn lines(maps: &str) -> io::Result<String> {
    maps.split(',').map(line).collect()
}

fn line(map: &str) -> io::Result<String> {
    let ids: Option<Vec<u32>> = map.split(':').map(|id| id.parse().ok()).collect();
    match ids.as_deref() {
        Some([inside, outside, count]) => Ok(format!("{inside} {outside} {count}\n")),
        _ => Err(invalid("a mapping is written container-id:host-id:size")),
    }
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_as_containerd_writes_them() {
        assert_eq!(lines("0:1000:10").unwrap(), "0 1000 10\n");
        assert_eq!(lines("0:1000:10,10:5000:1").unwrap(), "0 1000 10\n10 5000 1\n");
        for wrong in ["", "0:1000", "0:1000:10:1", "0:-1:10", "a:b:c", "0:1:2,"] {
            assert!(lines(wrong).is_err(), "{wrong:?}");
        }
    }
}
