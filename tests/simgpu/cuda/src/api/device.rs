//! Devices, as they were when the process first saw them.

use std::ffi::c_char;

use simgpu_model::GpuInfo;

use super::{give, give_text};
use crate::abi::CuUuid;
use crate::driver;
use crate::error::{Error, answer};

fn seen(device: i32) -> Result<GpuInfo, Error> {
    let entered = driver::enter()?;
    let process = entered.process();
    Ok(process.seen[process.place(device)?].clone())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> i32 {
    answer(|| {
        let devices = driver::enter()?.process().ordinals.len();
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(count, i32::try_from(devices).map_err(|_| Error::UNKNOWN)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut i32, ordinal: i32) -> i32 {
    answer(|| {
        driver::enter()?.process().place(ordinal)?;
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: i32, device: i32) -> i32 {
    // SAFETY: the caller keeps the driver API's contract.
    answer(|| unsafe { give_text(name, len, &seen(device)?.name) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut CuUuid, device: i32) -> i32 {
    // SAFETY: the caller keeps the driver API's contract.
    answer(|| unsafe {
        give(
            uuid,
            CuUuid {
                bytes: seen(device)?.uuid.0,
            },
        )
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut CuUuid, device: i32) -> i32 {
    // SAFETY: the same function; they differ for MIG only.
    unsafe { cuDeviceGetUuid(uuid, device) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) -> i32 {
    // SAFETY: the caller keeps the driver API's contract.
    answer(|| unsafe { give(bytes, simgpu_model::index(seen(device)?.memory)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, len: i32, device: i32) -> i32 {
    answer(|| {
        let address = seen(device)?.pci_address;
        // NVML writes the domain with eight digits, the driver API with four.
        let short = address.strip_prefix("0000").unwrap_or(&address);
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give_text(id, len, short) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> i32 {
    answer(|| {
        let gpu = seen(device)?;
        let field = |at| {
            gpu.pci_address
                .split([':', '.'])
                .nth(at)
                .and_then(|hex| i32::from_str_radix(hex, 16).ok())
        };
        let known = match attribute {
            1 => Some(1024),    // MAX_THREADS_PER_BLOCK
            10 => Some(32),     // WARP_SIZE
            16 => Some(132),    // MULTIPROCESSOR_COUNT
            33 => field(1),     // PCI_BUS_ID
            34 => field(2),     // PCI_DEVICE_ID
            41 | 83 => Some(1), // UNIFIED_ADDRESSING, MANAGED_MEMORY
            50 => field(0),     // PCI_DOMAIN_ID
            75 => Some(9),      // COMPUTE_CAPABILITY_MAJOR
            76 => Some(0),      // COMPUTE_CAPABILITY_MINOR
            // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            102 | 103 => Some(1),
            _ => None,
        };
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(value, known.ok_or(Error::INVALID_VALUE)?) }
    })
}
