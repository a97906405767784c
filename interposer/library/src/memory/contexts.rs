//! What the end of a context means for allocations, and who else may access them.

use core::sync::atomic::Ordering;

use super::allocations::{discard, grant_range};
use super::{access, current, within};
use crate::area::{self, Area};
use crate::driver::{self, READ_WRITE, SUCCESS, Status};

/// cuCtxDestroy
///
/// # Safety
/// As the driver's.
pub unsafe fn destroy(real: unsafe extern "C" fn(u64) -> Status, context: u64) -> Status {
    // SAFETY: the arguments are those of the program.
    let status = unsafe { real(context) };
    if let Some(area) = area::get().filter(|_| status == SUCCESS) {
        area.remove_context(context);
        end(area, context);
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
    // SAFETY: the arguments are those of the program.
    let status = unsafe { real(device) };
    let (mut flags, mut is_active) = (0, 1);
    let ordinal = device.cast_signed();
    // SAFETY: the driver's function, with places for its results.
    let asked = unsafe { driver::cuDevicePrimaryCtxGetState(ordinal, &mut flags, &mut is_active) };
    if let Some(area) = area::get().filter(|_| (status, asked, is_active) == (SUCCESS, SUCCESS, 0))
        && let Some(known) = area.primary.get(device as usize)
    {
        end(area, known.swap(0, Ordering::AcqRel));
    }
    status
}

/// The driver frees the allocations of a context with it.
fn end(area: &Area, context: u64) {
    let mut table = area.memory.take();
    let mut from = 0;
    while let Some(mapping) = table.mappings.between(from, u64::MAX).first().copied() {
        from = mapping.end();
        if mapping.context == context && mapping.is_allocation() {
            let Some(found) = table.allocation(mapping.begin) else {
                continue;
            };
            from = found.begin.saturating_add(found.bytes);
            discard(&mut table, found.begin, found.bytes);
        }
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
    // With the table: an allocation is made before or after it.
    let mut table = area.memory.take();
    if flags == 0 {
        peers.fetch_and(!bit, Ordering::AcqRel);
    } else {
        peers.fetch_or(bit, Ordering::AcqRel);
    }
    let accessor = access(accessing, flags);
    let mut from = 0;
    while let Some(mapping) = table.mappings.between(from, u64::MAX).first().copied() {
        from = mapping.end();
        if mapping.is_allocation() && mapping.device == owner {
            // A range that cannot be accessed fails where the program uses it, as without this.
            let _ = grant_range(&mut table, mapping.begin, mapping.bytes, &accessor);
        }
    }
}
