//! Memory of one simulated GPU: a header with owners and a word per chunk, then the chunks.
//!
//! A chunk's word is zero while it is free and otherwise names its owner's slot, the allocation and the
//! chunk's place in it. Words are taken by compare-and-swap, so no process can stop another by being frozen
//! or killed. A chunk is punched (its memory freed, its bytes lost) before its word is cleared.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mapping::Mapping;
use crate::slots::{SLOT_TABLE_SIZE, Slots};

/// Unit of allocation and size of the header: 2 MiB, as large as the driver's.
pub const CHUNK: usize = 2 << 20;
const MAGIC: u64 = u64::from_le_bytes(*b"SIMGPUM1");
const SLOTS_AT: usize = 4096;
const WORDS_AT: usize = SLOTS_AT + SLOT_TABLE_SIZE;
const BLKDISCARD: libc::c_ulong = 0x1277;
const MAX_CHUNKS: usize = (CHUNK - WORDS_AT) / size_of::<u64>();

/// Chunks of an allocation that lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    first: usize,
    count: usize,
}

/// An open GPU with its header mapped.
#[derive(Debug)]
pub struct GpuMemory {
    file: File,
    header: Mapping,
    chunks: usize,
}

impl GpuMemory {
    /// Bytes that the device of a GPU with `memory` bytes needs.
    pub fn device_size(memory: u64) -> u64 {
        memory.next_multiple_of(CHUNK as u64) + CHUNK as u64
    }

    /// Writes the header of a fresh device over `file` (the memory behind the loop device).
    pub fn format(file: &File, memory: u64) -> io::Result<()> {
        let chunks = crate::index(memory).div_ceil(CHUNK);
        if chunks == 0 || chunks > MAX_CHUNKS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "GPU memory must be between 2 MiB and 500 GiB",
            ));
        }
        let header = Mapping::shared(file.as_fd(), 0, CHUNK, None)?;
        Slots::within(&header, SLOTS_AT).initialise();
        file.write_all_at(&(chunks as u64).to_le_bytes(), 8)?;
        file.write_all_at(&MAGIC.to_le_bytes(), 0)
    }

    /// Opens the GPU behind `file`.
    pub fn open(file: File) -> io::Result<Self> {
        let mut head = [0; 16];
        file.read_exact_at(&mut head, 0)?;
        let (magic, chunks) = head.split_at(8);
        let chunks = u64::from_le_bytes(chunks.try_into().map_err(io::Error::other)?);
        if magic != MAGIC.to_le_bytes() || chunks > MAX_CHUNKS as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not the memory of a simulated GPU",
            ));
        }
        // A process that only sees a GPU has no large mapping of it.
        let words = crate::index(chunks) * size_of::<AtomicU64>();
        let header = Mapping::shared(file.as_fd(), 0, (WORDS_AT + words).next_multiple_of(4096), None)?;
        Ok(Self {
            file,
            header,
            chunks: crate::index(chunks),
        })
    }

    /// The processes that use this GPU.
    pub fn slots(&self) -> &Slots {
        Slots::within(&self.header, SLOTS_AT)
    }

    fn words(&self) -> &[AtomicU64] {
        let first = self
            .header
            .at(WORDS_AT, self.chunks * size_of::<AtomicU64>())
            .cast::<AtomicU64>();
        // SAFETY: `at` checked that the words lie inside the mapping, which is aligned and lives as long as
        // `self`; atomics may be shared with other processes.
        unsafe { std::slice::from_raw_parts(first, self.chunks) }
    }

    /// Takes a slot for the process with this token and the calling thread.
    pub fn claim(&self, token: u64) -> Option<usize> {
        self.slots().claim(token, |dead| self.free_all(dead))
    }

    /// Frees everything of `slot` and gives it back; called by the thread that claimed it.
    pub fn release(&self, slot: usize) {
        self.free_all(slot);
        self.slots().release(slot);
    }

    /// Frees the memory of processes that died.
    pub fn sweep(&self) {
        self.slots().sweep(|dead| self.free_all(dead));
    }

    /// Takes memory for allocation `id` of `slot`, sweeping dead owners when there is not enough.
    pub fn allocate(&self, slot: usize, id: u32, bytes: usize) -> Option<Vec<Run>> {
        let count = bytes.div_ceil(CHUNK);
        if !self.take(slot, id, count) {
            self.free(slot, id);
            self.sweep();
            if !self.take(slot, id, count) {
                self.free(slot, id);
                return None;
            }
        }
        Some(self.runs(slot, id))
    }

    fn take(&self, slot: usize, id: u32, count: usize) -> bool {
        let mut taken = 0;
        for word in self.words() {
            if taken == count {
                break;
            }
            let mine = pack(slot, id, taken);
            if word
                .compare_exchange(0, mine, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                taken += 1;
            }
        }
        taken == count
    }

    /// Where allocation `id` of `slot` lies, in order; empty when there is none.
    pub fn runs(&self, slot: usize, id: u32) -> Vec<Run> {
        let tag = pack(slot, id, 0);
        let mut chunks: Vec<(u64, usize)> = Vec::new();
        for (number, word) in self.words().iter().enumerate() {
            let word = word.load(Ordering::Acquire);
            if word & !PLACE_MASK == tag {
                chunks.push((word & PLACE_MASK, number));
            }
        }
        chunks.sort_unstable();
        let mut runs: Vec<Run> = Vec::new();
        for (_, number) in chunks {
            match runs.last_mut() {
                Some(run) if run.first + run.count == number => run.count += 1,
                _ => runs.push(Run {
                    first: number,
                    count: 1,
                }),
            }
        }
        runs
    }

    /// Frees allocation `id` of `slot`.
    pub fn free(&self, slot: usize, id: u32) {
        let tag = pack(slot, id, 0);
        self.free_where(|word| word & !PLACE_MASK == tag);
    }

    fn free_all(&self, slot: usize) {
        self.free_where(|word| word >> SLOT_SHIFT == slot as u64 + 1);
    }

    fn free_where(&self, belongs: impl Fn(u64) -> bool) {
        let words = self.words();
        let mut number = 0;
        while number < words.len() {
            let run = words[number..]
                .iter()
                .take_while(|word| belongs(word.load(Ordering::Acquire)))
                .count();
            if run == 0 {
                number += 1;
                continue;
            }
            // Order matters: a chunk must be empty before another process can take it.
            punch(self.file.as_fd(), chunk_offset(number), run * CHUNK);
            words[number..number + run]
                .iter()
                .for_each(|word| word.store(0, Ordering::Release));
            number += run;
        }
    }

    /// Maps as much of the device as a context does at this address, where forked children keep it.
    pub fn map_inherited(&self, at: usize) -> io::Result<Mapping> {
        Mapping::map(
            Some(at),
            CHUNK,
            libc::PROT_READ,
            libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE,
            self.file.as_raw_fd(),
            0,
        )
    }

    /// Maps `runs` side by side.
    pub fn map(&self, runs: &[Run]) -> io::Result<Mapping> {
        let len = runs.iter().map(|run| run.count).sum::<usize>() * CHUNK;
        let whole = Mapping::map(
            None,
            len,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )?;
        self.map_over(runs, &whole)?;
        Ok(whole)
    }

    /// Maps `runs` side by side over `whole`, which has their size.
    pub fn map_over(&self, runs: &[Run], whole: &Mapping) -> io::Result<()> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let mut done = 0;
        for run in runs {
            let offset = i64::try_from(chunk_offset(run.first)).map_err(io::Error::other)?;
            let (len, fd) = (run.count * CHUNK, self.file.as_raw_fd());
            whole.replace(done, len, protection, libc::MAP_SHARED, fd, offset)?;
            done += len;
        }
        whole.keep_from_children()
    }

    /// Bytes of memory.
    pub fn total(&self) -> u64 {
        (self.chunks * CHUNK) as u64
    }

    /// Bytes that nobody has.
    pub fn free_bytes(&self) -> u64 {
        let free = self
            .words()
            .iter()
            .filter(|word| word.load(Ordering::Relaxed) == 0)
            .count();
        (free * CHUNK) as u64
    }

    /// Bytes that the process in `slot` has.
    pub fn used_by(&self, slot: usize) -> u64 {
        let mine = |word: &&AtomicU64| word.load(Ordering::Relaxed) >> SLOT_SHIFT == slot as u64 + 1;
        (self.words().iter().filter(mine).count() * CHUNK) as u64
    }
}

const SLOT_SHIFT: u32 = 48;
const ID_SHIFT: u32 = 24;
const PLACE_MASK: u64 = (1 << ID_SHIFT) - 1;

fn pack(slot: usize, id: u32, place: usize) -> u64 {
    (slot as u64 + 1) << SLOT_SHIFT | (u64::from(id) & PLACE_MASK) << ID_SHIFT | place as u64
}

fn chunk_offset(number: usize) -> usize {
    CHUNK + number * CHUNK
}

/// Gives the memory of a range of a device back; its bytes read as zero afterwards.
pub fn punch(device: BorrowedFd<'_>, offset: usize, len: usize) {
    let range = [offset as u64, len as u64];
    // SAFETY: the argument is the range that the request reads, alive through the call.
    if unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD, range.as_ptr()) } == 0 {
        return;
    }
    // A file instead of a device, in tests.
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else {
        return;
    };
    // SAFETY: a system call on a descriptor that the caller holds; no memory of this process is involved.
    if unsafe { libc::fallocate(device.as_raw_fd(), mode, offset, len) } != 0 {
        eprintln!("simgpu: cannot give memory back: {}", io::Error::last_os_error());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::{CHUNK, GpuMemory};

    fn gpu(chunks: u64) -> (File, GpuMemory) {
        let memory = chunks * CHUNK as u64;
        let file = std::env::temp_dir().join(format!("simgpu-{}-{chunks}", std::process::id()));
        let open = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&file)
            .unwrap();
        std::fs::remove_file(file).unwrap();
        open.set_len(GpuMemory::device_size(memory)).unwrap();
        GpuMemory::format(&open, memory).unwrap();
        (open.try_clone().unwrap(), GpuMemory::open(open).unwrap())
    }

    #[test]
    fn scattered_chunks_map_in_order_and_are_lost_when_freed() {
        let (_file, gpu) = gpu(5);
        let slot = gpu.claim(7).unwrap();
        for id in 0..5 {
            gpu.allocate(slot, id, CHUNK).unwrap();
        }
        assert!(gpu.allocate(slot, 9, 1).is_none());
        gpu.free(slot, 1);
        gpu.free(slot, 3);
        let runs = gpu.allocate(slot, 10, 2 * CHUNK).unwrap();
        assert_eq!(runs.len(), 2);
        let mapping = gpu.map(&runs).unwrap();
        // SAFETY: the mapping lives, and nobody else uses this GPU.
        let bytes = unsafe { std::slice::from_raw_parts_mut(mapping.as_ptr(), mapping.size()) };
        bytes.fill(0xa5);
        assert_eq!(gpu.free_bytes(), 0);
        drop(mapping);
        gpu.free(slot, 10);
        let again = gpu.map(&gpu.allocate(slot, 11, 2 * CHUNK).unwrap()).unwrap();
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(again.as_ptr(), again.size()) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        gpu.release(slot);
        assert_eq!(gpu.free_bytes(), gpu.total());
    }

    #[test]
    fn memory_of_a_dead_owner_comes_back() {
        let (_file, gpu) = gpu(2);
        let gpu = &gpu;
        std::thread::scope(|scope| {
            // A thread that ends holding its slot is to the kernel what a killed process is. Joined, not only
            // waited for by the scope, which continues when the closure has returned and the thread has still
            // to end.
            let owner = scope.spawn(|| gpu.allocate(gpu.claim(1).unwrap(), 1, 2 * CHUNK).unwrap());
            owner.join().unwrap();
        });
        assert_eq!(gpu.free_bytes(), 0);
        let slot = gpu.claim(2).unwrap();
        assert!(gpu.allocate(slot, 1, 2 * CHUNK).is_some());
        assert_eq!(gpu.slots().owners(), [(slot, 2)]);
    }
}
