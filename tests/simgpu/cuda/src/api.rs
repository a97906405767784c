//! The exported functions, by subject. Each checks its pointers for null and leaves the rest to the parts
//! behind.

#![allow(non_snake_case, reason = "the names are the driver's")]

mod checkpoint;
mod context;
mod device;
mod init;
mod ipc;
mod launch;
mod memory;
mod pieces;
mod stream;

use std::ffi::{CStr, c_char};

use crate::error::Error;

/// Writes a result through a caller's pointer.
///
/// # Safety
/// `at` must be null or valid for writing a `T`, as the driver API asks of the caller.
unsafe fn give<T>(at: *mut T, value: T) -> Result<(), Error> {
    if at.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller promises the rest.
    unsafe { at.write(value) };
    Ok(())
}

/// Writes a C string of at most `len` bytes through a caller's pointer, cut where it does not fit.
///
/// # Safety
/// `at` must be null or valid for writing `len` bytes.
unsafe fn give_text(at: *mut c_char, len: i32, text: &str) -> Result<(), Error> {
    let room = usize::try_from(len)
        .ok()
        .filter(|len| *len > 0 && !at.is_null())
        .ok_or(Error::INVALID_VALUE)?;
    let used = text.len().min(room - 1);
    // SAFETY: `used` + 1 <= `len` bytes, which the caller promises; a str and a caller's buffer do not
    // overlap.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), at.cast(), used) };
    // SAFETY: as above.
    unsafe { *at.wrapping_add(used) = 0 };
    Ok(())
}

/// Reads a caller's C string.
///
/// # Safety
/// `at` must be null or point to a C string that lives for `'a`.
unsafe fn text<'a>(at: *const c_char) -> Result<&'a str, Error> {
    if at.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller promises the rest.
    unsafe { CStr::from_ptr(at) }
        .to_str()
        .map_err(|_| Error::INVALID_VALUE)
}
