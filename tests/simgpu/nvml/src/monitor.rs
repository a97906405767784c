//! What monitors and NVIDIA's hooks ask in addition to the inventory.
//!
//! Programs that bind NVML call functions by their names, and end where a library lacks one. The functions of
//! what a simulated GPU does not have answer as NVML does for a GPU that does not have it.

#![allow(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{CStr, c_void};
use std::fs::{self, File};
use std::io::Write;

use simgpu_model::paths;

use crate::abi::{Error, Memory2, MemoryLimits, ProcessInfo};
use crate::api::{Handle, answer, give, place};
use crate::library;

/// `nvmlMemory_v2`: size and version of the structure.
const MEMORY_2: u32 = 2 << 24 | 40;

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: *mut Memory2) -> i32 {
    answer(|| {
        if memory.is_null() {
            return Err(Error::InvalidArgument);
        }
        // SAFETY: not null, and valid by NVML's contract.
        let version = unsafe { (*memory).version };
        if version != MEMORY_2 {
            return Err(Error::VersionMismatch);
        }
        let (total, free) = library::with_device(place(device)?, |device| (device.total(), device.free()))?;
        let found = Memory2 {
            version,
            total,
            reserved: 0,
            free,
            used: total - free,
        };
        // SAFETY: as above.
        unsafe { give(memory, found) }
    })
}

/// Simulated GPUs run no graphics.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: Handle,
    count: *mut u32,
    _infos: *mut ProcessInfo,
) -> i32 {
    answer(|| {
        library::with_device(place(device)?, |_| ())?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(count, 0) }
    })
}

/// Newer than driver 580: NVIDIA's hook apply-cuda-memory-limits calls it. Nothing is limited; a line in the
/// node's state has what was asked for.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceSetMemoryLimits_v1(device: Handle, limits: *const MemoryLimits) -> i32 {
    answer(|| {
        let uuid = library::with_device(place(device)?, |device| device.info.uuid)?;
        // SAFETY: null, or valid by NVML's contract.
        let limits = unsafe { limits.as_ref() }.ok_or(Error::InvalidArgument)?;
        if limits.cgroup.is_null() || limits.soft > limits.hard {
            return Err(Error::InvalidArgument);
        }
        // SAFETY: not null, and a C string by NVML's contract.
        let cgroup = unsafe { CStr::from_ptr(limits.cgroup) }.to_string_lossy();
        let line = format!("{uuid} {cgroup} {} {}\n", limits.soft, limits.hard);
        note(&line).map_err(|_| Error::Unknown)
    })
}

fn note(line: &str) -> std::io::Result<()> {
    let dir = paths::state_dir();
    fs::create_dir_all(&dir)?;
    let file = File::options()
        .append(true)
        .create(true)
        .open(dir.join(paths::LIMITS));
    file?.write_all(line.as_bytes())
}

/// Functions with these names, which ask a device for what no simulated one has.
macro_rules! not_supported {
    ($($name:ident($($argument:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(device: Handle $(, _: $argument)*) -> i32 {
            answer(|| {
                library::with_device(place(device)?, |_| ())?;
                Err(Error::NotSupported)
            })
        }
    )*};
}

not_supported! {
    nvmlDeviceGetUtilizationRates(*mut c_void);
    nvmlDeviceGetProcessUtilization(*mut c_void, *mut u32, u64);
    nvmlDeviceGetTemperature(i32, *mut u32);
    nvmlDeviceGetPowerUsage(*mut u32);
    nvmlDeviceGetClockInfo(i32, *mut u32);
    nvmlDeviceGetEccMode(*mut i32, *mut i32);
    nvmlDeviceGetTotalEnergyConsumption(*mut u64);
    nvmlDeviceGetComputeMode(*mut i32);
}
