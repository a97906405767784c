//! Mounts the root file system that containerd describes, and takes mounts away again.
//!
//! All of it runs on threads made for one call, each with a working directory of its own: an overlay with
//! many layers is mounted by relative paths, and a mount that hangs (a network file system) hangs no one
//! else. What a helper program mounts is left to that, a child of the shim's main thread.
//!
//! Invariants: a call that fails to mount leaves nothing mounted. Unmounting may be repeated, and what is not
//! there is no error. Nothing here follows a link out of the root file system.

mod flags;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod helper;
mod idmap;
mod loopdev;
mod mount;
mod overlay;

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use containerd_shim_protos::types::mount::Mount;

use firn_process::unmount::{UnmountError, on_thread, unmount_recursive};

use firn_host::Chain;
use firn_process::reaper::Reaper;

use helper::Helper;

/// A mount that could not be made or removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    /// The option is meant for containerd, which should have acted on it.
    #[error("mount option {option} is reserved for containerd")]
    Reserved {
        /// The option.
        option: String,
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
    /// The kernel refused the mount, or the program that was to make it has failed.
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
        source: Box<dyn Error + Send + Sync>,
    },
    /// Unmounting failed, or the thread for the calls.
    #[error(transparent)]
    Unmount(#[from] UnmountError),
}

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

#[cfg(test)]
mod tests;
