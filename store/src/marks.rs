//! What is noted of an index, as a file of its name in a directory of the store: pins, what was stated of its
//! checkpoint, and since when gc has seen nothing that names it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::time::Duration;

use firn_host::UnlessAbsent;
use firn_host::bounded::read_at_most;
use nix::errno::Errno;
use nix::fcntl::{FlockArg, OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::contents::digests;
use super::error::io;
use super::layout::{PINNED, RELEASED, UNREFERENCED};
use super::{Digest, Store, StoreError, layout};

/// Content of a pin that `firn checkpoint` has made. That of an operator is empty.
const BY_CHECKPOINT: &[u8] = b"checkpoint\n";
/// More than a mark has.
const LIMIT: u64 = 64;
/// A mark, before it gets its name.
const NEW: &str = ".new";

/// Who has pinned an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// The operator. It lasts until `firn store unpin`.
    Operator,
    /// The checkpoint that depends on it. It lasts until that is removed by `firn images prune`, too.
    Checkpoint,
}

/// What is noted of an index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// gc keeps it.
    pub pin: Option<Pin>,
    /// Somebody has stated that its checkpoint is gone, or needs no pin.
    pub is_released: bool,
    /// Since when gc has seen nothing that names it, in time since 1970.
    pub unreferenced: Option<Duration>,
}

impl Store {
    /// Indexes that are pinned, by whomever.
    pub fn pinned(&self) -> Result<BTreeSet<Digest>, StoreError> {
        let pinned = self
            .dir()
            .inside(PINNED)
            .and_then(|dir| digests(&dir))
            .if_present();
        let pinned = pinned.map_err(io("list", self.root().join(PINNED)))?;
        Ok(pinned.into_iter().flatten().collect())
    }

    /// What is noted of an index.
    pub fn noted(&self, image: &Digest) -> Result<Noted, StoreError> {
        let pin = self.mark(PINNED, image)?;
        let since = self.mark(UNREFERENCED, image)?;
        // A mark without a time has just been made.
        let seconds = since.map(|text| String::from_utf8_lossy(&text).trim().parse().unwrap_or(u64::MAX));
        Ok(Noted {
            pin: pin.map(|by| {
                if by == BY_CHECKPOINT {
                    Pin::Checkpoint
                } else {
                    Pin::Operator
                }
            }),
            is_released: self.mark(RELEASED, image)?.is_some(),
            unreferenced: seconds.map(Duration::from_secs),
        })
    }

    /// Makes gc keep an index. A pin of the operator's stays one.
    pub fn pin(&self, image: &Digest, by: Pin) -> Result<(), StoreError> {
        // gc cannot remove it meanwhile.
        let _lock = layout::lock(self.dir(), self.root(), FlockArg::LockSharedNonblock)?;
        if !self.images()?.contains(image) {
            return Err(self.missing_one("index", image));
        }
        match by {
            Pin::Operator => self.set(PINNED, image, b"")?,
            Pin::Checkpoint if self.noted(image)?.pin.is_none() => self.set(PINNED, image, BY_CHECKPOINT)?,
            Pin::Checkpoint => {}
        }
        self.unset(RELEASED, image).map(drop)
    }

    /// Removes the pin, if there is one, and notes that its checkpoint needs none: gc removes the index when
    /// nothing names it. Returns whether there was a pin.
    pub fn unpin(&self, image: &Digest) -> Result<bool, StoreError> {
        let _lock = layout::lock(self.dir(), self.root(), FlockArg::LockSharedNonblock)?;
        // Order matters: after a failure it is kept.
        if self.images()?.contains(image) {
            self.set(RELEASED, image, b"")?;
        }
        self.unset(PINNED, image)
    }

    /// Notes that a checkpoint of this index was removed by its operator. A pin of the operator's stays.
    pub fn release(&self, image: &Digest) -> Result<(), StoreError> {
        match self.noted(image)?.pin {
            Some(Pin::Operator) => Ok(()),
            Some(Pin::Checkpoint) | None => self.unpin(image).map(drop),
        }
    }

    /// Notes since when nothing names an index, in time since 1970; none: something does. The caller holds
    /// the lock alone.
    pub(super) fn set_unreferenced(&self, image: &Digest, since: Option<Duration>) -> Result<(), StoreError> {
        match since {
            Some(since) => self.set(UNREFERENCED, image, since.as_secs().to_string().as_bytes()),
            None => self.unset(UNREFERENCED, image).map(drop),
        }
    }

    /// Removes all that is noted of an index, which is gone.
    pub(super) fn forget(&self, image: &Digest) -> Result<(), StoreError> {
        for dir in [PINNED, RELEASED, UNREFERENCED] {
            self.unset(dir, image)?;
        }
        Ok(())
    }

    /// The content of a mark; none if there is none.
    fn mark(&self, dir: &'static str, image: &Digest) -> Result<Option<Vec<u8>>, StoreError> {
        let path = || self.root().join(dir).join(image.to_string());
        let file = self
            .dir()
            .inside(dir)
            .and_then(|marks| marks.file(&image.to_string()))
            .if_present();
        let Some(file) = file.map_err(io("open", path()))? else {
            return Ok(None);
        };
        let bytes = read_at_most(file, LIMIT).map_err(io("read", path()))?;
        Ok(Some(bytes.unwrap_or_default()))
    }

    fn set(&self, dir: &'static str, image: &Digest, content: &[u8]) -> Result<(), StoreError> {
        let set = || {
            layout::make(self.dir(), dir)?;
            let marks = self.dir().inside(dir)?;
            // Others may set one at the same time: the content of none is cut off.
            let (name, new) = (image.to_string(), format!("{NEW}-{image}-{}", std::process::id()));
            let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let file = openat(&marks, new.as_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
            let mut file = File::from(file);
            file.set_len(0)?;
            file.write_all(content)?;
            file.sync_all()?;
            renameat(&marks, new.as_str(), &marks, name.as_str())?;
            marks.handle()?.sync_all()
        };
        set().map_err(io("write", self.root().join(dir).join(image.to_string())))
    }

    /// Returns whether there was one.
    fn unset(&self, dir: &'static str, image: &Digest) -> Result<bool, StoreError> {
        let path = self.root().join(dir).join(image.to_string());
        let marks = self.dir().inside(dir).if_present();
        let Some(marks) = marks.map_err(io("open", &path))? else {
            return Ok(false);
        };
        match unlinkat(&marks, image.to_string().as_str(), UnlinkatFlags::NoRemoveDir) {
            Err(Errno::ENOENT) => Ok(false),
            removed => removed
                .map(|()| true)
                .map_err(|error| io("remove", path)(io::Error::from(error))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::Packing;

    #[test]
    fn a_mark_is_roots_alone_and_goes_through_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("store");
        let store = Store::create(&root, &Packing::default()).unwrap();
        let (one, two) = (Digest::of(b"one"), Digest::of(b"two"));
        let since = Some(Duration::from_secs(1));
        store.set_unreferenced(&one, since).unwrap();
        let marks = root.join(UNREFERENCED);
        let mode = fs::metadata(marks.join(one.to_string()))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7777, 0o600);

        let elsewhere = dir.path().join("elsewhere");
        fs::write(&elsewhere, "kept").unwrap();
        let new = marks.join(format!("{NEW}-{two}-{}", std::process::id()));
        symlink(&elsewhere, &new).unwrap();
        store.set_unreferenced(&two, since).unwrap_err();
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "kept");
        assert!(!marks.join(two.to_string()).exists());
    }
}
