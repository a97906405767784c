//! The exported functions.

#![allow(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{CStr, c_char, c_void};

use crate::abi::{Error, Memory, PciInfo, ProcessInfo};
use crate::library;
use simgpu_model::{GpuInfo, NvLinkEnd};

pub(crate) type Handle = *mut c_void;

/// Compute instances are a MIG matter; this is NVML's "none".
const NO_INSTANCE: u32 = u32::MAX;

pub(crate) fn answer(call: impl FnOnce() -> Result<(), Error>) -> i32 {
    match call() {
        Ok(()) => 0,
        Err(error) => error as i32,
    }
}

/// # Safety
/// `at` must be null or valid for writing a `T`, as NVML asks of the caller.
pub(crate) unsafe fn give<T>(at: *mut T, value: T) -> Result<(), Error> {
    if at.is_null() {
        return Err(Error::InvalidArgument);
    }
    // SAFETY: not null, and the caller promises the rest.
    unsafe { at.write(value) };
    Ok(())
}

/// # Safety
/// `at` must be null or valid for writing `len` bytes.
unsafe fn give_text(at: *mut c_char, len: u32, text: &str) -> Result<(), Error> {
    if at.is_null() {
        return Err(Error::InvalidArgument);
    }
    if len as usize <= text.len() {
        return Err(Error::InsufficientSize);
    }
    // SAFETY: the text is shorter than `len`, which the caller promises; it cannot overlap the caller's
    // buffer.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), at.cast(), text.len()) };
    // SAFETY: as above.
    unsafe { *at.wrapping_add(text.len()) = 0 };
    Ok(())
}

pub(crate) fn place(device: Handle) -> Result<usize, Error> {
    device.addr().checked_sub(1).ok_or(Error::InvalidArgument)
}

fn handle(place: usize) -> Handle {
    std::ptr::without_provenance_mut(place + 1)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> i32 {
    answer(library::init)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: u32) -> i32 {
    answer(library::init)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> i32 {
    answer(library::shutdown)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: i32) -> *const c_char {
    let text: &CStr = match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        9 => c"Driver Not Loaded",
        25 => c"Argument Version Mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, len: u32) -> i32 {
    answer(|| {
        let text = library::with_control(|control| control.table.driver_version.clone())?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give_text(version, len, &text) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) -> i32 {
    // SAFETY: the caller keeps NVML's contract.
    answer(|| unsafe {
        give(
            version,
            library::with_control(|control| control.table.cuda_version)?,
        )
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut u32) -> i32 {
    answer(|| {
        let devices = library::with_devices(|devices| Ok(devices.len()))?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(count, u32::try_from(devices).map_err(|_| Error::Unknown)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut Handle) -> i32 {
    answer(|| {
        library::with_device(index as usize, |_| ())?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(device, handle(index as usize)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut Handle) -> i32 {
    answer(|| {
        if uuid.is_null() {
            return Err(Error::InvalidArgument);
        }
        // SAFETY: not null, and a C string by NVML's contract.
        let wanted = unsafe { CStr::from_ptr(uuid) }.to_string_lossy();
        let place = library::with_devices(|devices| {
            devices
                .iter()
                .position(|device| device.info.uuid.to_string() == wanted)
                .ok_or(Error::NotFound)
        })?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(device, handle(place)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetIndex(device: Handle, index: *mut u32) -> i32 {
    answer(|| {
        let place = place(device)?;
        library::with_device(place, |_| ())?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(index, u32::try_from(place).map_err(|_| Error::Unknown)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(device: Handle, uuid: *mut c_char, len: u32) -> i32 {
    answer(|| {
        let text = library::with_device(place(device)?, |device| device.info.uuid.to_string())?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give_text(uuid, len, &text) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(device: Handle, name: *mut c_char, len: u32) -> i32 {
    answer(|| {
        let text = library::with_device(place(device)?, |device| device.info.name.clone())?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give_text(name, len, &text) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMinorNumber(device: Handle, minor: *mut u32) -> i32 {
    // SAFETY: the caller keeps NVML's contract.
    answer(|| unsafe {
        give(
            minor,
            library::with_device(place(device)?, |device| device.info.minor)?,
        )
    })
}

/// What NVIDIA's device plugin needs to know of an H100 or H200.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: Handle,
    major: *mut i32,
    minor: *mut i32,
) -> i32 {
    answer(|| {
        library::with_device(place(device)?, |_| ())?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(major, 9) }?;
        // SAFETY: as above.
        unsafe { give(minor, 0) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceIsMigDeviceHandle(device: Handle, mig: *mut u32) -> i32 {
    answer(|| {
        library::with_device(place(device)?, |_| ())?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(mig, 0) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: *mut u32) -> i32 {
    answer(|| {
        library::with_device(place(device)?, |_| ())?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(count, 7) }
    })
}

/// No GPU is divided by the simulation, also where its MIG mode is on.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: Handle,
    _index: u32,
    _mig: *mut Handle,
) -> i32 {
    answer(|| {
        library::with_device(place(device)?, |_| ())?;
        Err(Error::NotFound)
    })
}

fn pci_info(info: &GpuInfo) -> Result<PciInfo, Error> {
    let field = |at| {
        let hex = info.pci_address.split([':', '.']).nth(at);
        hex.and_then(|hex| u32::from_str_radix(hex, 16).ok())
            .ok_or(Error::Unknown)
    };
    let mut found = PciInfo {
        bus_id_legacy: [0; 16],
        domain: field(0)?,
        bus: field(1)?,
        device: field(2)?,
        pci_device_id: info.pci_device_id,
        pci_subsystem_id: info.pci_device_id,
        bus_id: [0; 32],
    };
    let address = info.pci_address.as_bytes();
    // NVML's older form has a domain of four digits.
    let legacy = address.strip_prefix(b"0000").unwrap_or(address);
    let room = legacy.len().min(found.bus_id_legacy.len() - 1);
    found.bus_id_legacy[..room].copy_from_slice(&legacy[..room]);
    let room = address.len().min(found.bus_id.len() - 1);
    found.bus_id[..room].copy_from_slice(&address[..room]);
    Ok(found)
}

/// Where an active NVLink of a device ends. Devices without any have none of these calls; a device has 18
/// links at most.
fn nvlink_end(device: Handle, link: u32) -> Result<Option<NvLinkEnd>, Error> {
    let place = place(device)?;
    let uuid = library::with_device(place, |device| device.info.uuid)?;
    library::with_control(|control| {
        let table = &control.table;
        let gpu = table
            .gpus
            .iter()
            .position(|gpu| gpu.uuid == uuid)
            .ok_or(Error::Unknown)?;
        let ends = table.nvlinks(gpu);
        if ends.is_empty() {
            return Err(Error::NotSupported);
        }
        if link >= MOST_LINKS {
            return Err(Error::InvalidArgument);
        }
        Ok(ends.get(link as usize).copied())
    })?
}

/// `nvmlIntNvLinkDeviceType_t`
const TYPE_GPU: u32 = 0;
const TYPE_SWITCH: u32 = 2;

/// `NVML_NVLINK_MAX_LINKS`
const MOST_LINKS: u32 = 18;

/// `NVML_TOPOLOGY_NODE`
const SAME_NODE: u32 = 40;

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkState(device: Handle, link: u32, active: *mut u32) -> i32 {
    answer(|| {
        let end = nvlink_end(device, link)?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(active, u32::from(end.is_some())) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Handle, link: u32, kind: *mut u32) -> i32 {
    answer(|| {
        let found = match nvlink_end(device, link)?.ok_or(Error::NotSupported)? {
            NvLinkEnd::Gpu(_) => TYPE_GPU,
            NvLinkEnd::Switch => TYPE_SWITCH,
        };
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(kind, found) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: Handle,
    link: u32,
    pci: *mut PciInfo,
) -> i32 {
    answer(|| {
        let NvLinkEnd::Gpu(at) = nvlink_end(device, link)?.ok_or(Error::NotSupported)? else {
            return Err(Error::NotSupported);
        };
        let info = library::with_control(|control| control.table.gpus.get(at).cloned())?;
        let found = pci_info(&info.ok_or(Error::Unknown)?)?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(pci, found) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTopologyCommonAncestor(one: Handle, other: Handle, level: *mut u32) -> i32 {
    answer(|| {
        for device in [one, other] {
            library::with_device(place(device)?, |_| ())?;
        }
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(level, SAME_NODE) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: Handle, pci: *mut PciInfo) -> i32 {
    answer(|| {
        let info = library::with_device(place(device)?, |device| device.info.clone())?;
        let found = pci_info(&info)?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(pci, found) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: Handle, memory: *mut Memory) -> i32 {
    answer(|| {
        let (total, free) = library::with_device(place(device)?, |device| (device.total(), device.free()))?;
        // SAFETY: the caller keeps NVML's contract.
        unsafe {
            give(
                memory,
                Memory {
                    total,
                    free,
                    used: total - free,
                },
            )
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigMode(device: Handle, current: *mut u32, pending: *mut u32) -> i32 {
    answer(|| {
        let mig = u32::from(library::with_device(place(device)?, |device| device.info.mig)?);
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(current, mig) }?;
        // SAFETY: as above.
        unsafe { give(pending, mig) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPersistenceMode(device: Handle, mode: *mut u32) -> i32 {
    answer(|| {
        let on = u32::from(library::with_device(place(device)?, |device| {
            device.info.persistence
        })?);
        // SAFETY: the caller keeps NVML's contract.
        unsafe { give(mode, on) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Handle,
    count: *mut u32,
    infos: *mut ProcessInfo,
) -> i32 {
    answer(|| {
        if count.is_null() {
            return Err(Error::InvalidArgument);
        }
        let found = library::with_device(place(device)?, library::Device::processes)?;
        // SAFETY: not null, and valid by NVML's contract.
        let room = unsafe { count.read() } as usize;
        // SAFETY: as above.
        unsafe { give(count, u32::try_from(found.len()).map_err(|_| Error::Unknown)?) }?;
        if room < found.len() {
            return Err(Error::InsufficientSize);
        }
        for (at, (pid, used_gpu_memory)) in found.into_iter().enumerate() {
            let info = ProcessInfo {
                pid,
                used_gpu_memory,
                gpu_instance_id: NO_INSTANCE,
                compute_instance_id: NO_INSTANCE,
            };
            // SAFETY: `at` is below the room that the caller has announced.
            unsafe { give(infos.wrapping_add(at), info) }?;
        }
        Ok(())
    })
}
