//! `firn-store.json`: what a directory, or a bucket, is described by that is a store.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::form::{Form, Packing};
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
    /// Extents and indexes are compressed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    compressed: bool,
    /// They are encrypted: which key it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

impl Description {
    /// Name of its file.
    pub const NAME: &str = "firn-store.json";
    /// Largest one that is read.
    pub const MAX_BYTES: u64 = 64 << 10;

    /// That of a new store.
    pub fn random(packing: &Packing) -> Result<Self, StoreError> {
        let id = layout::random_id()?;
        let key = packing.key.as_ref().map(|key| key.check(&id));
        Ok(Self {
            format: FORMAT.to_owned(),
            version: if key.is_some() || packing.compressed {
                layout::PACKED_VERSION
            } else {
                layout::VERSION
            },
            id,
            compressed: packing.compressed,
            key,
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
        if ![layout::VERSION, layout::PACKED_VERSION].contains(&description.version) {
            return Err(StoreError::Version {
                path: root.to_owned(),
                found: description.version,
            });
        }
        let is_packed = description.compressed || description.key.is_some();
        let fits = is_packed == (description.version == layout::PACKED_VERSION);
        let has_id = (1..=MAX_ID).contains(&description.id.len()) && description.id.bytes().all(is_id);
        if fits && has_id {
            Ok(description)
        } else {
            Err(wrong(None))
        }
    }

    /// How the store at `root` writes what it holds.
    ///
    /// # Errors
    /// The key is not that of the store, or only one of the two has one; or the store is to compress and does
    /// not.
    pub fn form(&self, packing: &Packing, root: &Path) -> Result<Form, StoreError> {
        let path = root.to_owned();
        match (&self.key, &packing.key) {
            (Some(_), None) => return Err(StoreError::Encrypted { path }),
            (None, Some(_)) => return Err(StoreError::NotEncrypted { path }),
            (Some(own), Some(key)) if key.check(&self.id) != *own => {
                return Err(StoreError::WrongKey { path });
            }
            _ if packing.compressed && !self.compressed => return Err(StoreError::NotCompressed { path }),
            _ => {}
        }
        Ok(Form::new(self.compressed, packing.key.as_ref(), &self.id))
    }

    /// The random id of the store.
    pub fn id(&self) -> &str {
        &self.id
    }
}
