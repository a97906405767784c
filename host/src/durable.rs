//! Files that are on their disk: write-back that fails later takes nothing away from them.
//!
//! `write` and `close` succeed once the page cache has the bytes. A full thin volume, a quota or a disk that
//! fails shows when the kernel writes them back, and only a sync of that very file reports it. `syncfs` is
//! not enough: it may have nothing to report to the descriptor that calls it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use crate::reopen_regular;

/// What is not on its disk, and why.
#[derive(Debug, thiserror::Error)]
#[error("{} is not on its disk", path.display())]
pub struct NotOnDisk {
    pub path: PathBuf,
    pub source: io::Error,
}

impl NotOnDisk {
    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { path, source }
    }
}

/// Syncs a regular file, which is no link.
pub fn sync_file(path: &Path) -> Result<(), NotOnDisk> {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    let synced = open(path, flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(reopen_regular)
        .and_then(|file| file.sync_all());
    synced.map_err(NotOnDisk::at(path))
}

/// Syncs a directory: the names in it.
pub fn sync_names(dir: &Path) -> Result<(), NotOnDisk> {
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(NotOnDisk::at(dir))
}

/// Syncs the regular files of a directory whose names are meant, and then the directory. Fails soon after
/// `stop` is set.
pub fn sync_files(dir: &Path, is_meant: impl Fn(&OsStr) -> bool, stop: &AtomicBool) -> Result<(), NotOnDisk> {
    for entry in fs::read_dir(dir).map_err(NotOnDisk::at(dir))? {
        let entry = entry.map_err(NotOnDisk::at(dir))?;
        if stop.load(Ordering::Relaxed) {
            return Err(NotOnDisk::at(dir)(ErrorKind::Interrupted.into()));
        }
        let kind = entry.file_type().map_err(NotOnDisk::at(dir))?;
        if kind.is_file() && is_meant(&entry.file_name()) {
            sync_file(&entry.path())?;
        }
    }
    // Order matters: the names are worth something once what they name is there.
    sync_names(dir)
}

/// Syncs all regular files of a directory and below it, and then the directories. Follows no link. Fails
/// soon after `stop` is set.
pub fn sync_tree(dir: &Path, stop: &AtomicBool) -> Result<(), NotOnDisk> {
    for entry in fs::read_dir(dir).map_err(NotOnDisk::at(dir))? {
        let entry = entry.map_err(NotOnDisk::at(dir))?;
        if entry.file_type().map_err(NotOnDisk::at(dir))?.is_dir() {
            sync_tree(&entry.path(), stop)?;
        }
    }
    sync_files(dir, |_| true, stop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_is_no_regular_file_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("below")).unwrap();
        for name in ["pages-1.img", "below/core-1.img"] {
            fs::write(at(name), "x").unwrap();
        }
        symlink("/nonexistent", at("parent")).unwrap();
        symlink("pages-1.img", at("link")).unwrap();
        // Nobody reads from it: opening it would wait.
        nix::unistd::mkfifo(&at("fifo"), Mode::S_IRUSR).unwrap();
        let go = AtomicBool::new(false);
        sync_tree(dir.path(), &go).unwrap();
        sync_files(dir.path(), |_| true, &go).unwrap();
        assert!(sync_file(&at("parent")).is_err() && sync_file(&at("link")).is_err());
        assert!(sync_file(&at("fifo")).is_err());
    }

    #[test]
    fn a_sync_that_is_stopped_has_failed() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("pages-1.img"), "x").unwrap();
        let stopped = sync_tree(dir.path(), &AtomicBool::new(true)).unwrap_err();
        assert_eq!(stopped.source.kind(), ErrorKind::Interrupted);
        let gone = sync_tree(&dir.path().join("none"), &AtomicBool::new(false)).unwrap_err();
        assert_eq!(gone.path, dir.path().join("none"));
        assert!(sync_names(&gone.path).is_err());
    }
}
