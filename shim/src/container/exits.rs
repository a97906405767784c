//! Which process an exit belongs to.
//!
//! A container's processes are children of a runtime that has ended, so the reaper reports them by pid alone, and may
//! report one before the call that started it has told its pid. [`Exits::expect`] is therefore taken before every
//! runtime call that may start a process: while one is held, exits that nobody claims are kept for
//! [`Expectation::claim`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::{Container, Process};
use crate::reaper::Exit;

/// A process of a container.
#[derive(Clone)]
pub(crate) struct Owner {
    pub container: Weak<Container>,
    pub process: Arc<Process>,
}

#[derive(Default)]
struct Table {
    expecting: usize,
    early: HashMap<i32, Exit>,
    /// A pid can be taken again before the exit of its former owner has been handled.
    owners: HashMap<i32, Vec<Owner>>,
}

/// The table of all processes of this shim.
#[derive(Clone, Default)]
pub(crate) struct Exits(Arc<Mutex<Table>>);

/// Held over a runtime call that may start a process.
pub(crate) struct Expectation(Exits);

impl Exits {
    /// From now on no exit is thrown away until the expectation is claimed or dropped.
    pub(crate) fn expect(&self) -> Expectation {
        self.table().expecting += 1;
        Expectation(self.clone())
    }

    /// Owners of the process that ended; kept when nobody has claimed it yet.
    pub(crate) fn take(&self, exit: &Exit) -> Vec<Owner> {
        let mut table = self.table();
        let owners = table.owners.remove(&exit.pid).unwrap_or_default();
        if owners.is_empty() && table.expecting > 0 {
            table.early.insert(exit.pid, *exit);
        }
        owners
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Expectation {
    /// `pid` is `owner`'s; the exit comes back when the process has ended already.
    pub(crate) fn claim(self, pid: i32, owner: Owner) -> Option<Exit> {
        let mut table = self.0.table();
        let early = table.early.remove(&pid);
        if early.is_none() {
            table.owners.entry(pid).or_default().push(owner);
        }
        early
    }
}

impl Drop for Expectation {
    fn drop(&mut self) {
        let mut table = self.0.table();
        table.expecting -= 1;
        if table.expecting == 0 {
            table.early.clear();
        }
    }
}
