//! An image directory that is written from another one, of which nothing is changed.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

use firn_host::Problem;
use nix::unistd::syncfs;

use super::MemoryError;
use crate::checksums::{self, ImageError, ImageFile};
use crate::criu::ImageFault;
use crate::criu::memory::Run;
use crate::manifest::{Manifest, ManifestError};
use firn_store::UntrustedDir;
use firn_store::threads;
use firn_store::{EXTENT, StoreError};

/// A copy that failed. Nothing is left of it.
#[derive(Debug, thiserror::Error, Problem)]
pub enum ImageCopyError {
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("{} is no image of firn: it has no firn.json", dir.display())]
    #[problem("FIRN-MANIFEST-MISSING", "name the image directory of a finished checkpoint")]
    NoImage { dir: PathBuf },
    #[error("no memory of checkpoint {} is in a store", dir.display())]
    #[problem("FIRN-IMAGE-COPY", "use the directory as it is: it needs no store")]
    Inline { dir: PathBuf },
    #[error("memory of checkpoint {} is in a store", dir.display())]
    #[problem(
        "FIRN-IMAGE-COPY",
        "`firn store pull URL ID` brings it from one store into another"
    )]
    Stored { dir: PathBuf },
    #[error("no process of checkpoint {} has memory that a store gets", dir.display())]
    #[problem(
        "FIRN-IMAGE-COPY",
        "use the directory as it is: smaller memory stays in the image"
    )]
    Small { dir: PathBuf },
    #[error("{} is not empty: {found} is in it", dir.display())]
    #[problem("FIRN-IMAGE-COPY", "name a directory that is empty, or not there yet")]
    Occupied { dir: PathBuf, found: String },
    #[error("cannot write to {}", path.display())]
    #[problem("FIRN-IMAGE-COPY", "see whether its file system has room for the memory")]
    Write { path: PathBuf, source: io::Error },
}

impl From<ImageFault> for ImageCopyError {
    fn from(fault: ImageFault) -> Self {
        Self::Memory(fault.into())
    }
}

impl From<StoreError> for ImageCopyError {
    fn from(error: StoreError) -> Self {
        Self::Memory(error.into())
    }
}

/// The manifest of the image that is to be copied.
pub(super) fn manifest_of(from: &Path) -> Result<Manifest, ImageCopyError> {
    Manifest::read(from)?.ok_or_else(|| ImageCopyError::NoImage { dir: from.to_owned() })
}

/// A part of a pages file that a thread writes at once.
pub(super) struct Part<S> {
    pub run: Run,
    /// From where it comes.
    pub source: S,
    /// Where it lies in the new pages file.
    pub place: u64,
}

/// The copy that is written.
pub(super) struct ImageCopy<'a> {
    pub from: &'a Path,
    pub to: &'a Path,
    out: UntrustedDir,
    /// Names of the files that it has made: another copy may write there.
    made: Mutex<Vec<String>>,
}

impl<'a> ImageCopy<'a> {
    /// `to` is empty, or made; then nobody else can enter it.
    pub fn begin(from: &'a Path, to: &'a Path) -> Result<Self, ImageCopyError> {
        let mut builder = DirBuilder::new();
        let opened = builder.recursive(true).mode(0o700).create(to);
        let out = opened
            .and_then(|()| UntrustedDir::open(to))
            .map_err(unwritten(to))?;
        match out.names().map_err(unwritten(to))?.pop() {
            None => Ok(Self {
                from,
                to,
                out,
                made: Mutex::default(),
            }),
            Some(found) => Err(ImageCopyError::Occupied {
                dir: to.to_owned(),
                found,
            }),
        }
    }

    /// Removes what was written if that has failed. firn.json is the last, so it is not among it.
    pub fn end<T>(self, written: Result<T, ImageCopyError>) -> Result<T, ImageCopyError> {
        if written.is_err() {
            let made = self.made.into_inner().unwrap_or_else(PoisonError::into_inner);
            // The first failure is the one to report.
            for name in made {
                let _ = std::fs::remove_file(self.out.path().join(name));
            }
        }
        written
    }

    /// Copies the files of the image, but those that are `made`.
    pub fn others(&self, manifest: &Manifest, made: &[String]) -> Result<(), ImageCopyError> {
        for file in manifest.images.iter().filter(|file| !made.contains(&file.name)) {
            let mut content = self.open(&file.name)?;
            let copied = self.create(&file.name)?;
            io::copy(&mut content, &mut &copied).map_err(unwritten(&self.to.join(&file.name)))?;
        }
        Ok(())
    }

    /// Makes everything durable, and describes it.
    pub fn described(&self) -> Result<Vec<ImageFile>, ImageCopyError> {
        syncfs(&self.out).map_err(|errno| unwritten(self.to)(errno.into()))?;
        Ok(checksums::describe(self.to, &AtomicBool::new(false))?)
    }

    /// Writes a pages file that consists of these parts, each of at most [`EXTENT`] bytes.
    pub fn pages<S: Sync>(
        &self,
        name: &str,
        parts: &[Part<S>],
        read: impl Fn(&S, &mut [u8]) -> Result<(), ImageCopyError> + Sync,
    ) -> Result<(), ImageCopyError> {
        let made = self.create(name)?;
        let written = threads::each(
            parts.len(),
            || vec![0; EXTENT],
            |number, buffer| {
                let Part { run, source, place } = &parts[number];
                let length = run.at.end - run.at.start;
                let buffer = &mut buffer[..usize::try_from(length).unwrap_or(EXTENT)];
                read(source, buffer)?;
                made.write_all_at(buffer, *place)
                    .map_err(unwritten(&self.to.join(name)))
            },
        );
        written.map(drop)
    }

    /// A file of the image.
    pub fn open(&self, name: &str) -> Result<File, ImageCopyError> {
        let opened = UntrustedDir::open(self.from).and_then(|dir| dir.file(name));
        opened.map_err(|source| self.unreadable(name, source))
    }

    /// Reads a part of one.
    pub fn read(
        &self,
        file: &File,
        name: &str,
        buffer: &mut [u8],
        offset: u64,
    ) -> Result<(), ImageCopyError> {
        file.read_exact_at(buffer, offset)
            .map_err(|source| self.unreadable(name, source))
    }

    fn unreadable(&self, name: &str, source: io::Error) -> ImageCopyError {
        let path = self.from.join(name);
        ImageError::Read { path, source }.into()
    }

    pub(super) fn create(&self, name: &str) -> Result<File, ImageCopyError> {
        let path = self.to.join(name);
        let mut options = OpenOptions::new();
        let created = options.write(true).create_new(true).mode(0o600).open(&path);
        let created = created.map_err(unwritten(&path))?;
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.push(name.to_owned());
        Ok(created)
    }
}

pub(super) fn unwritten(path: &Path) -> impl Fn(io::Error) -> ImageCopyError {
    move |source| ImageCopyError::Write {
        path: path.to_owned(),
        source,
    }
}

/// A range in parts that a buffer holds.
pub(super) fn blocks(at: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = at.end;
    let starts = at.clone().step_by(EXTENT);
    starts.map(move |start| start..end.min(start.saturating_add(EXTENT as u64)))
}

/// The runs of these parts.
pub(super) fn joined<S>(parts: Vec<Part<S>>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for Part { run, .. } in parts {
        match runs.last_mut() {
            Some(last) if last.joins(&run) => last.at.end = run.at.end,
            _ => runs.push(run),
        }
    }
    runs
}
