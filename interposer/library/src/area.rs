//! Memory of this process alone, where its threads meet.

use core::mem::size_of;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use firn_interposer::abi::{self, Beacon};
use firn_interposer::gate::{Gate, Slot};
use firn_interposer::table::Table;
use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::job::Job;
use crate::lock::Lock;
use crate::memory::shared::Shares;

/// Threads with a slot of their own.
const THREADS: usize = 16_384;

/// Pieces of GPU memory that are known, and mappings.
const PIECES: usize = 65_536;

/// Devices of a process that are known.
pub const DEVICES: usize = 32;

/// Contexts of a process that are known, apart from primary ones.
const CONTEXTS: usize = 64;

/// Streams that are captured at a time.
const CAPTURES: usize = 64;

pub type Memory = Table<PIECES>;

/// What the threads of a process share. Of zero bytes it is that of a process without contexts.
#[repr(C)]
pub struct Area {
    pub beacon: Beacon,
    /// Whether a thread has begun to start the library's own one.
    has_begun: AtomicBool,
    /// Whether memory is out of the process, or may be: then the gate stays shut.
    pub is_away: AtomicBool,
    /// What each device can do; 0: not asked yet.
    pub abilities: [AtomicU32; DEVICES],
    /// For each device, a bit for each one whose contexts may access its allocations.
    pub peers: [AtomicU32; DEVICES],
    /// For each device, its primary context.
    pub primary: [AtomicU64; DEVICES],
    /// There is a context that is not among these: nobody can wait for its work.
    pub has_unknown: AtomicBool,
    /// Contexts that the program has made itself; 0: none.
    made: [AtomicU64; CONTEXTS],
    /// Every context was idle since the gate was shut.
    pub is_rehearsed: AtomicBool,
    /// Streams that are captured; 0: none.
    pub captures: [AtomicU64; CAPTURES],
    pub job: Job,
    pub gate: Gate<[Slot; THREADS]>,
    pub memory: Lock<Memory>,
    /// Allocations that processes have in common.
    pub shares: Lock<Shares>,
}

impl Area {
    /// Whether a stream is captured.
    pub fn is_capturing(&self) -> bool {
        let is_taken = |place: &AtomicU64| place.load(Ordering::Acquire) != 0;
        self.captures.iter().any(is_taken)
    }

    /// Opens the gate. False: memory is out of the process, and it stays shut.
    pub fn open(&self) -> bool {
        if self.is_away.load(Ordering::SeqCst) {
            return false;
        }
        if self.gate.is_shut() {
            for piece in self.memory.take().pieces.all_mut() {
                piece.is_lent = false;
            }
            self.is_rehearsed.store(false, Ordering::Release);
            self.gate.open();
        }
        true
    }

    /// Writes the sizes of so many pieces from this index on. Returns how many bytes they take.
    pub fn put_sizes(&self, from: usize, count: usize, rest: &mut [u8]) -> usize {
        let table = self.memory.take();
        let pieces = table.pieces.all().iter().skip(from).take(count);
        abi::put_sizes(rest, pieces.map(|piece| piece.bytes))
    }

    /// How many of so many pieces from this index on are those of other processes.
    pub fn imported(&self, from: usize, count: usize) -> usize {
        let table = self.memory.take();
        let pieces = table.pieces.all().iter().skip(from).take(count);
        pieces.filter(|piece| piece.is_imported).count()
    }

    /// Somebody holds descriptors of so many pieces from this index on.
    pub fn lend(&self, from: usize, count: usize) {
        let mut table = self.memory.take();
        for piece in table.pieces.all_mut().iter_mut().skip(from).take(count) {
            piece.is_lent = true;
        }
    }

    /// Notes whether memory is out of the process.
    pub fn look(&self) {
        let table = self.memory.take();
        let is_away = table.pieces.all().iter().any(|piece| piece.is_out)
            || table.mappings.all().iter().any(|mapping| mapping.is_empty);
        self.is_away.store(is_away, Ordering::SeqCst);
    }

    /// The contexts that there are.
    pub fn contexts(&self) -> impl Iterator<Item = u64> {
        let all = self.primary.iter().chain(&self.made);
        all.map(|context| context.load(Ordering::Acquire))
            .filter(|context| *context != 0)
    }

    /// The program has made a context.
    pub fn add_context(&self, context: u64) {
        let take = |place: &&AtomicU64| {
            let taken = place.compare_exchange(0, context, Ordering::AcqRel, Ordering::Relaxed);
            taken.is_ok()
        };
        if self.made.iter().find(take).is_none() {
            self.has_unknown.store(true, Ordering::Release);
        }
    }

    /// The program destroys a context. Whether it was known.
    pub fn remove_context(&self, context: u64) -> bool {
        let remove = |place: &AtomicU64| {
            let removed = place.compare_exchange(context, 0, Ordering::AcqRel, Ordering::Relaxed);
            removed.is_ok()
        };
        self.made.iter().any(remove)
    }

    /// Whether the caller is the first one to ask in this process.
    pub fn is_first(&self) -> bool {
        !self.has_begun.load(Ordering::Relaxed) && !self.has_begun.swap(true, Ordering::AcqRel)
    }
}

/// No area can be had.
const REFUSED: *mut Area = ptr::without_provenance_mut(1);

/// Where firn finds the area of a process; below 2: it has none. By this name, as the library's own symbol.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "as the other exported names")]
pub static firn_cuda_area: AtomicPtr<Area> = AtomicPtr::new(ptr::null_mut());

static AREA: &AtomicPtr<Area> = &firn_cuda_area;

/// The area. None: this process has none yet, or cannot have one.
#[inline(always)]
pub fn get() -> Option<&'static Area> {
    let area = AREA.load(Ordering::Acquire);
    // SAFETY: it is null, or what `make` has mapped, which stays.
    if area == REFUSED {
        None
    } else {
        unsafe { area.as_ref() }
    }
}

/// Makes the area: pages that a forked child finds empty, and in them an open gate that nobody has passed.
/// None: the kernel does not give them.
#[cold]
pub fn make() -> Option<&'static Area> {
    if AREA.load(Ordering::Acquire).is_null() {
        let mapped = map();
        let area = mapped.unwrap_or(REFUSED);
        let former = AREA.compare_exchange(ptr::null_mut(), area, Ordering::AcqRel, Ordering::Acquire);
        if former.is_err() && mapped.is_ok() {
            unmap(area);
        }
    }
    get()
}

fn map() -> Result<*mut Area, Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, where the kernel wants it; the advice is for it alone.
    unsafe {
        let mapped = mm::mmap_anonymous(ptr::null_mut(), size_of::<Area>(), access, flags)?;
        mm::madvise(mapped, size_of::<Area>(), Advice::LinuxWipeOnFork)
            .inspect_err(|_| unmap(mapped.cast()))?;
        // What nobody uses costs nothing. A kernel without huge pages refuses the advice.
        let _ = mm::madvise(mapped, size_of::<Area>(), Advice::LinuxNoHugepage);
        Ok(mapped.cast())
    }
}

fn unmap(area: *mut Area) {
    // SAFETY: nobody else has seen it.
    let _ = unsafe { mm::munmap(area.cast(), size_of::<Area>()) };
}
