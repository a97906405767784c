//! The driver's process checkpoint calls behind safe traits.
//!
//! [`Cuda`] is libcuda; tests put fakes behind [`Driver`] and [`Checkpointer`]. All calls may be made from
//! several threads at once and may block for as long as the driver likes: whoever needs a deadline kills the
//! process.

mod copier;
mod hold;
mod raw;

use std::ffi::{CStr, c_int, c_uint};

use crate::sys::{Library, LoadError};
pub(crate) use copier::{Copier, CopierError};
use firn_gpu::protocol::DriverError;
use firn_gpu::{CudaState, GpuPair};
pub(crate) use hold::{Held, HoldError};
use raw::{
    CheckpointArgs, CheckpointTable, GetErrorName, LIBRARY, LockArgs, Pair, RestoreArgs, Result32, Table,
    UnlockArgs,
};

/// `CUDA_ERROR_NOT_INITIALIZED`: the driver wants cuInit in this process first, or the process asked about
/// has no CUDA.
pub(crate) const NOT_INITIALIZED: i32 = 3;

/// `CUDA_ERROR_OPERATING_SYSTEM`: there is no process of that pid.
pub(crate) const OPERATING_SYSTEM: i32 = 304;

/// The call that makes the driver usable in this process.
pub(crate) const INIT: &str = "cuInit";

/// The user mode driver of this node.
pub trait Driver: Send + Sync {
    /// CUDA version of the driver, 13000 for 13.0.
    fn version(&self) -> Result<i32, DriverError>;

    /// cuInit in this process.
    fn init(&self) -> Result<(), DriverError>;

    /// The process checkpoint calls, or which of them this driver lacks.
    fn checkpointer(&self) -> Result<&dyn Checkpointer, &LoadError>;
}

/// The calls that act on another process, named by its pid in the caller's pid namespace.
pub trait Checkpointer: Send + Sync {
    /// Thread of the process that carries out its restore. Fails for a process without CUDA.
    fn restore_tid(&self, pid: i32) -> Result<i32, DriverError>;

    /// State of the process. May succeed for a process without CUDA.
    fn state(&self, pid: i32) -> Result<CudaState, DriverError>;

    /// running -> locked. The driver overruns `timeout_ms` when the threads of the process cannot run.
    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), DriverError>;

    /// locked -> checkpointed.
    fn checkpoint(&self, pid: i32) -> Result<(), DriverError>;

    /// checkpointed -> locked, on the GPUs of `pairs`, or on the same ones when `pairs` is empty.
    fn restore(&self, pid: i32, pairs: &[GpuPair]) -> Result<(), DriverError>;

    /// locked -> running.
    fn unlock(&self, pid: i32) -> Result<(), DriverError>;
}

/// libcuda.so.1, opened once.
pub(crate) struct Cuda {
    table: Table,
    checkpointer: Result<Calls, LoadError>,
}

/// The checkpoint part of libcuda.
struct Calls {
    table: CheckpointTable,
    get_error_name: Option<GetErrorName>,
}

impl Cuda {
    pub(crate) fn open() -> Result<Self, LoadError> {
        let library = Library::open(LIBRARY)?;
        let table = Table::load(library)?;
        let get_error_name = table.get_error_name;
        let checkpointer = CheckpointTable::load(library).map(|table| Calls {
            table,
            get_error_name,
        });
        Ok(Self { table, checkpointer })
    }
}

impl Driver for Cuda {
    fn version(&self) -> Result<i32, DriverError> {
        let mut version: c_int = 0;
        // SAFETY: the pointer is to a live int, which the call writes.
        let result = unsafe { (self.table.driver_get_version)(&raw mut version) };
        check(self.table.get_error_name, "cuDriverGetVersion", result)?;
        Ok(version)
    }

    fn init(&self) -> Result<(), DriverError> {
        // SAFETY: cuInit takes no pointer; it may be called at any time, from any thread and again.
        let result = unsafe { (self.table.init)(0) };
        check(self.table.get_error_name, INIT, result)
    }

    fn checkpointer(&self) -> Result<&dyn Checkpointer, &LoadError> {
        self.checkpointer.as_ref().map(|calls| calls as &dyn Checkpointer)
    }
}

impl Calls {
    fn check(&self, call: &'static str, result: Result32) -> Result<(), DriverError> {
        check(self.get_error_name, call, result)
    }
}

impl Checkpointer for Calls {
    fn restore_tid(&self, pid: i32) -> Result<i32, DriverError> {
        let mut tid: c_int = 0;
        // SAFETY: the pointer is to a live int, which the call writes; any pid may be asked about.
        let result = unsafe { (self.table.get_restore_tid)(pid, &raw mut tid) };
        self.check("cuCheckpointProcessGetRestoreThreadId", result)?;
        Ok(tid)
    }

    fn state(&self, pid: i32) -> Result<CudaState, DriverError> {
        let mut state: c_int = 0;
        // SAFETY: CUprocessState is an int in the C ABI, and the pointer is to a live one; any pid may be
        // asked about.
        let result = unsafe { (self.table.get_state)(pid, &raw mut state) };
        self.check("cuCheckpointProcessGetState", result)?;
        Ok(state_of(state))
    }

    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), DriverError> {
        let mut args = LockArgs {
            timeout_ms,
            ..LockArgs::default()
        };
        // SAFETY: the argument struct has the header's layout, lives through the call and its reserved fields
        // are zero.
        let result = unsafe { (self.table.lock)(pid, &raw mut args) };
        self.check("cuCheckpointProcessLock", result)
    }

    fn checkpoint(&self, pid: i32) -> Result<(), DriverError> {
        let mut args = CheckpointArgs::default();
        // SAFETY: the argument struct has the header's layout, lives through the call and is all zero.
        let result = unsafe { (self.table.checkpoint)(pid, &raw mut args) };
        self.check("cuCheckpointProcessCheckpoint", result)
    }

    fn restore(&self, pid: i32, pairs: &[GpuPair]) -> Result<(), DriverError> {
        let mut pairs: Vec<Pair> = pairs
            .iter()
            .map(|pair| Pair {
                old: pair.old.to_bytes(),
                new: pair.new.to_bytes(),
            })
            .collect();
        let mut args = RestoreArgs::default();
        if !pairs.is_empty() {
            args.pairs = pairs.as_mut_ptr();
            args.pair_count = c_uint::try_from(pairs.len()).unwrap_or(c_uint::MAX);
        }
        // SAFETY: `args.pairs` is null with a count of 0, or points to `pair_count` pairs of the header's
        // layout in a vector that lives through the call (one never holds more than c_uint counts: a pair has
        // 32 bytes and came in one line of bounded length). The struct itself has the header's layout and its
        // reserved fields are zero.
        let result = unsafe { (self.table.restore)(pid, &raw mut args) };
        self.check("cuCheckpointProcessRestore", result)
    }

    fn unlock(&self, pid: i32) -> Result<(), DriverError> {
        let mut args = UnlockArgs::default();
        // SAFETY: the argument struct has the header's layout, lives through the call and is all zero.
        let result = unsafe { (self.table.unlock)(pid, &raw mut args) };
        self.check("cuCheckpointProcessUnlock", result)
    }
}

/// The one place where a `CUresult` becomes a `Result`.
fn check(get_error_name: Option<GetErrorName>, call: &str, code: Result32) -> Result<(), DriverError> {
    if code == 0 {
        return Ok(());
    }
    let name = error_name(get_error_name, code).unwrap_or_else(|| format!("CUresult {code}"));
    Err(DriverError {
        call: call.to_owned(),
        code,
        name,
    })
}

/// The driver's name for a result, such as `CUDA_ERROR_NOT_READY`.
fn error_name(get_error_name: Option<GetErrorName>, code: Result32) -> Option<String> {
    let get_error_name = get_error_name?;
    let mut name = std::ptr::null();
    // SAFETY: the pointer is to a live `const char *`, which the call sets, to null for a number that it does
    // not know.
    let result = unsafe { get_error_name(code, &raw mut name) };
    if result != 0 || name.is_null() {
        return None;
    }
    // SAFETY: after success the driver's answer is a static NUL-terminated string.
    let name = unsafe { CStr::from_ptr(name) };
    Some(name.to_string_lossy().into_owned())
}

/// `CUprocessState`. 4 and 5 (checkpointing and restoring to custom storage) are never asked for and stay
/// numbers.
fn state_of(state: c_int) -> CudaState {
    match state {
        0 => CudaState::Running,
        1 => CudaState::Locked,
        2 => CudaState::Checkpointed,
        3 => CudaState::Failed,
        other => CudaState::Unknown(other),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_char;

    use super::*;

    unsafe extern "C" fn driver_name(code: Result32, name: *mut *const c_char) -> Result32 {
        if code != 998 {
            return 1;
        }
        // SAFETY: the test passes a pointer to a live variable.
        unsafe { *name = c"CUDA_ERROR_OF_TOMORROW".as_ptr() };
        0
    }

    #[test]
    fn every_result_has_a_name() {
        assert_eq!(check(None, "cuInit", 0), Ok(()));
        let known = check(Some(driver_name), "cuInit", 998).unwrap_err();
        assert_eq!((known.code, known.name.as_str()), (998, "CUDA_ERROR_OF_TOMORROW"));
        assert_eq!(known.to_string(), "cuInit answered CUDA_ERROR_OF_TOMORROW");
        let unknown = check(Some(driver_name), "cuInit", 4711).unwrap_err();
        assert_eq!(unknown.name, "CUresult 4711");
    }

    #[test]
    fn states_have_the_numbers_of_the_header() {
        assert_eq!(state_of(0), CudaState::Running);
        assert_eq!(state_of(1), CudaState::Locked);
        assert_eq!(state_of(2), CudaState::Checkpointed);
        assert_eq!(state_of(3), CudaState::Failed);
        assert_eq!(state_of(5), CudaState::Unknown(5));
    }
}
