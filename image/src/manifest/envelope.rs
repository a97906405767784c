//! The envelope of the manifest: what a reader checks before it reads the body.
//!
//! docs/reference/image-format.md, "Compatibility", states what a change of each field means.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::limits::{all, distinct};
use super::{MAX_BYTES, Manifest, ManifestError};
use firn_store::block_hash::sha256;

const FORMAT: &str = "firn-checkpoint";
pub(super) const MAJOR: u64 = 1;
const MINOR: u64 = 0;

/// The GPU state is the NVIDIA driver's.
pub(super) const NVIDIA: &str = "nvidia";

/// CRIU needs firn's plugin for GPUs that processes had inherited.
pub(super) const INHERITED: &str = "inherited-gpus";

/// The target's devices are given to a container that had others, and its job is called.
pub(super) const DEVICE_FREE: &str = "device-free";

/// Large memory is in a store.
pub(super) const STORED: &str = "stored-memory";

/// Large files have a BLAKE3.
pub(super) const BLAKE3: &str = "blake3";

/// The processes have firn's library mapped, which is in the image.
pub(super) const INTERPOSED: &str = "interposed";

/// Capabilities of this firn that an image may need.
const KNOWN_NEEDS: [&str; 6] = [NVIDIA, INHERITED, DEVICE_FREE, STORED, BLAKE3, INTERPOSED];

const MAX_NEEDS: usize = 32;
/// Longest name of a need.
const MAX_NEED: usize = 64;

/// Fields that every major version has.
#[derive(Deserialize)]
struct Head {
    format: String,
    major: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Envelope<'a> {
    format: &'a str,
    major: u64,
    minor: u64,
    pub needs: Vec<String>,
    sha256: &'a str,
    #[serde(borrow)]
    pub body: &'a RawValue,
}

/// The bytes of the file; `path` is for errors.
pub(super) fn seal(manifest: &Manifest, path: &Path) -> Result<Vec<u8>, ManifestError> {
    let unwritable = |source: serde_json::Error| ManifestError::Write {
        path: path.to_owned(),
        source: source.into(),
    };
    let body = serde_json::value::to_raw_value(manifest).map_err(unwritable)?;
    let envelope = Envelope {
        format: FORMAT,
        major: MAJOR,
        minor: MINOR,
        needs: manifest.needs().iter().copied().map(str::to_owned).collect(),
        sha256: &sha256(body.get().as_bytes()),
        body: &body,
    };
    let bytes = serde_json::to_vec(&envelope).map_err(unwritable)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(ManifestError::TooLarge {
            path: path.to_owned(),
        });
    }
    Ok(bytes)
}

/// Checks version, needs and checksum, in this order: a newer firn may have changed what comes after.
pub(super) fn open<'a>(bytes: &'a [u8], path: &Path) -> Result<Envelope<'a>, ManifestError> {
    let path = || path.to_owned();
    let shape = |source| ManifestError::Shape { path: path(), source };
    let value = |field| ManifestError::Value { path: path(), field };
    let head: Head = serde_json::from_slice(bytes).map_err(shape)?;
    if head.format != FORMAT {
        return Err(value("format"));
    }
    if head.major != MAJOR {
        return Err(ManifestError::Version {
            path: path(),
            found: head.major,
        });
    }
    let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(shape)?;
    if !are_names(&envelope.needs) {
        return Err(value("needs"));
    }
    let is_unknown = |need: &&String| !KNOWN_NEEDS.contains(&need.as_str());
    let unknown: Vec<String> = envelope.needs.iter().filter(is_unknown).cloned().collect();
    if !unknown.is_empty() {
        return Err(ManifestError::Needs {
            path: path(),
            unknown,
        });
    }
    if sha256(envelope.body.get().as_bytes()) != envelope.sha256 {
        return Err(ManifestError::Checksum { path: path() });
    }
    Ok(envelope)
}

/// Few, short, distinct, and of characters that are harmless on a terminal.
fn are_names(needs: &[String]) -> bool {
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    let is_name = |need: &String| (1..=MAX_NEED).contains(&need.len()) && need.bytes().all(allowed);
    all(needs, MAX_NEEDS, is_name) && distinct(needs.iter())
}
