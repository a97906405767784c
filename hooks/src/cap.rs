//! How much the archives of a checkpoint may take of this node.
//!
//! What counts are the bytes that come out of an archive, after decompression, whether they are written or
//! skipped, and something for each entry. So a small archive cannot fill a disk, nor occupy a processor for
//! long.

use std::cell::Cell;
use std::io::{self, Read};
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::statvfs::statvfs;

/// The headers of an archive may request any amount of memory.
const MEMORY: u64 = 1 << 30;
/// Seconds of a processor: enough for several hundred GiB.
const CPU: u64 = 1800;
/// What an entry of an archive costs in addition to its bytes.
pub const ENTRY: u64 = 4096;

/// Bytes that are left. Clones share them.
#[derive(Clone, Debug)]
pub struct Cap(Rc<Cell<u64>>);

impl Cap {
    pub fn new(bytes: u64) -> Self {
        Self(Rc::new(Cell::new(bytes)))
    }

    /// Of an argument: a number of bytes. 0 stands for half of what is free in the file system of `dir`.
    pub fn of(argument: &str, dir: &Path) -> Result<Self> {
        Ok(Self::new(match argument.parse().context("no size")? {
            0 => {
                let found = statvfs(dir).context("cannot find out how much is free")?;
                found.blocks_available().saturating_mul(found.fragment_size()) / 2
            }
            bytes => bytes,
        }))
    }

    pub fn left(&self) -> u64 {
        self.0.get()
    }

    /// Takes bytes.
    ///
    /// # Errors
    /// There are fewer.
    pub fn take(&self, bytes: u64) -> io::Result<()> {
        match self.left().checked_sub(bytes) {
            Some(left) => {
                self.0.set(left);
                Ok(())
            }
            None => {
                let text = "the checkpoint has more bytes than images may have here";
                Err(io::Error::new(io::ErrorKind::FileTooLarge, text))
            }
        }
    }

    /// The source, whose bytes are taken as they are read.
    pub fn reader<R: Read>(&self, source: R) -> Capped<R> {
        let cap = self.clone();
        Capped { source, cap }
    }
}

/// See [`Cap::reader`].
pub struct Capped<R> {
    source: R,
    cap: Cap,
}

impl<R: Read> Read for Capped<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buffer)?;
        self.cap.take(count as u64)?;
        Ok(count)
    }
}

/// Bounds the memory and the time of a processor that this process may take.
pub fn limit_process() -> Result<()> {
    setrlimit(Resource::RLIMIT_AS, MEMORY, MEMORY).context("cannot limit the memory")?;
    setrlimit(Resource::RLIMIT_CPU, CPU, CPU).context("cannot limit the time of the processor")
}

#[cfg(test)]
mod tests {
    use nix::sys::resource::getrlimit;

    use super::*;

    #[test]
    fn bytes_are_taken_once_and_to_the_last() {
        let cap = Cap::of("10", Path::new("/")).unwrap();
        let mut read = Vec::new();
        cap.reader(&b"seven.."[..]).read_to_end(&mut read).unwrap();
        assert_eq!((read.len(), cap.left()), (7, 3));
        assert!(cap.take(4).is_err());
        assert_eq!(cap.left(), 3, "what was refused is not taken");
        cap.take(3).unwrap();
        let error = cap.reader(&b"x"[..]).read_to_end(&mut read).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(Cap::of("x", Path::new("/")).is_err() && Cap::of("0", Path::new("/nonexistent")).is_err());
        let free = statvfs("/").unwrap();
        let free = free.blocks_available() * free.fragment_size();
        let half = Cap::of("0", Path::new("/")).unwrap().left();
        assert!(half > free / 4 && half < free / 4 * 3, "{half} of {free}");
    }

    #[test]
    #[ignore = "no test: the next one runs it"]
    fn limited_in_a_process_of_its_own() {
        limit_process().unwrap();
        for (resource, limit) in [(Resource::RLIMIT_AS, MEMORY), (Resource::RLIMIT_CPU, CPU)] {
            assert_eq!(getrlimit(resource).unwrap(), (limit, limit));
        }
    }

    #[test]
    fn memory_and_time_are_bounded() {
        let test = "cap::tests::limited_in_a_process_of_its_own";
        let run = crate::alone::run(test, &[]);
        assert!(run.status.success(), "{run:?}");
    }
}
