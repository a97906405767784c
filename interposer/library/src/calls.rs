//! The driver's functions as the program calls them: each passes the gate, and calls the driver's own.

use core::sync::atomic::{AtomicUsize, Ordering};

use firn_interposer::facts::ROWS;
use firn_interposer::gate::{Gate, Slot};
use rustix::io::Errno;
use rustix::process::getpgid;
use rustix::thread::{Pid, gettid};

use crate::{arch, resolve};

/// Threads with a slot of their own. More are not seen at the gate.
const THREADS: usize = 1024;

static GATE: Gate<[Slot; THREADS]> = Gate::new([const { Slot::new() }; THREADS]);

/// The driver's functions, by the index of their rows; 0: not looked for yet.
static REAL: [AtomicUsize; ROWS.len()] = [const { AtomicUsize::new(0) }; ROWS.len()];

/// What a function returns that this driver does not have: `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: i32 = 500;

/// What every function returns where libcuda cannot be loaded: `CUDA_ERROR_SHARED_OBJECT_INIT_FAILED`.
const NO_DRIVER: i32 = 303;

/// A structure that is passed by value in memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct InMemory<const WORDS: usize>([u64; WORDS]);

/// The address of a function.
pub struct Address(*const ());

// SAFETY: a function may be called by every thread.
unsafe impl Sync for Address {}

impl Address {
    pub fn get(&self) -> usize {
        self.0 as usize
    }
}

macro_rules! addresses {
    ($($symbol:ident),*) => { [$(Address($symbol as *const ())),*] };
}

macro_rules! wrapper {
    ($row:literal, $symbol:ident, $($argument:ident: $kind:ty),*) => {
        /// # Safety
        /// As the driver's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($argument: $kind),*) -> i32 {
            let Some((real, slot)) = enter($row) else {
                return if resolve::has_driver() { NOT_FOUND } else { NO_DRIVER };
            };
            // SAFETY: the driver's function has these arguments (facts), and returns a CUresult.
            let answer = unsafe {
                let real: unsafe extern "C" fn($($kind),*) -> i32 = core::mem::transmute(real);
                real($($argument),*)
            };
            GATE.leave(slot);
            after!($symbol, answer, $($argument),*)
        }
    };
}

/// What becomes of an answer.
macro_rules! after {
    (cuGetProcAddress, $answer:ident, $name:ident, $to:ident, $version:ident, $flags:ident) => {
        resolve::replaced($answer, $name, $to, $version, $flags)
    };
    (cuGetProcAddress_v2, $answer:ident, $name:ident, $to:ident, $version:ident, $flags:ident, $_:ident) => {
        resolve::replaced($answer, $name, $to, $version, $flags)
    };
    ($symbol:ident, $answer:ident, $($argument:ident),*) => {
        $answer
    };
}

#[allow(non_snake_case, reason = "the names are the driver's")]
mod all {
    use super::*;

    include!(concat!(env!("OUT_DIR"), "/calls.rs"));
}

pub use all::WRAPPERS;

/// Enters a call: the driver's function, and the slot of this thread. None: the driver does not have it.
#[inline(always)]
fn enter(row: usize) -> Option<(usize, &'static Slot)> {
    let real = REAL.get(row)?.load(Ordering::Relaxed);
    let (real, slot) = match (real, own_slot()) {
        (0, _) | (_, None) => first_call(row)?,
        (real, Some(slot)) => (real, slot),
    };
    GATE.enter(slot, row as u32);
    Some((real, slot))
}

/// The slot of this thread. None: it has not called yet.
#[inline(always)]
fn own_slot() -> Option<&'static Slot> {
    // SAFETY: the word of a thread is 0, or the address of a static slot.
    unsafe { (arch::cell() as *const Slot).as_ref() }
}

/// Those of threads beyond [`THREADS`].
static OTHERS: Slot = Slot::new();

#[cold]
#[inline(never)]
fn first_call(row: usize) -> Option<(usize, &'static Slot)> {
    let known = REAL.get(row)?;
    if known.load(Ordering::Relaxed) == 0 {
        known.store(resolve::exported(row)?, Ordering::Relaxed);
    }
    let slot = own_slot().unwrap_or_else(|| {
        GATE.register();
        let tid = gettid().as_raw_nonzero().get().unsigned_abs();
        let slot = GATE.take_slot(tid, is_gone).unwrap_or(&OTHERS);
        arch::set_cell(core::ptr::from_ref(slot) as usize);
        slot
    });
    Some((known.load(Ordering::Relaxed), slot))
}

/// Whether a thread has ended. One of another process that has got its number counts as it.
fn is_gone(tid: u32) -> bool {
    let pid = i32::try_from(tid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| getpgid(Some(pid)) == Err(Errno::SRCH))
}
