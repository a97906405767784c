//! The checksum of a large file: the SHA-256 of the SHA-256s of its blocks, in order, on several threads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use sha2::{Digest, Sha256};

/// Size of a block; the last one may be shorter. Part of the format.
const BLOCK: u64 = 4 << 20;

/// Bytes that a thread reads at once. Larger pieces read no faster, and allocators keep them.
const CHUNK: usize = 64 << 10;

/// More threads than these read no faster.
const THREADS: u64 = 16;

type Block = (u64, [u8; 32]);

/// The checksum of the first `size` bytes, in hexadecimal. A shorter file is an error, and so is `stop`,
/// which is checked after each block.
pub(super) fn checksum(file: &File, size: u64, stop: &AtomicBool) -> io::Result<String> {
    let blocks = size.div_ceil(BLOCK);
    let processors = thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let next = AtomicU64::new(0);
    let work = || {
        let mut buffer = vec![0; CHUNK];
        let mut done = Vec::new();
        while let block = next.fetch_add(1, Ordering::Relaxed)
            && block < blocks
        {
            if stop.load(Ordering::Relaxed) {
                return Err(io::Error::other("cancelled"));
            }
            let from = block * BLOCK;
            let length = (size - from).min(BLOCK);
            done.push((block, of_block(file, from, length, &mut buffer)?));
        }
        io::Result::Ok(done)
    };
    let parts: io::Result<Vec<Vec<Block>>> = thread::scope(|scope| {
        let others: Vec<_> = (1..processors.min(THREADS).min(blocks))
            // One that cannot be started leaves its share to the rest.
            .filter_map(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        let own = work();
        let panicked = || io::Error::other("a thread that sums up a file has panicked");
        let joined = others.into_iter().map(|other| other.join());
        let joined = joined.map(|joined| joined.unwrap_or_else(|_| Err(panicked())));
        joined.chain([own]).collect()
    });
    let mut all = parts?.concat();
    all.sort_unstable_by_key(|(block, _)| *block);
    let mut sum = Sha256::new();
    all.iter().for_each(|(_, digest)| sum.update(digest));
    Ok(hex(&sum.finalize()))
}

fn of_block(file: &File, from: u64, length: u64, buffer: &mut [u8]) -> io::Result<[u8; 32]> {
    let mut sum = Sha256::new();
    let mut at = 0;
    while at < length {
        let rest = usize::try_from(length - at).unwrap_or(CHUNK);
        let chunk = &mut buffer[..rest.min(CHUNK)];
        file.read_exact_at(chunk, from + at)?;
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
