//! libcuda's process checkpoint interface as cuda.h of CUDA 12.8 to 13.5 declares it.
//!
//! The argument structs are 64 bytes in every version; fields that a version does not know are reserved in it
//! and must be zero, which the `Default` values here are.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::sys::functions;

pub(super) const LIBRARY: &str = "libcuda.so.1";

/// `CUresult`.
pub(super) type Result32 = c_int;

/// `CUcheckpointLockArgs`.
#[repr(C)]
#[derive(Default)]
pub(super) struct LockArgs {
    /// Milliseconds; 0 is no timeout.
    pub timeout_ms: c_uint,
    pub reserved0: c_uint,
    pub reserved1: [u64; 7],
}

/// `CUcheckpointCheckpointArgs`.
#[repr(C)]
#[derive(Default)]
pub(super) struct CheckpointArgs {
    /// Custom storage of CUDA 13.3 and later; null lets the driver copy to host memory.
    pub custom_storage: *mut *mut c_void,
    pub reserved: [u64; 7],
}

/// `CUcheckpointGpuPair`: two `CUuuid` of 16 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Pair {
    pub old: [u8; 16],
    pub new: [u8; 16],
}

/// `CUcheckpointRestoreArgs`.
#[repr(C)]
#[derive(Default)]
pub(super) struct RestoreArgs {
    pub pairs: *mut Pair,
    pub pair_count: c_uint,
    pub padding: c_uint,
    /// Custom storage of CUDA 13.3 and later; null lets the driver copy from host memory.
    pub custom_storage: *mut *mut c_void,
    pub reserved: [u64; 5],
}

/// `CUcheckpointUnlockArgs`.
#[repr(C)]
#[derive(Default)]
pub(super) struct UnlockArgs {
    pub reserved: [u64; 8],
}

/// Gives the name of a result.
pub(super) type GetErrorName = unsafe extern "C" fn(Result32, *mut *const c_char) -> Result32;

functions! {
    /// The functions that every libcuda has.
    Table -> Result32;
    required {
        init = cuInit(c_uint);
        driver_get_version = cuDriverGetVersion(*mut c_int);
    }
    optional {
        get_error_name = cuGetErrorName(Result32, *mut *const c_char);
    }
}

functions! {
    /// The process checkpoint calls, all of them in libcuda 570 and later. `CUprocessState` is an int.
    CheckpointTable -> Result32;
    required {
        get_restore_tid = cuCheckpointProcessGetRestoreThreadId(c_int, *mut c_int);
        get_state = cuCheckpointProcessGetState(c_int, *mut c_int);
        lock = cuCheckpointProcessLock(c_int, *mut LockArgs);
        checkpoint = cuCheckpointProcessCheckpoint(c_int, *mut CheckpointArgs);
        restore = cuCheckpointProcessRestore(c_int, *mut RestoreArgs);
        unlock = cuCheckpointProcessUnlock(c_int, *mut UnlockArgs);
    }
    optional {}
}

/// `CUmemAllocationProp`, with the location and the flags taken apart.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Properties {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: c_int,
    pub id: c_int,
    pub win32: usize,
    pub flags: [u8; 8],
}

/// `CUmemAccessDesc`, with the location taken apart.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub location: c_int,
    pub id: c_int,
    pub flags: c_int,
}

functions! {
    /// What copies pieces of GPU memory. `CUmemGenericAllocationHandle` and `CUdeviceptr` are 64 bits.
    PieceTable -> Result32;
    required {
        device_count = cuDeviceGetCount(*mut c_int);
        device_uuid = cuDeviceGetUuid_v2(*mut [u8; 16], c_int);
        retain = cuDevicePrimaryCtxRetain(*mut *mut c_void, c_int);
        set_current = cuCtxSetCurrent(*mut c_void);
        synchronize = cuCtxSynchronize();
        import = cuMemImportFromShareableHandle(*mut u64, *mut c_void, c_int);
        export = cuMemExportToShareableHandle(*mut c_void, u64, c_int, u64);
        properties = cuMemGetAllocationPropertiesFromHandle(*mut Properties, u64);
        create = cuMemCreate(*mut u64, usize, *const Properties, u64);
        release = cuMemRelease(u64);
        reserve = cuMemAddressReserve(*mut u64, usize, usize, u64, u64);
        free = cuMemAddressFree(u64, usize);
        map = cuMemMap(u64, usize, usize, u64, u64);
        unmap = cuMemUnmap(u64, usize);
        set_access = cuMemSetAccess(u64, usize, *const Access, usize);
        copy = cuMemcpyDtoD_v2(u64, u64, usize);
        copy_peer = cuMemcpyPeer(u64, *mut c_void, u64, *mut c_void, usize);
    }
    optional {}
}

functions! {
    /// What a process calls to have GPU memory. `CUdevice` is an int, `CUdeviceptr` 64 bits.
    HoldTable -> Result32;
    required {
        device_get = cuDeviceGet(*mut c_int, c_int);
        retain = cuDevicePrimaryCtxRetain(*mut *mut c_void, c_int);
        set_current = cuCtxSetCurrent(*mut c_void);
        alloc = cuMemAlloc_v2(*mut u64, usize);
        fill = cuMemsetD32_v2(u64, c_uint, usize);
        copy = cuMemcpyDtoH_v2(*mut c_void, u64, usize);
    }
    optional {}
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    /// Sizes and offsets printed by a C program over cuda.h of CUDA 13.5 on x86-64.
    #[test]
    fn layouts_are_those_of_the_header() {
        assert_eq!(size_of::<LockArgs>(), 64);
        assert_eq!(offset_of!(LockArgs, timeout_ms), 0);
        assert_eq!(offset_of!(LockArgs, reserved0), 4);
        assert_eq!(offset_of!(LockArgs, reserved1), 8);

        assert_eq!(size_of::<CheckpointArgs>(), 64);
        assert_eq!(offset_of!(CheckpointArgs, custom_storage), 0);

        assert_eq!(size_of::<RestoreArgs>(), 64);
        assert_eq!(offset_of!(RestoreArgs, pairs), 0);
        assert_eq!(offset_of!(RestoreArgs, pair_count), 8);
        assert_eq!(offset_of!(RestoreArgs, custom_storage), 16);
        assert_eq!(offset_of!(RestoreArgs, reserved), 24);

        assert_eq!(size_of::<UnlockArgs>(), 64);

        assert_eq!(size_of::<Properties>(), 32);
        assert_eq!(offset_of!(Properties, location), 8);
        assert_eq!(offset_of!(Properties, flags), 24);
        assert_eq!(size_of::<Access>(), 12);

        assert_eq!(size_of::<Pair>(), 32);
        assert_eq!(offset_of!(Pair, new), 16);
        assert_eq!(align_of::<Pair>(), 1);
    }

    #[test]
    fn arguments_start_as_zeroes() {
        let lock = LockArgs::default();
        assert_eq!((lock.timeout_ms, lock.reserved0, lock.reserved1), (0, 0, [0; 7]));
        let checkpoint = CheckpointArgs::default();
        assert!(checkpoint.custom_storage.is_null());
        assert_eq!(checkpoint.reserved, [0; 7]);
        let restore = RestoreArgs::default();
        assert!(restore.pairs.is_null() && restore.custom_storage.is_null());
        assert_eq!(
            (restore.pair_count, restore.padding, restore.reserved),
            (0, 0, [0; 5])
        );
        assert_eq!(UnlockArgs::default().reserved, [0; 8]);
    }
}
