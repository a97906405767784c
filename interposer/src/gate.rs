//! The gate that a program's threads pass at each call of the driver.
//!
//! A thread counts the calls that it is in, in a slot of its own, and looks whether the gate is shut. Whoever
//! shuts it waits until no thread is inside: each has then returned from the driver, and holds none of its
//! locks. Threads that come later wait outside.
//!
//! A passage costs a few stores and loads, without a fence: membarrier makes every thread of the process
//! order its store and its load while the gate is being shut. Without membarrier the passages themselves do.

use core::sync::atomic::{AtomicU32, Ordering, compiler_fence, fence};

use rustix::io::Errno;
use rustix::thread::{MembarrierCommand, futex, membarrier};

/// Where a thread counts the calls that it is in. A cache line each: no thread waits for another one's.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Slot {
    /// The thread that has it; 0: none.
    tid: AtomicU32,
    /// The calls that it is in, as a function of the driver may call another one; and [`ASKING`].
    depth: AtomicU32,
    /// Of the outermost call.
    row: AtomicU32,
}

/// A thread that is in a call of the driver, or asks to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    pub tid: u32,
    /// The function that it has entered last from outside, by its index in [`crate::facts::ROWS`].
    pub row: u32,
}

impl Slot {
    /// A slot that no thread has.
    pub const fn new() -> Self {
        Self {
            tid: AtomicU32::new(0),
            depth: AtomicU32::new(0),
            row: AtomicU32::new(0),
        }
    }

    /// Whether no thread has it: as in a forked child, which finds it empty.
    #[inline]
    pub fn is_free(&self) -> bool {
        self.tid.load(Ordering::Relaxed) == 0
    }

    /// Leaves a call.
    #[inline]
    pub fn leave(&self) {
        let depth = self.depth.load(Ordering::Relaxed);
        if depth & CALLS != 0 {
            self.depth.store(depth.wrapping_sub(1), Ordering::Release);
        }
    }
}

/// Of a depth: the calls. They are fewer than the stack has room for.
const CALLS: u32 = ASKING - 1;
/// Of a depth: the thread asks whether the gate is open. Whoever shuts it then waits for the thread; a
/// handler of a signal that interrupts it there asks for itself.
const ASKING: u32 = 1 << 31;

/// Of the number of a slot's thread: it takes the slot at this moment. The kernel's numbers are smaller.
const CLAIMED: u32 = 1 << 31;

/// Set while the gate is shut.
const SHUT: u32 = 1;
/// Set if membarrier cannot be used.
const FENCED: u32 = 2;
/// Set once a thread has entered without a slot.
const UNSEEN: u32 = 4;

/// A gate, and the slots of those who pass it. Of zero bytes it is one that is open.
#[derive(Debug)]
#[repr(C)]
pub struct Gate<S: ?Sized> {
    state: AtomicU32,
    /// Slots from the first on that a thread has, or has had.
    used: AtomicU32,
    slots: S,
}

impl<S> Gate<S> {
    /// A gate that is open.
    pub const fn new(slots: S) -> Self {
        Self {
            state: AtomicU32::new(0),
            used: AtomicU32::new(0),
            slots,
        }
    }
}

impl<S: AsRef<[Slot]> + ?Sized> Gate<S> {
    /// A slot for a thread, which calls this before it enters for the first time: a free one, or that of a
    /// thread that is gone. None: all are in use.
    pub fn take_slot(&self, tid: u32, is_gone: impl Fn(u32) -> bool) -> Option<&Slot> {
        if membarrier(MembarrierCommand::RegisterPrivateExpedited).is_err() {
            self.state.fetch_or(FENCED, Ordering::SeqCst);
        }
        let take = |slot: &&Slot| {
            let owner = slot.tid.load(Ordering::Relaxed);
            let is_free = owner == 0 || owner & CLAIMED == 0 && is_gone(owner);
            let take = || {
                slot.tid
                    .compare_exchange(owner, tid, Ordering::AcqRel, Ordering::Relaxed)
            };
            is_free && take().is_ok()
        };
        // One that had this number before may have ended inside of a call. Others may take its slot as well.
        let claim = |slot: &&Slot| {
            let claimed = tid | CLAIMED;
            slot.tid
                .compare_exchange(tid, claimed, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        let former = self.used().find(claim);
        if let Some(slot) = former {
            slot.tid.store(tid, Ordering::Release);
        }
        let mut all = self.slots.as_ref().iter().enumerate();
        let taken = former.or_else(|| {
            let (index, slot) = all.find(|(_, slot)| take(slot))?;
            let end = u32::try_from(index).ok()?.checked_add(1)?;
            self.used.fetch_max(end, Ordering::SeqCst);
            Some(slot)
        });
        let slot = taken?;
        slot.depth.store(0, Ordering::Release);
        Some(slot)
    }

    /// Enters a call without a slot, once the gate is open. It cannot be shut from then on.
    #[cold]
    pub fn enter_unseen(&self) {
        loop {
            let before = self.state.fetch_or(UNSEEN, Ordering::SeqCst);
            if before & SHUT == 0 {
                return;
            }
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, before | UNSEEN, None);
        }
    }

    fn used(&self) -> impl Iterator<Item = &Slot> {
        let used = self.used.load(Ordering::Acquire) as usize;
        self.slots.as_ref().iter().take(used)
    }

    /// Enters a call, once the gate is open. A call inside of another one enters at once.
    ///
    /// `row`: the function, by its index in [`crate::facts::ROWS`].
    #[inline]
    pub fn enter(&self, slot: &Slot, row: u32) {
        let before = slot.depth.load(Ordering::Relaxed);
        if before & CALLS != 0 {
            slot.depth.store(before.wrapping_add(1), Ordering::Relaxed);
            return;
        }
        slot.row.store(row, Ordering::Relaxed);
        slot.depth.store(ASKING, Ordering::Release);
        // Pairs with the membarrier in `shut`: either this thread sees the gate shut, or it is seen.
        compiler_fence(Ordering::SeqCst);
        if self.state.load(Ordering::Acquire) != 0 {
            self.ask(slot);
        }
        // In a handler of a signal that has interrupted this function, the one below still asks.
        slot.depth.store(before | 1, Ordering::Release);
    }

    /// Asks until the gate is open, in `ASKING`.
    #[cold]
    #[inline(never)]
    fn ask(&self, slot: &Slot) {
        loop {
            fence(Ordering::SeqCst);
            let state = self.state.load(Ordering::Acquire);
            if state & SHUT == 0 {
                return;
            }
            slot.depth.store(0, Ordering::Release);
            // Interrupted, or the state has changed: the loop looks again.
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, state, None);
            slot.depth.store(ASKING, Ordering::Release);
        }
    }

    /// Shuts the gate. From its return on no thread enters from outside of the driver; those inside are
    /// [`Self::busy`].
    ///
    /// # Errors
    /// Those of membarrier, and EUSERS after [`Self::enter_unseen`]: the gate is as before.
    pub fn shut(&self) -> Result<(), Errno> {
        let before = self.state.fetch_or(SHUT, Ordering::SeqCst);
        self.order(before).inspect_err(|_| {
            if before & SHUT == 0 {
                self.open();
            }
        })
    }

    /// Returns once each thread sees the gate shut, or is seen. `before`: the state that it had.
    fn order(&self, before: u32) -> Result<(), Errno> {
        if before & UNSEEN != 0 {
            return Err(Errno::USERS);
        }
        if before & FENCED != 0 {
            fence(Ordering::SeqCst);
            return Ok(());
        }
        // Once more, since CRIU may have restored the process without it.
        membarrier(MembarrierCommand::RegisterPrivateExpedited)?;
        membarrier(MembarrierCommand::PrivateExpedited)
    }

    /// Whether the gate is shut.
    pub fn is_shut(&self) -> bool {
        self.state.load(Ordering::Acquire) & SHUT != 0
    }

    /// Opens the gate.
    pub fn open(&self) {
        self.state.fetch_and(!SHUT, Ordering::Release);
        // Nobody can be woken that does not look again by itself.
        let _ = futex::wake(&self.state, futex::Flags::PRIVATE, u32::MAX >> 1);
    }

    /// The threads that are inside, ask at this moment, or have ended inside: to be looked at again until
    /// there is none.
    pub fn busy(&self) -> impl Iterator<Item = Busy> {
        self.used().filter_map(|slot| {
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
