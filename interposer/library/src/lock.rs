//! A lock that is free in zero bytes.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::futex;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Taken, and somebody waits.
const AWAITED: u32 = 2;

#[repr(C)]
pub struct Lock<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time has the value.
unsafe impl<T: Send> Sync for Lock<T> {}

/// The value, as long as this lives.
pub struct Taken<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Lock<T> {
    pub fn take(&self) -> Taken<'_, T> {
        let taken = self
            .state
            .compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_err() {
            while self.state.swap(AWAITED, Ordering::Acquire) != FREE {
                // Interrupted, or free by now: the loop looks again.
                let _ = futex::wait(&self.state, futex::Flags::PRIVATE, AWAITED, None);
            }
        }
        Taken { lock: self }
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        if self.lock.state.swap(FREE, Ordering::Release) == AWAITED {
            // Nobody waits any more if it fails.
            let _ = futex::wake(&self.lock.state, futex::Flags::PRIVATE, 1);
        }
    }
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is taken.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is taken.
        unsafe { &mut *self.lock.value.get() }
    }
}
