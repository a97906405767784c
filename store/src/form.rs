//! How a store writes extents and indexes: as they are, or compressed, encrypted, or both.
//!
//! docs/reference/store.md, "Compressed and encrypted stores", describes the bytes.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use aes_gcm_siv::aead::AeadInPlace;
use aes_gcm_siv::{Aes256GcmSiv, KeyInit};
use nix::unistd::geteuid;

use super::{Digest, EXTENT, Index, StoreError};

/// First byte of what is written: what follows it.
const PLAIN: u8 = 0;
const ZSTD: u8 = 1;
/// Faster than most disks and networks; higher levels save little on numbers.
const LEVEL: i32 = 1;
/// Bytes of the authentication tag, at the end.
const TAG: usize = 16;
const NONCE: usize = 12;

/// Purposes of keys. Part of the format.
const NAMES: &str = "firn-store 2026-11 names of extents";
const CONTENT: &str = "firn-store 2026-11 content of extents and indexes";
const CHECK: &str = "firn-store 2026-11 which key it is";
/// Digits by which a store's description names its key.
const CHECK_DIGITS: usize = 16;

/// More than the file of a key has.
const LONGEST_KEY: u64 = 1 << 10;

/// The secret from which the keys of encrypted stores are made.
pub struct Key([u8; 32]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Reads a file with 64 small hexadecimal digits, which its owner alone can read.
    ///
    /// # Errors
    /// It cannot be read, belongs to another user, others may read it, or it has something else.
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let not_read = |source| StoreError::KeyFile {
            path: path.to_owned(),
            source,
        };
        let unusable = |why| StoreError::Key {
            path: path.to_owned(),
            why,
        };
        let file = File::open(path).map_err(not_read)?;
        let metadata = file.metadata().map_err(not_read)?;
        if !metadata.is_file() {
            return Err(unusable("is no regular file"));
        }
        if metadata.mode() & 0o077 != 0 || ![0, geteuid().as_raw()].contains(&metadata.uid()) {
            return Err(unusable("is not root's alone"));
        }
        let mut text = String::new();
        file.take(LONGEST_KEY)
            .read_to_string(&mut text)
            .map_err(not_read)?;
        let digest: Result<Digest, _> = text.trim_ascii().parse();
        digest
            .map(|digest| Self(*digest.as_bytes()))
            .map_err(|_| unusable("has not 64 small hexadecimal digits"))
    }

    /// A key for one purpose in one store.
    fn derive(&self, purpose: &str, store: &str) -> [u8; 32] {
        blake3::derive_key(purpose, &[&self.0, store.as_bytes()].concat())
    }

    /// By what a store's description names the key: whoever reads it learns nothing else about the key.
    pub(super) fn check(&self, store: &str) -> String {
        let mut digits = crate::block_hash::hex(&self.derive(CHECK, store));
        digits.truncate(CHECK_DIGITS);
        digits
    }
}

/// What the operator asks of a store: the key of one that is encrypted, and how a new one is made.
#[derive(Debug, Default)]
pub struct Packing {
    /// An encrypted store is opened with it; a new one becomes encrypted.
    pub key: Option<Key>,
    /// A new store compresses what it gets.
    pub compressed: bool,
}

impl Packing {
    /// With the key in this file, if any.
    pub fn with_key(path: Option<&Path>) -> Result<Self, StoreError> {
        Ok(Self {
            key: path.map(Key::read).transpose()?,
            compressed: false,
        })
    }
}

/// How a store writes what it holds.
pub struct Form(Packed);

enum Packed {
    AsItIs,
    Framed {
        compressed: bool,
        secret: Option<Box<Secret>>,
    },
}

struct Secret {
    names: [u8; 32],
    content: Aes256GcmSiv,
}

impl std::fmt::Debug for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match &self.0 {
            Packed::AsItIs => "AsItIs",
            Packed::Framed { .. } => "Framed",
        })
    }
}

impl Form {
    /// That of a store with this id.
    pub(super) fn new(compressed: bool, key: Option<&Key>, store: &str) -> Self {
        if !compressed && key.is_none() {
            return Self(Packed::AsItIs);
        }
        let secret = key.map(|key| {
            Box::new(Secret {
                names: key.derive(NAMES, store),
                content: Aes256GcmSiv::new(&key.derive(CONTENT, store).into()),
            })
        });
        Self(Packed::Framed { compressed, secret })
    }

    /// Whether files have the bytes of extents and indexes, and nothing else.
    pub fn is_plain(&self) -> bool {
        matches!(self.0, Packed::AsItIs)
    }

    /// The name under which an extent is kept. In an encrypted store it shows nothing of the memory.
    pub fn name(&self, extent: &Digest) -> Digest {
        match &self.0 {
            Packed::Framed {
                secret: Some(secret), ..
            } => Digest::from_bytes(*blake3::keyed_hash(&secret.names, extent.as_bytes()).as_bytes()),
            _ => *extent,
        }
    }

    /// Whether a file of so many bytes may have this many bytes of memory.
    pub fn may_hold(&self, size: u64, length: u64) -> bool {
        if self.is_plain() {
            size == length
        } else {
            (1..=self.most(length)).contains(&size)
        }
    }

    /// Most bytes of a file for this many bytes.
    pub fn most(&self, length: u64) -> u64 {
        match &self.0 {
            Packed::AsItIs => length,
            Packed::Framed { secret, .. } => length + 1 + secret.as_ref().map_or(0, |_| TAG as u64),
        }
    }

    /// What is written for an extent of this name in the store.
    ///
    /// # Errors
    /// The library that compresses or encrypts fails.
    pub fn packed_extent<'a>(&self, name: &Digest, bytes: &'a [u8]) -> io::Result<Cow<'a, [u8]>> {
        self.pack(&name.extent_path(), name, bytes)
    }

    /// What is written for an index.
    pub fn packed_index<'a>(&self, id: &Digest, bytes: &'a [u8]) -> io::Result<Cow<'a, [u8]>> {
        self.pack(&id.image_path(), id, bytes)
    }

    /// The bytes of an extent of this name in the store. None: it is damaged.
    pub fn extent(&self, name: &Digest, stored: Vec<u8>) -> Option<Vec<u8>> {
        let bytes = self.unpack(&name.extent_path(), name, stored, EXTENT)?;
        (self.name(&Digest::of(&bytes)) == *name).then_some(bytes)
    }

    /// The bytes of an index, which the caller compares with its name. None: it is damaged.
    pub fn index(&self, id: &Digest, stored: Vec<u8>) -> Option<Vec<u8>> {
        let most = usize::try_from(Index::MAX_BYTES).unwrap_or(usize::MAX);
        self.unpack(&id.image_path(), id, stored, most)
    }

    /// `path` is authenticated with the bytes. The nonce is part of the name: bytes of one name are the same.
    fn pack<'a>(&self, path: &str, name: &Digest, bytes: &'a [u8]) -> io::Result<Cow<'a, [u8]>> {
        let Packed::Framed { compressed, secret } = &self.0 else {
            return Ok(Cow::Borrowed(bytes));
        };
        let smaller = if *compressed {
            Some(zstd::bulk::compress(bytes, LEVEL)?).filter(|small| small.len() < bytes.len())
        } else {
            None
        };
        let (kind, content) = match &smaller {
            Some(smaller) => (ZSTD, smaller.as_slice()),
            None => (PLAIN, bytes),
        };
        let mut packed = Vec::with_capacity(content.len() + 1 + TAG);
        packed.push(kind);
        packed.extend_from_slice(content);
        if let Some(secret) = secret {
            let tag = secret
                .content
                .encrypt_in_place_detached(&nonce(name).into(), path.as_bytes(), &mut packed)
                .map_err(|_| io::Error::other("the bytes cannot be encrypted"))?;
            packed.extend_from_slice(&tag);
        }
        Ok(Cow::Owned(packed))
    }

    fn unpack(&self, path: &str, name: &Digest, mut stored: Vec<u8>, most: usize) -> Option<Vec<u8>> {
        let Packed::Framed { secret, .. } = &self.0 else {
            return Some(stored);
        };
        if let Some(secret) = secret {
            let tag = stored.split_off(stored.len().checked_sub(TAG)?);
            let tag: [u8; TAG] = tag.try_into().ok()?;
            secret
                .content
                .decrypt_in_place_detached(&nonce(name).into(), path.as_bytes(), &mut stored, &tag.into())
                .ok()?;
        }
        match *stored.first()? {
            PLAIN => {
                stored.remove(0);
                Some(stored)
            }
            // Never more than that, whatever the bytes claim.
            ZSTD => zstd::bulk::decompress(&stored[1..], most).ok(),
            _ => None,
        }
    }
}

/// Names differ where bytes do; AES-GCM-SIV would bear a nonce that comes twice.
fn nonce(name: &Digest) -> [u8; NONCE] {
    let mut nonce = [0; NONCE];
    nonce.copy_from_slice(&name.as_bytes()[..NONCE]);
    nonce
}
