//! What is known of a workload whose checkpoint is on its way to another node, and what may be done then.
//!
//! ```text
//!   stands still -> sent -> started there -> seen there twice -> ended here
//!        |           |            |
//!        +-----------+------------+-> nothing runs there: it continues here
//!                    +------------+-> not known: all stays as it is
//! ```
//!
//! | known | the source | copies of its checkpoint |
//! |---|---|---|
//! | [`StaysHere`] | may continue | may be removed |
//! | nothing | stays as it is | are kept, and named |
//! | [`RunsElsewhere`] | may end ([`EndProof`]) | may be removed where nobody needs them |
//!
//! What resumes a source, or removes copies for `firn drain` and of a pod, takes the proof: whoever calls it
//! names what is known. An answer "it was started" is no proof: a copy may die of the first thing that it
//! does. So it is looked at again after a while.
//!
//! [`EndProof`]: crate::end_proof::EndProof

use std::cell::Cell;
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

/// A checkpoint that is sent while its workload stands still.
#[derive(Default)]
pub struct Transfer {
    is_sent: Cell<bool>,
}

impl Transfer {
    /// The last byte is sent next: from then on only an answer shows whether a copy runs.
    pub fn send_last(&self) {
        self.is_sent.set(true);
    }

    /// The proof, as long as the last byte was not sent: a copy begins after it.
    pub fn stays_here(&self) -> Option<StaysHere> {
        (!self.is_sent.get()).then_some(StaysHere(()))
    }
}

/// Proof that a workload stays where it is: nothing that was asked for ends it, and no copy of it runs.
#[derive(Debug)]
#[must_use]
pub struct StaysHere(());

impl StaysHere {
    /// Whatever was made of it is on its own node, and nobody was asked to restore it.
    pub fn never_sent() -> Self {
        Self(())
    }

    /// The other node has answered that nothing runs there, and that nothing will.
    pub fn refused() -> Self {
        Self(())
    }

    /// The copy has ended there, with this status; none: without an error, so that its work may be done.
    pub fn died(status: u32) -> Option<Self> {
        (status != 0).then_some(Self(()))
    }

    /// It was seen to run, after the last that could have ended it.
    pub fn seen() -> Self {
        Self(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_has_ended_well_proves_nothing() {
        assert!(StaysHere::died(137).is_some() && StaysHere::died(0).is_none());
    }

    #[test]
    fn a_source_stays_until_its_last_byte_is_sent() {
        let transfer = Transfer::default();
        assert!(transfer.stays_here().is_some());
        transfer.send_last();
        assert!(transfer.stays_here().is_none());
    }

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
