//! Streams whose work is being captured: the driver refuses to wait for a context that has one, and spoils
//! what is captured.

use core::sync::atomic::Ordering;

use rustix::thread::{Timespec, nanosleep};

use super::allocations::discard_freed;
use crate::area::{self, Area};
use crate::driver::{SUCCESS, Status};

/// What a call of the wrong thread gets, which ends no capture: CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD.
const WRONG_THREAD: Status = 908;

/// CU_STREAM_PER_THREAD
const PER_THREAD: u64 = 2;

/// How often a capture that is to begin looks whether nobody waits for a context any more.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000,
};

/// cuStreamBeginCapture and its kind: once nobody waits for a context.
pub fn begin(stream: u64, begin: impl FnOnce() -> Status) -> Status {
    let Some(area) = area::get() else {
        return begin();
    };
    // More than there is room for are not seen.
    let place = area.captures.iter().find(|place| {
        place
            .compare_exchange(0, key(stream), Ordering::SeqCst, Ordering::Relaxed)
            .is_ok()
    });
    while area.waits.load(Ordering::SeqCst) > 0 {
        let _ = nanosleep(&LOOK);
    }
    let answer = begin();
    if let Some(place) = place.filter(|_| answer != SUCCESS) {
        // It may be that of a capture of this stream which has ended meanwhile.
        let _ = place.compare_exchange(key(stream), 0, Ordering::AcqRel, Ordering::Relaxed);
        discard_freed(area);
    }
    answer
}

/// Waits for contexts, if no stream is captured; none begins to be meanwhile. None: one is.
pub fn unless_capturing<T>(area: &Area, wait: impl FnOnce() -> T) -> Option<T> {
    area.waits.fetch_add(1, Ordering::SeqCst);
    let waited = (!area.is_capturing()).then(wait);
    area.waits.fetch_sub(1, Ordering::SeqCst);
    waited
}

/// cuStreamEndCapture and its kind.
pub fn end(stream: u64, end: impl FnOnce() -> Status) -> Status {
    let answer = end();
    if answer != WRONG_THREAD {
        forget(stream);
        // Captures may follow each other so closely that no free finds a moment without one.
        if let Some(area) = area::get() {
            discard_freed(area);
        }
    }
    answer
}

/// Nothing is captured of a stream: it is being destroyed.
pub fn forget(stream: u64) {
    if let Some(area) = area::get() {
        let _ = area.captures.iter().find(|place| {
            place
                .compare_exchange(key(stream), 0, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        });
    }
}

/// A stream in a place. The thread's own one has two numbers.
fn key(stream: u64) -> u64 {
    if stream == 0 { PER_THREAD } else { stream }
}
