//! The part of libnvidia-ml that the inventory reads, as nvml.h of CUDA 12.9 and 13.5 declares it.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::sys::functions;

pub(super) const LIBRARY: &str = "libnvidia-ml.so.1";

/// `nvmlReturn_t`.
pub(super) type Return = c_int;

/// `nvmlDevice_t`, a handle that only the library looks into.
#[repr(transparent)]
#[derive(Clone, Copy, Default)]
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

functions! {
    /// The functions. Enums of the header have the size of an unsigned int: `nvmlEnableState_t` with the
    /// values 0 and 1, `nvmlIntNvLinkDeviceType_t` with values from 0 to 255, `nvmlGpuTopologyLevel_t` with
    /// values from 0 to 50.
    Table -> Return;
    required {
        init = nvmlInit_v2();
        driver_version = nvmlSystemGetDriverVersion(*mut c_char, c_uint);
        count = nvmlDeviceGetCount_v2(*mut c_uint);
        handle_by_index = nvmlDeviceGetHandleByIndex_v2(c_uint, *mut Device);
        uuid = nvmlDeviceGetUUID(Device, *mut c_char, c_uint);
        name = nvmlDeviceGetName(Device, *mut c_char, c_uint);
        pci_info = nvmlDeviceGetPciInfo_v3(Device, *mut PciInfo);
        memory_info = nvmlDeviceGetMemoryInfo(Device, *mut Memory);
        minor_number = nvmlDeviceGetMinorNumber(Device, *mut c_uint);
    }
    optional {
        processes = nvmlDeviceGetComputeRunningProcesses_v3(Device, *mut c_uint, *mut ProcessInfo);
        persistence_mode = nvmlDeviceGetPersistenceMode(Device, *mut c_uint);
        mig_mode = nvmlDeviceGetMigMode(Device, *mut c_uint, *mut c_uint);
        nvlink_state = nvmlDeviceGetNvLinkState(Device, c_uint, *mut c_uint);
        nvlink_remote = nvmlDeviceGetNvLinkRemotePciInfo_v2(Device, c_uint, *mut PciInfo);
        nvlink_remote_type = nvmlDeviceGetNvLinkRemoteDeviceType(Device, c_uint, *mut c_uint);
        common_ancestor = nvmlDeviceGetTopologyCommonAncestor(Device, Device, *mut c_uint);
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
