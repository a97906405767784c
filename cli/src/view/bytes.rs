//! Parts of a file, or of a blob in containerd's content store, without the rest.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::archive::{self, Entry, FileSpan};
use crate::containerd::Containerd;
use crate::oci_image::{ImageError, no_checkpoint};

/// How much is read at once.
const CHUNK: u64 = 1 << 20;

pub enum Bytes<'a> {
    /// From an offset on, so many.
    File(&'a File, FileSpan),
    /// By its digest, with its size.
    Blob(&'a Containerd, &'a str, u64),
}

impl Bytes<'_> {
    pub fn len(&self) -> u64 {
        match self {
            Self::File(_, place) => place.length,
            Self::Blob(.., size) => *size,
        }
    }

    /// So many bytes from an offset on, or fewer at the end.
    pub async fn read(&self, from: u64, size: u64) -> Result<Vec<u8>, ImageError> {
        let size = size.min(self.len().saturating_sub(from));
        match self {
            Self::Blob(containerd, digest, _) => Ok(containerd.content(digest, from, size).await?),
            Self::File(file, place) => {
                let mut bytes = vec![0; usize::try_from(size).unwrap_or(usize::MAX)];
                let mut read = 0;
                while read < bytes.len() {
                    let at = place.from + from + read as u64;
                    match file.read_at(&mut bytes[read..], at) {
                        Ok(0) => break,
                        Ok(more) => read += more,
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => return Err(ImageError::file("read the archive")(error)),
                    }
                }
                bytes.truncate(read);
                Ok(bytes)
            }
        }
    }

    /// The entries of this archive.
    pub async fn list(&self, what: &str) -> Result<Vec<Entry>, ImageError> {
        let read = async |from, size| self.read(from, size).await;
        let all = archive::list(self.len(), read).await?;
        all.ok_or_else(|| no_checkpoint(what, "it is no tar archive, or ends early"))
    }

    /// The content of an entry of this archive, if it has no more than `most` bytes.
    pub async fn content(&self, what: &str, entry: &Entry, most: u64) -> Result<Vec<u8>, ImageError> {
        if entry.place.length > most {
            return Err(no_checkpoint(
                what,
                format!("{} is too large", entry.path.display()),
            ));
        }
        self.read(entry.place.from, entry.place.length).await
    }

    /// Copies a file of this archive.
    pub async fn copy(&self, place: &FileSpan, to: &mut impl io::Write) -> Result<(), ImageError> {
        let mut done = 0;
        while done < place.length {
            let part = self
                .read(place.from + done, CHUNK.min(place.length - done))
                .await?;
            if part.is_empty() {
                return Err(ImageError::file("read the archive")(
                    io::ErrorKind::UnexpectedEof.into(),
                ));
            }
            to.write_all(&part)
                .map_err(ImageError::file("unpack the archive"))?;
            done += part.len() as u64;
        }
        Ok(())
    }
}
