//! `firn-store.json`: what a directory, or a bucket, is described by that is a store.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{StoreError, error::io, layout};

const FORMAT: &str = "firn-store";
/// Longest id of a store.
const MAX_ID: usize = 64;

/// The description of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    format: String,
    version: u64,
    id: String,
}

impl Description {
    /// Name of its file.
    pub const NAME: &str = "firn-store.json";
    /// Largest one that is read.
    pub const MAX_BYTES: u64 = 64 << 10;

    /// That of a new store.
    pub fn random() -> Result<Self, StoreError> {
        Ok(Self {
            format: FORMAT.to_owned(),
            version: layout::VERSION,
            id: layout::random_id()?,
        })
    }

    /// The bytes of the file; `root` is for errors.
    pub fn to_bytes(&self, root: &Path) -> Result<Vec<u8>, StoreError> {
        serde_json::to_vec(self).map_err(io("describe", root))
    }

    /// Reads the file of the store at `root`.
    pub fn from_bytes(bytes: &[u8], root: &Path) -> Result<Self, StoreError> {
        let wrong = |source| StoreError::Description {
            path: root.join(Self::NAME),
            source,
        };
        let description: Self = serde_json::from_slice(bytes).map_err(|error| wrong(Some(error)))?;
        let is_id = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if description.format != FORMAT {
            return Err(wrong(None));
        }
        if description.version != layout::VERSION {
            return Err(StoreError::Version {
                path: root.to_owned(),
                found: description.version,
            });
        }
        match (1..=MAX_ID).contains(&description.id.len()) && description.id.bytes().all(is_id) {
            true => Ok(description),
            false => Err(wrong(None)),
        }
    }

    /// The random id of the store.
    pub fn id(&self) -> &str {
        &self.id
    }
}
