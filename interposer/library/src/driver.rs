//! The driver's own functions, as this library calls them, and what they take.

#![allow(non_snake_case, reason = "the names are the driver's")]

use core::ffi::c_void;

use firn_interposer::table::Kind;

use crate::calls;

/// A CUresult.
pub type Status = i32;

pub const SUCCESS: Status = 0;
pub const INVALID_VALUE: Status = 1;
pub const OUT_OF_MEMORY: Status = 2;
/// What a function returns that this driver does not have.
pub const NOT_FOUND: Status = 500;

/// Of a place of memory: CU_MEM_LOCATION_TYPE_DEVICE.
pub const DEVICE: u32 = 1;
/// Of a type of handles: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
pub const DESCRIPTOR: u32 = 1;
/// Of access: CU_MEM_ACCESS_FLAGS_PROT_READ and _READWRITE.
pub const READ: u32 = 1;
pub const READ_WRITE: u32 = 3;

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    pub kind: u32,
    pub id: u32,
}

/// `CUmemAllocationProp`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Properties {
    pub kind: u32,
    pub handles: u32,
    pub location: Location,
    pub security: usize,
    pub compression: u8,
    pub rdma: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Accessor {
    pub location: Location,
    pub flags: u32,
}

impl Properties {
    /// Those of memory of this kind with these types of handles.
    pub fn of(kind: Kind, handles: u32) -> Self {
        Self {
            // CU_MEM_ALLOCATION_TYPE_PINNED
            kind: 1,
            handles,
            location: Location {
                kind: kind.location,
                id: kind.id,
            },
            security: 0,
            compression: kind.compression,
            rdma: kind.rdma,
            usage: kind.usage,
            reserved: [0; 4],
        }
    }
}

const _: () = assert!(size_of::<Properties>() == 32 && size_of::<Accessor>() == 12);

macro_rules! functions {
    ($($symbol:ident($($argument:ident: $kind:ty),*);)*) => {
        $(
            /// # Safety
            /// As the driver's.
            pub unsafe fn $symbol($($argument: $kind),*) -> Status {
                let Some(real) = calls::real(calls::row::$symbol) else {
                    return NOT_FOUND;
                };
                // SAFETY: the driver's function has these arguments.
                unsafe {
                    let real: unsafe extern "C" fn($($kind),*) -> Status = core::mem::transmute(real);
                    real($($argument),*)
                }
            }
        )*
    };
}

functions! {
    cuCtxGetCurrent(context: *mut u64);
    cuCtxGetDevice(device: *mut i32);
    cuCtxGetFlags(flags: *mut u32);
    cuCtxPopCurrent_v2(context: *mut u64);
    cuCtxPushCurrent_v2(context: u64);
    cuCtxSetFlags(flags: u32);
    cuCtxSynchronize();
    cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32);
    cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, is_active: *mut i32);
    cuMemAddressFree(address: u64, bytes: u64);
    cuMemAddressReserve(address: *mut u64, bytes: u64, alignment: u64, wanted: u64, flags: u64);
    cuMemAlloc_v2(address: *mut u64, bytes: u64);
    cuMemCreate(handle: *mut u64, bytes: u64, properties: *const Properties, flags: u64);
    cuMemExportToShareableHandle(to: *mut i32, handle: u64, kind: u32, flags: u64);
    cuMemFree_v2(address: u64);
    cuMemGetAllocationPropertiesFromHandle(to: *mut Properties, handle: u64);
    cuMemGetInfo_v2(free: *mut u64, total: *mut u64);
    cuMemImportFromShareableHandle(to: *mut u64, shared: usize, kind: u32);
    cuMemMap(address: u64, bytes: u64, offset: u64, handle: u64, flags: u64);
    cuMemRelease(handle: u64);
    cuMemSetAccess(address: u64, bytes: u64, accessors: *const Accessor, count: u64);
    cuMemUnmap(address: u64, bytes: u64);
    cuMemcpyDtoD_v2(to: u64, from: u64, bytes: u64);
}

/// An argument that is written to, if the caller has given one.
///
/// # Safety
/// It is null, or the caller's to be written to.
pub unsafe fn out<'a, T>(argument: u64) -> Option<&'a mut T> {
    // SAFETY: as the caller of the driver promises.
    unsafe { (argument as *mut c_void).cast::<T>().as_mut() }
}

/// An argument that is read, if the caller has given one.
///
/// # Safety
/// It is null, or the caller's to be read.
pub unsafe fn given<'a, T>(argument: u64) -> Option<&'a T> {
    // SAFETY: as the caller of the driver promises.
    unsafe { (argument as *const c_void).cast::<T>().as_ref() }
}
