//! Start, versions, error names.

use std::ffi::{CStr, c_char};

use simgpu_model::fault::Call;

use super::give;
use crate::error::{Error, answer, describe};
use crate::{caller, driver, hardware};

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: u32) -> i32 {
    answer(|| {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        let own = i32::try_from(std::process::id()).map_err(|_| Error::UNKNOWN)?;
        caller::disturbed(Call::Init, own, |_| driver::start())
    })
}

/// Not of the driver's API: what the simulated NVML calls when it is initialised.
#[unsafe(no_mangle)]
extern "C" fn simgpu_attach() -> i32 {
    answer(driver::attach)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> i32 {
    // A library knows its version without a device; the simulated one is as new as its node's driver.
    let known = hardware::open_control().map_or(13000, |control| control.table.cuda_version);
    // SAFETY: the caller keeps the driver API's contract.
    answer(|| unsafe { give(version, known) })
}

unsafe fn give_description(
    code: i32,
    at: *mut *const c_char,
    pick: fn((&'static CStr, &'static CStr)) -> &'static CStr,
) -> i32 {
    answer(|| {
        let found = describe(code).map(pick);
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(at, found.map_or(std::ptr::null(), CStr::as_ptr)) }?;
        found.map(drop).ok_or(Error::INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: i32, name: *mut *const c_char) -> i32 {
    // SAFETY: the caller keeps the driver API's contract.
    unsafe { give_description(code, name, |(name, _)| name) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: i32, description: *mut *const c_char) -> i32 {
    // SAFETY: the caller keeps the driver API's contract.
    unsafe { give_description(code, description, |(_, description)| description) }
}
