//! The process checkpoint calls.

use std::ffi::c_void;

use simgpu_model::Uuid;
use simgpu_model::fault::Call;

use super::give;
use crate::abi::{LockArgs, RestoreArgs};
use crate::caller;
use crate::error::{Error, answer};
use crate::wire::Request;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCheckpointProcessGetState(pid: i32, state: *mut i32) -> i32 {
    // SAFETY: the caller keeps the driver API's contract.
    answer(|| unsafe { give(state, caller::state(pid)?) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCheckpointProcessGetRestoreThreadId(pid: i32, tid: *mut i32) -> i32 {
    // SAFETY: the caller keeps the driver API's contract.
    answer(|| unsafe { give(tid, caller::look(Call::Tid, pid)?.restore_tid) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCheckpointProcessLock(pid: i32, args: *const LockArgs) -> i32 {
    // SAFETY: null or valid, by the driver API's contract.
    let timeout_ms = unsafe { args.as_ref() }.map_or(0, |args| args.timeout_ms);
    answer(|| caller::request(Call::Lock, pid, |_| Request::Lock { timeout_ms }))
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessCheckpoint(pid: i32, _args: *const c_void) -> i32 {
    answer(|| caller::request(Call::Checkpoint, pid, |slow_ms| Request::Checkpoint { slow_ms }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCheckpointProcessRestore(pid: i32, args: *const RestoreArgs) -> i32 {
    answer(|| {
        // SAFETY: null or valid, by the driver API's contract.
        let pairs = match unsafe { args.as_ref() } {
            Some(args) if args.count > 0 => {
                if args.pairs.is_null() || args.count > 256 {
                    return Err(Error::INVALID_VALUE);
                }
                // SAFETY: not null, and the caller promises `count` pairs.
                unsafe { std::slice::from_raw_parts(args.pairs, args.count as usize) }
            }
            _ => &[],
        };
        let pairs = pairs
            .iter()
            .map(|pair| (Uuid(pair.old.bytes), Uuid(pair.new.bytes)))
            .collect();
        caller::request(Call::Restore, pid, |slow_ms| Request::Restore { slow_ms, pairs })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessUnlock(pid: i32, _args: *const c_void) -> i32 {
    answer(|| caller::request(Call::Unlock, pid, |_| Request::Unlock))
}
