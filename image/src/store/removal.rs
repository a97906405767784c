//! Removing from a store: with the lock alone, so that no writer relies on what goes.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use firn_host::UnlessAbsent;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::error::{io, is_wrong_kind};
use super::{Digest, Store, StoreError, layout, writer};
use crate::dir::UntrustedDir;

/// Nobody writes while it is there.
#[derive(Debug)]
pub struct Removal<'a> {
    store: &'a Store,
    _lock: Flock<File>,
}

impl Store {
    /// Keeps writers out, to remove what is not needed. Waits for those that are at work.
    pub fn removal(&self) -> Result<Removal<'_>, StoreError> {
        let lock = layout::lock(self.dir(), self.root(), FlockArg::LockExclusiveNonblock)?;
        Ok(Removal {
            store: self,
            _lock: lock,
        })
    }
}

impl Removal<'_> {
    /// Removes an index, and not the extents that it names.
    pub fn image(&self, image: &Digest) -> Result<(), StoreError> {
        let name = image.to_string();
        let path = self.store.root().join(layout::IMAGES).join(&name);
        remove(self.store.images_dir(), &name, path)
    }

    /// Removes the extent that has this name in the store.
    pub fn extent(&self, name: &Digest) -> Result<(), StoreError> {
        let (name, path) = (name.to_string(), self.store.extent_path(name));
        let fan = self.store.extents_dir().inside(&name[..2]).if_present();
        match fan.map_err(io("open", &path))? {
            None => Ok(()),
            Some(fan) => remove(&fan, &name, path),
        }
    }

    /// Removes what writers have left that were killed.
    pub fn unfinished(&self) -> Result<(), StoreError> {
        let new = self.store.inside(layout::NEW)?;
        writer::clear(&new).map_err(io("clear", self.store.root().join(layout::NEW)))
    }
}

/// Removes a file. An empty directory that has its name goes as well.
fn remove(dir: &UntrustedDir, name: &str, path: PathBuf) -> Result<(), StoreError> {
    let remove = |flags| unlinkat(dir, name, flags).map_err(io::Error::from);
    let removed = match remove(UnlinkatFlags::NoRemoveDir) {
        Err(error) if is_wrong_kind(&error) || error.kind() == io::ErrorKind::IsADirectory => {
            remove(UnlinkatFlags::RemoveDir)
        }
        removed => removed,
    };
    removed.unless_absent().map_err(io("remove", path))
}
