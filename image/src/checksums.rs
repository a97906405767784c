//! CRIU's files in the image directory: described at the dump, compared before a restore.
//!
//! Every file has its size and a checksum. Large files are memory; their checksums are taken block by block
//! on several threads, because the container waits for them.
//!
//! A file can be changed after it was compared and before CRIU reads it. [`Verified`] finds that.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use firn_config::names;
use firn_host::bounded::read_at_most;
use firn_host::{FileId, Problem};
use serde::{Deserialize, Serialize};

use firn_store::UntrustedDir;
use firn_store::block_hash::{self, Kind, Sums, sha256};

use crate::form::LAST;

/// Files from this size on are summed up in blocks.
const LARGE: u64 = 1 << 20;

/// A link to the image of an earlier pre-dump, in which CRIU looks for memory too.
pub(crate) const PARENT: &str = "parent";

/// A file of the image directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ImageFile {
    /// Its name in the directory.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its checksum in hexadecimal, for small files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Another one, for large files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
    /// The checksum of the checksums of its blocks: old images have it for large files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256_of_blocks: Option<String>,
}

impl ImageFile {
    /// A file of so many bytes whose blocks were summed up while they were written.
    pub(crate) fn written(name: &str, file: &File, size: u64, sums: Sums<'_>) -> io::Result<Self> {
        let mut described = Self::sized(name.to_owned(), size);
        if size < LARGE {
            described.sha256 = read_at_most(file, LARGE)?.map(|bytes| sha256(&bytes));
        } else {
            described.blake3 = Some(sums.finish(size)?);
        }
        Ok(described)
    }

    fn sized(name: String, size: u64) -> Self {
        Self {
            name,
            size,
            sha256: None,
            blake3: None,
            sha256_of_blocks: None,
        }
    }

    /// Every checksum that it has: one, if it is that of an image.
    pub(crate) fn checksums(&self) -> impl Iterator<Item = &String> {
        [&self.sha256, &self.blake3, &self.sha256_of_blocks]
            .into_iter()
            .flatten()
    }
}

const COPY_AGAIN: &str = "copy the checkpoint from its origin again, or make it again";

/// CRIU's files are not those of a finished dump.
#[derive(Debug, thiserror::Error, Problem)]
#[problem("FIRN-IMAGE-CORRUPT", COPY_AGAIN)]
pub enum ImageError {
    /// A file is not there.
    #[error("checkpoint {} lacks {name}", dir.display())]
    #[problem("FIRN-IMAGE-TRUNCATED", COPY_AGAIN)]
    Missing { dir: PathBuf, name: String },
    /// A file has another size.
    #[error("{} of the checkpoint has {found} bytes instead of {expected}", path.display())]
    #[problem("FIRN-IMAGE-TRUNCATED", COPY_AGAIN)]
    Size {
        path: PathBuf,
        found: u64,
        expected: u64,
    },
    /// A file has another content.
    #[error("{} of the checkpoint is damaged: its checksum does not match", path.display())]
    Checksum { path: PathBuf },
    /// A file that CRIU would read was added.
    #[error("{} does not belong to the checkpoint", path.display())]
    Added { path: PathBuf },
    /// A file was written to after it was compared.
    #[error("{} of the checkpoint was changed after it was checked", path.display())]
    #[problem(
        "FIRN-IMAGE-CHANGED",
        "restore from a copy of the checkpoint to which nobody writes"
    )]
    Changed { path: PathBuf },
    /// A file or the directory cannot be read.
    #[error("cannot read {} of the checkpoint", path.display())]
    #[problem(
        "FIRN-IMAGE-UNREADABLE",
        "check the checkpoint directory; CRIU's files must be regular files"
    )]
    Read { path: PathBuf, source: io::Error },
}

/// An image whose files were those of the dump when they were compared.
#[derive(Debug)]
pub struct Verified {
    path: PathBuf,
    stamps: Vec<(String, Stamp)>,
    /// Files whose content is still to be compared.
    unread: Vec<ImageFile>,
}

/// When the content of large pages files is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    Now,
    /// By [`Verified::memory`], while CRIU restores them into processes that stand still.
    Later,
}

impl Memory {
    fn leaves(self, file: &ImageFile) -> bool {
        self == Self::Later && file.size >= LARGE && file.name.starts_with("pages-")
    }
}

/// What changes with every write to a file: which it is, size, and both times in nanoseconds.
type Stamp = (FileId, u64, [i64; 4]);

impl Verified {
    /// Compares what was left for later. It fails soon after `stop` is set.
    pub fn memory(&self, stop: &AtomicBool) -> Result<(), ImageError> {
        let dir = UntrustedDir::open(&self.path).map_err(unreadable(&self.path))?;
        self.unread
            .iter()
            .try_for_each(|file| compare(&dir, &self.path, file, stop).map(drop))
    }

    /// Whether the files are still those that were compared. To be asked right before CRIU reads them.
    pub fn expect_unchanged(&self) -> Result<(), ImageError> {
        let dir = UntrustedDir::open(&self.path).map_err(unreadable(&self.path))?;
        let same = |(name, before): &&(String, Stamp)| {
            dir.metadata(name)
                .is_ok_and(|metadata| stamp(&metadata) == *before)
        };
        match self.stamps.iter().find(|file| !same(file)) {
            None => Ok(()),
            Some((name, _)) => Err(ImageError::Changed {
                path: self.path.join(name),
            }),
        }
    }
}

fn stamp(metadata: &std::fs::Metadata) -> Stamp {
    let times = [
        metadata.mtime(),
        metadata.mtime_nsec(),
        metadata.ctime(),
        metadata.ctime_nsec(),
    ];
    (FileId::of(metadata), metadata.len(), times)
}

/// Whether CRIU, runc or a part of firn reads a file of this name.
fn is_image(name: &str) -> bool {
    name.ends_with(".img") || name == names::RUNC_DESCRIPTORS
}

/// Whether a file of this name is part of a checkpoint.
pub fn is_of_image(name: &str) -> bool {
    is_image(name) || name == names::MANIFEST
}

/// Describes CRIU's files of a finished dump, in the order of their names. It fails soon after `stop` is set.
pub fn describe(path: &Path, stop: &AtomicBool) -> Result<Vec<ImageFile>, ImageError> {
    describe_by(path, path, &[], stop)
}

/// As [`describe`], where `way` leads to the directory and errors name it `path`. Those that are `known` are
/// not read.
pub fn describe_by(
    way: &Path,
    path: &Path,
    known: &[ImageFile],
    stop: &AtomicBool,
) -> Result<Vec<ImageFile>, ImageError> {
    let (dir, mut names) = open(way, path)?;
    names.sort_unstable();
    let describe = |name: String| match known.iter().find(|known| known.name == name) {
        Some(known) => Ok(known.clone()),
        None => measure(&dir, &path.join(&name), name, None, stop).map(|(file, _)| file),
    };
    let files: Vec<ImageFile> = names.into_iter().map(describe).collect::<Result<_, _>>()?;
    essential(&files, path)?;
    Ok(files)
}

/// Compares CRIU's files with their description. It fails soon after `stop` is set.
pub(super) fn verify(
    files: &[ImageFile],
    path: &Path,
    memory: Memory,
    stop: &AtomicBool,
) -> Result<Verified, ImageError> {
    essential(files, path)?;
    let (dir, names) = open(path, path)?;
    let listed: HashSet<&str> = files.iter().map(|file| &*file.name).collect();
    if let Some(name) = names.iter().find(|name| !listed.contains(name.as_str())) {
        return Err(ImageError::Added {
            path: path.join(name),
        });
    }
    let (mut stamps, mut unread) = (Vec::with_capacity(files.len()), Vec::new());
    for file in files {
        let mut expected = file.clone();
        if memory.leaves(file) {
            expected = ImageFile::sized(file.name.clone(), file.size);
            unread.push(file.clone());
        }
        let stamp = compare(&dir, path, &expected, stop)?;
        stamps.push((file.name.clone(), stamp));
    }
    Ok(Verified {
        path: path.to_owned(),
        stamps,
        unread,
    })
}

/// Compares a file with its description; its content, if that has a checksum.
fn compare(
    dir: &UntrustedDir,
    path: &Path,
    file: &ImageFile,
    stop: &AtomicBool,
) -> Result<Stamp, ImageError> {
    let at = path.join(&file.name);
    let (found, stamp) = match measure(dir, &at, file.name.clone(), Some(file), stop) {
        Err(ImageError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Err(ImageError::Missing {
                dir: path.to_owned(),
                name: file.name.clone(),
            });
        }
        other => other?,
    };
    if found.size != file.size {
        return Err(ImageError::Size {
            path: at,
            found: found.size,
            expected: file.size,
        });
    }
    if found == *file {
        Ok(stamp)
    } else {
        Err(ImageError::Checksum { path: at })
    }
}

fn unreadable(path: &Path) -> impl Fn(io::Error) -> ImageError {
    move |source| ImageError::Read {
        path: path.to_owned(),
        source,
    }
}

fn essential(files: &[ImageFile], dir: &Path) -> Result<(), ImageError> {
    let is_listed = |name: &&str| files.iter().any(|file| file.name == *name);
    match LAST.iter().find(|name| !is_listed(name)) {
        None => Ok(()),
        Some(name) => Err(ImageError::Missing {
            dir: dir.to_owned(),
            name: (*name).to_owned(),
        }),
    }
}

/// The directory to which `way` leads, and the names of CRIU's files in it.
fn open(way: &Path, path: &Path) -> Result<(UntrustedDir, Vec<String>), ImageError> {
    let dir = UntrustedDir::open(way).map_err(unreadable(path))?;
    let mut names = dir.names().map_err(unreadable(path))?;
    // Memory in another directory has no checksum, and CRIU would follow the link wherever it leads.
    if names.iter().any(|name| name == PARENT) {
        return Err(ImageError::Added {
            path: path.join(PARENT),
        });
    }
    names.retain(|name| is_image(name));
    Ok((dir, names))
}

/// A file as it is. It is not read if it has another size than expected, or no checksum is expected.
fn measure(
    dir: &UntrustedDir,
    path: &Path,
    name: String,
    expected: Option<&ImageFile>,
    stop: &AtomicBool,
) -> Result<(ImageFile, Stamp), ImageError> {
    let unreadable = unreadable(path);
    let file = dir.file(&name).map_err(&unreadable)?;
    // Before the content: what is written while it is read shows later.
    let metadata = file.metadata().map_err(&unreadable)?;
    let size = metadata.len();
    let is_read = expected.is_none_or(|file| file.size == size && file.checksums().next().is_some());
    let is_old = expected.is_some_and(|file| file.sha256_of_blocks.is_some());
    let mut found = ImageFile::sized(name, size);
    let sum = |kind| block_hash::checksum(kind, &file, size, stop).map_err(&unreadable);
    if !is_read {
        return Ok((found, stamp(&metadata)));
    }
    if size < LARGE {
        let bytes = read_at_most(&file, LARGE).map_err(&unreadable)?;
        found.sha256 = bytes.map(|bytes| sha256(&bytes));
    } else if is_old {
        found.sha256_of_blocks = Some(sum(Kind::Sha256OfBlocks)?);
    } else {
        found.blake3 = Some(sum(Kind::Blake3)?);
    }
    Ok((found, stamp(&metadata)))
}
