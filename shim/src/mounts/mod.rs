//! Mounts the root file system that containerd describes, and takes mounts away again.
//!
//! All of it runs on threads made for one call, each with a working directory of its own: an overlay with many layers
//! is mounted by relative paths, and a mount that hangs (a network file system) hangs no one else. What a helper program
//! mounts is left to that, a child of the shim's main thread.
//!
//! Invariants: a call that fails to mount leaves nothing mounted. Unmounting may be repeated, and what is not there
//! is no error. Nothing here follows a link out of the root file system.

mod flags;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod helper;
mod idmap;
mod loopdev;
mod mount;
mod overlay;
mod unmount;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use containerd_shim_protos::types::mount::Mount;
use nix::sched::{CloneFlags, unshare};
use tokio::sync::oneshot;

pub(crate) use firn_host::mountinfo::mounted;

use crate::logger::Chain;
use crate::reaper::{OutputError, Reaper};

use helper::Helper;
use unmount::Busy;

/// A mount that could not be made or removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    /// The option is meant for containerd, which should have acted on it.
    #[error("mount option {option} is reserved for containerd")]
    Reserved {
        /// The option.
        option: String,
    },
    /// The helper program could not be run, or did not end.
    #[error("cannot mount {source_name} ({fs_type}) on {}", target.display())]
    Helper {
        /// What is to be mounted.
        source_name: String,
        /// Its type.
        fs_type: String,
        /// Where.
        target: PathBuf,
        /// Cause.
        source: OutputError,
    },
    /// The helper program has failed.
    #[error("cannot mount {source_name} ({fs_type}) on {}: {program} says: {said}", target.display())]
    HelperFailed {
        /// What is to be mounted.
        source_name: String,
        /// Its type.
        fs_type: String,
        /// Where.
        target: PathBuf,
        /// The helper.
        program: &'static str,
        /// Its words.
        said: String,
    },
    /// The options do not fit the page that the kernel takes.
    #[error("mount of {source_name}: options of {length} bytes are longer than {limit}")]
    TooLong {
        /// What is to be mounted.
        source_name: String,
        /// Length of the options.
        length: usize,
        /// Longest allowed.
        limit: usize,
    },
    /// The target is not there.
    #[error("cannot find mount target {} in {}", target.display(), rootfs.display())]
    Target {
        /// The root file system.
        rootfs: PathBuf,
        /// Path inside of it.
        target: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The common directory of an overlay's layers could not be entered.
    #[error("cannot enter {} to mount its layers", path.display())]
    Layers {
        /// The directory.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// No loop device could be had for a file.
    #[error("cannot make a loop device of {}", path.display())]
    Loop {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The kernel refused the mount.
    #[error("cannot {step} {source_name} ({fs_type}) on {}", target.display())]
    Mount {
        /// Which of the calls.
        step: &'static str,
        /// What is to be mounted.
        source_name: String,
        /// Its type.
        fs_type: String,
        /// Where.
        target: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The mounts cannot be listed.
    #[error("cannot list mounts")]
    List {
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// The kernel refused to unmount.
    #[error("cannot unmount {}", path.display())]
    Unmount {
        /// The mount point.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The thread for the calls could not be had, or ended early.
    #[error("cannot run a thread to mount and unmount")]
    Thread {
        /// Cause.
        #[source]
        source: io::Error,
    },
}

/// How long a mount or unmount may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Mounts everything onto `rootfs`, in order, or nothing. `reaper` runs the helpers of some types.
pub(crate) async fn mount_all(mounts: &[Mount], rootfs: &Path, reaper: &Reaper) -> Result<(), MountError> {
    for mount in mounts {
        let mounted = match Helper::of(mount) {
            Some(helper) => helper.mount(mount, rootfs, reaper).await,
            None => {
                let (mount, rootfs) = (mount.clone(), rootfs.to_owned());
                on_thread(move || mount::one(&mount, &rootfs)).await
            }
        };
        if let Err(error) = mounted {
            if let Err(left) = unmount_recursive(rootfs).await {
                log::warn!("after a failed mount: {}", Chain(&left));
            }
            return Err(error);
        }
    }
    Ok(())
}

/// Unmounts everything at and below `path`. A mount that stays busy is an error.
pub(crate) async fn unmount_recursive(path: &Path) -> Result<(), MountError> {
    let path = path.to_owned();
    on_thread(move || unmount::tree(&path, Busy::Fail)).await
}

/// Unmounts everything at and below `path` even if it is in use: for what killed programs left behind, before a
/// directory is deleted. A mount that stays busy disappears from here at once and ends with its last user.
pub(crate) async fn unmount_below(path: &Path) -> Result<(), MountError> {
    let path = path.to_owned();
    on_thread(move || unmount::tree(&path, Busy::Detach)).await
}

/// Runs `work` to its end on a thread with its own working directory, also if the caller goes away.
async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, MountError> + Send + 'static,
) -> Result<T, MountError> {
    let (done, result) = oneshot::channel();
    let run = move || {
        let result = unshare(CloneFlags::CLONE_FS)
            .map_err(|errno| MountError::Thread { source: errno.into() })
            .and_then(|()| work());
        // The caller may have gone; the mounts are as they should be all the same.
        let _caller_gone = done.send(result);
    };
    let thread = std::thread::Builder::new()
        .name("firn-mount".to_owned())
        .spawn(run);
    thread.map_err(|source| MountError::Thread { source })?;
    let lost = |_| MountError::Thread {
        source: io::ErrorKind::BrokenPipe.into(),
    };
    // A file server that does not answer keeps its thread, and nobody else.
    let late = |_| MountError::Thread {
        source: io::ErrorKind::TimedOut.into(),
    };
    let ended = tokio::time::timeout(LIMIT, result).await;
    ended.map_err(late)?.map_err(lost)?
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
