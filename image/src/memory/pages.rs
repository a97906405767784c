//! Writes a pages file of CRIU's, on several threads.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};

use super::progress::Counter;
use super::{Kept, MemoryError, remote};
use crate::checksums::ImageFile;
use crate::criu::memory::{PAGE, Run};
use firn_store::block_hash::Sums;
use firn_store::is_zero;
use firn_store::threads;

/// Bytes that a thread reads at once.
pub(super) const BLOCK: u64 = 4 << 20;

/// A part of a run, in one mapping.
pub(super) struct Block {
    pub run: Run,
    /// Where it is read.
    pub pid: i32,
    pub address: u64,
    /// Whether zero pages may be left out.
    pub is_anonymous: bool,
}

impl Block {
    fn bytes(&self) -> u64 {
        self.run.at.end - self.run.at.start
    }
}

/// Where the next block begins in the pages file: blocks are placed in their order, and written in any.
struct Places {
    next: Mutex<(usize, u64)>,
    taken: Condvar,
}

impl Places {
    /// The place of a block with so many bytes. Waits for those before it, which always come: threads take
    /// blocks in order, and one that fails passes its turn on.
    fn take(&self, number: usize, bytes: u64) -> u64 {
        let next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = self.taken.wait_while(next, |(turn, _)| *turn != number);
        let mut next = wait.unwrap_or_else(PoisonError::into_inner);
        let place = next.1;
        *next = (number + 1, place + bytes);
        self.taken.notify_all();
        place
    }
}

/// Writes the blocks into a pages file. Returns the runs that are in it.
pub(super) fn pages(
    dir: &Path,
    name: &str,
    blocks: &[Block],
    kept: &mut Kept,
    counter: &Counter,
) -> Result<Vec<Run>, MemoryError> {
    let failed = |source| MemoryError::Pages {
        file: name.to_owned(),
        source,
    };
    let file = replace(dir, name).map_err(failed)?;
    let places = Places {
        next: Mutex::new((0, 0)),
        taken: Condvar::new(),
    };
    let most = blocks.iter().map(Block::bytes).sum();
    counter.expect(most);
    let sums = Sums::new(&file, most);
    let written = threads::each(
        blocks.len(),
        || vec![0; usize::try_from(BLOCK).unwrap_or_default()],
        |number, buffer| {
            let block = &blocks[number];
            let length = block.bytes();
            let buffer = &mut buffer[..usize::try_from(length).unwrap_or_default()];
            let read = remote::read(block.pid, block.address, buffer);
            let runs = match &read {
                Ok(()) => content(block, buffer),
                Err(_) => Vec::new(),
            };
            let kept = compact(&block.run, &runs, buffer);
            let bytes = kept as u64;
            let place = places.take(number, bytes);
            read?;
            let written = file.write_all_at(&buffer[..kept], place);
            written.and_then(|()| sums.wrote(place, bytes)).map_err(failed)?;
            counter.add(length);
            Ok::<_, MemoryError>((runs, length - bytes))
        },
    )?;
    let (mut runs, mut size): (Vec<Run>, u64) = (Vec::new(), 0);
    for (run, zero) in written {
        kept.zero += zero;
        for run in run {
            size += run.at.end - run.at.start;
            match runs.last_mut() {
                Some(last) if last.joins(&run) => last.at.end = run.at.end,
                _ => runs.push(run),
            }
        }
    }
    kept.bytes += size;
    let described = ImageFile::written(name, &file, size, sums).map_err(failed)?;
    kept.files.push(described);
    Ok(runs)
}

/// The runs of a block that have to be in the file.
fn content(block: &Block, bytes: &[u8]) -> Vec<Run> {
    if !block.is_anonymous {
        return vec![block.run.clone()];
    }
    let mut runs: Vec<Run> = Vec::new();
    let page = usize::try_from(PAGE).unwrap_or(usize::MAX);
    for (at, page) in (block.run.at.start..).step_by(page).zip(bytes.chunks(page)) {
        if is_zero(page) {
            continue;
        }
        let at = at..at + PAGE;
        match runs.last_mut() {
            Some(last) if last.at.end == at.start => last.at.end = at.end,
            _ => runs.push(block.run.part(at)),
        }
    }
    runs
}

/// Moves the runs of a block to the front of its bytes. Returns how many bytes they are.
fn compact(of: &Run, runs: &[Run], bytes: &mut [u8]) -> usize {
    let offset = |at: u64| usize::try_from(at - of.at.start).unwrap_or_default();
    let mut end = 0;
    for run in runs {
        let from = offset(run.at.start)..offset(run.at.end);
        let length = from.len();
        bytes.copy_within(from, end);
        end += length;
    }
    end
}

/// Puts an empty file in the place of the link.
pub(super) fn replace(dir: &Path, name: &str) -> io::Result<File> {
    // Hidden: who watches the directory for lost files passes it over.
    let new = dir.join(format!(".{name}"));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    std::fs::rename(&new, dir.join(name))?;
    Ok(file)
}
