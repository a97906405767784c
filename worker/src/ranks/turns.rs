//! In which order processes are locked that wait for each other on their GPUs: the ranks of a job.
//!
//! A lock lets a process start no more work, and returns once its GPU has done what was started. A rank
//! whose GPU waits in a collective for a peer that has not started it keeps its lock pending for as long as
//! that peer is locked or asleep. So a rank that is behind is unlocked for a moment, and locked again:
//!
//! ```text
//!   pending ──lock returns──▶ locked ──release──▶ running for a window ──lock again──▶ pending
//! ```
//! Why this ends. Let a rank's count be the number of collectives that it has started. A collective is done
//! when all ranks have started it, so a rank without work left has a count that no rank is below: **the
//! locked ranks are exactly those with the smallest count**, and some rank is locked once the GPUs have
//! come to rest. A pending rank starts nothing more: the largest count of those, the frontier, stands
//! still. Every window lets ranks below the frontier come closer to it, and a rank that has left the
//! smallest count is pending from then on. If no rank passes the frontier within one window, the sum of the
//! distances to it only falls, and at 0 all are locked.
//!
//! A rank that starts several collectives within one window can pass the frontier, which is then its own
//! count, and the others follow. Three rules keep that rare:
//! - A window begins short. It grows only while a rank comes back as it went, and becomes a quarter after
//!   the rank was seen to have passed one that had been ahead.
//! - A window ends as soon as a pending lock returns: the ranks that run have reached that rank.
//! - Windows are of random length, so that two ranks do not take turns for ever.
//!
//! What never comes to rest is given up when the driver's time limit passes: the caller sets it, reads the
//! states, and unlocks what is locked. Time passes for a rank that is locked too: one that sleeps, saves or
//! logs need not be unlocked for that, and its windows find it awake some time later.

use std::time::Duration;

/// How long the GPUs must have been at rest before those that are locked are taken for those behind. Too
/// short costs a longer way, not an end: ranks that compute are pending like those that wait.
const REST: Duration = Duration::from_millis(5);

/// Length of a rank's first window.
const FIRST: Duration = Duration::from_micros(200);
const SHORTEST: Duration = Duration::from_micros(10);
const LONGEST: Duration = Duration::from_millis(20);

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Its lock has not returned.
    Pending,
    Locked,
    /// The driver refused a call, or all are given up: it is not locked.
    Failed,
}

#[derive(Clone, Debug)]
struct Rank {
    at: At,
    window: Duration,
    /// Whether the last release was of this rank.
    released: bool,
}

/// Where all ranks are. Times are since the begin of the lock.
#[derive(Debug)]
pub(super) struct Turns {
    ranks: Vec<Rank>,
    /// When the last lock returned, or the longest window of the last release ends.
    rest_from: Duration,
    random: u64,
}

impl Turns {
    /// All locks are asked for.
    pub(super) fn new(ranks: usize, seed: u64) -> Self {
        let rank = Rank {
            at: At::Pending,
            window: FIRST,
            released: false,
        };
        Self {
            ranks: vec![rank; ranks],
            rest_from: Duration::ZERO,
            random: seed | 1,
        }
    }

    /// Takes note that a rank's lock returned, or that the driver refused a call for it. Returns the ranks
    /// whose windows end now.
    pub(super) fn note_return(&mut self, rank: usize, is_locked: bool, now: Duration) -> Vec<usize> {
        let returned = &mut self.ranks[rank];
        returned.at = if is_locked { At::Locked } else { At::Failed };
        let was_ahead = !returned.released;
        self.rest_from = now;
        let running = |(_, rank): &(usize, &Rank)| rank.released && rank.at == At::Pending;
        if was_ahead || !is_locked {
            self.ranks
                .iter()
                .enumerate()
                .filter(running)
                .map(|(place, _)| place)
                .collect()
        } else {
            Vec::new()
        }
    }

    /// Whether every lock has returned.
    pub(super) fn is_over(&self) -> bool {
        self.ranks.iter().all(|rank| rank.at != At::Pending)
    }

    /// When ranks are to be released next, unless a lock returns before.
    pub(super) fn due(&self) -> Option<Duration> {
        let any = |at| self.ranks.iter().any(|rank| rank.at == at);
        (any(At::Locked) && any(At::Pending) && !any(At::Failed)).then(|| self.rest_from + REST)
    }

    /// Lets the locked ranks run; returns each with its window.
    pub(super) fn release(&mut self, now: Duration) -> Vec<(usize, Duration)> {
        // Locked now, and not among those released: it was ahead of all that were.
        let is_overtaken = |rank: &Rank| rank.at == At::Locked && !rank.released;
        let is_passed = self.ranks.iter().any(is_overtaken);
        let mut windows = Vec::new();
        for place in 0..self.ranks.len() {
            let random = self.random();
            let rank = &mut self.ranks[place];
            match rank.at {
                At::Pending if rank.released && is_passed => rank.window = (rank.window / 4).max(SHORTEST),
                At::Locked if rank.released && !is_passed => rank.window = (rank.window * 3 / 2).min(LONGEST),
                _ => {}
            }
            rank.released = rank.at == At::Locked;
            if rank.released {
                rank.at = At::Pending;
                // Between half of it and one and a half.
                windows.push((place, rank.window / 2 + rank.window.mul_f64(random)));
            }
        }
        let longest = windows
            .iter()
            .map(|(_, window)| *window)
            .max()
            .unwrap_or_default();
        self.rest_from = now + longest;
        windows
    }

    /// One was refused: returns those that are locked, which are to be unlocked.
    pub(super) fn give_up(&mut self) -> Vec<usize> {
        let locked: Vec<usize> = (0..self.ranks.len())
            .filter(|place| self.ranks[*place].at == At::Locked)
            .collect();
        for place in &locked {
            self.ranks[*place].at = At::Failed;
        }
        locked
    }

    /// From 0 to 1.
    fn random(&mut self) -> f64 {
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        f64::from(u32::try_from(self.random >> 32).unwrap_or_default()) / f64::from(u32::MAX)
    }
}

#[cfg(test)]
mod tests;
