//! Locks all processes of a container: a thread for each of them, which does what [`turns`] decides.

mod turns;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use firn_gpu::protocol::DriverError;
use turns::Turns;

use crate::cuda::Checkpointer;
use crate::session::no_thread;

/// A call of the driver on a process.
type Call<'c> = &'c dyn Fn(&dyn Checkpointer, i32) -> Result<(), DriverError>;

/// Makes a call, with cuInit where the driver asks for it.
type Caller<'c> = &'c (dyn Fn(i32, Call<'_>) -> Result<(), DriverError> + Sync);

/// What a process's thread is asked for once its lock has returned.
enum Order {
    /// Unlock it for so long, or until the next order, and lock it again.
    Release(Duration),
    /// The window is over.
    Recall,
}

/// Locks `pids` within `timeout_ms` (0: no limit) and returns what the driver answered where it refused.
///
/// Returns when no lock is pending any more: the driver keeps the time limit, or else whoever kills this
/// process does. Once one is refused, all are unlocked, so that those that wait for them return soon.
pub(crate) fn lock(pids: &[i32], timeout_ms: u32, caller: Caller<'_>) -> BTreeMap<i32, DriverError> {
    let began = Instant::now();
    let (sender, returned) = mpsc::channel();
    let mut refused = BTreeMap::new();
    thread::scope(|scope| {
        let mut orders = Vec::new();
        for (place, &pid) in pids.iter().enumerate() {
            let (order, next) = mpsc::channel();
            let rank = Rank {
                pid,
                end: (timeout_ms > 0).then(|| began + Duration::from_millis(timeout_ms.into())),
                caller,
            };
            let thread = sender.clone();
            let run = move || rank.follow(&next, |result| thread.send((place, result)).is_ok());
            if let Err(error) = thread::Builder::new().spawn_scoped(scope, run) {
                let _ = sender.send((place, Err(no_thread(&error))));
            }
            orders.push(order);
        }
        let mut turns = Turns::new(pids.len(), RandomState::new().build_hasher().finish());
        while !turns.is_over() {
            let (place, result) = match next(&returned, turns.due().map(|due| began + due)) {
                Some(event) => event,
                None => {
                    for (place, window) in turns.release(began.elapsed()) {
                        let _ = orders[place].send(Order::Release(window));
                    }
                    continue;
                }
            };
            for place in turns.note_return(place, result.is_ok(), began.elapsed()) {
                let _ = orders[place].send(Order::Recall);
            }
            if let Err(error) = result {
                refused.insert(pids[place], error);
            }
            if !refused.is_empty() {
                for place in turns.give_up() {
                    // What it left is asked for afterwards.
                    let _ = caller(pids[place], &|checkpointer, pid| checkpointer.unlock(pid));
                }
            }
        }
    });
    refused
}

/// What returned, unless nothing does until `due`.
fn next<T>(returned: &Receiver<T>, due: Option<Instant>) -> Option<T> {
    match due {
        Some(due) => returned
            .recv_timeout(due.saturating_duration_since(Instant::now()))
            .ok(),
        // A sender is held next to the receiver.
        None => returned.recv().ok(),
    }
}

/// A process as its thread has it.
struct Rank<'c> {
    pid: i32,
    end: Option<Instant>,
    caller: Caller<'c>,
}

impl Rank<'_> {
    /// Locks, reports, and follows orders until there are none to come.
    fn follow(&self, orders: &Receiver<Order>, report: impl Fn(Result<(), DriverError>) -> bool) {
        let mut result = self.lock();
        while report(result) {
            let window = loop {
                match orders.recv() {
                    Ok(Order::Release(window)) => break window,
                    // It came after the window had ended by itself.
                    Ok(Order::Recall) => {}
                    Err(_) => return,
                }
            };
            result = (self.caller)(self.pid, &|checkpointer, pid| checkpointer.unlock(pid)).and_then(|()| {
                let _ = orders.recv_timeout(window);
                self.lock()
            });
        }
    }

    fn lock(&self) -> Result<(), DriverError> {
        let left = self.end.map(|end| end.saturating_duration_since(Instant::now()));
        // The driver takes 0 for no limit.
        let left = left.map_or(0, |left| {
            u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1)
        });
        (self.caller)(self.pid, &|checkpointer, pid| checkpointer.lock(pid, left))
    }
}

#[cfg(test)]
mod tests;
