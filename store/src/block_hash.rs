//! Checksums of large files, block by block on several threads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use sha2::{Digest, Sha256};

use crate::threads;

/// Size of a block; the last one may be shorter. Part of the format of old images, and whole subtrees of a
/// BLAKE3.
const BLOCK: u64 = 4 << 20;

/// Bytes that a thread reads at once. Larger pieces read no faster, and allocators keep them.
const CHUNK: usize = 64 << 10;

type BlockSum = [u8; 32];

/// What a checksum is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The file's BLAKE3, as `b3sum` prints it.
    Blake3,
    /// The SHA-256 of the SHA-256s of its blocks, in order: firn before 2026-11-24 wrote these.
    Sha256OfBlocks,
}

impl Kind {
    /// The checksum of a file of so many bytes, of which these are the blocks.
    fn of_sums(self, sums: &[BlockSum]) -> String {
        match (self, sums) {
            (Self::Blake3, [one]) => hex(one),
            (Self::Blake3, []) => blake3::hash(&[]).to_string(),
            (Self::Blake3, _) => {
                let (left, right) = halves(sums);
                merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash).to_string()
            }
            (Self::Sha256OfBlocks, _) => {
                let mut all = Sha256::new();
                sums.iter().for_each(|sum| all.update(sum));
                hex(&all.finalize())
            }
        }
    }

    /// Of a block of a file that has so many bytes.
    fn of_block(self, file: &File, block: usize, size: u64) -> io::Result<BlockSum> {
        let at = block as u64 * BLOCK;
        let end = size.min(at + BLOCK);
        match self {
            Self::Blake3 => {
                let mut sum = blake3::Hasher::new();
                sum.set_input_offset(at);
                read(file, at, end, |bytes| {
                    sum.update(bytes);
                })?;
                Ok(if size <= BLOCK {
                    sum.finalize().into()
                } else {
                    sum.finalize_non_root()
                })
            }
            Self::Sha256OfBlocks => {
                let mut sum = Sha256::new();
                read(file, at, end, |bytes| sum.update(bytes))?;
                Ok(sum.finalize().into())
            }
        }
    }
}

/// The two subtrees of which a tree over these blocks consists: the left one is the largest whole one.
fn halves(sums: &[BlockSum]) -> (&[BlockSum], &[BlockSum]) {
    sums.split_at(sums.len().next_power_of_two() / 2)
}

fn subtree(sums: &[BlockSum]) -> BlockSum {
    if let [one] = sums {
        return *one;
    }
    let (left, right) = halves(sums);
    merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
}

fn read(file: &File, mut at: u64, end: u64, mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    while at < end {
        let rest = usize::try_from(end - at).unwrap_or(CHUNK);
        let chunk = &mut buffer[..rest.min(CHUNK)];
        file.read_exact_at(chunk, at)?;
        each(chunk);
        at += chunk.len() as u64;
    }
    Ok(())
}

/// The checksum of the first `size` bytes, in hexadecimal. A shorter file is an error, and so is `stop`,
/// which is checked after each block.
pub fn checksum(kind: Kind, file: &File, size: u64, stop: &AtomicBool) -> io::Result<String> {
    let blocks = usize::try_from(size.div_ceil(BLOCK)).map_err(io::Error::other)?;
    let sums = threads::each(
        blocks,
        || (),
        |block, ()| {
            if stop.load(Ordering::Relaxed) {
                Err(io::Error::other("cancelled"))
            } else {
                kind.of_block(file, block, size)
            }
        },
    )?;
    Ok(kind.of_sums(&sums))
}

/// The BLAKE3 of a file that is being written: each block is read again, by the thread that has written the
/// last of it, while it is in the page cache and in part in the processor's.
pub struct Sums<'a> {
    file: &'a File,
    /// Of each block: the bytes that are written.
    written: Vec<AtomicU64>,
    whole: Mutex<Vec<(usize, BlockSum)>>,
}

impl<'a> Sums<'a> {
    /// Of a file that gets at most so many bytes.
    pub fn new(file: &'a File, most: u64) -> Self {
        let blocks = usize::try_from(most.div_ceil(BLOCK)).unwrap_or_default();
        Self {
            file,
            written: std::iter::repeat_with(AtomicU64::default).take(blocks).collect(),
            whole: Mutex::default(),
        }
    }

    /// These bytes of the file are written; each byte once.
    pub fn wrote(&self, mut from: u64, bytes: u64) -> io::Result<()> {
        let end = from + bytes;
        while from < end {
            let block = from / BLOCK;
            let next = end.min((block + 1) * BLOCK);
            let block = usize::try_from(block).map_err(io::Error::other)?;
            let written = self.written.get(block).ok_or(io::ErrorKind::InvalidInput)?;
            // Order matters: who adds the last bytes reads what others have written before they added theirs.
            if written.fetch_add(next - from, Ordering::AcqRel) + (next - from) == BLOCK {
                let sum = Kind::Blake3.of_block(self.file, block, u64::MAX)?;
                self.whole().push((block, sum));
            }
            from = next;
        }
        Ok(())
    }

    /// The checksum, in hexadecimal, once all `size` bytes are written.
    pub fn finish(self, size: u64) -> io::Result<String> {
        let mut sums = std::mem::take(&mut *self.whole());
        if size <= BLOCK {
            // The block is the root, which was not known when it was written.
            return Ok(hex(&Kind::Blake3.of_block(self.file, 0, size)?));
        }
        sums.sort_unstable_by_key(|(block, _)| *block);
        let mut sums: Vec<BlockSum> = sums.into_iter().map(|(_, sum)| sum).collect();
        if !size.is_multiple_of(BLOCK) {
            sums.push(Kind::Blake3.of_block(self.file, sums.len(), size)?);
        }
        if sums.len() as u64 == size.div_ceil(BLOCK) {
            Ok(Kind::Blake3.of_sums(&sums))
        } else {
            Err(io::Error::other("a block of the file was not written"))
        }
    }

    fn whole(&self) -> std::sync::MutexGuard<'_, Vec<(usize, BlockSum)>> {
        self.whole.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The SHA-256 of some bytes, in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn checksum(kind: Kind, file: &File, size: u64) -> io::Result<String> {
        super::checksum(kind, file, size, &AtomicBool::new(false))
    }

    #[test]
    fn every_byte_and_the_order_of_blocks_count() {
        every_byte_counts(Kind::Blake3);
        every_byte_counts(Kind::Sha256OfBlocks);
    }

    fn every_byte_counts(kind: Kind) {
        let size = 3 * BLOCK + 17;
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        let blank = checksum(kind, &file, size).unwrap();
        let mut seen = std::collections::HashSet::from([blank.clone()]);
        for at in [0, BLOCK - 1, BLOCK, 2 * BLOCK + 5, 3 * BLOCK, size - 1] {
            file.write_all_at(&[1], at).unwrap();
            assert!(
                seen.insert(checksum(kind, &file, size).unwrap()),
                "byte {at} does not count"
            );
            file.write_all_at(&[0], at).unwrap();
        }
        assert_eq!(checksum(kind, &file, size).unwrap(), blank);
        assert!(seen.insert(checksum(kind, &file, size - 1).unwrap()));
        assert!(
            checksum(kind, &file, size + 1).is_err(),
            "a file that is too short"
        );
    }

    #[test]
    fn a_checksum_that_would_take_for_ever_can_be_cancelled() {
        let file = tempfile::tempfile().unwrap();
        let size = 1 << 40;
        file.set_len(size).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let working = scope.spawn(|| super::checksum(Kind::Blake3, &file, size, &stop));
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
                blake3::hash(&content).to_string(),
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
    fn it_is_the_blake3_of_the_file() {
        let file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..6 * BLOCK + 1).map(|n| (n % 251) as u8).collect();
        file.write_all_at(&content, 0).unwrap();
        let whole = (0..=6).map(|blocks| blocks * BLOCK);
        for size in whole.flat_map(|size| [size.saturating_sub(1025), size, size + 1]) {
            let expected = blake3::hash(&content[..usize::try_from(size).unwrap()]);
            let found = checksum(Kind::Blake3, &file, size).unwrap();
            assert_eq!(found, expected.to_string(), "{size}");
        }
    }

    #[test]
    fn old_images_have_another_one() {
        let file = tempfile::tempfile().unwrap();
        let content = [vec![1; 4 << 20], vec![2; 3]];
        file.write_all_at(&content.concat(), 0).unwrap();
        let digests: Vec<u8> = content
            .iter()
            .flat_map(|block| Sha256::digest(block).to_vec())
            .collect();
        let found = checksum(Kind::Sha256OfBlocks, &file, (4 << 20) + 3).unwrap();
        assert_eq!(found, sha256(&digests));
    }
}
