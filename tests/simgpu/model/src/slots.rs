//! Owners of a device: one slot per process, held by a robust mutex for as long as the process uses the
//! device.
//!
//! Invariants: a slot's mutex is held by its process's restore thread; the token is zero unless a process has
//! the slot; what a dead owner left is freed by whoever takes or sweeps its slot next, before the slot
//! is used again.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::mapping::Mapping;
use crate::robust::{Held, RobustMutex};

/// Processes that can use one device at a time.
pub const SLOT_COUNT: usize = 256;
/// Bytes of a slot table.
pub const SLOT_TABLE_SIZE: usize = SLOT_COUNT * 64;

#[repr(C, align(64))]
struct Slot {
    mutex: RobustMutex,
    token: AtomicU64,
}

/// The slot table of a mapped device. Lives as long as the mapping that it was found in.
#[repr(transparent)]
pub struct Slots([Slot; SLOT_COUNT]);

impl Slots {
    /// The table at `offset` of a mapped device.
    pub fn within(device: &Mapping, offset: usize) -> &Self {
        let at = device.at(offset, SLOT_TABLE_SIZE).cast::<Self>();
        assert!(at.is_aligned(), "the slot table is not aligned");
        // SAFETY: size and alignment are checked above and the mapping outlives the result; every field is an
        // atomic or a mutex, so any bytes that other processes write meanwhile are valid.
        unsafe { &*at }
    }

    /// Makes all slots of a fresh device.
    pub fn initialise(&self) {
        for slot in &self.0 {
            slot.mutex.initialise();
        }
    }

    /// Takes a slot for the process with this token and the calling thread; `reclaim` frees what a dead
    /// owner of a slot left. Nothing when all slots are in use.
    pub fn claim(&self, token: u64, reclaim: impl Fn(usize)) -> Option<usize> {
        self.0.iter().enumerate().find_map(|(number, slot)| {
            match slot.mutex.try_hold() {
                Held::Busy => return None,
                Held::Free => {}
                Held::OwnerDied => reclaim(number),
            }
            slot.token.store(token, Ordering::Release);
            Some(number)
        })
    }

    /// Gives the slot back; called by the thread that claimed it, after it has freed everything.
    pub fn release(&self, number: usize) {
        self.0[number].token.store(0, Ordering::Release);
        self.0[number].mutex.release();
    }

    /// Frees what dead owners left.
    pub fn sweep(&self, reclaim: impl Fn(usize)) {
        for (number, slot) in self.0.iter().enumerate() {
            if slot.token.load(Ordering::Acquire) == 0 {
                continue;
            }
            match slot.mutex.try_hold() {
                Held::Busy => continue,
                Held::Free => {}
                Held::OwnerDied => reclaim(number),
            }
            slot.token.store(0, Ordering::Release);
            slot.mutex.release();
        }
    }

    /// Slots in use with the tokens of their processes.
    pub fn owners(&self) -> Vec<(usize, u64)> {
        let tokens = self
            .0
            .iter()
            .map(|slot| slot.token.load(Ordering::Acquire))
            .enumerate();
        tokens.filter(|(_, token)| *token != 0).collect()
    }
}

const _: () = assert!(size_of::<Slots>() == SLOT_TABLE_SIZE);
