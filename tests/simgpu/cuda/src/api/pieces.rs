//! The virtual memory functions.

use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};

use simgpu_model::CHUNK;

use super::give;
use crate::abi::{Accessor, Properties};
use crate::driver;
use crate::error::{Error, answer};

/// CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
const PINNED: u32 = 1;
const DEVICE: u32 = 1;
const DESCRIPTOR: u32 = 1;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(
    size: *mut usize,
    _properties: *const Properties,
    _option: u32,
) -> i32 {
    // SAFETY: the caller keeps the driver API's contract.
    answer(|| unsafe { give(size, CHUNK) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    size: usize,
    properties: *const Properties,
    _flags: u64,
) -> i32 {
    answer(|| {
        // SAFETY: the caller keeps the driver API's contract.
        let properties = unsafe { properties.as_ref() }.ok_or(Error::INVALID_VALUE)?;
        if (properties.kind, properties.location.kind) != (PINNED, DEVICE) {
            return Err(Error::INVALID_VALUE);
        }
        let entered = driver::enter()?;
        let mut process = entered.process();
        let gpu = process.place(properties.location.id)?;
        let made = process.create_piece(gpu, size, properties.handles & DESCRIPTOR != 0)?;
        // SAFETY: as above.
        unsafe { give(handle, made) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> i32 {
    answer(|| driver::enter()?.process().release_piece(handle))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: u64) -> i32 {
    answer(|| {
        let retained = driver::enter()?.process().retain_piece(address)?;
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(handle, retained) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: u64) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        let (gpu, can_export) = process.piece_of(handle)?;
        let ordinal = process.ordinals.iter().position(|place| *place == gpu);
        let ordinal = ordinal.and_then(|ordinal| i32::try_from(ordinal).ok());
        let found = Properties::of_device(ordinal.ok_or(Error::INVALID_DEVICE)?, u32::from(can_export));
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(properties, found) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemExportToShareableHandle(to: *mut RawFd, handle: u64, kind: u32, flags: u64) -> i32 {
    answer(|| {
        if (kind, flags) != (DESCRIPTOR, 0) || to.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        let exported = driver::enter()?.process().export_piece(handle)?;
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(to, exported.into_raw_fd()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemImportFromShareableHandle(to: *mut u64, shared: usize, kind: u32) -> i32 {
    answer(|| {
        let number = RawFd::try_from(shared).ok().filter(|_| kind == DESCRIPTOR);
        let number = number.ok_or(Error::INVALID_VALUE)?;
        // SAFETY: the caller has the descriptor; one that it has not is found below.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        let made = driver::enter()?.process().import_piece(descriptor)?;
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(to, made) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    size: usize,
    _alignment: usize,
    _wanted: u64,
    _flags: u64,
) -> i32 {
    answer(|| {
        let reserved = driver::enter()?.process().reserve_addresses(size)?;
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(address, reserved) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, size: usize) -> i32 {
    answer(|| driver::enter()?.process().free_addresses(address, size))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, _flags: u64) -> i32 {
    answer(|| {
        driver::enter()?
            .process()
            .map_piece(address, size, offset, handle)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: u64, size: usize) -> i32 {
    answer(|| driver::enter()?.process().unmap_pieces(address, size))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemSetAccess(
    address: u64,
    size: usize,
    accessors: *const Accessor,
    count: usize,
) -> i32 {
    answer(|| {
        if accessors.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the caller keeps the driver API's contract.
        let accessors = unsafe { std::slice::from_raw_parts(accessors, count) };
        let entered = driver::enter()?;
        let mut process = entered.process();
        for accessor in accessors {
            if accessor.location.kind != DEVICE {
                return Err(Error::NOT_SUPPORTED);
            }
            let gpu = process.place(accessor.location.id)?;
            process.grant(address, size, gpu, accessor.flags != 0)?;
        }
        Ok(())
    })
}
