//! The library that the loader puts between a program and libcuda.
//!
//! Its functions have the names of the driver's. Each passes the gate and calls the driver's function: found
//! in libcuda where the program is linked with it, by `dlsym` or by cuGetProcAddress where it asks for it.
//! What the table of facts lacks passes untouched. Nothing runs before the program's first call.
//!
//! It is loaded into programs of every C library, also those that never use a GPU: it has no standard
//! library, does not panic, and imports no function, since a program may have its own by that name. It looks
//! for the C library's when the program first calls the driver.
#![no_std]

mod arch;
mod area;
mod calls;
mod driver;
mod elf;
mod job;
mod lock;
mod meeting;
mod memory;
mod message;
mod resolve;
mod service;

use core::panic::PanicInfo;

unsafe extern "C" {
    /// There is no such function: the linker leaves it undefined in a library that could panic, and a test
    /// sees it.
    fn firn_cuda_panics() -> !;
}

/// Never called: the program is not to be aborted.
#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    // SAFETY: no code that is linked calls this.
    unsafe { firn_cuda_panics() }
}
