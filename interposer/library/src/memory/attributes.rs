//! What the program asks about its memory: an allocation is to look as the driver's would.

use core::ptr;

use firn_interposer::table::Allocation;

use super::{table, within};
use crate::driver::{self, SUCCESS, Status};

/// Of pointers: CU_POINTER_ATTRIBUTE_CONTEXT, _RANGE_START_ADDR, _RANGE_SIZE and _ALLOWED_HANDLE_TYPES.
const CONTEXT: u32 = 1;
const BEGIN: u32 = 11;
const SIZE: u32 = 12;
const HANDLES: u32 = 14;
/// CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, and of a context CU_CTX_SYNC_MEMOPS
const SYNC: u32 = 6;
const SYNC_ALL: u32 = 0x80;

fn allocation(address: u64) -> Option<Allocation> {
    table()?.allocation(address)
}

/// cuMemGetAddressRange
///
/// # Safety
/// As the driver's.
pub unsafe fn range(
    real: unsafe extern "C" fn(u64, u64, u64) -> Status,
    begin: u64,
    bytes: u64,
    address: u64,
) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let Some(found) = allocation(address) else {
            return real(begin, bytes, address);
        };
        if let Some(begin) = driver::out(begin) {
            *begin = found.begin;
        }
        if let Some(bytes) = driver::out(bytes) {
            *bytes = found.asked;
        }
    }
    SUCCESS
}

/// cuPointerGetAttribute
///
/// # Safety
/// As the driver's.
pub unsafe fn one(
    real: unsafe extern "C" fn(u64, u32, u64) -> Status,
    to: u64,
    attribute: u32,
    address: u64,
) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let status = real(to, attribute, address);
        if status == SUCCESS
            && let Some(found) = allocation(address)
        {
            correct(&found, attribute, to);
        }
        status
    }
}

/// cuPointerSetAttribute
///
/// # Safety
/// As the driver's.
pub unsafe fn set(
    real: unsafe extern "C" fn(u64, u32, u64) -> Status,
    value: u64,
    attribute: u32,
    address: u64,
) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let status = real(value, attribute, address);
        let is_set = driver::given::<u32>(value).is_some_and(|value| *value != 0);
        if status == SUCCESS || attribute != SYNC || !is_set {
            return status;
        }
        // The driver has it for its own allocations alone. A context has it for everything.
        let Some(found) = allocation(address) else {
            return status;
        };
        within(found.context, || {
            let mut flags = 0;
            match driver::cuCtxGetFlags(&mut flags) {
                SUCCESS => driver::cuCtxSetFlags(flags | SYNC_ALL),
                refused => refused,
            }
        })
    }
}

/// cuPointerGetAttributes
///
/// # Safety
/// As the driver's.
pub unsafe fn several(
    real: unsafe extern "C" fn(u32, u64, u64, u64) -> Status,
    count: u32,
    attributes: u64,
    to: u64,
    address: u64,
) -> Status {
    // SAFETY: the arguments are those of the program: so many attributes, and as many addresses for them.
    unsafe {
        let status = real(count, attributes, to, address);
        if status == SUCCESS
            && let Some(found) = allocation(address)
        {
            let attributes = ptr::with_exposed_provenance::<u32>(attributes as usize);
            let to = ptr::with_exposed_provenance::<u64>(to as usize);
            for index in 0..count as usize {
                correct(&found, attributes.add(index).read(), to.add(index).read());
            }
        }
        status
    }
}

/// Writes what the driver would answer about an allocation of its own.
///
/// # Safety
/// The driver has written the attribute there.
unsafe fn correct(found: &Allocation, attribute: u32, to: u64) {
    // SAFETY: as the attributes are: words, but for the last, which is half of one.
    unsafe {
        match attribute {
            CONTEXT => write(to, found.context),
            BEGIN => write(to, found.begin),
            SIZE => write(to, found.asked),
            HANDLES => write(to, 0_u32),
            _ => {}
        }
    }
}

/// # Safety
/// It is null, or a place for the value.
unsafe fn write<T>(to: u64, value: T) {
    // SAFETY: as the caller promises.
    if let Some(to) = unsafe { driver::out(to) } {
        *to = value;
    }
}
