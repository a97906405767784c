//! Makes an inline image one of which a store has the large memory, as if the checkpoint had used the store.
//!
//! The choice is that of [`super::find`], as far as an image shows it: what is mostly zero and was left out
//! stays, and so does a mapping that another process has at the same addresses, whose pages CRIU may share
//! between both.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::MemoryError;
use super::call::host;
use super::find::SMALLEST;
use super::image_copy::{ImageCopy, ImageCopyError, Part, blocks, joined, manifest_of, unwritten};
use crate::checksums::ImageError;
use crate::criu::memory::{Pagemap, Run, Vma, advise_huge_pages, vmas};
use crate::manifest::{Manifest, StoredMemory};
use firn_store::threads;
use firn_store::{EXTENT, Index, Piece, Store, StoreError, Writer, machine, mount_of};

/// Writes the inline image `from` into the directory `to`, without the memory that the store gets, which may
/// hold `cap` bytes. `to` is empty, or made. `begin` gets the bytes of that memory and returns what
/// counts those that are copied.
pub fn import<P: Fn(u64) + Sync>(
    from: &Path,
    store: impl FnOnce() -> Result<Store, StoreError>,
    cap: Option<u64>,
    to: &Path,
    begin: impl FnOnce(u64) -> P,
) -> Result<StoredMemory, ImageCopyError> {
    let manifest = manifest_of(from)?;
    if manifest.bulk.is_some() {
        return Err(ImageCopyError::Stored { dir: from.to_owned() });
    }
    let verified = manifest.verify_images(from)?;
    let processes = large(from, &manifest)?;
    let bytes = processes.iter().flat_map(|process| &process.bulk);
    let bytes: u64 = bytes.map(|at| at.end - at.start).sum();
    if bytes == 0 {
        return Err(ImageCopyError::Small { dir: from.to_owned() });
    }
    let store = store()?;
    let copy = ImageCopy::begin(from, to)?;
    let written = store
        .writer(cap)
        .map_err(ImageCopyError::from)
        .and_then(|writer| {
            let import = Import {
                copy: &copy,
                writer: &writer,
                progress: &begin(bytes),
            };
            // Order matters: what can fail comes before the store gets an index of this image.
            let made = import.image(&manifest, processes).and_then(|pieces| {
                verified.expect_unchanged()?;
                Ok((copy.described()?, index(&manifest, to, pieces)?))
            });
            let (images, index) = match made {
                Ok(made) => made,
                Err(error) => {
                    writer.abort();
                    return Err(error);
                }
            };
            let memory = StoredMemory {
                store: store.id().to_owned(),
                bytes,
                written: writer.written(),
                reused: writer.reused(),
                index: writer.finish(&index)?,
            };
            let bulk = Some(memory.clone());
            Manifest {
                bulk,
                images,
                ..manifest
            }
            .write(to)?;
            Ok(memory)
        });
    copy.end(written)
}

fn index(manifest: &Manifest, to: &Path, pieces: Vec<Piece>) -> Result<Index, ImageCopyError> {
    let image = to.canonicalize().map_err(unwritten(to))?;
    let made = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // The image does not have the container's name.
    let container = image
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    Ok(Index {
        checkpoint: manifest.checkpoint.clone(),
        made: made.as_secs(),
        container,
        host: host(),
        machine: machine(),
        owner: None,
        mount: mount_of(&image),
        image,
        pieces,
    })
}

/// A process with memory that the store gets.
struct Large {
    /// Its pid in the container.
    pid: i32,
    map: Pagemap,
    /// The memory, by address.
    bulk: Vec<Range<u64>>,
}

/// The processes of an image that have such memory.
fn large(from: &Path, manifest: &Manifest) -> Result<Vec<Large>, ImageCopyError> {
    let pid = |name: &str| name.strip_prefix("pagemap-")?.strip_suffix(".img")?.parse().ok();
    let pids = manifest.images.iter().filter_map(|file| pid(&file.name));
    let mut all: Vec<(Pagemap, i32, Vec<Range<u64>>)> = Vec::new();
    for pid in pids {
        let map = Pagemap::of_image(from, pid)?.ok_or(MemoryError::Layout { inside: pid, at: 0 })?;
        let size = manifest.images.iter().find(|file| file.name == map.pages_name());
        let (found, expected) = (size.map_or(0, |file| file.size), map.bytes());
        if found != expected {
            let path = from.join(map.pages_name());
            return Err(ImageError::Size {
                path,
                found,
                expected,
            }
            .into());
        }
        all.push((map, pid, plain(&vmas(from, pid)?)));
    }
    let ranges: Vec<Range<u64>> = all.iter().flat_map(|(_, _, ranges)| ranges.clone()).collect();
    let is_of_one = |at: &Range<u64>| ranges.iter().filter(|other| *other == at).count() == 1;
    let processes = all.into_iter().map(|(map, pid, mut bulk)| {
        let has_content = |at: &Range<u64>| map.bytes_in(at).saturating_mul(2) >= at.end - at.start;
        bulk.retain(|at| is_of_one(at) && has_content(at));
        Large { pid, map, bulk }
    });
    Ok(processes.filter(|process| !process.bulk.is_empty()).collect())
}

/// The mappings that are large, and have no policy that a copy has to repeat.
fn plain(vmas: &[Vma]) -> Vec<Range<u64>> {
    let overlaps = |one: &Vma, other: &Vma| one.at.start < other.at.end && other.at.start < one.at.end;
    let is_large = |vma: &Vma| vma.is_plain && vma.at.end.saturating_sub(vma.at.start) >= SMALLEST;
    // CRIU lists guard pages as mappings that overlap theirs.
    let is_alone = |vma: &Vma| vmas.iter().filter(|other| overlaps(vma, other)).count() == 1;
    let plain = vmas.iter().filter(|vma| is_large(vma) && is_alone(vma));
    plain.map(|vma| vma.at.clone()).collect()
}

struct Import<'a, P> {
    copy: &'a ImageCopy<'a>,
    writer: &'a Writer,
    progress: &'a P,
}

impl<P: Fn(u64) + Sync> Import<'_, P> {
    /// Everything but the manifest. Returns what the store has.
    fn image(&self, manifest: &Manifest, processes: Vec<Large>) -> Result<Vec<Piece>, ImageCopyError> {
        let (mut made, mut pieces) = (Vec::new(), Vec::new());
        let mut advised = Vec::new();
        for Large { pid, mut map, bulk } in processes {
            let name = map.pages_name();
            let content = Content::new(self.copy, &name, &map)?;
            for at in &bulk {
                pieces.push(self.piece(pid, at, &content)?);
            }
            let parts = rest(&content.runs, &bulk);
            self.copy
                .pages(&name, &parts, |offset, buffer| content.read(buffer, *offset))?;
            map.runs = joined(parts);
            map.write(self.copy.to, &Pagemap::name(pid))?;
            made.extend([name, Pagemap::name(pid)]);
            advised.push((pid, bulk));
        }
        self.copy.others(manifest, &made)?;
        for (pid, bulk) in advised {
            advise_huge_pages(self.copy.to, pid, &bulk)?;
        }
        Ok(pieces)
    }

    /// Puts a range into the store.
    fn piece(&self, pid: i32, at: &Range<u64>, content: &Content<'_>) -> Result<Piece, ImageCopyError> {
        let parts: Vec<Range<u64>> = blocks(at).collect();
        let extents = threads::each(
            parts.len(),
            || vec![0; EXTENT],
            |number, buffer| {
                let part = &parts[number];
                let length = part.end - part.start;
                let buffer = &mut buffer[..usize::try_from(length).unwrap_or(EXTENT)];
                content.fill(part, buffer)?;
                let extent = self.writer.put(buffer)?;
                (self.progress)(length);
                Ok::<_, ImageCopyError>(extent)
            },
        )?;
        Ok(Piece {
            pid,
            address: at.start,
            length: at.end - at.start,
            extents,
        })
    }
}

/// The pages of a process in the image.
struct Content<'a> {
    copy: &'a ImageCopy<'a>,
    name: &'a str,
    file: File,
    /// By address, with their offsets in the file.
    runs: Vec<(Run, u64)>,
}

impl<'a> Content<'a> {
    fn new(copy: &'a ImageCopy<'a>, name: &'a str, map: &Pagemap) -> Result<Self, ImageCopyError> {
        let mut offset = 0;
        let place = |run: &Run| {
            let begin = offset;
            offset += run.at.end - run.at.start;
            (run.clone(), begin)
        };
        Ok(Self {
            file: copy.open(name)?,
            runs: map.runs.iter().map(place).collect(),
            copy,
            name,
        })
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<(), ImageCopyError> {
        self.copy.read(&self.file, self.name, buffer, offset)
    }

    /// Memory at these addresses: what the image does not have is zero.
    fn fill(&self, at: &Range<u64>, buffer: &mut [u8]) -> Result<(), ImageCopyError> {
        buffer.fill(0);
        let first = self.runs.partition_point(|(run, _)| run.at.end <= at.start);
        let runs = self.runs[first..].iter();
        for (run, offset) in runs.take_while(|(run, _)| run.at.start < at.end) {
            let (start, end) = (run.at.start.max(at.start), run.at.end.min(at.end));
            let index = |address: u64| usize::try_from(address - at.start).unwrap_or(EXTENT);
            self.read(
                &mut buffer[index(start)..index(end)],
                offset + (start - run.at.start),
            )?;
        }
        Ok(())
    }
}

/// The runs without these ranges, with their offsets in the old pages file.
fn rest(runs: &[(Run, u64)], bulk: &[Range<u64>]) -> Vec<Part<u64>> {
    let (mut parts, mut place) = (Vec::new(), 0);
    for (run, offset) in runs {
        for at in without(&run.at, bulk).iter().flat_map(blocks) {
            let source = offset + (at.start - run.at.start);
            let length = at.end - at.start;
            let run = run.part(at);
            parts.push(Part { run, source, place });
            place += length;
        }
    }
    parts
}

/// A range without others, which come by address.
fn without(at: &Range<u64>, others: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut left, mut start) = (Vec::new(), at.start);
    for other in others
        .iter()
        .filter(|other| other.start < at.end && at.start < other.end)
    {
        left.push(start..other.start.max(start));
        start = other.end.max(start);
    }
    left.push(start..at.end.max(start));
    left.retain(|at| at.start < at.end);
    left
}

#[cfg(test)]
mod tests;
