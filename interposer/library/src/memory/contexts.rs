//! What the end of a context means for allocations, and who else may access them.

use core::sync::atomic::Ordering;

use firn_interposer::table::{Mapping, Stage};

use super::allocations::{discard, grant_range, set_stage};
use super::{access, current, within};
use crate::area::{self, Area};
use crate::driver::{self, READ_WRITE, SUCCESS, Status};

/// cuCtxDestroy
///
/// # Safety
/// As the driver's.
pub unsafe fn destroy(real: unsafe extern "C" fn(u64) -> Status, context: u64) -> Status {
    mark(context, true);
    // Before the driver does it: another thread may get a new one of this number.
    let is_known = area::get().is_some_and(|area| area.remove_context(context));
    // SAFETY: the arguments are those of the program.
    let status = unsafe { real(context) };
    if let Some(area) = area::get() {
        if status == SUCCESS {
            end(area, context);
        } else {
            mark(context, false);
            if is_known {
                area.add_context(context);
            }
        }
    }
    status
}

/// The program has made a context.
///
/// # Safety
/// The driver has written it there.
pub unsafe fn remember(to: u64) {
    // SAFETY: as the caller promises.
    if let Some((area, to)) = area::get().zip(unsafe { driver::out::<u64>(to) }) {
        area.add_context(*to);
    }
}

/// cuDevicePrimaryCtxRetain
///
/// # Safety
/// As the driver's.
pub unsafe fn retain(real: unsafe extern "C" fn(u64, u32) -> Status, to: u64, device: u32) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let status = real(to, device);
        let known = area::get().and_then(|area| area.primary.get(device as usize));
        if let Some((known, to)) = known.zip(driver::out::<u64>(to)).filter(|_| status == SUCCESS) {
            known.store(*to, Ordering::Release);
        }
        status
    }
}

/// cuDevicePrimaryCtxRelease and cuDevicePrimaryCtxReset
///
/// # Safety
/// As the driver's.
pub unsafe fn release(real: unsafe extern "C" fn(u32) -> Status, device: u32) -> Status {
    let known = area::get().and_then(|area| area.primary.get(device as usize));
    let context = known.map_or(0, |known| known.load(Ordering::Acquire));
    mark(context, true);
    // SAFETY: the arguments are those of the program.
    let status = unsafe { real(device) };
    let (mut flags, mut is_active) = (0, 1);
    let ordinal = device.cast_signed();
    // SAFETY: the driver's function, with places for its results.
    let asked = unsafe { driver::cuDevicePrimaryCtxGetState(ordinal, &mut flags, &mut is_active) };
    let has_ended = (status, asked, is_active) == (SUCCESS, SUCCESS, 0);
    if let Some((area, known)) = area::get().zip(known).filter(|_| has_ended) {
        // Another thread may have begun it again.
        let _ = known.compare_exchange(context, 0, Ordering::AcqRel, Ordering::Relaxed);
        end(area, context);
    } else {
        mark(context, false);
    }
    status
}

/// A context is being destroyed, and with it the allocations that it has now; or no longer.
fn mark(context: u64, is_ending: bool) {
    if let Some(area) = area::get() {
        let mut table = area.memory.take();
        for mapping in table.mappings.all_mut() {
            if mapping.context == context && mapping.is_allocation() {
                mapping.is_ending = is_ending;
            }
        }
    }
}

/// The driver frees the allocations of a context with it: those that were marked.
fn end(area: &Area, context: u64) {
    let next = || {
        let mut table = area.memory.take();
        let mut all = table.mappings.all().iter();
        let is_ended = |mapping: &&Mapping| mapping.is_ending && mapping.context == context;
        let is_first = |mapping: &&Mapping| mapping.begin == mapping.allocation;
        let has_it = |mapping: &&Mapping| mapping.stage == Stage::Whole;
        let first = all
            .find(|mapping| is_ended(mapping) && is_first(mapping) && has_it(mapping))?
            .begin;
        let found = table.allocation(first)?;
        set_stage(&mut table, first, Stage::Partial);
        Some(found)
    };
    while let Some(found) = next() {
        discard(area, found.begin, found.bytes);
    }
}

/// cuCtxEnablePeerAccess
///
/// # Safety
/// As the driver's.
pub unsafe fn enable_peer(
    real: unsafe extern "C" fn(u64, u32) -> Status,
    context: u64,
    flags: u32,
) -> Status {
    // SAFETY: the arguments are those of the program.
    let status = unsafe { real(context, flags) };
    if status == SUCCESS {
        set_peer(context, READ_WRITE);
    }
    status
}

/// cuCtxDisablePeerAccess
///
/// # Safety
/// As the driver's.
pub unsafe fn disable_peer(real: unsafe extern "C" fn(u64) -> Status, context: u64) -> Status {
    // SAFETY: the arguments are those of the program.
    let status = unsafe { real(context) };
    if status == SUCCESS {
        set_peer(context, 0);
    }
    status
}

/// The current device may access the allocations of a context's device, or no longer.
fn set_peer(context: u64, flags: u32) {
    let mut owner = None;
    within(context, || {
        owner = current().map(|(device, _)| device);
        SUCCESS
    });
    let (Some(area), Some((accessing, _)), Some(owner)) = (area::get(), current(), owner) else {
        return;
    };
    let Some(peers) = area.peers.get(owner as usize) else {
        return;
    };
    let bit = 1_u32.checked_shl(accessing).unwrap_or(0);
    // Before it looks: an allocation that is made meanwhile sees it, or is seen.
    if flags == 0 {
        peers.fetch_and(!bit, Ordering::AcqRel);
    } else {
        peers.fetch_or(bit, Ordering::AcqRel);
    }
    let accessor = access(accessing, flags);
    let mut from = 0;
    let next = |from| {
        area.memory
            .take()
            .mappings
            .between(from, u64::MAX)
            .first()
            .copied()
    };
    while let Some(mapping) = next(from) {
        from = mapping.end();
        if mapping.is_allocation() && mapping.device == owner {
            // A range that cannot be accessed fails where the program uses it, as without this.
            let _ = grant_range(area, mapping.begin, mapping.bytes, &accessor);
        }
    }
}
