//! Maps exits to processes.
//!
//! A container's processes are children of a runtime that has ended, so the reaper reports them by pid alone,
//! and may report an exit before the runtime call that started the process has returned its pid. Therefore
//! every runtime call that may start a process is preceded by [`Exits::expect`], which records unclaimed
//! exits for [`Expectation::claim`].
//!
//! A pid can be reused during such a call, and before the exit of its former owner was handled. A child of
//! this process that is not reaped yet has not ended, whatever was reported for its pid before.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use firn_process::panics::lock;
use firn_process::reaper::Exit;
use firn_process::sys;

use super::{Container, Process};

/// A process of a container.
#[derive(Clone)]
pub struct Owner {
    pub container: Weak<Container>,
    pub process: Arc<Process>,
}

#[derive(Default)]
struct Table<T> {
    next: u64,
    /// Unclaimed exits since each expectation, the last one of each pid.
    expected: HashMap<u64, HashMap<i32, Exit>>,
    owners: HashMap<i32, Vec<T>>,
}

/// The table of all processes of this shim.
pub struct Exits<T = Owner> {
    table: Arc<Mutex<Table<T>>>,
    /// Whether a pid is that of a child that was not reaped.
    unreaped: fn(i32) -> bool,
}

/// Held during a runtime call that may start a process.
pub struct Expectation<T = Owner> {
    exits: Exits<T>,
    key: u64,
}

impl<T> Clone for Exits<T> {
    fn clone(&self) -> Self {
        Self {
            table: self.table.clone(),
            unreaped: self.unreaped,
        }
    }
}

impl Default for Exits {
    fn default() -> Self {
        Self::with(sys::is_unreaped_child)
    }
}

impl<T> Exits<T> {
    fn with(unreaped: fn(i32) -> bool) -> Self {
        Self {
            table: Arc::new(Mutex::new(Table {
                next: 0,
                expected: HashMap::new(),
                owners: HashMap::new(),
            })),
            unreaped,
        }
    }

    /// From now on every exit is kept until the expectation is claimed or dropped.
    pub fn expect(&self) -> Expectation<T> {
        let mut table = lock(&self.table);
        let key = table.next;
        table.next += 1;
        table.expected.insert(key, HashMap::new());
        drop(table);
        Expectation {
            exits: self.clone(),
            key,
        }
    }

    /// Owners of the process that ended; without an owner the exit is recorded for every expectation.
    pub fn take(&self, exit: &Exit) -> Vec<T> {
        let mut table = lock(&self.table);
        let mut owners = table.owners.remove(&exit.pid).unwrap_or_default();
        if owners.is_empty() {
            for early in table.expected.values_mut() {
                early.insert(exit.pid, *exit);
            }
        } else if owners.len() > 1
            && (self.unreaped)(exit.pid)
            && let Some(alive) = owners.pop()
        {
            table.owners.insert(exit.pid, vec![alive]);
        }
        owners
    }
}

impl<T> Expectation<T> {
    /// Assigns `pid` to `owner`; returns the exit if the process has ended already.
    pub fn claim(self, pid: i32, owner: T) -> Option<Exit> {
        let mut table = lock(&self.exits.table);
        let early = table
            .expected
            .get_mut(&self.key)
            .and_then(|early| early.remove(&pid))
            .filter(|_| !(self.exits.unreaped)(pid));
        if early.is_none() {
            table.owners.entry(pid).or_default().push(owner);
        }
        early
    }
}

impl<T> Drop for Expectation<T> {
    fn drop(&mut self) {
        lock(&self.exits.table).expected.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn exit(pid: i32, code: u32) -> Exit {
        Exit {
            pid,
            code,
            at: SystemTime::UNIX_EPOCH,
        }
    }

    fn gone() -> Exits<&'static str> {
        Exits::with(|_| false)
    }

    fn alive() -> Exits<&'static str> {
        Exits::with(|_| true)
    }

    #[test]
    fn an_exit_goes_to_its_owner_once() {
        let exits = gone();
        assert_eq!(exits.expect().claim(7, "one"), None);
        assert_eq!(exits.take(&exit(7, 1)), ["one"]);
        assert!(exits.take(&exit(7, 2)).is_empty());
    }

    #[test]
    fn an_exit_before_its_claim_is_kept_for_every_expectation() {
        let exits = gone();
        let (one, other) = (exits.expect(), exits.expect());
        assert!(exits.take(&exit(7, 3)).is_empty());
        assert_eq!(other.claim(8, "other"), None);
        assert_eq!(one.claim(7, "one"), Some(exit(7, 3)));
    }

    #[test]
    fn an_exit_before_an_expectation_is_not_its_own() {
        let exits = gone();
        let long = exits.expect();
        assert!(exits.take(&exit(7, 3)).is_empty());
        assert_eq!(exits.expect().claim(7, "later"), None);
        assert_eq!(exits.take(&exit(7, 4)), ["later"]);
        drop(long);
    }

    #[test]
    fn an_earlier_exit_of_a_reused_pid_is_not_its_new_owners() {
        let exits = alive();
        let long = exits.expect();
        assert!(exits.take(&exit(7, 3)).is_empty());
        assert_eq!(long.claim(7, "new"), None);
    }

    #[test]
    fn the_newest_owner_of_a_pid_that_runs_is_kept() {
        let exits = alive();
        assert_eq!(exits.expect().claim(7, "old"), None);
        assert_eq!(exits.expect().claim(7, "new"), None);
        assert_eq!(exits.take(&exit(7, 3)), ["old"]);
        assert_eq!(exits.take(&exit(7, 4)), ["new"]);
    }

    #[test]
    fn all_owners_of_an_ended_pid_get_its_exit() {
        let exits = gone();
        assert_eq!(exits.expect().claim(7, "old"), None);
        assert_eq!(exits.expect().claim(7, "new"), None);
        assert_eq!(exits.take(&exit(7, 3)), ["old", "new"]);
    }

    #[test]
    fn an_expectation_that_is_dropped_keeps_nothing() {
        let exits = gone();
        drop(exits.expect());
        assert!(lock(&exits.table).expected.is_empty());
        assert_eq!(exits.expect().claim(7, "one"), None);
        assert!(lock(&exits.table).expected.is_empty());
    }
}
