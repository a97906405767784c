//! The calls that unmount. On a thread of their own: see `mounts`.

use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use super::{MountError, mounted};

/// How often a busy mount is tried again.
const BUSY_ATTEMPTS: usize = 50;

/// Pause before a busy mount is tried again: somebody who just looked at it (a scanner, a dying process) is gone then.
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// What to do with a mount that stays busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Busy {
    /// Report it.
    Fail,
    /// Take it out of the directory tree at once; it ends with its last user.
    Detach,
}

/// Unmounts all that is mounted at and below `path`, deepest first; tries all before the first failure is reported.
pub(super) fn tree(path: &Path, busy: Busy) -> Result<(), MountError> {
    let unmount = |source| MountError::Unmount {
        path: path.to_owned(),
        source,
    };
    // The kernel lists mounts by their real paths.
    let path = match path.canonicalize() {
        Ok(path) => path,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(unmount(error)),
    };
    let mounts = mounted().map_err(|source| MountError::List { source })?;
    let mut points: Vec<PathBuf> = mounts
        .into_iter()
        .map(|mount| mount.mount_point)
        .filter(|point| point.starts_with(&path))
        .collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    points.dedup();
    let mut first = Ok(());
    for point in points {
        first = first.and(all_at(&point, busy));
    }
    first
}

/// Unmounts all mounts that lie over each other at one point.
fn all_at(point: &Path, busy: Busy) -> Result<(), MountError> {
    loop {
        match patiently(point, busy) {
            Ok(()) => {}
            // Nothing is mounted here any more, or the point went with another mount.
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(errno) => {
                return Err(MountError::Unmount {
                    path: point.to_owned(),
                    source: errno.into(),
                });
            }
        }
    }
}

fn patiently(point: &Path, busy: Busy) -> nix::Result<()> {
    for _ in 0..BUSY_ATTEMPTS {
        match umount2(point, MntFlags::UMOUNT_NOFOLLOW) {
            Err(Errno::EBUSY) => sleep(BUSY_PAUSE),
            other => return other,
        }
    }
    match busy {
        Busy::Fail => Err(Errno::EBUSY),
        Busy::Detach => umount2(point, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH),
    }
}
