//! The part of libnvidia-ml that the inventory reads, as nvml.h of CUDA 12.9 and 13.5 declares it.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::sys::{Library, LoadError};

pub(super) const LIBRARY: &str = "libnvidia-ml.so.1";

/// `nvmlReturn_t`.
pub(super) type Return = c_int;

/// `nvmlDevice_t`, a handle that only the library looks into.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(super) struct Device(pub *mut c_void);

/// `nvmlPciInfo_t` of `nvmlDeviceGetPciInfo_v3`.
#[repr(C)]
#[derive(Default)]
pub(super) struct PciInfo {
    pub bus_id_legacy: [u8; 16],
    pub domain: c_uint,
    pub bus: c_uint,
    pub device: c_uint,
    pub pci_device_id: c_uint,
    pub pci_subsystem_id: c_uint,
    pub bus_id: [u8; 32],
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
pub(super) struct Memory {
    pub total: u64,
    pub free: u64,
    pub used: u64,
}

/// `nvmlProcessInfo_t` of `nvmlDeviceGetComputeRunningProcesses_v3`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct ProcessInfo {
    pub pid: c_uint,
    pub used_gpu_memory: u64,
    pub gpu_instance_id: c_uint,
    pub compute_instance_id: c_uint,
}

pub(super) type Init = unsafe extern "C" fn() -> Return;
pub(super) type SystemText = unsafe extern "C" fn(*mut c_char, c_uint) -> Return;
pub(super) type Count = unsafe extern "C" fn(*mut c_uint) -> Return;
pub(super) type HandleByIndex = unsafe extern "C" fn(c_uint, *mut Device) -> Return;
pub(super) type DeviceText = unsafe extern "C" fn(Device, *mut c_char, c_uint) -> Return;
pub(super) type DeviceNumber = unsafe extern "C" fn(Device, *mut c_uint) -> Return;
pub(super) type DevicePci = unsafe extern "C" fn(Device, *mut PciInfo) -> Return;
pub(super) type DeviceMemory = unsafe extern "C" fn(Device, *mut Memory) -> Return;
pub(super) type DeviceMigMode = unsafe extern "C" fn(Device, *mut c_uint, *mut c_uint) -> Return;

/// A number about one NVLink of a device.
pub(super) type LinkNumber = unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> Return;
pub(super) type LinkPci = unsafe extern "C" fn(Device, c_uint, *mut PciInfo) -> Return;
/// A number about two devices.
pub(super) type PairNumber = unsafe extern "C" fn(Device, Device, *mut c_uint) -> Return;
pub(super) type DeviceProcesses = unsafe extern "C" fn(Device, *mut c_uint, *mut ProcessInfo) -> Return;

/// The functions, those that old libraries lack as options.
pub(super) struct Table {
    pub init: Init,
    pub driver_version: SystemText,
    pub count: Count,
    pub handle_by_index: HandleByIndex,
    pub uuid: DeviceText,
    pub name: DeviceText,
    pub pci_info: DevicePci,
    pub memory_info: DeviceMemory,
    pub minor_number: DeviceNumber,
    pub processes: Option<DeviceProcesses>,
    pub persistence_mode: Option<DeviceNumber>,
    pub mig_mode: Option<DeviceMigMode>,
    pub nvlink_state: Option<LinkNumber>,
    pub nvlink_remote: Option<LinkPci>,
    pub nvlink_remote_type: Option<LinkNumber>,
    pub common_ancestor: Option<PairNumber>,
}

impl Table {
    pub(super) fn load() -> Result<Self, LoadError> {
        let library = Library::open(LIBRARY)?;
        Ok(Self {
            // SAFETY: nvml.h: nvmlReturn_t nvmlInit_v2(void).
            init: unsafe { library.symbol("nvmlInit_v2") }?,
            // SAFETY: nvml.h: nvmlReturn_t nvmlSystemGetDriverVersion(char *, unsigned int).
            driver_version: unsafe { library.symbol("nvmlSystemGetDriverVersion") }?,
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *).
            count: unsafe { library.symbol("nvmlDeviceGetCount_v2") }?,
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int, nvmlDevice_t *).
            handle_by_index: unsafe { library.symbol("nvmlDeviceGetHandleByIndex_v2") }?,
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t, char *, unsigned int).
            uuid: unsafe { library.symbol("nvmlDeviceGetUUID") }?,
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t, char *, unsigned int).
            name: unsafe { library.symbol("nvmlDeviceGetName") }?,
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t, nvmlPciInfo_t *).
            pci_info: unsafe { library.symbol("nvmlDeviceGetPciInfo_v3") }?,
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t, nvmlMemory_t *).
            memory_info: unsafe { library.symbol("nvmlDeviceGetMemoryInfo") }?,
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t, unsigned int *).
            minor_number: unsafe { library.symbol("nvmlDeviceGetMinorNumber") }?,
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t, unsigned int
            // *, nvmlProcessInfo_t *).
            processes: unsafe { library.symbol("nvmlDeviceGetComputeRunningProcesses_v3") }.ok(),
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t, nvmlEnableState_t *),
            // whose enum has the values 0 and 1 and the size of an unsigned int.
            persistence_mode: unsafe { library.symbol("nvmlDeviceGetPersistenceMode") }.ok(),
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t, unsigned int *, unsigned int
            // *).
            mig_mode: unsafe { library.symbol("nvmlDeviceGetMigMode") }.ok(),
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t, unsigned int,
            // nvmlEnableState_t *), whose enum has the values 0 and 1 and the size of an unsigned int.
            nvlink_state: unsafe { library.symbol("nvmlDeviceGetNvLinkState") }.ok(),
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t, unsigned int,
            // nvmlPciInfo_t *), the struct being that of nvmlDeviceGetPciInfo_v3.
            nvlink_remote: unsafe { library.symbol("nvmlDeviceGetNvLinkRemotePciInfo_v2") }.ok(),
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t, unsigned int,
            // nvmlIntNvLinkDeviceType_t *), whose enum has values from 0 to 255 and the size of an unsigned
            // int.
            nvlink_remote_type: unsafe { library.symbol("nvmlDeviceGetNvLinkRemoteDeviceType") }.ok(),
            // SAFETY: nvml.h: nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t, nvmlDevice_t,
            // nvmlGpuTopologyLevel_t *), whose enum has values from 0 to 50 and the size of an unsigned int.
            common_ancestor: unsafe { library.symbol("nvmlDeviceGetTopologyCommonAncestor") }.ok(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// Sizes and offsets printed by a C program over nvml.h of CUDA 13.5 on x86-64.
    #[test]
    fn layouts_are_those_of_the_header() {
        assert_eq!(size_of::<PciInfo>(), 68);
        assert_eq!(offset_of!(PciInfo, domain), 16);
        assert_eq!(offset_of!(PciInfo, pci_device_id), 28);
        assert_eq!(offset_of!(PciInfo, pci_subsystem_id), 32);
        assert_eq!(offset_of!(PciInfo, bus_id), 36);

        assert_eq!(size_of::<Memory>(), 24);
        assert_eq!(offset_of!(Memory, total), 0);
        assert_eq!(offset_of!(Memory, free), 8);
        assert_eq!(offset_of!(Memory, used), 16);

        assert_eq!(size_of::<ProcessInfo>(), 24);
        assert_eq!(offset_of!(ProcessInfo, used_gpu_memory), 8);
        assert_eq!(offset_of!(ProcessInfo, compute_instance_id), 20);

        assert_eq!(size_of::<Device>(), size_of::<usize>());
    }
}
