//! Makes an image of which a store has memory one that CRIU restores alone: the memory is put into the pages
//! files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::MemoryError;
use super::call::{Stored, complete};
use super::image_copy::{ImageCopy, ImageCopyError, Part, blocks, joined, manifest_of};
use crate::criu::memory::{PAGE, Pagemap, Run, Vma, vmas};
use crate::manifest::Manifest;
use firn_store::{Digest, EXTENT, Index, Piece, Reader, Store};

/// Writes the image `from` into the directory `to`, with the memory that the store at `store` has, of which
/// `key` is the file of the key. `to` is empty, or made. `begin` gets the bytes that the store has and
/// returns what counts those that are copied. Returns the bytes of memory, with zeros.
pub fn export<P: Fn(u64) + Sync>(
    from: &Path,
    store: Option<PathBuf>,
    key: Option<PathBuf>,
    to: &Path,
    begin: impl FnOnce(u64) -> P,
) -> Result<u64, ImageCopyError> {
    let manifest = manifest_of(from)?;
    let memory = manifest.bulk.clone();
    let memory = memory.ok_or_else(|| ImageCopyError::Inline { dir: from.to_owned() })?;
    let verified = manifest.verify_images(from)?;
    let (store, index) = complete(&Stored {
        store,
        key,
        memory,
        checkpoint: Some(manifest.checkpoint.clone()),
        reader: Reader::Root,
    })?;
    let copy = ImageCopy::begin(from, to)?;
    let export = Export {
        copy: &copy,
        store: &store,
        progress: &begin(index.bytes() - index.zero_bytes()),
    };
    let written = export.image(&manifest, &index).and_then(|()| {
        verified.expect_unchanged()?;
        let inline = Manifest {
            bulk: None,
            images: copy.described()?,
            ..manifest
        };
        Ok(inline.write(to)?)
    });
    copy.end(written)?;
    Ok(index.bytes())
}

/// From where a part of a pages file comes.
#[derive(Clone, Copy)]
enum Source {
    /// From this offset of the other one.
    File(u64),
    Store(Digest),
}

struct Export<'a, P> {
    copy: &'a ImageCopy<'a>,
    store: &'a Store,
    progress: &'a P,
}

impl<P: Fn(u64) + Sync> Export<'_, P> {
    /// Everything but the manifest.
    fn image(&self, manifest: &Manifest, index: &Index) -> Result<(), ImageCopyError> {
        let mut processes: BTreeMap<i32, Vec<&Piece>> = BTreeMap::new();
        for piece in &index.pieces {
            processes.entry(piece.pid).or_default().push(piece);
        }
        let mut made = Vec::new();
        for (pid, pieces) in processes {
            made.extend(self.process(pid, &pieces)?);
        }
        self.copy.others(manifest, &made)
    }

    /// The pages of a process. Returns the names of the files that are made.
    fn process(&self, pid: i32, pieces: &[&Piece]) -> Result<[String; 2], ImageCopyError> {
        let (from, to) = (self.copy.from, self.copy.to);
        let mut map = Pagemap::of_image(from, pid)?.ok_or(MemoryError::Layout {
            inside: pid,
            at: pieces[0].address,
        })?;
        expect_anonymous(pid, pieces, &vmas(from, pid)?)?;
        let parts = parts(pid, &map.runs, pieces)?;
        let pages = map.pages_name();
        let file = self.copy.open(&pages)?;
        self.copy.pages(&pages, &parts, |source, buffer| match source {
            Source::Store(extent) => {
                self.store.read(extent, buffer)?;
                (self.progress)(buffer.len() as u64);
                Ok(())
            }
            Source::File(offset) => self.copy.read(&file, &pages, buffer, *offset),
        })?;
        map.runs = joined(parts);
        let name = Pagemap::name(pid);
        map.write(to, &name)?;
        Ok([name, pages])
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
fn parts(pid: i32, runs: &[Run], pieces: &[&Piece]) -> Result<Vec<Part<Source>>, MemoryError> {
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

#[cfg(test)]
mod tests;
