//! Blobs of containerd's content store, which are compared with their digests.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use firn_host::reopen_regular;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use serde::Deserialize;
use sha2::{Digest, Sha256};

/// A part of an image.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    pub media_type: String,
    pub digest: String,
    pub size: u64,
}

/// The directory of the store, as containerd keeps it.
pub struct Store(PathBuf);

impl Store {
    pub fn new(root: &Path) -> Self {
        Self(root.join("blobs/sha256"))
    }

    /// All bytes of a blob that has no more than `limit`.
    pub fn read(&self, digest: &str, limit: u64) -> Result<Vec<u8>> {
        let mut blob = self.find(digest)?;
        let size = blob.file.metadata()?.len();
        ensure!(
            size <= limit,
            "{digest} has {size} bytes, more than an image's list"
        );
        blob.left = size;
        let mut bytes = Vec::new();
        blob.read_to_end(&mut bytes)?;
        blob.finish()?;
        Ok(bytes)
    }

    pub fn open(&self, part: &Descriptor) -> Result<Blob> {
        let mut blob = self.find(&part.digest)?;
        let size = blob.file.metadata()?.len();
        let (digest, expected) = (&part.digest, part.size);
        ensure!(
            size == expected,
            "{digest} has {size} bytes instead of {expected}"
        );
        blob.left = size;
        Ok(blob)
    }

    fn find(&self, digest: &str) -> Result<Blob> {
        let name = digest.strip_prefix("sha256:").unwrap_or_default();
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_digest = name.len() == 64 && name.bytes().all(is_digit);
        ensure!(is_digest, "{digest:?} is no digest of SHA-256");
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let found = open(&self.0.join(name), flags, Mode::empty());
        let found = found.with_context(|| format!("containerd does not have {digest}"))?;
        Ok(Blob {
            file: reopen_regular(found).with_context(|| format!("cannot read {digest}"))?,
            left: 0,
            sum: Sha256::new(),
            digest: digest.to_owned(),
        })
    }
}

/// An open blob. What was read counts only once [`Blob::finish`] has succeeded.
pub struct Blob {
    file: File,
    left: u64,
    sum: Sha256,
    digest: String,
}

impl Blob {
    /// How many bytes are left.
    pub fn size(&self) -> u64 {
        self.left
    }

    /// Reads the rest and compares the whole with the digest.
    pub fn finish(mut self) -> Result<()> {
        io::copy(&mut self, &mut io::sink())?;
        let sum = self.sum.finalize();
        let found: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        ensure!(
            self.digest.ends_with(&found),
            "{} is damaged: its digest is {found}",
            self.digest
        );
        Ok(())
    }
}

impl Read for Blob {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.file.read(&mut buffer[..room])?;
        self.sum.update(&buffer[..count]);
        self.left -= count as u64;
        Ok(count)
    }
}
