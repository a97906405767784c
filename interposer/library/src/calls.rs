//! The driver's functions as the program calls them: each passes the gate, and calls the driver's own.

use core::sync::atomic::{AtomicUsize, Ordering};

use firn_interposer::facts::ROWS;
use firn_interposer::gate::Slot;
use rustix::io::Errno;
use rustix::process::getpgid;
use rustix::thread::{Pid, gettid};

use crate::area::{self, Area};
use crate::driver::NOT_FOUND;
use crate::{arch, memory, resolve, service};

/// The driver's functions, by the index of their rows; 0: not looked for yet.
static REAL: [AtomicUsize; ROWS.len()] = [const { AtomicUsize::new(0) }; ROWS.len()];

/// What every function returns where libcuda cannot be loaded: `CUDA_ERROR_SHARED_OBJECT_INIT_FAILED`.
const NO_DRIVER: i32 = 303;

/// A structure that is passed by value in memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct InMemory<const WORDS: usize>(pub [u64; WORDS]);

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
            let entered = enter($row);
            if entered.real == 0 {
                return absent();
            }
            // SAFETY: the driver's function has these arguments (facts), and returns a CUresult.
            let answer = unsafe {
                let real: unsafe extern "C" fn($($kind),*) -> i32 = core::mem::transmute(entered.real);
                call!($symbol, real, $($argument),*)
            };
            if let Some(slot) = entered.slot {
                slot.leave();
            }
            after!($symbol, answer, $($argument),*)
        }
    };
}

/// What is called for a function: what this library makes of it, or the driver's.
macro_rules! call {
    (cuMemAlloc_v2, $($rest:ident),*) => { memory::allocations::allocate($($rest),*) };
    (cuMemAllocPitch_v2, $($rest:ident),*) => { memory::allocations::allocate_pitched($($rest),*) };
    (cuMemFree_v2, $($rest:ident),*) => { memory::allocations::free($($rest),*) };
    (cuMemGetAddressRange_v2, $($rest:ident),*) => { memory::attributes::range($($rest),*) };
    (cuPointerGetAttribute, $($rest:ident),*) => { memory::attributes::one($($rest),*) };
    (cuPointerGetAttributes, $($rest:ident),*) => { memory::attributes::several($($rest),*) };
    (cuMemCreate, $($rest:ident),*) => { memory::pieces::create($($rest),*) };
    (cuMemRelease, $($rest:ident),*) => { memory::pieces::release($($rest),*) };
    (cuMemMap, $($rest:ident),*) => { memory::pieces::map($($rest),*) };
    (cuMemUnmap, $($rest:ident),*) => { memory::pieces::unmap($($rest),*) };
    (cuMemSetAccess, $($rest:ident),*) => { memory::pieces::set_access($($rest),*) };
    (cuMemRetainAllocationHandle, $($rest:ident),*) => { memory::pieces::retain($($rest),*) };
    (cuMemExportToShareableHandle, $real:ident, $to:ident, $handle:ident, $($rest:ident),*) => {
        $real($to, memory::pieces::shared_handle($handle), $($rest),*)
    };
    (cuMemImportFromShareableHandle, $($rest:ident),*) => { memory::pieces::import($($rest),*) };
    (cuMemGetAllocationPropertiesFromHandle, $($rest:ident),*) => { memory::pieces::properties($($rest),*) };
    (cuMulticastBindMem, $real:ident, $to:ident, $offset:ident, $handle:ident, $($rest:ident),*) => {
        $real($to, $offset, memory::pieces::shared_handle($handle), $($rest),*)
    };
    (cuMulticastBindMem_v2, $($rest:ident),*) => { call!(bind, $($rest),*) };
    (cuLogicalEndpointBindMem, $($rest:ident),*) => { call!(bind, $($rest),*) };
    (bind, $real:ident, $to:ident, $device:ident, $offset:ident, $handle:ident, $($rest:ident),*) => {
        $real($to, $device, $offset, memory::pieces::shared_handle($handle), $($rest),*)
    };
    (cuMulticastBindAddr, $real:ident, $to:ident, $offset:ident, $begin:ident, $bytes:ident,
        $flags:ident) => {{
        memory::pieces::share_range($begin, $bytes);
        $real($to, $offset, $begin, $bytes, $flags)
    }};
    (cuMulticastBindAddr_v2, $($rest:ident),*) => { call!(bind_range, $($rest),*) };
    (cuLogicalEndpointBindAddr, $($rest:ident),*) => { call!(bind_range, $($rest),*) };
    (bind_range, $real:ident, $to:ident, $device:ident, $offset:ident, $begin:ident, $bytes:ident,
        $flags:ident) => {{
        memory::pieces::share_range($begin, $bytes);
        $real($to, $device, $offset, $begin, $bytes, $flags)
    }};
    (cuMemGetHandleForAddressRange, $real:ident, $to:ident, $begin:ident, $bytes:ident,
        $($rest:ident),*) => {{
        memory::pieces::share_range($begin, $bytes);
        $real($to, $begin, $bytes, $($rest),*)
    }};
    (cuIpcGetMemHandle, $($rest:ident),*) => { memory::shared::get($($rest),*) };
    (cuIpcOpenMemHandle, $($rest:ident),*) => { memory::shared::open($($rest),*) };
    (cuIpcOpenMemHandle_v2, $($rest:ident),*) => { memory::shared::open($($rest),*) };
    (cuIpcCloseMemHandle, $($rest:ident),*) => { memory::shared::close($($rest),*) };
    (cuMulticastCreate, $($rest:ident),*) => { memory::pieces::create_multicast($($rest),*) };
    (cuPointerSetAttribute, $($rest:ident),*) => { memory::attributes::set($($rest),*) };
    (cuMemFreeAsync, $($rest:ident),*) => { memory::allocations::free_in_stream($($rest),*) };
    (cuMemFreeAsync_ptsz, $($rest:ident),*) => { memory::allocations::free_in_stream($($rest),*) };
    (cuMemMapArrayAsync, $($rest:ident),*) => { memory::pieces::map_arrays($($rest),*) };
    (cuMemMapArrayAsync_ptsz, $($rest:ident),*) => { memory::pieces::map_arrays($($rest),*) };
    (cuCtxDestroy, $($rest:ident),*) => { memory::contexts::destroy($($rest),*) };
    (cuCtxDestroy_v2, $($rest:ident),*) => { memory::contexts::destroy($($rest),*) };
    (cuDevicePrimaryCtxRetain, $($rest:ident),*) => { memory::contexts::retain($($rest),*) };
    (cuDevicePrimaryCtxRelease, $($rest:ident),*) => { memory::contexts::release($($rest),*) };
    (cuDevicePrimaryCtxRelease_v2, $($rest:ident),*) => { memory::contexts::release($($rest),*) };
    (cuDevicePrimaryCtxReset, $($rest:ident),*) => { memory::contexts::release($($rest),*) };
    (cuDevicePrimaryCtxReset_v2, $($rest:ident),*) => { memory::contexts::release($($rest),*) };
    (cuCtxEnablePeerAccess, $($rest:ident),*) => { memory::contexts::enable_peer($($rest),*) };
    (cuCtxDisablePeerAccess, $($rest:ident),*) => { memory::contexts::disable_peer($($rest),*) };
    (cuStreamDestroy, $real:ident, $stream:ident) => {{
        memory::captures::forget($stream);
        $real($stream)
    }};
    (cuStreamDestroy_v2, $real:ident, $stream:ident) => {{
        memory::captures::forget($stream);
        $real($stream)
    }};
    (cuStreamBeginCapture, $($rest:tt)*) => { call!(capture, $($rest)*) };
    (cuStreamBeginCapture_v2, $($rest:tt)*) => { call!(capture, $($rest)*) };
    (cuStreamBeginCapture_ptsz, $($rest:tt)*) => { call!(capture, $($rest)*) };
    (cuStreamBeginCapture_v2_ptsz, $($rest:tt)*) => { call!(capture, $($rest)*) };
    (cuStreamBeginCaptureToGraph, $($rest:tt)*) => { call!(capture, $($rest)*) };
    (cuStreamBeginCaptureToGraph_ptsz, $($rest:tt)*) => { call!(capture, $($rest)*) };
    (cuStreamBeginCaptureToCig, $($rest:tt)*) => { call!(capture, $($rest)*) };
    (cuStreamBeginCaptureToCig_ptsz, $($rest:tt)*) => { call!(capture, $($rest)*) };
    (capture, $real:ident, $stream:ident $(, $argument:ident)*) => {
        memory::captures::begin($stream, || $real($stream $(, $argument)*))
    };
    (cuStreamEndCapture, $($rest:tt)*) => { call!(captured, $($rest)*) };
    (cuStreamEndCapture_ptsz, $($rest:tt)*) => { call!(captured, $($rest)*) };
    (cuStreamEndCaptureToCig, $($rest:tt)*) => { call!(captured, $($rest)*) };
    (cuStreamEndCaptureToCig_ptsz, $($rest:tt)*) => { call!(captured, $($rest)*) };
    (cuStreamBeginRecaptureToGraph, $($rest:tt)*) => { call!(capture, $($rest)*) };
    (cuStreamBeginRecaptureToGraph_ptsz, $($rest:tt)*) => { call!(capture, $($rest)*) };
    (cuCtxCreate, $($rest:tt)*) => { call!(made, $($rest)*) };
    (cuCtxCreate_v2, $($rest:tt)*) => { call!(made, $($rest)*) };
    (cuCtxCreate_v3, $($rest:tt)*) => { call!(made, $($rest)*) };
    (cuCtxCreate_v4, $($rest:tt)*) => { call!(made, $($rest)*) };
    (captured, $real:ident, $stream:ident $(, $argument:ident)*) => {
        memory::captures::end($stream, || $real($stream $(, $argument)*))
    };
    (made, $real:ident, $to:ident $(, $argument:ident)*) => {{
        let answer = $real($to $(, $argument)*);
        if answer == 0 {
            memory::contexts::remember($to);
        }
        answer
    }};
    ($symbol:ident, $real:ident, $($argument:ident),*) => { $real($($argument),*) };
}

/// What becomes of an answer.
macro_rules! after {
    (cuGetProcAddress, $answer:ident, $name:ident, $to:ident, $version:ident, $flags:ident) => {
        resolve::replaced($answer, $name, $to, $version, $flags)
    };
    (cuCtxCreate, $($rest:tt)*) => { after!(context, $($rest)*) };
    (cuCtxCreate_v2, $($rest:tt)*) => { after!(context, $($rest)*) };
    (cuCtxCreate_v3, $($rest:tt)*) => { after!(context, $($rest)*) };
    (cuCtxCreate_v4, $($rest:tt)*) => { after!(context, $($rest)*) };
    (cuDevicePrimaryCtxRetain, $($rest:tt)*) => { after!(context, $($rest)*) };
    (context, $answer:ident, $($argument:ident),*) => {{
        if $answer == 0 {
            service::start();
        }
        $answer
    }};
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

pub use all::{WRAPPERS, cuMemExportToShareableHandle};

/// The rows of the driver's functions.
#[allow(
    non_upper_case_globals,
    dead_code,
    reason = "the names are the driver's, and few are needed"
)]
pub mod row {
    include!(concat!(env!("OUT_DIR"), "/rows.rs"));
}

/// The driver's function, 0 if the driver does not have it, and the slot by which its call was entered.
#[repr(C)]
struct Entered {
    real: usize,
    slot: Option<&'static Slot>,
}

#[inline(always)]
fn enter(row: u32) -> Entered {
    let real = REAL
        .get(row as usize)
        .map_or(0, |real| real.load(Ordering::Relaxed));
    let Some((area, slot)) = area::get().zip(own_slot()).filter(|_| real != 0) else {
        return enter_first(row);
    };
    area.gate.enter(slot, row);
    Entered {
        real,
        slot: Some(slot),
    }
}

/// The slot of this thread. None: it has not called yet, or not in this process.
#[inline(always)]
fn own_slot() -> Option<&'static Slot> {
    // SAFETY: the word of a thread is 0, or the address of a slot, which stays.
    let slot = unsafe { (arch::cell() as *const Slot).as_ref() };
    slot.filter(|slot| !slot.is_free())
}

/// The first call of a thread, or of a function. A thread enters without a slot where there is none for it.
#[cold]
#[inline(never)]
extern "C" fn enter_first(row: u32) -> Entered {
    let real = real(row as usize).unwrap_or(0);
    let area = area::get().or_else(area::make).filter(|_| real != 0);
    let slot = area.and_then(|area| enter_area(area, row));
    Entered { real, slot }
}

/// The driver's function of a row.
pub fn real(row: usize) -> Option<usize> {
    let known = REAL.get(row)?;
    if known.load(Ordering::Relaxed) == 0 {
        known.store(resolve::exported(row)?, Ordering::Relaxed);
    }
    Some(known.load(Ordering::Relaxed))
}

fn enter_area(area: &'static Area, row: u32) -> Option<&'static Slot> {
    let slot = own_slot().or_else(|| {
        let tid = gettid().as_raw_nonzero().get().unsigned_abs();
        let slot = area.gate.take_slot(tid, is_gone)?;
        arch::set_cell(core::ptr::from_ref(slot) as usize);
        Some(slot)
    });
    match slot {
        Some(slot) => area.gate.enter(slot, row),
        None => area.gate.enter_unseen(),
    }
    slot
}

/// The result of a function that there is not.
#[cold]
#[inline(never)]
extern "C" fn absent() -> i32 {
    if resolve::has_driver() {
        NOT_FOUND
    } else {
        NO_DRIVER
    }
}

/// Whether a thread has ended. One of another process that has got its number counts as it.
pub fn is_gone(tid: u32) -> bool {
    let pid = i32::try_from(tid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| getpgid(Some(pid)) == Err(Errno::SRCH))
}
