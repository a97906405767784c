//! Modules and kernel launches.

use std::ffi::{c_char, c_void};

use super::context::current_gpu;
use super::{give, text};
use crate::abi::Handle;
use crate::driver;
use crate::error::{Error, answer};
use crate::kernels::{self, Arguments, Kernel};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        current_gpu(&process)?;
        // SAFETY: the caller keeps the driver API's contract; only PTX, which is a C string, is understood
        // here.
        let image = unsafe { text(image.cast::<c_char>()) }.map_err(|_| Error::INVALID_IMAGE)?;
        let entries = kernels::entries(image).ok_or(Error::INVALID_IMAGE)?;
        let number = process.fresh_handle();
        process.modules.insert(number, entries);
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(module, std::ptr::without_provenance_mut(number)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: Handle) -> i32 {
    answer(|| {
        driver::enter()?
            .process()
            .modules
            .remove(&module.addr())
            .map(drop)
            .ok_or(Error::INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        let entries = process.modules.get(&module.addr()).ok_or(Error::INVALID_HANDLE)?;
        // SAFETY: the caller keeps the driver API's contract.
        let wanted = kernels::by_name(unsafe { text(name) }?).filter(|kernel| entries.contains(kernel));
        let kernel = wanted.ok_or(Error::NOT_FOUND)?;
        let number = process.fresh_handle();
        process.functions.insert(number, kernel);
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(function, std::ptr::without_provenance_mut(number)) }
    })
}

/// Reads argument `at` of a launch.
///
/// # Safety
/// `list` must hold more than `at` pointers, the one at `at` to a `T`.
unsafe fn argument<T: Copy>(list: *const *const c_void, at: usize) -> Result<T, Error> {
    // SAFETY: the caller promises that the list is long enough.
    let value = unsafe { *list.wrapping_add(at) };
    if value.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller promises its type; nothing promises its alignment.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    _shared: u32,
    stream: Handle,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let process = entered.process();
        current_gpu(&process)?;
        let kernel = *process
            .functions
            .get(&function.addr())
            .ok_or(Error::INVALID_HANDLE)?;
        if !stream.is_null() && !process.streams.contains(&stream.addr()) {
            return Err(Error::INVALID_HANDLE);
        }
        let threads = u64::from(block_x) * u64::from(block_y) * u64::from(block_z);
        if grid_x == 0 || grid_y == 0 || grid_z == 0 || threads == 0 || threads > 1024 {
            return Err(Error::INVALID_VALUE);
        }
        if parameters.is_null() || !extra.is_null() {
            return Err(Error::NOT_SUPPORTED);
        }
        let arguments = Arguments {
            // SAFETY: a launch passes the arguments that its kernel has; both kernels begin with this one.
            address: unsafe { argument(parameters, 0) }?,
            // SAFETY: as above.
            count: unsafe { argument(parameters, 1) }?,
            // SAFETY: as above.
            iteration: unsafe { argument(parameters, 2) }?,
            results: match kernel {
                Kernel::Fill => 0,
                // SAFETY: this kernel has a fourth argument.
                Kernel::Step => unsafe { argument(parameters, 3) }?,
            },
        };
        let launch = kernel.prepare(&process, &arguments)?;
        drop(process);
        launch.run();
        Ok(())
    })
}
