//! What the shim asks a program of its own for: copies take threads, memory and time that the shim does not
//! have. `firn-hook memory` reads an [`Order`] and prints a result.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use firn_config::names;
use serde::{Deserialize, Serialize};

use super::progress::{Counter, ProgressFile};
use super::{Bulk, Kept, MemoryError, Process, fill, find, rest, save};
use crate::manifest::StoredMemory;
use firn_store::{Index, Owner, Packing, Reader, Store, StoreError, Writer, machine, mount_of};

/// What is to be done, and where it is shown how far that is.
#[derive(Debug, Serialize, Deserialize)]
pub struct Order {
    pub request: Request,
    pub shown: Option<ProgressFile>,
}

/// What is to be done.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Make a store ready for the memory of a checkpoint, before its container stands still: a [`Ready`] is
    /// printed.
    Ready(MakeReady),
    /// Copy large memory of these processes into a store.
    Save(Save),
    /// Write the pages files that CRIU has not written: a [`Kept`] is printed.
    Rest(Rest),
    /// See whether a store has all that an image names.
    Look(Stored),
    /// Fill the memory of restored processes.
    Fill(Fill),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MakeReady {
    /// Path of the store.
    pub store: PathBuf,
    /// The file of its key, if it is encrypted.
    pub key: Option<PathBuf>,
    /// Bytes that the store may hold at most.
    pub cap: Option<u64>,
}

/// A store that is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Its id.
    pub id: String,
    /// Bytes that the cap leaves.
    pub room: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Save {
    /// Path of the store.
    pub store: PathBuf,
    /// The file of its key, if it is encrypted.
    pub key: Option<PathBuf>,
    /// Bytes that the store may hold at most, unless it is ready.
    pub cap: Option<u64>,
    /// What was found when it was made ready.
    #[serde(default)]
    pub ready: Option<Ready>,
    /// The container ends with its checkpoint: what the store has already is read and compared.
    #[serde(default)]
    pub exit: bool,
    pub processes: Vec<Process>,
    /// Whose memory it is.
    #[serde(default)]
    pub owner: Option<Owner>,
    /// Id of the checkpoint, its container and its image directory, for people and for the store's clean-up.
    pub checkpoint: String,
    pub container: String,
    pub image: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Rest {
    /// The image directory.
    pub image: PathBuf,
    pub processes: Vec<Process>,
    /// What the store has.
    pub bulk: Vec<Bulk>,
}

/// Memory in the store of this node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stored {
    /// Path of this node's store; none where the node has none.
    pub store: Option<PathBuf>,
    /// The file of its key, if it is encrypted.
    #[serde(default)]
    pub key: Option<PathBuf>,
    pub memory: StoredMemory,
    /// The id of the checkpoint in firn.json. A shim that is older than this sends none.
    #[serde(default)]
    pub checkpoint: Option<String>,
    /// For whom it is read.
    #[serde(default)]
    pub reader: Reader,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Fill {
    pub stored: Stored,
    /// Pids on the host by the pids in the container.
    pub pids: BTreeMap<i32, i32>,
}

/// What the store got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    pub bulk: Vec<Bulk>,
    /// None where no process has large memory.
    pub memory: Option<StoredMemory>,
}

/// Makes a store ready: nothing that takes the longer the more it holds is left for [`saved`].
pub fn ready(request: &MakeReady) -> Result<Ready, MemoryError> {
    let packing = Packing::with_key(request.key.as_deref())?;
    let store = Store::create_again(&request.store, Path::new(names::STORES), &packing)?;
    Ok(Ready {
        room: store.ready(request.cap)?,
        id: store.id().to_owned(),
    })
}

/// The writer of a store, and the store.
fn writer(request: &Save) -> Result<(Store, Writer), MemoryError> {
    let packing = Packing::with_key(request.key.as_deref())?;
    let (store, room) = match &request.ready {
        Some(ready) => {
            let store = Store::open(&request.store, &packing)?;
            // Its file system has gone, and below it is another one.
            if store.id() != ready.id {
                let path = request.store.clone();
                return Err(StoreError::Absent { path }.into());
            }
            (store, ready.room)
        }
        None => {
            let store = Store::create_again(&request.store, Path::new(names::STORES), &packing)?;
            let room = store.ready(request.cap)?;
            (store, room)
        }
    };
    let writer = store.writer_within(room)?.comparing(request.exit);
    Ok((store, writer))
}

/// Copies large memory into the store.
pub fn saved(request: Save, counter: &Counter) -> Result<Saved, MemoryError> {
    let bulk = find(&request.processes)?;
    if bulk.is_empty() {
        return Ok(Saved::default());
    }
    let bytes = bulk.iter().map(|bulk| bulk.at.end - bulk.at.start).sum();
    counter.expect(bytes);
    let (store, writer) = writer(&request)?;
    let pieces = match save(&bulk, &writer, counter) {
        Ok(pieces) => pieces,
        Err(error) => {
            writer.abort();
            return Err(error);
        }
    };
    let made = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let index = Index {
        checkpoint: request.checkpoint,
        made: made.as_secs(),
        container: request.container,
        host: host(),
        machine: machine(),
        owner: request.owner,
        mount: mount_of(&request.image),
        image: request.image,
        pieces,
    };
    let (written, reused) = (writer.written(), writer.reused());
    let memory = StoredMemory {
        store: store.id().to_owned(),
        index: writer.finish(&index)?,
        bytes,
        written,
        reused,
    };
    Ok(Saved {
        bulk,
        memory: Some(memory),
    })
}

/// Writes the pages files that CRIU has not written.
pub fn kept(request: &Rest, counter: &Counter) -> Result<Kept, MemoryError> {
    rest(&request.image, &request.processes, &request.bulk, counter)
}

/// The memory's index, of which the store has every extent. It is that of this checkpoint, and the reader may
/// have it: firn.json may have been written by anybody.
pub fn complete(stored: &Stored) -> Result<(Store, Index), MemoryError> {
    let StoredMemory {
        store: id,
        index: name,
        ..
    } = &stored.memory;
    let path = stored.store.as_deref();
    let path = path.ok_or_else(|| MemoryError::NoStore {
        id: id.clone(),
        index: *name,
    })?;
    let store = Store::open(path, &Packing::with_key(stored.key.as_deref())?)?;
    let index = store.index(name)?;
    let (index_of, reader) = (&index.checkpoint, &stored.reader);
    if stored.checkpoint.as_ref().is_some_and(|is| is != index_of) {
        return Err(MemoryError::OtherCheckpoint { index: *name });
    }
    if !reader.may_have(index.owner.as_ref()) {
        let (index, reader) = (*name, reader.clone());
        return Err(MemoryError::Owner { index, reader });
    }
    store.expect(&index)?;
    Ok((store, index))
}

/// Fills the memory of restored processes. Returns the bytes that were written.
pub fn filled(request: &Fill, counter: &Counter) -> Result<u64, MemoryError> {
    counter.expect(request.stored.memory.bytes);
    let (store, index) = complete(&request.stored)?;
    // Nothing has to be written for these.
    counter.add(index.zero_bytes());
    fill(&store, &index, &request.pids, counter)
}

pub(super) fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

#[cfg(test)]
mod tests;
