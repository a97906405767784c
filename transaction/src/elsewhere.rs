//! What has to be known before a workload is ended here because it runs elsewhere.
//!
//! An answer "it was started" proves little: a copy may die of the first thing that it does. So it is looked
//! at again after a while, and only what was seen twice is a proof. Functions that end a source, or remove
//! the last checkpoint of one, take the proof.

use std::time::{Duration, Instant};

/// How long a copy has to run before its source may be ended.
pub const PROBATION: Duration = Duration::from_secs(5);

/// A look at a copy that ran. `T` is what a copy that was started again would have another one of: its pid,
/// the ids of its containers.
#[derive(Clone)]
pub struct Sighting<T> {
    what: T,
    at: Instant,
}

impl<T> Sighting<T> {
    /// It runs now.
    pub fn now(what: T) -> Self {
        let at = Instant::now();
        Self { what, at }
    }

    /// When that was.
    pub fn at(&self) -> Instant {
        self.at
    }

    /// Whether both are of one copy.
    pub fn is_same(&self, other: &Self) -> bool
    where
        T: PartialEq,
    {
        self.what == other.what
    }
}

/// Proof that a workload runs elsewhere: the same copy was seen twice, and some time apart.
#[derive(Debug)]
pub struct RunsElsewhere(());

impl RunsElsewhere {
    /// None: another copy, or it was seen too early again.
    pub fn confirmed<T: PartialEq>(first: &Sighting<T>, again: &Sighting<T>) -> Option<Self> {
        let apart = again.at.saturating_duration_since(first.at);
        (first.is_same(again) && apart >= PROBATION).then_some(Self(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_copy_seen_twice_and_apart_is_a_proof() {
        let at = Instant::now();
        let seen = |what: u32, after: Duration| Sighting { what, at: at + after };
        let first = seen(7, Duration::ZERO);
        let confirmed = |again| RunsElsewhere::confirmed(&first, &again).is_some();
        assert!(confirmed(seen(7, PROBATION)));
        assert!(confirmed(seen(7, 2 * PROBATION)));
        assert!(!confirmed(seen(7, PROBATION - Duration::from_millis(1))));
        assert!(!confirmed(seen(8, 2 * PROBATION)), "another copy");
        assert!(!confirmed(seen(7, Duration::ZERO)), "the same look");
        let later = seen(7, PROBATION);
        assert!(RunsElsewhere::confirmed(&later, &first).is_none(), "backwards");
    }
}
