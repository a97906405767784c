//! Streams whose work is being captured: memory stays in the process while there are any.

use core::sync::atomic::Ordering;

use crate::area;
use crate::driver::{SUCCESS, Status};

/// What a call of the wrong thread gets, which ends no capture: CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD.
const WRONG_THREAD: Status = 908;

/// CU_STREAM_PER_THREAD
const PER_THREAD: u64 = 2;

/// cuStreamBeginCapture and its kind.
pub fn begin(stream: u64, begin: impl FnOnce() -> Status) -> Status {
    let Some(area) = area::get() else {
        return begin();
    };
    // More than there is room for are not seen.
    let place = area.captures.iter().find(|place| {
        place
            .compare_exchange(0, key(stream), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    });
    let answer = begin();
    if let Some(place) = place.filter(|_| answer != SUCCESS) {
        // It may be that of a capture of this stream which has ended meanwhile.
        let _ = place.compare_exchange(key(stream), 0, Ordering::AcqRel, Ordering::Relaxed);
    }
    answer
}

/// cuStreamEndCapture and its kind.
pub fn end(stream: u64, end: impl FnOnce() -> Status) -> Status {
    let answer = end();
    if answer != WRONG_THREAD {
        forget(stream);
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
