use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::layout::{EXTENTS, IMAGES};
use crate::block_hash::hex;

/// Digits that are shown.
const SHORT: usize = 12;

/// The BLAKE3 of an extent or of an index, written as 64 small hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// That of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes).into())
    }

    pub(super) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub(super) fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Its first digits, for logs and messages, which others than root may read.
    pub fn short(&self) -> String {
        let name = self.to_string();
        name[..SHORT].to_owned()
    }

    /// Where the extent of this name is, below a store's root.
    pub fn extent_path(&self) -> String {
        let name = self.to_string();
        format!("{EXTENTS}/{}/{name}", &name[..2])
    }

    /// Where the index of this name is, below a store's root.
    pub fn image_path(&self) -> String {
        format!("{IMAGES}/{self}")
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex(&self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        hex(&digest.0)
    }
}

/// A text that is no digest.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not 64 small hexadecimal digits")]
pub struct NotADigest;

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let mut digest = [0; 32];
        if pairs.len() != digest.len() || !rest.is_empty() {
            return Err(NotADigest);
        }
        for (byte, [high, low]) in digest.iter_mut().zip(pairs) {
            *byte = value(*high)? << 4 | value(*low)?;
        }
        Ok(Self(digest))
    }
}

fn value(digit: u8) -> Result<u8, NotADigest> {
    match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        _ => Err(NotADigest),
    }
}

impl TryFrom<String> for Digest {
    type Error = NotADigest;

    fn try_from(text: String) -> Result<Self, NotADigest> {
        text.parse()
    }
}
