//! Device and managed memory.

use std::ffi::c_void;
use std::ptr::{copy, copy_nonoverlapping, write_bytes};

use simgpu_model::CHUNK;

use super::context::current_gpu;
use super::give;
use crate::driver;
use crate::error::{Error, answer};
use crate::process::{Allocation, Backing};

/// Flag of cuMemAllocManaged: any stream on any device can use the memory.
const MEM_ATTACH_GLOBAL: u32 = 1;
const MEM_ATTACH_HOST: u32 = 2;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, size: usize) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        let gpu = current_gpu(&process)?;
        if size == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let made = process.allocate(gpu, size)?;
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(address, made) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocManaged(address: *mut u64, size: usize, flags: u32) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        let gpu = current_gpu(&process)?;
        if size == 0 || !matches!(flags, MEM_ATTACH_GLOBAL | MEM_ATTACH_HOST) {
            return Err(Error::INVALID_VALUE);
        }
        let mapping = process.hardware()?.map_managed(size.next_multiple_of(CHUNK))?;
        let made = mapping.as_ptr().expose_provenance() as u64;
        process.allocations.insert(
            made,
            Allocation {
                gpu,
                size,
                backing: Backing::Managed { mapping },
            },
        );
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(address, made) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        // Seen of driver 580, whatever is freed.
        entered.waits().finish();
        entered.process().free(address)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let process = entered.process();
        let memory = &process.open_gpu(current_gpu(&process)?)?.memory;
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(free, simgpu_model::index(memory.free_bytes())) }?;
        // SAFETY: as above.
        unsafe { give(total, simgpu_model::index(memory.total())) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let at = entered.process().reach(to, len)?;
        // SAFETY: `reach` found `len` bytes that stay mapped while the call is under way; the caller's are
        // its contract.
        unsafe { copy(from.cast(), at, len) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let at = entered.process().reach(from, len)?;
        // SAFETY: as in cuMemcpyHtoD_v2.
        unsafe { copy(at, to.cast(), len) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let process = entered.process();
        let (to, from) = (process.reach(to, len)?, process.reach(from, len)?);
        drop(process);
        // SAFETY: `reach` found both ranges; `copy` allows them to overlap.
        unsafe { copy(from, to, len) };
        Ok(())
    })
}

/// The contexts are not looked at: addresses are those of one space.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyPeer(to: u64, _: *mut c_void, from: u64, _: *mut c_void, len: usize) -> i32 {
    cuMemcpyDtoD_v2(to, from, len)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8_v2(address: u64, value: u8, count: usize) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let at = entered.process().reach(address, count)?;
        // SAFETY: `reach` found `count` bytes that stay mapped while the call is under way.
        unsafe { write_bytes(at, value, count) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32_v2(address: u64, value: u32, count: usize) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let bytes = count
            .checked_mul(4)
            .filter(|_| address.is_multiple_of(4))
            .ok_or(Error::INVALID_VALUE)?;
        let at = entered.process().reach(address, bytes)?;
        let value = value.to_ne_bytes();
        for place in (0..bytes).step_by(4) {
            // SAFETY: `place` + 4 <= `bytes`, which `reach` found.
            unsafe { copy_nonoverlapping(value.as_ptr(), at.wrapping_add(place), 4) };
        }
        Ok(())
    })
}
