//! How far something is, for whoever sits at a terminal.

use std::io::{IsTerminal, stderr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::output::note;
use crate::text;

/// How often it is shown.
const STEP: Duration = Duration::from_secs(2);

/// Bytes of a total, counted by several threads.
pub struct Progress {
    what: &'static str,
    total: u64,
    done: AtomicU64,
    /// When it was shown last. None: nobody looks.
    shown: Option<Mutex<Instant>>,
}

impl Progress {
    pub fn new(what: &'static str, total: u64) -> Self {
        Self {
            what,
            total,
            done: AtomicU64::new(0),
            shown: stderr().is_terminal().then(|| Mutex::new(Instant::now())),
        }
    }

    /// Counts bytes that are done.
    pub fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        // Another thread shows it.
        let Some(Ok(mut shown)) = self.shown.as_ref().map(Mutex::try_lock) else {
            return;
        };
        if shown.elapsed() >= STEP {
            *shown = Instant::now();
            let (done, total) = (text::bytes(done), text::bytes(self.total));
            note!("firn: {} {done} of {total}", self.what);
        }
    }
}
