//! The GPU memory of the program: what it allocates is made of pieces that can be taken out and put back.
//!
//! Each function here stands for one of the driver's, and gets the driver's and its arguments.

pub mod allocations;
pub mod attributes;
pub mod captures;
pub mod contexts;
pub mod moving;
pub mod pieces;
pub mod shared;

use firn_interposer::table::{Access, Host};

use crate::area::{self, DEVICES, Memory};
use crate::driver::{self, Accessor, DEVICE, Location, READ, READ_WRITE, Status};
use crate::lock::Taken;

/// The table of this process. None: the process has none.
fn table() -> Option<Taken<'static, Memory>> {
    Some(area::get()?.memory.take())
}

/// Adds to a mapping's access what the driver has granted.
fn grant(access: &mut Access, accessor: &Accessor) {
    let Location { kind, id } = accessor.location;
    if kind == DEVICE {
        let bit = 1_u32.checked_shl(id).unwrap_or(0);
        let set = |bits: u32, is_set| if is_set { bits | bit } else { bits & !bit };
        access.reading = set(access.reading, accessor.flags >= READ);
        access.writing = set(access.writing, accessor.flags == READ_WRITE);
        return;
    }
    let is_same = |host: &&mut Host| (host.kind, host.id) == (kind, id) || host.kind == 0;
    if let Some(host) = access.hosts.iter_mut().find(is_same) {
        *host = Host {
            kind,
            id,
            flags: accessor.flags,
        };
    }
}

/// Lets a device access an address range, or no longer.
fn access(device: u32, flags: u32) -> Accessor {
    let location = Location {
        kind: DEVICE,
        id: device,
    };
    Accessor { location, flags }
}

/// The current device, and its context. None: there is none, or one that is not known here.
fn current() -> Option<(u32, u64)> {
    let (mut device, mut context) = (-1, 0);
    // SAFETY: both are there.
    let known = unsafe {
        driver::cuCtxGetDevice(&mut device) == driver::SUCCESS
            && driver::cuCtxGetCurrent(&mut context) == driver::SUCCESS
    };
    let device = u32::try_from(device).ok().filter(|_| known)?;
    ((device as usize) < DEVICES).then_some((device, context))
}

/// Waits for all work of the current context. The driver's own frees do that, and spoil no capture of another
/// thread, as cuCtxSynchronize would (docs/evidence/gpu-runs.md).
fn wait_for_work() -> Status {
    let mut small = 0;
    // SAFETY: the driver's functions, with a place for its result.
    unsafe {
        match driver::cuMemAlloc_v2(&mut small, 1) {
            driver::SUCCESS => driver::cuMemFree_v2(small),
            // The device is full.
            driver::OUT_OF_MEMORY => driver::cuCtxSynchronize(),
            refused => refused,
        }
    }
}

/// Does something with a context as the current one.
fn within(context: u64, does: impl FnOnce() -> Status) -> Status {
    if current().is_some_and(|(_, current)| current == context) {
        return does();
    }
    // SAFETY: the program has this context.
    let pushed = unsafe { driver::cuCtxPushCurrent_v2(context) };
    if pushed != driver::SUCCESS {
        return pushed;
    }
    let answer = does();
    let mut popped = 0;
    // SAFETY: it was pushed.
    unsafe { driver::cuCtxPopCurrent_v2(&mut popped) };
    answer
}
