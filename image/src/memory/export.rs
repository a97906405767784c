//! Makes an image of which a store has memory one that CRIU restores alone: the memory is put into the pages
//! files.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use firn_host::Problem;
use nix::unistd::syncfs;

use super::MemoryError;
use super::call::{Stored, complete};
use crate::checksums::{self, ImageError};
use crate::criu::memory::{PAGE, Pagemap, Run, Vma, vmas};
use crate::dir::UntrustedDir;
use crate::manifest::{Manifest, ManifestError};
use crate::store::{Digest, EXTENT, Index, Piece, Store};
use crate::threads;

/// A copy that failed. Nothing is left of it.
#[derive(Debug, thiserror::Error, Problem)]
pub enum ExportError {
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
    #[problem("FIRN-EXPORT", "use the directory as it is: it needs no store")]
    Inline { dir: PathBuf },
    #[error("{} is not empty: {found} is in it", dir.display())]
    #[problem("FIRN-EXPORT", "name a directory that is empty, or not there yet")]
    Occupied { dir: PathBuf, found: String },
    #[error("cannot write to {}", path.display())]
    #[problem("FIRN-EXPORT", "see whether its file system has room for the memory")]
    Write { path: PathBuf, source: io::Error },
}

/// Writes the image `from` into the directory `to`, with the memory that the store at `store` has. `to` is
/// empty, or made. `begin` gets the bytes that the store has and returns what counts those that are copied.
/// Returns the bytes of memory, with zeros.
pub fn export<P: Fn(u64) + Sync>(
    from: &Path,
    store: Option<PathBuf>,
    to: &Path,
    begin: impl FnOnce(u64) -> P,
) -> Result<u64, ExportError> {
    let manifest = Manifest::read(from)?.ok_or_else(|| ExportError::NoImage { dir: from.to_owned() })?;
    let memory = manifest.bulk.clone();
    let memory = memory.ok_or_else(|| ExportError::Inline { dir: from.to_owned() })?;
    let verified = manifest.verify_images(from)?;
    let (store, index) = complete(&Stored { store, memory })?;
    let out = empty(to)?;
    let progress = begin(index.bytes() - index.zero_bytes());
    let copy = Copy {
        from,
        to,
        store: &store,
        progress: &progress,
    };
    let written = copy.image(&manifest, &index).and_then(|()| {
        verified.unchanged()?;
        syncfs(&out).map_err(|errno| unwritten(to)(errno.into()))?;
        let inline = Manifest {
            bulk: None,
            images: checksums::describe(to, &AtomicBool::new(false))?,
            ..manifest
        };
        Ok(inline.write(to)?)
    });
    if written.is_err() {
        // The first failure is the one to report.
        let names = out.names().unwrap_or_default();
        names
            .iter()
            .for_each(|name| drop(std::fs::remove_file(out.path().join(name))));
    }
    written.map(|()| index.bytes())
}

/// The directory, which nobody else can enter if it is made.
fn empty(dir: &Path) -> Result<UntrustedDir, ExportError> {
    let mut builder = DirBuilder::new();
    let opened = builder.recursive(true).mode(0o700).create(dir);
    let opened = opened
        .and_then(|()| UntrustedDir::open(dir))
        .map_err(unwritten(dir))?;
    match opened.names().map_err(unwritten(dir))?.pop() {
        None => Ok(opened),
        Some(found) => Err(ExportError::Occupied {
            dir: dir.to_owned(),
            found,
        }),
    }
}

fn unwritten(path: &Path) -> impl Fn(io::Error) -> ExportError {
    move |source| ExportError::Write {
        path: path.to_owned(),
        source,
    }
}

/// From where a part of a pages file comes.
#[derive(Clone, Copy)]
enum Source {
    /// From this offset of the other one.
    File(u64),
    Store(Digest),
}

/// A part of memory that a thread copies at once.
struct Part {
    run: Run,
    source: Source,
    /// Where it lies in the new pages file.
    place: u64,
}

struct Copy<'a, P> {
    from: &'a Path,
    to: &'a Path,
    store: &'a Store,
    progress: &'a P,
}

impl<P: Fn(u64) + Sync> Copy<'_, P> {
    /// Everything but the manifest.
    fn image(&self, manifest: &Manifest, index: &Index) -> Result<(), ExportError> {
        let mut processes: BTreeMap<i32, Vec<&Piece>> = BTreeMap::new();
        for piece in &index.pieces {
            processes.entry(piece.pid).or_default().push(piece);
        }
        let mut made = Vec::new();
        for (pid, pieces) in processes {
            made.extend(self.process(pid, &pieces)?);
        }
        for file in manifest.images.iter().filter(|file| !made.contains(&file.name)) {
            let mut content = self.open(&file.name)?;
            let copied = self.create(&file.name)?;
            io::copy(&mut content, &mut &copied).map_err(unwritten(&self.to.join(&file.name)))?;
        }
        Ok(())
    }

    /// The pages of a process. Returns the names of the files that are made.
    fn process(&self, pid: i32, pieces: &[&Piece]) -> Result<[String; 2], ExportError> {
        let map = Pagemap::read(self.from, pid).map_err(MemoryError::from)?;
        let mut map = map.ok_or(MemoryError::Layout {
            inside: pid,
            at: pieces[0].address,
        })?;
        expect_anonymous(pid, pieces, &vmas(self.from, pid).map_err(MemoryError::from)?)?;
        let parts = parts(pid, &map.runs, pieces)?;
        self.pages(&map.pages_name(), &parts)?;
        map.runs = joined(parts);
        let name = Pagemap::name(pid);
        map.write(self.to, &name).map_err(MemoryError::from)?;
        Ok([name, map.pages_name()])
    }

    fn pages(&self, name: &str, parts: &[Part]) -> Result<(), ExportError> {
        let (pages, made) = (self.open(name)?, self.create(name)?);
        let written = threads::each(
            parts.len(),
            || vec![0; EXTENT],
            |number, buffer| {
                let Part { run, source, place } = &parts[number];
                let length = run.at.end - run.at.start;
                let buffer = &mut buffer[..usize::try_from(length).unwrap_or(EXTENT)];
                match source {
                    Source::Store(extent) => {
                        self.store.read(extent, buffer).map_err(MemoryError::from)?;
                        (self.progress)(length);
                    }
                    Source::File(offset) => pages
                        .read_exact_at(buffer, *offset)
                        .map_err(|source| self.unreadable(name, source))?,
                }
                made.write_all_at(buffer, *place)
                    .map_err(unwritten(&self.to.join(name)))
            },
        );
        written.map(drop)
    }

    fn open(&self, name: &str) -> Result<File, ExportError> {
        let opened = UntrustedDir::open(self.from).and_then(|dir| dir.file(name));
        opened.map_err(|source| self.unreadable(name, source))
    }

    fn unreadable(&self, name: &str, source: io::Error) -> ExportError {
        let path = self.from.join(name);
        ImageError::Read { path, source }.into()
    }

    fn create(&self, name: &str) -> Result<File, ExportError> {
        let path = self.to.join(name);
        let mut options = OpenOptions::new();
        let created = options.write(true).create_new(true).mode(0o600).open(&path);
        created.map_err(unwritten(&path))
    }
}

/// The index is untrusted: it fills private anonymous memory and no other, in whole pages.
fn expect_anonymous(pid: i32, pieces: &[&Piece], vmas: &[Vma]) -> Result<(), MemoryError> {
    for piece in pieces {
        let (mut covered, end) = (piece.address, piece.address.saturating_add(piece.length));
        for vma in vmas.iter().filter(|vma| vma.is_anonymous) {
            if vma.at.contains(&covered) {
                covered = vma.at.end;
            }
        }
        if covered < end || piece.address % PAGE != 0 || piece.length % PAGE != 0 {
            let at = covered.min(end);
            return Err(MemoryError::Layout { inside: pid, at });
        }
    }
    Ok(())
}

/// What the new pages file consists of, by address. Zero extents are in no file.
fn parts(pid: i32, runs: &[Run], pieces: &[&Piece]) -> Result<Vec<Part>, MemoryError> {
    let mut parts: Vec<(Run, Source)> = Vec::new();
    let mut offset = 0;
    for run in runs {
        for at in blocks(&run.at) {
            let length = at.end - at.start;
            parts.push((run.part(at), Source::File(offset)));
            offset += length;
        }
    }
    for piece in pieces {
        let starts = (piece.address..).step_by(EXTENT);
        for (start, (extent, length)) in starts.zip(piece.extents()) {
            let run = Run::present(start..start + length as u64);
            parts.extend(extent.map(|extent| (run, Source::Store(extent))));
        }
    }
    parts.sort_unstable_by_key(|(run, _)| run.at.start);
    let (mut place, mut end) = (0, 0);
    let place_one = |(run, source): (Run, Source)| {
        if run.at.start < end {
            let at = run.at.start;
            return Err(MemoryError::Layout { inside: pid, at });
        }
        end = run.at.end;
        let part = Part { run, source, place };
        place += part.run.at.end - part.run.at.start;
        Ok(part)
    };
    parts.into_iter().map(place_one).collect()
}

/// A range in parts that a buffer holds.
fn blocks(at: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = at.end;
    let starts = at.clone().step_by(EXTENT);
    starts.map(move |start| start..end.min(start.saturating_add(EXTENT as u64)))
}

/// The runs of these parts.
fn joined(parts: Vec<Part>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for Part { run, .. } in parts {
        match runs.last_mut() {
            Some(last) if last.joins(&run) => last.at.end = run.at.end,
            _ => runs.push(run),
        }
    }
    runs
}

#[cfg(test)]
mod tests;
