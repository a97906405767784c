//! The GPU's queue of work that waits. All streams have one queue: nothing here runs ahead of anything.
//!
//! Calls that wait for the GPU, and a lock of the process, wait until the queue is empty. A start of work
//! waits inside the driver while the queue is full.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// How much work the queue takes, as a channel of driver 580.
const DEPTH: usize = 1024;

/// How often a waiting call looks.
const LOOK: Duration = Duration::from_micros(200);

/// Work that is done when its word is as large as its value.
pub(crate) struct Wait {
    pub(crate) word: &'static AtomicU32,
    pub(crate) value: u32,
}

/// See the module head.
#[derive(Default)]
pub(crate) struct Waits(Mutex<VecDeque<Wait>>);

impl Waits {
    /// What is left, without what is done.
    fn left(&self) -> MutexGuard<'_, VecDeque<Wait>> {
        let mut waits = self.0.lock().expect("nothing panics with the queue locked");
        let is_done = |wait: &mut Wait| wait.word.load(Ordering::Acquire) >= wait.value;
        while waits.pop_front_if(is_done).is_some() {}
        waits
    }

    /// Whether the GPU has done everything.
    pub(crate) fn is_empty(&self) -> bool {
        self.left().is_empty()
    }

    /// Starts work.
    pub(crate) fn push(&self, wait: Wait) {
        loop {
            let mut left = self.left();
            if left.len() < DEPTH {
                left.push_back(wait);
                return;
            }
            drop(left);
            thread::sleep(LOOK);
        }
    }

    /// Returns when the GPU has done everything.
    pub(crate) fn finish(&self) {
        while !self.is_empty() {
            thread::sleep(LOOK);
        }
    }
}
