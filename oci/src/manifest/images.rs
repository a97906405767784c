//! CRIU's files in the image directory: described at the dump, compared before a restore.
//!
//! Of every file the size is kept, of small ones a checksum too. Small files are the metadata without which nothing can
//! be restored; large ones are memory, too long to be read twice, where a truncated copy shows in the size.

use std::io;
use std::path::{Path, PathBuf};

use firn_config::names;
use serde::{Deserialize, Serialize};

use super::{open_regular, read_at_most, sha256};

/// Files below this size have a checksum.
const CHECKSUM_BELOW: u64 = 1 << 20;

/// Files without which CRIU has not finished a dump.
const ESSENTIAL: [&str; 2] = ["inventory.img", "pstree.img"];

/// A file of the image directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// Its name in the directory.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its checksum in hexadecimal, for small files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// CRIU's files are not those of a finished dump.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A file is not there.
    #[error("checkpoint {} lacks {name}", dir.display())]
    Missing { dir: PathBuf, name: String },
    /// A file has another size.
    #[error("{} of the checkpoint has {found} bytes instead of {expected}", path.display())]
    Size {
        path: PathBuf,
        found: u64,
        expected: u64,
    },
    /// A file has another content.
    #[error("{} of the checkpoint is damaged: its checksum does not match", path.display())]
    Checksum { path: PathBuf },
    /// A file or the directory cannot be read.
    #[error("cannot read {} of the checkpoint", path.display())]
    Read { path: PathBuf, source: io::Error },
}

impl ImageError {
    /// The code shown to users.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Missing { .. } | Self::Size { .. } => "FIRN-IMAGE-TRUNCATED",
            Self::Checksum { .. } => "FIRN-IMAGE-CORRUPT",
            Self::Read { .. } => "FIRN-IMAGE-UNREADABLE",
        }
    }

    /// What the operator can do.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Read { .. } => "check the checkpoint directory; CRIU's files must be regular files",
            _ => "copy the checkpoint from its origin again, or make it again",
        }
    }
}

/// Describes CRIU's files of a finished dump, in order of their names.
pub fn describe(dir: &Path) -> Result<Vec<ImageFile>, ImageError> {
    let unreadable = |source| ImageError::Read {
        path: dir.to_owned(),
        source,
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        // CRIU's and runc's names are ASCII; whatever else lies there is not part of the image.
        let Ok(name) = entry.map_err(unreadable)?.file_name().into_string() else {
            continue;
        };
        if name.ends_with(".img") || name == names::RUNC_DESCRIPTORS {
            let (size, sha256) = measure(&dir.join(&name), None)?;
            files.push(ImageFile { name, size, sha256 });
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    essential(&files, dir)?;
    Ok(files)
}

/// Compares CRIU's files with their description.
pub(super) fn verify(files: &[ImageFile], dir: &Path) -> Result<(), ImageError> {
    essential(files, dir)?;
    for file in files {
        let path = dir.join(&file.name);
        let (size, sha256) = match measure(&path, Some(file)) {
            Err(ImageError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(ImageError::Missing {
                    dir: dir.to_owned(),
                    name: file.name.clone(),
                });
            }
            other => other?,
        };
        if size != file.size {
            return Err(ImageError::Size {
                path,
                found: size,
                expected: file.size,
            });
        }
        if file.sha256.is_some() && sha256 != file.sha256 {
            return Err(ImageError::Checksum { path });
        }
    }
    Ok(())
}

fn essential(files: &[ImageFile], dir: &Path) -> Result<(), ImageError> {
    match ESSENTIAL
        .iter()
        .find(|name| !files.iter().any(|file| file.name == **name))
    {
        None => Ok(()),
        Some(name) => Err(ImageError::Missing {
            dir: dir.to_owned(),
            name: (*name).to_owned(),
        }),
    }
}

/// Size and, for a small file, checksum. A file whose size is not the expected one is not read.
fn measure(path: &Path, expected: Option<&ImageFile>) -> Result<(u64, Option<String>), ImageError> {
    let unreadable = |source| ImageError::Read {
        path: path.to_owned(),
        source,
    };
    let file = open_regular(path).map_err(unreadable)?;
    let size = file.metadata().map_err(unreadable)?.len();
    if size >= CHECKSUM_BELOW || expected.is_some_and(|expected| expected.size != size) {
        return Ok((size, None));
    }
    let bytes = read_at_most(file, CHECKSUM_BELOW).map_err(unreadable)?;
    Ok((size, bytes.map(|bytes| sha256(&bytes))))
}
