//! NVML's structures and return codes, laid out as in its header.

use std::ffi::c_char;

/// `nvmlReturn_t` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Error {
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NotFound = 6,
    InsufficientSize = 7,
    DriverNotLoaded = 9,
    VersionMismatch = 25,
    Unknown = 999,
}

/// `nvmlPciInfo_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PciInfo {
    pub(crate) bus_id_legacy: [u8; 16],
    pub(crate) domain: u32,
    pub(crate) bus: u32,
    pub(crate) device: u32,
    pub(crate) pci_device_id: u32,
    pub(crate) pci_subsystem_id: u32,
    pub(crate) bus_id: [u8; 32],
}

/// `nvmlMemory_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlMemory_v2_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Memory2 {
    pub(crate) version: u32,
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlSetMemoryLimits_v1_t`
#[repr(C)]
pub(crate) struct MemoryLimits {
    /// Path of a cgroup.
    pub(crate) cgroup: *const c_char,
    pub(crate) soft: u64,
    pub(crate) hard: u64,
}

/// `nvmlProcessInfo_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ProcessInfo {
    pub(crate) pid: u32,
    pub(crate) used_gpu_memory: u64,
    pub(crate) gpu_instance_id: u32,
    pub(crate) compute_instance_id: u32,
}

const _: () = assert!(size_of::<PciInfo>() == 68);
const _: () = assert!(size_of::<Memory>() == 24);
const _: () = assert!(size_of::<Memory2>() == 40);
const _: () = assert!(size_of::<MemoryLimits>() == 24);
const _: () = assert!(size_of::<ProcessInfo>() == 24);
