//! libcuda's process checkpoint interface as cuda.h of CUDA 12.8 to 13.5 declares it.
//!
//! The argument structs are 64 bytes in every version; fields that a version does not know are reserved in it
//! and must be zero, which the `Default` values here are.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

use crate::sys::{Library, LoadError};

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
pub(super) struct CheckpointArgs {
    /// Custom storage of CUDA 13.3 and later; null lets the driver copy to host memory.
    pub custom_storage: *mut *mut c_void,
    pub reserved: [u8; 56],
}

impl Default for CheckpointArgs {
    fn default() -> Self {
        Self {
            custom_storage: ptr::null_mut(),
            reserved: [0; 56],
        }
    }
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
pub(super) struct RestoreArgs {
    pub pairs: *mut Pair,
    pub pair_count: c_uint,
    pub padding: c_uint,
    /// Custom storage of CUDA 13.3 and later; null lets the driver copy from host memory.
    pub custom_storage: *mut *mut c_void,
    pub reserved: [u8; 40],
}

impl Default for RestoreArgs {
    fn default() -> Self {
        Self {
            pairs: ptr::null_mut(),
            pair_count: 0,
            padding: 0,
            custom_storage: ptr::null_mut(),
            reserved: [0; 40],
        }
    }
}

/// `CUcheckpointUnlockArgs`.
#[repr(C)]
#[derive(Default)]
pub(super) struct UnlockArgs {
    pub reserved: [u64; 8],
}

pub(super) type Init = unsafe extern "C" fn(c_uint) -> Result32;
pub(super) type DriverGetVersion = unsafe extern "C" fn(*mut c_int) -> Result32;
pub(super) type GetErrorName = unsafe extern "C" fn(Result32, *mut *const c_char) -> Result32;
/// `cuCheckpointProcessGetRestoreThreadId` and `cuCheckpointProcessGetState`: pid in, number out.
pub(super) type Ask = unsafe extern "C" fn(c_int, *mut c_int) -> Result32;
pub(super) type Lock = unsafe extern "C" fn(c_int, *mut LockArgs) -> Result32;
pub(super) type Checkpoint = unsafe extern "C" fn(c_int, *mut CheckpointArgs) -> Result32;
pub(super) type Restore = unsafe extern "C" fn(c_int, *mut RestoreArgs) -> Result32;
pub(super) type Unlock = unsafe extern "C" fn(c_int, *mut UnlockArgs) -> Result32;

/// The functions that every libcuda has.
pub(super) struct Table {
    pub init: Init,
    pub driver_get_version: DriverGetVersion,
    pub get_error_name: Option<GetErrorName>,
}

/// The process checkpoint calls, all of them in libcuda 570 and later.
pub(super) struct CheckpointTable {
    pub get_restore_tid: Ask,
    pub get_state: Ask,
    pub lock: Lock,
    pub checkpoint: Checkpoint,
    pub restore: Restore,
    pub unlock: Unlock,
}

impl Table {
    /// Opens libcuda; of the checkpoint calls it gives all or the error about the first that is missing.
    pub(super) fn load() -> Result<(Self, Result<CheckpointTable, LoadError>), LoadError> {
        let library = Library::open(LIBRARY)?;
        let table = Self {
            // SAFETY: cuda.h: CUresult cuInit(unsigned int).
            init: unsafe { library.symbol("cuInit") }?,
            // SAFETY: cuda.h: CUresult cuDriverGetVersion(int *).
            driver_get_version: unsafe { library.symbol("cuDriverGetVersion") }?,
            // SAFETY: cuda.h: CUresult cuGetErrorName(CUresult, const char **).
            get_error_name: unsafe { library.symbol("cuGetErrorName") }.ok(),
        };
        Ok((table, CheckpointTable::load(library)))
    }
}

impl CheckpointTable {
    fn load(library: Library) -> Result<Self, LoadError> {
        Ok(Self {
            // SAFETY: cuda.h: CUresult cuCheckpointProcessGetRestoreThreadId(int, int *).
            get_restore_tid: unsafe { library.symbol("cuCheckpointProcessGetRestoreThreadId") }?,
            // SAFETY: cuda.h: CUresult cuCheckpointProcessGetState(int, CUprocessState *), the enum being an
            // int.
            get_state: unsafe { library.symbol("cuCheckpointProcessGetState") }?,
            // SAFETY: cuda.h: CUresult cuCheckpointProcessLock(int, CUcheckpointLockArgs *).
            lock: unsafe { library.symbol("cuCheckpointProcessLock") }?,
            // SAFETY: cuda.h: CUresult cuCheckpointProcessCheckpoint(int, CUcheckpointCheckpointArgs *).
            checkpoint: unsafe { library.symbol("cuCheckpointProcessCheckpoint") }?,
            // SAFETY: cuda.h: CUresult cuCheckpointProcessRestore(int, CUcheckpointRestoreArgs *).
            restore: unsafe { library.symbol("cuCheckpointProcessRestore") }?,
            // SAFETY: cuda.h: CUresult cuCheckpointProcessUnlock(int, CUcheckpointUnlockArgs *).
            unlock: unsafe { library.symbol("cuCheckpointProcessUnlock") }?,
        })
    }
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
        assert_eq!(checkpoint.reserved, [0; 56]);
        let restore = RestoreArgs::default();
        assert!(restore.pairs.is_null() && restore.custom_storage.is_null());
        assert_eq!(
            (restore.pair_count, restore.padding, restore.reserved),
            (0, 0, [0; 40])
        );
        assert_eq!(UnlockArgs::default().reserved, [0; 8]);
    }
}
