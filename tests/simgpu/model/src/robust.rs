//! Robust mutexes in memory shared by processes of different containers.
//!
//! The kernel marks a robust mutex when the thread that holds it dies, whatever pid namespace that thread was
//! in. So "this mutex is held" means "that process lives", to every process that maps the memory, without
//! looking at /proc.

use std::cell::UnsafeCell;

use libc::{EBUSY, EOWNERDEAD};

/// A process-shared robust mutex of normal kind; only tried, never waited for.
#[repr(transparent)]
pub(crate) struct RobustMutex(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a process-shared pthread mutex is made to be used by many threads through its address.
unsafe impl Sync for RobustMutex {}

/// What [`RobustMutex::try_hold`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// It was free; this thread holds it now.
    Free,
    /// Its holder died; this thread holds it now.
    OwnerDied,
    /// A living thread holds it.
    Busy,
}

impl RobustMutex {
    /// Makes the mutex in place.
    pub(crate) fn initialise(&self) {
        let mut attr = std::mem::MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        // SAFETY: `attr` is memory of the right type, given for initialisation.
        unsafe { libc::pthread_mutexattr_init(attr.as_mut_ptr()) };
        // SAFETY: `attr` was initialised above.
        unsafe { libc::pthread_mutexattr_setpshared(attr.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED) };
        // SAFETY: `attr` was initialised above.
        unsafe { libc::pthread_mutexattr_setrobust(attr.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST) };
        // SAFETY: the cell's memory has the mutex's type; nobody uses it before setup is finished.
        unsafe { libc::pthread_mutex_init(self.0.get(), attr.as_ptr()) };
    }

    /// Takes the mutex unless a living thread holds it.
    pub(crate) fn try_hold(&self) -> Held {
        // SAFETY: the mutex was made by `initialise` when the device was set up and is never destroyed.
        match unsafe { libc::pthread_mutex_trylock(self.0.get()) } {
            0 => Held::Free,
            EOWNERDEAD => {
                // SAFETY: this thread has just got the mutex with EOWNERDEAD, the only time this call is
                // allowed.
                unsafe { libc::pthread_mutex_consistent(self.0.get()) };
                Held::OwnerDied
            }
            EBUSY => Held::Busy,
            // Not recoverable or damaged: never to be used again, which is what busy means to callers.
            _ => Held::Busy,
        }
    }

    /// Lets go; only the holding thread can.
    pub(crate) fn release(&self) {
        // SAFETY: the mutex was made by `initialise`; unlocking by a thread without it answers an error only.
        unsafe { libc::pthread_mutex_unlock(self.0.get()) };
    }
}
