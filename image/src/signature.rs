//! Signatures of checkpoints: `firn.json.minisig` next to `firn.json`, in minisign's format (Ed25519).
//!
//! firn.json has the checksums of CRIU's files and the digest of what is in a store. The files that the
//! container had written are not among them. The signature's trusted comment, which is signed too, has their
//! checksum, and the namespaces of Kubernetes whose pods may be restored from the checkpoint. It may have
//! the only name by which the checkpoint may be restored, and the last day:
//!
//! ```text
//! firn namespaces=ml,web layer=sha256:<64 digits> name=warm until=2027-01-31
//! ```
//!
//! A signature with another comment permits nothing, nor does one of a firn.json that is in the list of
//! revoked ones next to the keys.

mod statement;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use firn_config::names;
use firn_host::bounded::read_at_most;
use firn_host::{Absent, Problem, Rfc3339, open_regular};
use minisign_verify::{Error, PublicKey, Signature};
use sha2::{Digest, Sha256};

use crate::manifest::MAX_BYTES;
use firn_store::UntrustedDir;
pub use statement::{Namespaces, Statement};

/// Most bytes of a signature or a key.
const MAX_TEXT: u64 = 64 << 10;
/// Next to the keys: SHA-256 of every firn.json that no signature permits any more, a line each, as sha256sum
/// prints it.
const REVOKED: &str = "revoked";
/// Most bytes of this list.
const MAX_REVOKED: u64 = 16 << 20;
/// Characters of a day: `2027-01-31`.
const DAY: usize = 10;
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
    #[error("the list of revoked checkpoints {} cannot be read: {reason}", path.display())]
    #[problem(
        "FIRN-SIGNATURE-KEY",
        "correct the list, or remove it: a line of it is a SHA-256, and what stands behind that is for people"
    )]
    List { path: PathBuf, reason: String },
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
    #[error("checkpoint {} is signed for the name {signed:?} and not for {name:?}", dir.display())]
    #[problem(
        "FIRN-SIGNATURE-NAME",
        "name it as it was signed, or let whoever vouches for it sign it for this name: `firn sign --name`"
    )]
    Name {
        dir: PathBuf,
        signed: String,
        name: String,
    },
    #[error("the signature of checkpoint {} has ended: it holds until {until}", dir.display())]
    #[problem(
        "FIRN-SIGNATURE-EXPIRED",
        "make a new checkpoint, or let whoever vouches for this one sign it again: `firn sign --until`"
    )]
    Expired { dir: PathBuf, until: String },
    #[error("checkpoint {} was revoked: {} has sha256 {sha256}", dir.display(), list.display())]
    #[problem(
        "FIRN-SIGNATURE-REVOKED",
        "make a new checkpoint, or take the line out of the list if it was put there by mistake"
    )]
    Revoked {
        dir: PathBuf,
        list: PathBuf,
        sha256: String,
    },
}

/// A checkpoint that a pod is to be restored from.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub dir: PathBuf,
    /// The files that its container had written.
    pub layer: Option<PathBuf>,
    /// The pod's namespace.
    pub namespace: String,
    /// How the pod names it.
    pub name: String,
}

/// Checks that one of the keys in the directory `keys` has signed the checkpoint, with its written files, for
/// pods of the namespace and by this name, and that it was not revoked. It fails soon after `stop` is set.
pub fn check(wanted: &Wanted, keys: &Path, stop: &AtomicBool) -> Result<(), SignatureError> {
    let dir = &wanted.dir;
    let bad = |reason: String| SignatureError::Bad {
        dir: dir.clone(),
        reason,
    };
    let trusted = trusted(keys)?;
    let text = read(dir, names::SIGNATURE, MAX_TEXT)?;
    let text = text.ok_or_else(|| SignatureError::Missing { dir: dir.clone() })?;
    let signature = String::from_utf8(text).map_err(|error| bad(error.to_string()))?;
    let signature = Signature::decode(&signature).map_err(|error| bad(error.to_string()))?;
    let manifest = read(dir, names::MANIFEST, MAX_BYTES)?;
    let manifest = manifest.ok_or_else(|| bad(format!("there is no {}", names::MANIFEST)))?;
    let mut checks = trusted.iter().map(|key| key.verify(&manifest, &signature, true));
    match checks.find(|check| !matches!(check, Err(Error::UnexpectedKeyId))) {
        Some(Ok(())) => {}
        Some(Err(error)) => return Err(bad(error.to_string())),
        None => {
            let (dir, keys) = (dir.clone(), keys.to_owned());
            return Err(SignatureError::Unknown { dir, keys });
        }
    }
    let statement = Statement::parse(signature.trusted_comment())
        .ok_or_else(|| bad("its trusted comment is not that of a checkpoint".to_owned()))?;
    expect_held(&statement, wanted)?;
    expect_not_revoked(&manifest, dir, keys)?;
    let found = wanted.layer.as_ref().map(|layer| {
        let unreadable = |source| SignatureError::Unreadable {
            path: layer.clone(),
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

/// The statement permits this pod to be restored by this name today.
fn expect_held(statement: &Statement, wanted: &Wanted) -> Result<(), SignatureError> {
    let dir = wanted.dir.clone();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let today = Rfc3339(now.unwrap_or_default()).to_string();
    let today = today.get(..DAY).unwrap_or_default();
    let (name, until) = (statement.name.clone(), statement.until.clone());
    if !statement.namespaces.include(&wanted.namespace) {
        return Err(SignatureError::Namespace {
            dir,
            signed: statement.namespaces.to_string(),
            namespace: wanted.namespace.clone(),
        });
    }
    if !statement.has_name(&wanted.name) {
        return Err(SignatureError::Name {
            dir,
            signed: name.unwrap_or_default(),
            name: wanted.name.clone(),
        });
    }
    match until.filter(|_| !statement.holds_on(today)) {
        Some(until) => Err(SignatureError::Expired { dir, until }),
        None => Ok(()),
    }
}

/// The list next to the keys does not have this firn.json. A list that cannot be read permits nothing.
fn expect_not_revoked(manifest: &[u8], dir: &Path, keys: &Path) -> Result<(), SignatureError> {
    let list = keys.join(REVOKED);
    let wrong = |reason: String| SignatureError::List {
        path: list.clone(),
        reason,
    };
    // A link that leads nowhere is a list that cannot be read.
    if let Err(error) = list.symlink_metadata()
        && error.is_absent()
    {
        return Ok(());
    }
    let text = open_regular(&list).and_then(|file| read_at_most(file, MAX_REVOKED));
    let text = text.map_err(|error| wrong(error.to_string()))?;
    let text = text.ok_or_else(|| wrong("it is too long".to_owned()))?;
    let text = String::from_utf8(text).map_err(|error| wrong(error.to_string()))?;
    let sha256 = firn_store::block_hash::hex(&Sha256::digest(manifest));
    for line in text.lines() {
        match line.split_whitespace().next() {
            Some(word) if !word.starts_with('#') => {
                if !statement::is_sum(word) {
                    return Err(wrong(format!("{word:?} is no SHA-256")));
                }
                if word.eq_ignore_ascii_case(&sha256) {
                    let (dir, list) = (dir.to_owned(), list.clone());
                    return Err(SignatureError::Revoked { dir, list, sha256 });
                }
            }
            _ => {}
        }
    }
    Ok(())
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
            0 => return Ok(firn_store::block_hash::hex(&sum.finalize())),
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
