//! A store: a directory that holds the memory of checkpoints in pieces, each of them once.
//!
//! ```text
//! firn-store.json     format, version, id
//! lock                held shared by writers, alone by gc
//! extents/ab/abcd...  4 MiB of memory, named by their digest
//! images/0123...      what the memory of one checkpoint consists of, named by its digest
//! pinned/0123...      gc keeps the index of this name
//! released/0123...    somebody has stated that the checkpoint of this index is gone
//! unreferenced/0123.. since when gc has seen nothing that names it
//! new/                what is being written
//! ```
//!
//! docs/reference/store.md describes it. Invariants:
//! - An extent or index in its place is whole: it was durable before it got its name.
//! - Whoever reads one compares its content with its name. So nothing depends on who has written it, and a
//!   copied store may be hostile. Its directories are still refused when others than root can enter them:
//!   they hold the memory of containers.
//! - Nodes may share the directory. Only rename and flock have to work between them.
//! - Extents and indexes are removed by `gc` alone, while it holds the lock.
//! - A store that encrypts has extents under other names ([`Form::name`]). An index, and whoever asks for an
//!   extent, names it by its digest.
#![forbid(unsafe_code)]

pub mod block_hash;
mod contents;
mod description;
mod digest;
mod dir;
mod error;
#[cfg(any(test, fuzzing, feature = "fixtures"))]
#[doc(hidden)]
pub mod fixtures;
mod form;
mod index;
mod layout;
mod machine;
mod marks;
mod owner;
mod record;
mod removal;
pub mod threads;
mod writer;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_host::UnlessAbsent;
use firn_host::bounded::read_at_most;

pub use description::Description;
pub use digest::{Digest, NotADigest};
pub use dir::UntrustedDir;
pub use error::StoreError;
use error::{io, is_not_there, is_wrong_kind};
pub use form::{Form, Key, Packing};
#[cfg(any(test, fuzzing, feature = "fixtures"))]
#[doc(hidden)]
pub use index::to_bytes as write_index;
pub use index::{Index, IndexError, Piece};
pub use layout::{EXTENTS, IMAGES};
pub use machine::machine;
pub use marks::{Noted, Pin};
pub use owner::{Owner, Reader};
pub use record::expect_mounted;
pub use record::mount_of;
pub use removal::{Decisions, Kept, Needs, Removal, Rules};
pub use writer::Writer;
pub use writer::is_zero;

/// Bytes of an extent; the last one of a range may be shorter. Part of the format.
pub const EXTENT: usize = 4 << 20;

/// A directory that the operator names as `[images] store`.
#[derive(Clone, Debug)]
pub struct Store(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    root: PathBuf,
    id: String,
    form: Form,
    dir: UntrustedDir,
    extents: UntrustedDir,
    images: UntrustedDir,
}

impl Store {
    /// Opens it.
    ///
    /// # Errors
    /// Where there is none, others than root can enter it, a newer firn has made it, or the key is not its
    /// own.
    pub fn open(root: &Path, packing: &Packing) -> Result<Self, StoreError> {
        let root = without_slash(root);
        Self::of(layout::root(&root)?, root, packing)
    }

    /// Opens it, or makes it in an empty or absent directory.
    ///
    /// # Errors
    /// As [`Store::open`], and where the directory holds anything else.
    pub fn create(root: &Path, packing: &Packing) -> Result<Self, StoreError> {
        let root = without_slash(root);
        let dir = layout::made_root(&root)?;
        layout::complete(&dir, &root, packing)?;
        Self::of(dir, root, packing)
    }

    fn of(dir: UntrustedDir, root: PathBuf, packing: &Packing) -> Result<Self, StoreError> {
        let (id, form) = layout::described(&dir, &root, packing)?;
        Ok(Self(Arc::new(Opened {
            id,
            form,
            extents: layout::inside(&dir, &root, layout::EXTENTS)?,
            images: layout::inside(&dir, &root, layout::IMAGES)?,
            root,
            dir,
        })))
    }

    /// The random id of the store.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.0.root
    }

    /// How it writes what it holds.
    pub fn form(&self) -> &Form {
        &self.0.form
    }

    /// The index of this name.
    pub fn index(&self, id: &Digest) -> Result<Index, StoreError> {
        self.verified_index(id).map(|(index, _)| index)
    }

    /// An index with its content, which another store can have as it is.
    pub fn verified_index(&self, id: &Digest) -> Result<(Index, Vec<u8>), StoreError> {
        let path = || self.0.root.join(layout::IMAGES).join(id.short());
        let unusable = |error| match error {
            IndexError::Version(found) => StoreError::Version { path: path(), found },
            source => StoreError::Index { path: path(), source },
        };
        let file = match self.images_dir().file(&id.to_string()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(self.missing_one("index", id));
            }
            Err(error) if is_wrong_kind(&error) => return Err(unusable(IndexError::Content)),
            opened => opened.map_err(io("open", path()))?,
        };
        let most = self.form().most(Index::MAX_BYTES);
        let bytes = read_at_most(file, most).map_err(io("read", path()))?;
        let bytes = bytes.ok_or_else(|| unusable(IndexError::TooLarge))?;
        let bytes = self.form().index(id, bytes);
        let bytes = bytes.ok_or_else(|| unusable(IndexError::Content))?;
        Ok((Index::from_bytes(&bytes, id).map_err(unusable)?, bytes))
    }

    /// Reads an extent into a buffer of its length, and compares its content with its name.
    pub fn read(&self, extent: &Digest, buffer: &mut [u8]) -> Result<(), StoreError> {
        if self.form().is_plain() {
            self.read_plain(extent, buffer)
        } else {
            self.read_packed(extent, &self.form().name(extent), buffer)
        }
    }

    /// Compares an extent of this name in the store, and of `size` bytes there, with its name. The buffer has
    /// [`EXTENT`] bytes.
    pub fn compare(&self, name: &Digest, size: u64, buffer: &mut [u8]) -> Result<(), StoreError> {
        let plain = usize::try_from(size).ok().and_then(|size| buffer.get_mut(..size));
        match (self.form().is_plain(), plain) {
            (true, Some(buffer)) => self.read_plain(name, buffer),
            (true, None) => Err(self.damaged(name)),
            (false, _) => self.unpacked(name, name).map(drop),
        }
    }

    /// An extent that has another name in the store.
    fn read_packed(&self, extent: &Digest, name: &Digest, buffer: &mut [u8]) -> Result<(), StoreError> {
        let bytes = self.unpacked(extent, name)?;
        if bytes.len() != buffer.len() {
            return Err(self.damaged(name));
        }
        buffer.copy_from_slice(&bytes);
        Ok(())
    }

    fn unpacked(&self, extent: &Digest, name: &Digest) -> Result<Vec<u8>, StoreError> {
        let file = self.opened_extent(extent, name)?;
        let stored = read_at_most(file, self.form().most(EXTENT as u64));
        let stored = stored.map_err(io("read", self.extent_path(name)))?;
        let bytes = stored.and_then(|stored| self.form().extent(name, stored));
        bytes.ok_or_else(|| self.damaged(name))
    }

    fn read_plain(&self, extent: &Digest, buffer: &mut [u8]) -> Result<(), StoreError> {
        let path = || self.extent_path(extent);
        let mut file = self.opened_extent(extent, extent)?;
        let length = file.metadata().map_err(io("look at", path()))?.len();
        match file.read_exact(buffer) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
            read => read.map_err(io("read", path()))?,
        }
        if length == buffer.len() as u64 && Digest::of(buffer) == *extent {
            Ok(())
        } else {
            Err(self.damaged(extent))
        }
    }

    fn damaged(&self, name: &Digest) -> StoreError {
        StoreError::Extent {
            path: self.extent_path(name),
        }
    }

    /// The extents of an index that are not there or have another size. Their content is not read.
    pub fn missing(&self, index: &Index) -> Result<Vec<Digest>, StoreError> {
        let mut extents: Vec<(Digest, usize)> = index
            .extents()
            .filter_map(|(extent, length)| Some((extent?, length)))
            .collect();
        extents.sort_unstable();
        extents.dedup();
        let mut missing = Vec::new();
        for (extent, length) in extents {
            if !self.has(&extent, length as u64)? {
                missing.push(extent);
            }
        }
        missing.dedup();
        Ok(missing)
    }

    /// Refuses an index of which extents are not there. Their content is not read.
    pub fn expect(&self, index: &Index) -> Result<(), StoreError> {
        match self.missing(index)?.first() {
            None => Ok(()),
            Some(extent) => Err(self.missing_one("extent", extent)),
        }
    }

    /// Whether there is an extent of this name and size.
    fn has(&self, extent: &Digest, length: u64) -> Result<bool, StoreError> {
        let digest = self.form().name(extent);
        let name = digest.to_string();
        let found = match self.extents_dir().inside(&name[..2]) {
            Err(error) if is_not_there(&error) => return Ok(false),
            inside => inside.and_then(|inside| size(&inside, &name)),
        };
        let found = found.map_err(io("look for", self.extent_path(&digest)))?;
        Ok(found.is_some_and(|size| self.form().may_hold(size, length)))
    }

    /// The size of the file of an extent that has this name in the store; 0 if there is none.
    fn size_of_extent(&self, name: &Digest) -> Result<u64, StoreError> {
        let text = name.to_string();
        let found = match self.extents_dir().inside(&text[..2]) {
            Err(error) if is_not_there(&error) => return Ok(0),
            fan => fan.and_then(|fan| size(&fan, &text)),
        };
        Ok(found
            .map_err(io("look for", self.extent_path(name)))?
            .unwrap_or(0))
    }

    /// An extent that has this name in the store.
    fn opened_extent(&self, extent: &Digest, name: &Digest) -> Result<File, StoreError> {
        let text = name.to_string();
        let opened = self
            .extents_dir()
            .inside(&text[..2])
            .and_then(|fan| fan.file(&text));
        match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(self.missing_one("extent", extent)),
            Err(error) if is_wrong_kind(&error) => Err(self.damaged(name)),
            opened => opened.map_err(io("open", self.extent_path(name))),
        }
    }

    /// Of an extent that has this name in the store.
    fn extent_path(&self, name: &Digest) -> PathBuf {
        self.0.root.join(name.extent_path())
    }

    fn missing_one(&self, kind: &'static str, digest: &Digest) -> StoreError {
        StoreError::Missing {
            path: self.0.root.clone(),
            id: self.0.id.clone(),
            kind,
            digest: *digest,
        }
    }

    fn dir(&self) -> &UntrustedDir {
        &self.0.dir
    }

    fn extents_dir(&self) -> &UntrustedDir {
        &self.0.extents
    }

    fn images_dir(&self) -> &UntrustedDir {
        &self.0.images
    }

    fn inside(&self, name: &'static str) -> Result<UntrustedDir, StoreError> {
        layout::inside(self.dir(), self.root(), name)
    }
}

/// A slash at the end of a path makes the kernel follow the link before it.
fn without_slash(root: &Path) -> PathBuf {
    root.components().collect()
}

/// The size of a regular file in a directory, if there is one.
fn size(dir: &UntrustedDir, name: &str) -> io::Result<Option<u64>> {
    let found = dir.metadata(name).if_present()?;
    Ok(found
        .filter(|metadata| metadata.is_file())
        .map(|metadata| metadata.len()))
}

#[cfg(test)]
mod tests;
