//! The gate that every call of the application into the driver passes.
//!
//! Open while the process runs. Closing it lets the calls under way finish and makes later ones wait until it
//! is opened again: that is the driver's lock.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::error::Error;

#[derive(Default)]
struct Inside {
    calls: usize,
    closed: bool,
}

/// See the module head.
#[derive(Default)]
pub(crate) struct Gate {
    inside: Mutex<Inside>,
    changed: Condvar,
}

/// A call under way.
pub(crate) struct Passed<'a>(&'a Gate);

impl Gate {
    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().expect("nothing panics in the gate")
    }

    /// Passes, waiting while the gate is closed.
    pub(crate) fn pass(&self) -> Passed<'_> {
        let mut inside = self.inside();
        while inside.closed {
            inside = self.changed.wait(inside).expect("nothing panics in the gate");
        }
        inside.calls += 1;
        Passed(self)
    }

    /// Closes the gate once no call is under way and the GPU `is_idle`; leaves it open when
    /// `give_up` has a reason to.
    pub(crate) fn close(
        &self,
        is_idle: impl Fn() -> bool,
        mut give_up: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut inside = self.inside();
        inside.closed = true;
        while inside.calls > 0 || !is_idle() {
            let waited = self.changed.wait_timeout(inside, Duration::from_millis(1));
            inside = waited.expect("nothing panics in the gate").0;
            if let Err(reason) = give_up() {
                inside.closed = false;
                self.changed.notify_all();
                return Err(reason);
            }
        }
        Ok(())
    }

    /// Opens the gate.
    pub(crate) fn open(&self) {
        self.inside().closed = false;
        self.changed.notify_all();
    }
}

impl Drop for Passed<'_> {
    fn drop(&mut self) {
        self.0.inside().calls -= 1;
        self.0.changed.notify_all();
    }
}
