//! Signatures of checkpoints: `firn.json.minisig` next to `firn.json`, in minisign's format (Ed25519).
//!
//! firn.json has the checksums of CRIU's files and the digest of what is in a store. The files that the
//! container had written are not among them. The signature's trusted comment, which is signed too, has their
//! checksum, and the namespaces of Kubernetes whose pods may be restored from the checkpoint:
//!
//! ```text
//! firn namespaces=ml,web layer=sha256:<64 digits>
//! ```
//!
//! A signature with another comment permits nothing.

mod statement;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use firn_config::names;
use firn_host::bounded::read_at_most;
use firn_host::{Absent, Problem, open_regular};
use minisign_verify::{Error, PublicKey, Signature};
use sha2::{Digest, Sha256};

use crate::dir::UntrustedDir;
use crate::manifest::MAX_BYTES;
pub use statement::{Namespaces, Statement};

/// Most bytes of a signature or a key.
const MAX_TEXT: u64 = 64 << 10;
/// How the name of a file with a trusted key ends.
const KEY: &str = "pub";
const BLOCK: usize = 1 << 20;

/// A checkpoint that its signature does not permit.
#[derive(Debug, thiserror::Error, Problem)]
pub enum SignatureError {
    #[error("checkpoint {} has no signature", dir.display())]
    #[problem(
        "FIRN-SIGNATURE-MISSING",
        "whoever vouches for it signs it: `firn sign DIR --key FILE --namespace NAMESPACE`"
    )]
    Missing { dir: PathBuf },
    #[error("cannot read {}", path.display())]
    #[problem("FIRN-SIGNATURE-BAD", "see that the checkpoint and its signature are whole")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} is no trusted key: {reason}", path.display())]
    #[problem(
        "FIRN-SIGNATURE-KEY",
        "trusted-keys under [restore] names a directory whose files NAME.pub are public keys of minisign"
    )]
    Key { path: PathBuf, reason: String },
    #[error("none of the keys in {} has signed checkpoint {}", keys.display(), dir.display())]
    #[problem(
        "FIRN-SIGNATURE-KEY",
        "if you trust who has signed it, put the public key into that directory"
    )]
    Unknown { dir: PathBuf, keys: PathBuf },
    #[error("the signature of checkpoint {} is not valid: {reason}", dir.display())]
    #[problem(
        "FIRN-SIGNATURE-BAD",
        "copy the checkpoint and its signature from their origin again, or sign it again"
    )]
    Bad { dir: PathBuf, reason: String },
    #[error("checkpoint {} is signed for namespaces {signed} and not {namespace:?}", dir.display())]
    #[problem(
        "FIRN-SIGNATURE-NAMESPACE",
        "whoever vouches for the checkpoint may sign it for this namespace, too"
    )]
    Namespace {
        dir: PathBuf,
        signed: String,
        namespace: String,
    },
}

/// Checks that one of the keys in the directory `keys` has signed the checkpoint in `dir`, with its written
/// files, for pods of the namespace. It fails soon after `stop` is set.
pub fn check(
    dir: &Path,
    layer: Option<&Path>,
    namespace: &str,
    keys: &Path,
    stop: &AtomicBool,
) -> Result<(), SignatureError> {
    let bad = |reason: String| SignatureError::Bad {
        dir: dir.to_owned(),
        reason,
    };
    let trusted = trusted(keys)?;
    let text = read(dir, names::SIGNATURE, MAX_TEXT)?;
    let text = text.ok_or_else(|| SignatureError::Missing { dir: dir.to_owned() })?;
    let signature = String::from_utf8(text).map_err(|error| bad(error.to_string()))?;
    let signature = Signature::decode(&signature).map_err(|error| bad(error.to_string()))?;
    let manifest = read(dir, names::MANIFEST, MAX_BYTES)?;
    let manifest = manifest.ok_or_else(|| bad(format!("there is no {}", names::MANIFEST)))?;
    let mut checks = trusted.iter().map(|key| key.verify(&manifest, &signature, true));
    match checks.find(|check| !matches!(check, Err(Error::UnexpectedKeyId))) {
        Some(Ok(())) => {}
        Some(Err(error)) => return Err(bad(error.to_string())),
        None => {
            let (dir, keys) = (dir.to_owned(), keys.to_owned());
            return Err(SignatureError::Unknown { dir, keys });
        }
    }
    let statement = Statement::parse(signature.trusted_comment())
        .ok_or_else(|| bad("its trusted comment is not that of a checkpoint".to_owned()))?;
    if !statement.namespaces.include(namespace) {
        return Err(SignatureError::Namespace {
            dir: dir.to_owned(),
            signed: statement.namespaces.to_string(),
            namespace: namespace.to_owned(),
        });
    }
    let found = layer.map(|layer| {
        let unreadable = |source| SignatureError::Unreadable {
            path: layer.to_owned(),
            source,
        };
        checksum(layer, stop).map_err(unreadable)
    });
    match (statement.layer, found.transpose()?) {
        (signed, found) if signed == found => Ok(()),
        (_, None) => Err(bad(
            "the files that the container had written are absent".to_owned()
        )),
        (_, Some(_)) => Err(bad(
            "the files that the container had written are others".to_owned()
        )),
    }
}

/// The SHA-256 of a regular file, in hexadecimal. It fails soon after `stop` is set.
pub fn checksum(path: &Path, stop: &AtomicBool) -> io::Result<String> {
    let mut file: File = open_regular(path)?;
    let (mut sum, mut block) = (Sha256::new(), vec![0; BLOCK]);
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match file.read(&mut block)? {
            0 => return Ok(crate::block_hash::hex(&sum.finalize())),
            count => sum.update(&block[..count]),
        }
    }
}

fn trusted(keys: &Path) -> Result<Vec<PublicKey>, SignatureError> {
    let wrong = |path: &Path, reason: String| SignatureError::Key {
        path: path.to_owned(),
        reason,
    };
    let entries = fs::read_dir(keys).and_then(|entries| {
        let paths = entries.map(|entry| entry.map(|entry| entry.path()));
        paths.collect::<io::Result<Vec<_>>>()
    });
    let paths = entries.map_err(|error| wrong(keys, error.to_string()))?;
    let is_key = |path: &&PathBuf| path.extension().is_some_and(|end| end == KEY);
    let keys = paths.iter().filter(is_key).map(|path| {
        let read = open_regular(path).and_then(|file| read_at_most(file, MAX_TEXT));
        let text = read.map_err(|error| wrong(path, error.to_string()))?;
        let text = String::from_utf8(text.unwrap_or_default());
        let text = text.map_err(|error| wrong(path, error.to_string()))?;
        PublicKey::decode(&text).map_err(|error| wrong(path, error.to_string()))
    });
    keys.collect()
}

/// A file of the image directory; none if it is absent.
fn read(dir: &Path, name: &str, most: u64) -> Result<Option<Vec<u8>>, SignatureError> {
    let file = UntrustedDir::open(dir).and_then(|dir| dir.file(name));
    let bytes = match file.and_then(|file| read_at_most(file, most)) {
        Err(error) if error.is_absent() => return Ok(None),
        bytes => bytes.and_then(|bytes| bytes.ok_or_else(|| io::ErrorKind::FileTooLarge.into())),
    };
    bytes.map(Some).map_err(|source| SignatureError::Unreadable {
        path: dir.join(name),
        source,
    })
}

#[cfg(test)]
mod tests;
