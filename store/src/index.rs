//! The index of a checkpoint's memory: which extents make up which addresses of which process.

use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::{Digest, EXTENT, Owner};

const FORMAT: &str = "firn-store-index";
const VERSION: u64 = super::layout::VERSION;

/// Longest id or name.
const MAX_TEXT: usize = 256;
/// Longest path (PATH_MAX of Linux).
const MAX_PATH: usize = 4096;

/// What the memory of one checkpoint consists of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// The checkpoint's id, as in its manifest.
    pub checkpoint: String,
    /// When it was made, in seconds since 1970.
    pub made: u64,
    /// The container's id.
    pub container: String,
    /// The node's name.
    pub host: String,
    /// Which node it is ([`machine`](super::machine)): nodes may have one name. Those of older versions have
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Whose memory it is. Indexes of older versions, and those of imported images, have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// The image directory as it was named at the checkpoint.
    pub image: PathBuf,
    /// Where the file system of that directory was mounted: while it is not, nobody knows what is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<PathBuf>,
    /// The memory.
    pub pieces: Vec<Piece>,
}

/// A range of a process's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The process, by its pid in the container.
    pub pid: i32,
    /// Where the range begins.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Its content, [`EXTENT`] bytes each; the last may be shorter. None: zeros.
    pub extents: Vec<Option<Digest>>,
}

impl Piece {
    /// Each extent with its length.
    pub fn extents(&self) -> impl Iterator<Item = (Option<Digest>, usize)> {
        let length = |at: usize| {
            let rest = usize::try_from(self.length).unwrap_or(usize::MAX) - at * EXTENT;
            rest.min(EXTENT)
        };
        let extents = self.extents.iter().enumerate();
        extents.map(move |(at, extent)| (*extent, length(at)))
    }

    /// Whether it has a length, an extent for each part of it, and addresses that exist.
    fn is_sound(&self) -> bool {
        let extents = self.length.div_ceil(EXTENT as u64);
        self.pid > 0
            && self.length > 0
            && self.address.checked_add(self.length).is_some()
            && self.extents.len() as u64 == extents
    }
}

impl Index {
    /// Largest index that is written or read: that of some four terabytes of memory.
    pub const MAX_BYTES: u64 = 64 << 20;

    /// Reads the file of this name.
    pub fn from_bytes(bytes: &[u8], id: &Digest) -> Result<Self, IndexError> {
        if Digest::of(bytes) == *id {
            from_bytes(bytes)
        } else {
            Err(IndexError::Content)
        }
    }

    /// Every extent with its length, as often as it is used.
    pub fn extents(&self) -> impl Iterator<Item = (Option<Digest>, usize)> {
        self.pieces.iter().flat_map(Piece::extents)
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.length).sum()
    }

    /// Bytes of extents that are zero, for which nothing is stored.
    pub fn zero_bytes(&self) -> u64 {
        let zero = self.extents().filter(|(extent, _)| extent.is_none());
        zero.map(|(_, length)| length as u64).sum()
    }

    /// The first field whose value no checkpoint writes.
    fn check(&self) -> Result<(), &'static str> {
        let mut total = Some(0_u64);
        for piece in &self.pieces {
            total = total.and_then(|sum| sum.checked_add(piece.length));
        }
        let is_path =
            |path: &Path| path.is_absolute() && path.to_str().is_some_and(|path| is_text(path, MAX_PATH));
        let checks = [
            ("checkpoint", is_text(&self.checkpoint, MAX_TEXT)),
            ("container", is_text(&self.container, MAX_TEXT)),
            ("host", is_text(&self.host, MAX_TEXT)),
            (
                "machine",
                self.machine.as_deref().is_none_or(|text| is_text(text, MAX_TEXT)),
            ),
            (
                "owner",
                self.owner
                    .as_ref()
                    .is_none_or(|owner| is_text(owner.name(), MAX_TEXT)),
            ),
            ("image", is_path(&self.image)),
            ("mount", self.mount.as_deref().is_none_or(is_path)),
            (
                "pieces",
                self.pieces.iter().all(Piece::is_sound) && total.is_some(),
            ),
        ];
        match checks.into_iter().find(|(_, good)| !good) {
            None => Ok(()),
            Some((field, _)) => Err(field),
        }
    }
}

/// Short and free of control characters: it is shown on terminals and in logs.
fn is_text(text: &str, most: usize) -> bool {
    text.len() <= most && !text.contains(char::is_control)
}

/// What makes an index unusable.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    #[error("it is not JSON of the right shape")]
    Shape(#[from] serde_json::Error),
    #[error("its format is not {FORMAT}")]
    Format,
    #[error("it has version {0}")]
    Version(u64),
    #[error("it holds an impossible value in {0}")]
    Value(&'static str),
    #[error("it has more than {} bytes", Index::MAX_BYTES)]
    TooLarge,
    #[error("its content does not match its name")]
    Content,
}

/// Fields that every version has.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
    #[serde(rename = "index")]
    _index: IgnoredAny,
}

#[derive(Serialize, Deserialize)]
struct Envelope<I> {
    format: String,
    version: u64,
    index: I,
}

/// The bytes of the file.
pub fn to_bytes(index: &Index) -> Result<Vec<u8>, IndexError> {
    index.check().map_err(IndexError::Value)?;
    let envelope = Envelope {
        format: FORMAT.to_owned(),
        version: VERSION,
        index,
    };
    let bytes = serde_json::to_vec(&envelope)?;
    if bytes.len() as u64 > Index::MAX_BYTES {
        Err(IndexError::TooLarge)
    } else {
        Ok(bytes)
    }
}

/// Checks format and version first: a newer firn may have changed what comes after.
fn from_bytes(bytes: &[u8]) -> Result<Index, IndexError> {
    let head: Head = serde_json::from_slice(bytes)?;
    if head.format != FORMAT {
        return Err(IndexError::Format);
    }
    if head.version != VERSION {
        return Err(IndexError::Version(head.version));
    }
    let envelope: Envelope<Index> = serde_json::from_slice(bytes)?;
    envelope.index.check().map_err(IndexError::Value)?;
    Ok(envelope.index)
}
