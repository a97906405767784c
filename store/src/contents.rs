//! What a store holds, for those who show it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use firn_host::UnlessAbsent;
use nix::sys::statvfs::fstatvfs;

use super::error::{io, is_not_there};
use super::layout::{EXTENTS, IMAGES, NEW};
use super::{Digest, Store, StoreError, size};
use crate::dir::UntrustedDir;

impl Store {
    /// Names of all indexes.
    pub fn images(&self) -> Result<BTreeSet<Digest>, StoreError> {
        let names = digests(self.images_dir());
        Ok(names.map_err(io("list", self.root().join(IMAGES)))?.collect())
    }

    /// The names that all extents have in the store, with the sizes of their files. What is no regular file
    /// has none.
    pub fn extents(&self) -> Result<BTreeMap<Digest, u64>, StoreError> {
        let mut found = BTreeMap::new();
        let mut visit = |fan: String| {
            let inside = match self.extents_dir().inside(&fan) {
                Err(error) if is_not_there(&error) => return Ok(()),
                inside => inside?,
            };
            for digest in digests(&inside)? {
                let name = digest.to_string();
                if name.starts_with(&fan) {
                    found.insert(digest, size(&inside, &name)?.unwrap_or(0));
                }
            }
            io::Result::Ok(())
        };
        let names = self.extents_dir().names();
        let visited = names.and_then(|names| names.into_iter().try_for_each(&mut visit));
        visited.map_err(io("list", self.root().join(EXTENTS)))?;
        Ok(found)
    }

    /// Bytes of what writers have not finished, or have left.
    pub fn unfinished(&self) -> Result<u64, StoreError> {
        let count = || {
            let new = self.dir().inside(NEW)?;
            let mut total = 0;
            for writer in new.names()? {
                let files = new.inside(&writer).and_then(|own| {
                    let sizes = own.names()?.into_iter().map(|name| size(&own, &name));
                    sizes.map(|size| Ok(size?.unwrap_or(0))).sum::<io::Result<u64>>()
                });
                // A writer may finish meanwhile.
                total += files.or_else(|error| if is_not_there(&error) { Ok(0) } else { Err(error) })?;
            }
            Ok(total)
        };
        let counted: io::Result<Option<u64>> = count().if_present();
        Ok(counted.map_err(io("count", self.root().join(NEW)))?.unwrap_or(0))
    }

    /// Bytes that its file system has left.
    pub fn free(&self) -> Result<u64, StoreError> {
        let found = fstatvfs(self.dir()).map_err(io("look at", self.root()))?;
        Ok(found.blocks_available() * found.fragment_size())
    }
}

/// The entries whose names are digests.
pub(super) fn digests(dir: &UntrustedDir) -> io::Result<impl Iterator<Item = Digest> + use<>> {
    Ok(dir.names()?.into_iter().filter_map(|name| name.parse().ok()))
}
