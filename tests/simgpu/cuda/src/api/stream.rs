//! Work that waits on the GPU for a word in host memory, as a collective of NCCL over sockets waits for the
//! other ranks.

use std::sync::atomic::AtomicU32;

use super::context::current_gpu;
use crate::abi::Handle;
use crate::driver;
use crate::error::{Error, answer};
use crate::waits::Wait;

/// Flag of cuStreamWaitValue32: wait until the word is as large as the value.
const GEQ: u32 = 0;

/// Only words in host memory, which have one address on both sides.
#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitValue32_v2(stream: Handle, address: u64, value: u32, flags: u32) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let process = entered.process();
        current_gpu(&process)?;
        if !stream.is_null() && !process.streams.contains(&stream.addr()) {
            return Err(Error::INVALID_HANDLE);
        }
        drop(process);
        let at = std::ptr::with_exposed_provenance_mut::<AtomicU32>(simgpu_model::index(address));
        if at.is_null() || !at.is_aligned() || flags != GEQ {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the caller keeps the driver API's contract: the word is there for as long as work waits for
        // it.
        let word = unsafe { &*at };
        entered.waits().push(Wait { word, value });
        Ok(())
    })
}
