//! The checksum of a large file: the SHA-256 of the SHA-256s of its blocks, in order, on several threads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};

use crate::threads;

/// Size of a block; the last one may be shorter. Part of the format.
const BLOCK: u64 = 4 << 20;

/// Bytes that a thread reads at once. Larger pieces read no faster, and allocators keep them.
const CHUNK: usize = 64 << 10;

type BlockSum = [u8; 32];

/// The checksum of the first `size` bytes, in hexadecimal. A shorter file is an error, and so is `stop`,
/// which is checked after each block.
pub(super) fn checksum(file: &File, size: u64, stop: &AtomicBool) -> io::Result<String> {
    let blocks = usize::try_from(size.div_ceil(BLOCK)).map_err(io::Error::other)?;
    let sums = threads::each(
        blocks,
        || (),
        |block, ()| match stop.load(Ordering::Relaxed) {
            true => Err(io::Error::other("cancelled")),
            false => of_block(file, block, size),
        },
    )?;
    Ok(of_sums(&sums))
}

/// The checksum of a file that is being written: each block is read again, by the thread that has written the
/// last of it, while it is in the page cache and in part in the processor's.
pub(crate) struct Sums<'a> {
    file: &'a File,
    /// Of each block: the bytes that are written.
    written: Vec<AtomicU64>,
    whole: Mutex<Vec<(usize, BlockSum)>>,
}

impl<'a> Sums<'a> {
    /// Of a file that gets at most so many bytes.
    pub(crate) fn new(file: &'a File, most: u64) -> Self {
        let blocks = usize::try_from(most.div_ceil(BLOCK)).unwrap_or_default();
        Self {
            file,
            written: std::iter::repeat_with(AtomicU64::default).take(blocks).collect(),
            whole: Mutex::default(),
        }
    }

    /// These bytes of the file are written; each byte once.
    pub(crate) fn wrote(&self, mut from: u64, bytes: u64) -> io::Result<()> {
        let end = from + bytes;
        while from < end {
            let block = from / BLOCK;
            let next = end.min((block + 1) * BLOCK);
            let block = usize::try_from(block).map_err(io::Error::other)?;
            let written = self.written.get(block).ok_or(io::ErrorKind::InvalidInput)?;
            // Order matters: who adds the last bytes reads what others have written before they added theirs.
            if written.fetch_add(next - from, Ordering::AcqRel) + (next - from) == BLOCK {
                let sum = of_block(self.file, block, u64::MAX)?;
                self.whole().push((block, sum));
            }
            from = next;
        }
        Ok(())
    }

    /// The checksum, in hexadecimal, once all `size` bytes are written.
    pub(crate) fn finish(self, size: u64) -> io::Result<String> {
        let mut sums = std::mem::take(&mut *self.whole());
        sums.sort_unstable_by_key(|(block, _)| *block);
        let mut sums: Vec<BlockSum> = sums.into_iter().map(|(_, sum)| sum).collect();
        if !size.is_multiple_of(BLOCK) {
            sums.push(of_block(self.file, sums.len(), size)?);
        }
        match sums.len() as u64 == size.div_ceil(BLOCK) {
            true => Ok(of_sums(&sums)),
            false => Err(io::Error::other("a block of the file was not written")),
        }
    }

    fn whole(&self) -> std::sync::MutexGuard<'_, Vec<(usize, BlockSum)>> {
        self.whole.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn of_sums(sums: &[BlockSum]) -> String {
    let mut all = Sha256::new();
    sums.iter().for_each(|sum| all.update(sum));
    hex(&all.finalize())
}

/// The SHA-256 of a block of a file that has so many bytes.
fn of_block(file: &File, block: usize, size: u64) -> io::Result<BlockSum> {
    let (mut sum, mut buffer) = (Sha256::new(), vec![0; CHUNK]);
    let mut at = block as u64 * BLOCK;
    let end = size.min(at + BLOCK);
    while at < end {
        let rest = usize::try_from(end - at).unwrap_or(CHUNK);
        let chunk = &mut buffer[..rest.min(CHUNK)];
        file.read_exact_at(chunk, at)?;
        sum.update(&*chunk);
        at += chunk.len() as u64;
    }
    Ok(sum.finalize().into())
}

/// The SHA-256 of some bytes, in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn checksum(file: &File, size: u64) -> io::Result<String> {
        super::checksum(file, size, &AtomicBool::new(false))
    }

    #[test]
    fn every_byte_and_the_order_of_blocks_count() {
        let size = 3 * BLOCK + 17;
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        let blank = checksum(&file, size).unwrap();
        let mut seen = std::collections::HashSet::from([blank.clone()]);
        for at in [0, BLOCK - 1, BLOCK, 2 * BLOCK + 5, 3 * BLOCK, size - 1] {
            file.write_all_at(&[1], at).unwrap();
            assert!(
                seen.insert(checksum(&file, size).unwrap()),
                "byte {at} does not count"
            );
            file.write_all_at(&[0], at).unwrap();
        }
        assert_eq!(checksum(&file, size).unwrap(), blank);
        assert!(seen.insert(checksum(&file, size - 1).unwrap()));
        assert!(checksum(&file, size + 1).is_err(), "a file that is too short");
    }

    #[test]
    fn a_checksum_that_would_take_for_ever_can_be_cancelled() {
        let file = tempfile::tempfile().unwrap();
        let size = 1 << 40;
        file.set_len(size).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let working = scope.spawn(|| super::checksum(&file, size, &stop));
            stop.store(true, Ordering::Relaxed);
            assert!(working.join().unwrap().is_err());
        });
    }

    #[test]
    fn a_file_that_is_written_in_any_order_has_the_same_checksum() {
        for size in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 5] {
            let file = tempfile::tempfile().unwrap();
            let content: Vec<u8> = (0..size).map(|n| (n % 251) as u8).collect();
            let sums = Sums::new(&file, 3 * BLOCK);
            let parts: Vec<(u64, &[u8])> = content
                .chunks(1_000_003)
                .enumerate()
                .map(|(n, part)| (n as u64 * 1_000_003, part))
                .collect();
            for (at, part) in parts.iter().rev() {
                file.write_all_at(part, *at).unwrap();
                sums.wrote(*at, part.len() as u64).unwrap();
            }
            assert_eq!(
                sums.finish(size).unwrap(),
                checksum(&file, size).unwrap(),
                "{size}"
            );
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * BLOCK).unwrap();
        let sums = Sums::new(&file, 2 * BLOCK);
        sums.wrote(0, BLOCK).unwrap();
        assert!(sums.finish(2 * BLOCK).is_err(), "a block was not written");
    }

    #[test]
    fn it_is_the_checksum_of_the_format() {
        let file = tempfile::tempfile().unwrap();
        let content = [vec![1; 4 << 20], vec![2; 3]];
        file.write_all_at(&content.concat(), 0).unwrap();
        let digests: Vec<u8> = content
            .iter()
            .flat_map(|block| Sha256::digest(block).to_vec())
            .collect();
        assert_eq!(checksum(&file, (4 << 20) + 3).unwrap(), sha256(&digests));
    }
}
