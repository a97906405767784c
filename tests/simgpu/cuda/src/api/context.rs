//! Contexts and streams. Work is done when the call that asks for it returns, so waiting for it is passing
//! the gate.

use std::cell::RefCell;

use simgpu_model::CHUNK;

use super::give;
use crate::abi::Handle;
use crate::driver;
use crate::error::{Error, answer};
use crate::process::{Context, Process};

thread_local! {
    /// The thread's context stack, the current one last.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn handle(number: usize) -> Handle {
    std::ptr::without_provenance_mut(number)
}

/// The GPU of the calling thread's current context.
pub(super) fn current_gpu(process: &Process) -> Result<usize, Error> {
    let current = STACK
        .with_borrow(|stack| stack.last().copied())
        .ok_or(Error::INVALID_CONTEXT)?;
    Ok(process.contexts.get(&current).ok_or(Error::INVALID_CONTEXT)?.gpu)
}

fn make(process: &mut Process, gpu: usize, primary: bool) -> Result<usize, Error> {
    process
        .hardware
        .as_mut()
        .ok_or(Error::ILLEGAL_STATE)?
        .map_base(gpu)?;
    let memory = process.allocate(gpu, CHUNK)?;
    let number = process.fresh_handle();
    process.contexts.insert(
        number,
        Context {
            gpu,
            memory,
            retained: 1,
            primary,
        },
    );
    Ok(number)
}

fn destroy(process: &mut Process, number: usize) -> Result<(), Error> {
    let context = process.contexts.remove(&number).ok_or(Error::INVALID_CONTEXT)?;
    process.free(context.memory)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxCreate_v2(context: *mut Handle, _flags: u32, device: i32) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        let gpu = process.place(device)?;
        let number = make(&mut process, gpu, false)?;
        STACK.with_borrow_mut(|stack| stack.push(number));
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(context, handle(number)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxDestroy_v2(context: Handle) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        STACK.with_borrow_mut(|stack| stack.retain(|number| *number != context.addr()));
        destroy(&mut entered.process(), context.addr())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: i32) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        let gpu = process.place(device)?;
        let existing = process
            .contexts
            .iter_mut()
            .find(|(_, context)| context.primary && context.gpu == gpu);
        let number = match existing {
            Some((number, context)) => {
                context.retained += 1;
                *number
            }
            None => make(&mut process, gpu, true)?,
        };
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(context, handle(number)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        let gpu = process.place(device)?;
        let existing = process
            .contexts
            .iter_mut()
            .find(|(_, context)| context.primary && context.gpu == gpu);
        let (number, context) = existing.ok_or(Error::INVALID_CONTEXT)?;
        context.retained -= 1;
        let (number, last) = (*number, context.retained == 0);
        if last {
            destroy(&mut process, number)
        } else {
            Ok(())
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: Handle) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        if !context.is_null() && !entered.process().contexts.contains_key(&context.addr()) {
            return Err(Error::INVALID_CONTEXT);
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if !context.is_null() {
                stack.push(context.addr());
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut Handle) -> i32 {
    answer(|| {
        let _entered = driver::enter()?;
        let current = STACK.with_borrow(|stack| stack.last().copied()).unwrap_or(0);
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(context, handle(current)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(device: *mut i32) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let process = entered.process();
        let gpu = current_gpu(&process)?;
        let ordinal = process.ordinals.iter().position(|place| *place == gpu);
        let ordinal = ordinal.and_then(|ordinal| i32::try_from(ordinal).ok());
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(device, ordinal.ok_or(Error::INVALID_CONTEXT)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let process = entered.process();
        let gpu = process.place(device)?;
        let is_own = |context: &Context| context.primary && context.gpu == gpu;
        let is_active = process.contexts.values().any(is_own);
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(flags, 0) }?;
        // SAFETY: as above.
        unsafe { give(active, i32::from(is_active)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        if !entered.process().contexts.contains_key(&context.addr()) {
            return Err(Error::INVALID_CONTEXT);
        }
        STACK.with_borrow_mut(|stack| stack.push(context.addr()));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut Handle) -> i32 {
    answer(|| {
        let _entered = driver::enter()?;
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(Error::INVALID_CONTEXT)?;
        if context.is_null() {
            return Ok(());
        }
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(context, handle(popped)) }
    })
}

/// The current context's GPU may access memory of that of `peer` from now on.
#[unsafe(no_mangle)]
extern "C" fn cuCtxEnablePeerAccess(peer: Handle, _flags: u32) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        let pair = peers(&process, peer)?;
        if process.peers.insert(pair) {
            Ok(())
        } else {
            Err(Error::PEER_ACCESS_ALREADY_ENABLED)
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxDisablePeerAccess(peer: Handle) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        let pair = peers(&process, peer)?;
        if process.peers.remove(&pair) {
            Ok(())
        } else {
            Err(Error::PEER_ACCESS_NOT_ENABLED)
        }
    })
}

/// The GPU that accesses, and the one whose memory it accesses.
fn peers(process: &Process, peer: Handle) -> Result<(usize, usize), Error> {
    let accessing = current_gpu(process)?;
    let accessed = process
        .contexts
        .get(&peer.addr())
        .ok_or(Error::INVALID_CONTEXT)?
        .gpu;
    if accessing == accessed {
        Err(Error::INVALID_DEVICE)
    } else {
        Ok((accessing, accessed))
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        current_gpu(&entered.process())?;
        entered.waits().finish();
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, _flags: u32) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        current_gpu(&process)?;
        let number = process.fresh_handle();
        process.streams.insert(number);
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(stream, handle(number)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: Handle) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        if !stream.is_null() && !entered.process().streams.contains(&stream.addr()) {
            return Err(Error::INVALID_HANDLE);
        }
        entered.waits().finish();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: Handle) -> i32 {
    answer(|| {
        let known = driver::enter()?.process().streams.remove(&stream.addr());
        if known { Ok(()) } else { Err(Error::INVALID_HANDLE) }
    })
}
