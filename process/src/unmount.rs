//! Unmounts on a separate thread: a mount that hangs (a network file system) blocks no other work.
//!
//! Every call may be repeated; a path that is not mounted is no error.

use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use nix::sched::{CloneFlags, unshare};
use tokio::sync::oneshot;

use firn_host::UnlessAbsent;
use firn_host::mountinfo::mounted;
use firn_host::ordered::sort_few_by_key;

/// Deadline of a mount or unmount.
const LIMIT: Duration = Duration::from_secs(60);

/// A failed unmount.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    /// The mounts cannot be listed.
    #[error("cannot list mounts")]
    List { source: io::Error },
    /// The kernel refused to unmount.
    #[error("cannot unmount {path}")]
    Unmount { path: PathBuf, source: io::Error },
    /// The thread for the calls could not be started, or ended early.
    #[error("cannot run a thread to mount and unmount")]
    Thread { source: io::Error },
}

/// How often the unmount of a busy mount is tried.
const BUSY_ATTEMPTS: usize = 50;

/// Pause between the attempts: a program that used the mount only briefly (a scanner, a dying process) is
/// gone then.
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// The handling of a mount that stays busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Busy {
    /// Report it.
    Fail,
    /// Detach it from the directory tree at once; it ends with its last user.
    Detach,
}

/// Unmounts everything at and below `path`, deepest first; tries all mounts before it reports the first
/// failure.
fn tree(path: &Path, busy: Busy) -> Result<(), UnmountError> {
    let unmount = |source| UnmountError::Unmount {
        path: path.to_owned(),
        source,
    };
    // The kernel lists mounts by their real paths.
    let Some(path) = path.canonicalize().if_present().map_err(unmount)? else {
        return Ok(());
    };
    let mounts = mounted().map_err(|source| UnmountError::List { source })?;
    let mut points: Vec<PathBuf> = mounts
        .into_iter()
        .map(|mount| mount.mount_point)
        .filter(|point| point.starts_with(&path))
        .collect();
    sort_few_by_key(&mut points, |point| std::cmp::Reverse(point.components().count()));
    points.dedup();
    let mut first = Ok(());
    for point in points {
        first = first.and(all_at(&point, busy));
    }
    first
}

/// Unmounts all mounts that are stacked at one point.
fn all_at(point: &Path, busy: Busy) -> Result<(), UnmountError> {
    loop {
        match patiently(point, busy) {
            Ok(()) => {}
            // Nothing is mounted here any more, or the mount point was removed with another mount.
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(errno) => {
                return Err(UnmountError::Unmount {
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

/// Unmounts everything at and below `path`. A mount that stays busy is an error.
pub async fn unmount_recursive(path: &Path) -> Result<(), UnmountError> {
    let path = path.to_owned();
    on_thread(move || tree(&path, Busy::Fail)).await
}

/// Unmounts everything at and below `path` even if it is in use: for mounts that killed programs left behind,
/// before a directory is deleted. A busy mount disappears from the tree at once and ends with its last user.
pub async fn unmount_below(path: &Path) -> Result<(), UnmountError> {
    let path = path.to_owned();
    on_thread(move || tree(&path, Busy::Detach)).await
}

/// Runs `work` to its end on a thread with its own working directory, even if the caller is dropped.
pub async fn on_thread<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: From<UnmountError> + Send + 'static,
{
    let (done, result) = oneshot::channel();
    let run = move || {
        let result = unshare(CloneFlags::CLONE_FS)
            .map_err(|errno| thread_error(errno.into()))
            .and_then(|()| work());
        // The caller may have been dropped; the mounts are done all the same.
        let _caller_gone = done.send(result);
    };
    let thread = std::thread::Builder::new()
        .name("firn-mount".to_owned())
        .spawn(run);
    thread.map_err(thread_error)?;
    let lost = |_| thread_error(io::ErrorKind::BrokenPipe.into());
    // A file server that does not answer blocks this thread only.
    let late = |_| thread_error(io::ErrorKind::TimedOut.into());
    let ended = tokio::time::timeout(LIMIT, result).await;
    ended.map_err(late)?.map_err(lost)?
}

fn thread_error<E: From<UnmountError>>(source: io::Error) -> E {
    UnmountError::Thread { source }.into()
}
