//! Types of the driver API whose layout callers rely on.

use std::ffi::c_void;

/// `CUuuid`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CuUuid {
    pub(crate) bytes: [u8; 16],
}

/// `CUcheckpointGpuPair`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GpuPair {
    pub(crate) old: CuUuid,
    pub(crate) new: CuUuid,
}

/// `CUcheckpointLockArgs`
#[repr(C)]
pub(crate) struct LockArgs {
    pub(crate) timeout_ms: u32,
    reserved: [u32; 15],
}

/// `CUcheckpointRestoreArgs`
#[repr(C)]
pub(crate) struct RestoreArgs {
    pub(crate) pairs: *const GpuPair,
    pub(crate) count: u32,
    reserved: [u8; 52],
}

/// `CUipcMemHandle`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcMemHandle {
    pub(crate) reserved: [u8; 64],
}

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

/// `CUmemAllocationProp`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    pub(crate) kind: u32,
    pub(crate) handles: u32,
    pub(crate) location: Location,
    security: usize,
    flags: [u8; 8],
}

impl Properties {
    /// Those of memory of a device.
    pub(crate) fn of_device(id: i32, handles: u32) -> Self {
        Self {
            kind: 1,
            handles,
            location: Location { kind: 1, id },
            security: 0,
            flags: [0; 8],
        }
    }
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Accessor {
    pub(crate) location: Location,
    pub(crate) flags: u32,
}

/// Opaque handles: contexts, modules, functions, streams.
pub(crate) type Handle = *mut c_void;

const _: () = assert!(size_of::<LockArgs>() == 64);
const _: () = assert!(size_of::<RestoreArgs>() == 64);
const _: () = assert!(size_of::<GpuPair>() == 32);
const _: () = assert!(size_of::<Properties>() == 32 && size_of::<Accessor>() == 12);
