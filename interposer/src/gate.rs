//! The gate that a program's threads pass at each call of the driver.
//!
//! A thread counts the calls that it is in, in a slot of its own, and looks whether the gate is shut. Whoever
//! shuts it waits until no thread is inside: each has then returned from the driver, and holds none of its
//! locks. Threads that come later wait outside.
//!
//! A passage costs two stores and a load, without a fence: membarrier makes every thread of the process order
//! its store and its load while the gate is being shut. Without membarrier the passages themselves do.

use core::sync::atomic::{AtomicU32, Ordering, compiler_fence, fence};

use rustix::io::Errno;
use rustix::thread::{MembarrierCommand, futex, membarrier};

/// Where a thread counts the calls that it is in. A cache line each: no thread waits for another one's.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Slot {
    /// The thread that has it; 0: none.
    tid: AtomicU32,
    /// Of calls: a function of the driver may call another one.
    depth: AtomicU32,
    /// Of the outermost call.
    row: AtomicU32,
}

/// A thread that is in a call of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    pub tid: u32,
    /// The function, by its index in [`crate::facts::ROWS`].
    pub row: u32,
}

/// Set while the gate is shut.
const SHUT: u32 = 1;
/// Set if membarrier cannot be used.
const FENCED: u32 = 2;

/// A gate, and the slots of those who pass it.
#[derive(Debug)]
pub struct Gate<S> {
    state: AtomicU32,
    slots: S,
}

impl<S: AsRef<[Slot]>> Gate<S> {
    /// A gate that is open.
    pub fn new(slots: S) -> Self {
        let registered = membarrier(MembarrierCommand::RegisterPrivateExpedited);
        let state = if registered.is_ok() { 0 } else { FENCED };
        Self {
            state: AtomicU32::new(state),
            slots,
        }
    }

    /// Takes a slot for a thread: a free one, or that of a thread that is gone. None: all are in use.
    pub fn take_slot(&self, tid: u32, is_gone: impl Fn(u32) -> bool) -> Option<&Slot> {
        self.slots.as_ref().iter().find(|slot| {
            let owner = slot.tid.load(Ordering::Relaxed);
            if owner != 0 && !is_gone(owner) {
                return false;
            }
            let taken = slot
                .tid
                .compare_exchange(owner, tid, Ordering::AcqRel, Ordering::Relaxed);
            if taken.is_ok() {
                // Its thread may have ended inside of a call.
                slot.depth.store(0, Ordering::Release);
            }
            taken.is_ok()
        })
    }

    /// Enters a call, once the gate is open. A call inside of another one enters at once.
    ///
    /// `row`: the function, by its index in [`crate::facts::ROWS`].
    #[inline]
    pub fn enter(&self, slot: &Slot, row: u32) {
        let depth = slot.depth.load(Ordering::Relaxed);
        slot.depth.store(depth.wrapping_add(1), Ordering::Relaxed);
        // Pairs with the membarrier in `shut`: either this thread sees the gate shut, or its depth is seen.
        compiler_fence(Ordering::SeqCst);
        if depth == 0 {
            slot.row.store(row, Ordering::Relaxed);
            if self.state.load(Ordering::Acquire) != 0 {
                self.enter_slowly(slot);
            }
        }
    }

    #[cold]
    fn enter_slowly(&self, slot: &Slot) {
        loop {
            fence(Ordering::SeqCst);
            let state = self.state.load(Ordering::Acquire);
            if state & SHUT == 0 {
                return;
            }
            slot.depth.store(0, Ordering::Release);
            // Interrupted, or the state has changed: the loop looks again.
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, state, None);
            slot.depth.store(1, Ordering::Relaxed);
        }
    }

    /// Leaves a call.
    #[inline]
    pub fn leave(&self, slot: &Slot) {
        let depth = slot.depth.load(Ordering::Relaxed);
        slot.depth.store(depth.wrapping_sub(1), Ordering::Release);
    }

    /// Shuts the gate. From its return on no thread enters; those inside are [`Self::busy`].
    ///
    /// # Errors
    /// Those of membarrier: the gate is open then.
    pub fn shut(&self) -> Result<(), Errno> {
        let before = self.state.fetch_or(SHUT, Ordering::SeqCst);
        if before & FENCED != 0 {
            fence(Ordering::SeqCst);
            return Ok(());
        }
        // Once more, since CRIU may have restored the process without it.
        let ordered = membarrier(MembarrierCommand::RegisterPrivateExpedited)
            .and_then(|()| membarrier(MembarrierCommand::PrivateExpedited));
        ordered.inspect_err(|_| self.open())
    }

    /// Opens the gate.
    pub fn open(&self) {
        self.state.fetch_and(!SHUT, Ordering::Release);
        // Nobody can be woken that does not look again by itself.
        let _ = futex::wake(&self.state, futex::Flags::PRIVATE, u32::MAX >> 1);
    }

    /// The threads that are inside.
    pub fn busy(&self) -> impl Iterator<Item = Busy> {
        self.slots.as_ref().iter().filter_map(|slot| {
            let is_inside = slot.depth.load(Ordering::Acquire) != 0;
            is_inside.then(|| Busy {
                tid: slot.tid.load(Ordering::Relaxed),
                row: slot.row.load(Ordering::Relaxed),
            })
        })
    }
}

#[cfg(test)]
mod tests;
