//! Mounts for tests, in a mount namespace of each test's own. Needs root.

use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use tempfile::TempDir;

/// A temporary directory in a private mount namespace, which ends with the test's thread, together with all
/// its mounts.
pub struct Private(TempDir);

impl Private {
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // A mounted directory could not be removed.
        umount2(self.path(), MntFlags::MNT_DETACH).unwrap();
    }
}

pub fn private_dir() -> Option<Private> {
    if let Err(errno) = unshare(CloneFlags::CLONE_NEWNS) {
        eprintln!("skipped: needs root for a mount namespace ({errno})");
        return None;
    }
    mount(
        None::<&str>,
        "/",
        None::<&str>,
        MsFlags::MS_PRIVATE | MsFlags::MS_REC,
        None::<&str>,
    )
    .unwrap();
    let dir = TempDir::new().unwrap();
    // Overlay layers need a file system that is not an overlay itself.
    tmpfs_at(dir.path());
    Some(Private(dir))
}

pub fn tmpfs_at(path: &Path) {
    mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
}
