//! Streams whose work is being captured: the driver refuses to wait for a context that has one, and spoils
//! what is captured.

use core::sync::atomic::Ordering;

use crate::area;
use crate::driver::{SUCCESS, Status};

/// What a call of the wrong thread gets, which ends no capture: CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD.
const WRONG_THREAD: Status = 908;

/// cuStreamBeginCapture and its kind have answered.
pub fn begin(answer: Status, stream: u64) -> Status {
    if let Some(area) = area::get().filter(|_| answer == SUCCESS) {
        // More than there is room for are not seen.
        let _ = area.captures.iter().find(|place| {
            place
                .compare_exchange(0, key(stream), Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        });
    }
    answer
}

/// cuStreamEndCapture and its kind have answered.
pub fn end(answer: Status, stream: u64) -> Status {
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

/// A stream in a place; that of the thread is 0 itself.
fn key(stream: u64) -> u64 {
    stream | 1 << 63
}
