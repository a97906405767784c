//! A process with a little GPU memory, for `firn doctor --deep`.

use std::ffi::{c_int, c_uint, c_void};

use super::raw::{HoldTable, LIBRARY, Result32, Table};
use super::{INIT, check};
use crate::sys::{Library, LoadError};
use firn_gpu::protocol::DriverError;

/// Words of GPU memory that are held: 1 MiB.
const WORDS: usize = 1 << 18;
const VALUE: c_uint = 0xf1_9a_c1_e5;

/// Why it cannot be held.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HoldError {
    #[error(transparent)]
    Library(#[from] LoadError),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("word {0} of the GPU memory has changed")]
    Changed(usize),
}

/// GPU memory with a known content, in this process's context on the first GPU.
pub(crate) struct Held {
    calls: HoldTable,
    base: Table,
    address: u64,
}

impl Held {
    pub(crate) fn take() -> Result<Self, HoldError> {
        let library = Library::open(LIBRARY)?;
        let mut held = Self {
            calls: HoldTable::load(library)?,
            base: Table::load(library)?,
            address: 0,
        };
        let (mut device, mut context): (c_int, *mut c_void) = (0, std::ptr::null_mut());
        // SAFETY: cuInit takes no pointer.
        held.check(INIT, unsafe { (held.base.init)(0) })?;
        // SAFETY: the pointer is to a live int, which the call writes.
        held.check("cuDeviceGet", unsafe {
            (held.calls.device_get)(&raw mut device, 0)
        })?;
        // SAFETY: the pointer is to a live handle, which the call writes; the device is the driver's.
        let retained = unsafe { (held.calls.retain)(&raw mut context, device) };
        held.check("cuDevicePrimaryCtxRetain", retained)?;
        // SAFETY: the context is the one that the driver has just returned, and is never released.
        held.check("cuCtxSetCurrent", unsafe { (held.calls.set_current)(context) })?;
        let mut address = 0;
        // SAFETY: the pointer is to a live address, which the call writes.
        let made = unsafe { (held.calls.alloc)(&raw mut address, WORDS * size_of::<c_uint>()) };
        held.check("cuMemAlloc", made)?;
        held.address = address;
        // SAFETY: the address is of GPU memory of this many words, which is never freed.
        let filled = unsafe { (held.calls.fill)(address, VALUE, WORDS) };
        held.check("cuMemsetD32", filled)?;
        Ok(held)
    }

    /// Reads the memory and compares it with what was written.
    pub(crate) fn compare(&self) -> Result<(), HoldError> {
        let mut words: Vec<c_uint> = vec![0; WORDS];
        let to = words.as_mut_ptr().cast::<c_void>();
        // SAFETY: the vector has as many bytes as are copied, and so has the GPU memory at the address.
        let copied = unsafe { (self.calls.copy)(to, self.address, WORDS * size_of::<c_uint>()) };
        self.check("cuMemcpyDtoH", copied)?;
        match words.iter().position(|word| *word != VALUE) {
            None => Ok(()),
            Some(at) => Err(HoldError::Changed(at)),
        }
    }

    fn check(&self, call: &'static str, result: Result32) -> Result<(), DriverError> {
        check(self.base.get_error_name, call, result)
    }
}
