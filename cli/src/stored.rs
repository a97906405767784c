//! Memory of a checkpoint that lies in the node's store, without which it cannot be restored: what is shown
//! of it, its pin, and whether it is there.

use std::collections::BTreeMap;
use std::fmt::Display;

use firn_config::{Config, ConfigError, Images, Keys};
use firn_host::{Problem, ProblemReport};
use firn_image::manifest::{Manifest, StoredMemory};
use firn_image::memory::MemoryError;
use firn_image::memory::call::{Stored, complete};
use firn_store::{Digest, EXTENT, Pin, Reader, StoreError};
use serde::Serialize;

use crate::output::note;
use crate::text;

/// Memory of a checkpoint that lies in a store. The checkpoint cannot be restored without it.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct InStore {
    /// Id of the store.
    store: String,
    /// Id of the checkpoint in the store.
    index: Digest,
    /// Bytes of memory.
    bytes: u64,
    /// Whether it is kept until `firn images prune` has removed the checkpoint, or until `firn store unpin`.
    pinned: bool,
}

impl InStore {
    /// Pins the memory of a checkpoint that was just made, if a store has some of it.
    pub fn pin(manifest: &Manifest) -> Option<Self> {
        let memory = manifest.bulk.clone()?;
        match pin(manifest, memory.clone()) {
            Ok(()) => Some(Self::of(memory, true)),
            Err(error) => Self::without_pin(manifest, &error),
        }
    }

    /// As [`Self::pin`], where there was none for this reason.
    pub fn without_pin(manifest: &Manifest, why: &dyn Display) -> Option<Self> {
        let memory = manifest.bulk.clone()?;
        let index = memory.index.short();
        note!("firn: `firn store gc` may remove the memory of the checkpoint, {index}: {why}");
        Some(Self::of(memory, false))
    }

    fn of(memory: StoredMemory, pinned: bool) -> Self {
        Self {
            store: memory.store,
            index: memory.index,
            bytes: memory.bytes,
            pinned,
        }
    }

    /// For people.
    pub fn shown(&self) -> String {
        format!("memory: {} in store {}", text::bytes(self.bytes), self.store)
    }
}

fn pin(manifest: &Manifest, memory: StoredMemory) -> Result<(), ProblemReport> {
    let index = memory.index;
    let (store, _) = complete(&of_root(manifest, memory, Config::load(Keys::STORE)?))?;
    Ok(store.pin(&index, Pin::Checkpoint)?)
}

/// Why the node's store cannot be used, or a container may not end with a checkpoint whose memory it has.
#[derive(Debug, thiserror::Error, Problem)]
pub enum CompareError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Reads all that a store has of a checkpoint and compares it with its names, before its container ends: what
/// was there of an earlier checkpoint was believed by its size.
///
/// # Errors
/// This node names no store, the store or the index cannot be read, the index is that of another checkpoint,
/// or an extent is not there or has another content.
pub fn compare(manifest: &Manifest) -> Result<(), CompareError> {
    let Some(memory) = manifest.bulk.clone() else {
        return Ok(());
    };
    let (store, index) = complete(&of_root(manifest, memory, Config::load(Keys::STORE)?))?;
    let extents = index.extents();
    let extents: BTreeMap<Digest, usize> = extents
        .filter_map(|(extent, length)| Some((extent?, length)))
        .collect();
    let mut buffer = vec![0; EXTENT];
    for (extent, length) in extents {
        store.read(&extent, &mut buffer[..length])?;
    }
    Ok(())
}

/// Why the memory of a checkpoint is not in this node's store. None: it is there, or none of it is in a
/// store. The content of extents is not read.
pub fn missing(manifest: &Manifest) -> Option<ProblemReport> {
    let memory = manifest.bulk.clone()?;
    let config = match Config::load(Keys::STORE) {
        Ok(config) => config,
        Err(error) => return Some(error.into()),
    };
    let looked = complete(&of_root(manifest, memory, config));
    let report = ProblemReport::from(looked.err()?);
    Some(ProblemReport {
        message: format!("memory missing: {}", report.message),
        ..report
    })
}

fn of_root(manifest: &Manifest, memory: StoredMemory, config: Config) -> Stored {
    let Images { store, store_key, .. } = config.images;
    Stored {
        store,
        key: store_key,
        memory,
        checkpoint: Some(manifest.checkpoint.clone()),
        reader: Reader::Root,
    }
}
