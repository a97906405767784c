//! What memory is read from: the store of a directory or of a bucket.

use std::collections::{BTreeMap, BTreeSet};

use firn_host::Problem;
use firn_store::threads;
use firn_store::{Digest, EXTENT, Form, Index, Store, StoreError};

use super::bucket::BucketError;

/// A store that can be read. Several threads may do so at once.
pub trait Origin: Sync {
    /// Its directory or URL.
    fn place(&self) -> String;
    /// The random id of the store.
    fn id(&self) -> &str;
    /// How it writes what it holds.
    fn form(&self) -> &Form;
    /// How many threads shall work with it.
    fn threads(&self) -> usize;
    /// Names of all indexes.
    fn images(&self) -> Result<BTreeSet<Digest>, Fault>;
    /// The names that all extents have there, with the sizes of their files.
    fn extents(&self) -> Result<BTreeMap<Digest, u64>, Fault>;
    /// Indexes that gc keeps in any case.
    fn pinned(&self) -> Result<BTreeSet<Digest>, Fault>;
    /// The index of this name, with its content, which another store can have as it is.
    fn index(&self, id: &Digest) -> Result<(Index, Vec<u8>), Fault>;
    /// Reads an extent into a buffer of its length, and compares its content with its name.
    fn read(&self, extent: &Digest, buffer: &mut [u8]) -> Result<(), Fault>;
    /// Compares an extent of this name and size there with its name. The buffer has [`EXTENT`] bytes.
    fn compare(&self, name: &Digest, size: u64, buffer: &mut [u8]) -> Result<(), Fault>;
}

/// A store that cannot be used, or lacks what is looked for.
#[derive(Debug, thiserror::Error, Problem)]
pub enum Fault {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Bucket(#[from] BucketError),
}

impl Fault {
    /// Whether an extent or index is not there.
    pub fn is_missing(&self) -> bool {
        matches!(
            self,
            Self::Store(StoreError::Missing { .. }) | Self::Bucket(BucketError::Missing { .. })
        )
    }

    /// Whether an extent has another content than its name stands for.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Store(StoreError::Extent { .. }) | Self::Bucket(BucketError::Extent { .. })
        )
    }
}

impl Origin for Store {
    fn place(&self) -> String {
        self.root().display().to_string()
    }

    fn id(&self) -> &str {
        Self::id(self)
    }

    fn form(&self) -> &Form {
        Self::form(self)
    }

    fn threads(&self) -> usize {
        threads::copying()
    }

    fn images(&self) -> Result<BTreeSet<Digest>, Fault> {
        Ok(Self::images(self)?)
    }

    fn extents(&self) -> Result<BTreeMap<Digest, u64>, Fault> {
        Ok(Self::extents(self)?)
    }

    fn pinned(&self) -> Result<BTreeSet<Digest>, Fault> {
        Ok(Self::pinned(self)?)
    }

    fn index(&self, id: &Digest) -> Result<(Index, Vec<u8>), Fault> {
        Ok(self.verified_index(id)?)
    }

    fn read(&self, extent: &Digest, buffer: &mut [u8]) -> Result<(), Fault> {
        Ok(Self::read(self, extent, buffer)?)
    }

    fn compare(&self, name: &Digest, size: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        Ok(Self::compare(self, name, size, buffer)?)
    }
}

/// Does the same with each extent. Every thread has a buffer for one.
pub fn each<E: Send>(
    threads: usize,
    extents: &[(Digest, u64)],
    work: impl Fn(&Digest, u64, &mut [u8]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let begin = || vec![0; EXTENT];
    let work = |number: usize, buffer: &mut Vec<u8>| {
        let (extent, length) = &extents[number];
        work(extent, *length, buffer)
    };
    threads::each_on(threads, extents.len(), begin, work).map(drop)
}
