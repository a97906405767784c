//! Transactions of several containers that wait for each other, so that all stand still at one moment.

use std::time::Duration;

use firn_config::Deadlines;
use firn_preflight::STARTS;
use tokio::sync::watch;
use tokio::time::timeout;

/// A checkpoint of several containers. Each joins three times: before anything is locked, when it stands
/// still, and when its image is there.
pub struct Meeting {
    /// How many containers take part.
    count: usize,
    /// How long one waits for the others.
    limit: Duration,
    seen: watch::Sender<Seen>,
}

#[derive(Clone, Copy, Default)]
struct Seen {
    joined: usize,
    /// How often all have joined.
    met: usize,
    given_up: bool,
    withdrawn: bool,
    late: bool,
}

impl Meeting {
    pub fn of(count: usize, limit: Duration) -> Self {
        let seen = watch::Sender::new(Seen::default());
        Self { count, limit, seen }
    }

    /// The longest time that one may work between two joins: more than any of its deadlines. Those end each
    /// participant by itself; this is the end of the meeting if one does not keep them.
    pub fn limit(deadlines: &Deadlines) -> Duration {
        // Every field by its name, so that none is forgotten.
        let Deadlines {
            inventory,
            discover,
            look,
            freeze,
            gpu_lock,
            gpu_checkpoint,
            hold,
            criu_dump,
            prepare,
            worker_end,
            // After its last join.
            resumed: _,
            failed: _,
            gpu_unlock: _,
            rollback: _,
            end: _,
            // Of a restore, and of a resume.
            verify: _,
            restored: _,
            criu_restore: _,
            gpu_restore: _,
            gpu_wait: _,
        } = *deadlines;
        let before = prepare + inventory + 2 * discover + 3 * look + STARTS;
        let driver = gpu_lock + freeze + hold + gpu_checkpoint + worker_end;
        before + driver + 3 * criu_dump
    }

    /// Joins for the `nth` time, the first being 1, and waits until all have. False if one has given up
    /// before. Gives up for all if the others do not come.
    pub async fn join(&self, nth: usize) -> bool {
        self.seen.send_modify(|seen| {
            seen.joined += 1;
            if !seen.given_up && seen.joined == nth * self.count {
                seen.met = nth;
            }
        });
        let mut seen = self.seen.subscribe();
        let met = seen.wait_for(|seen| seen.given_up || seen.met >= nth);
        if timeout(self.limit, met).await.is_err() {
            self.seen.send_modify(|seen| {
                seen.late |= seen.met < nth;
                seen.given_up = true;
            });
        }
        self.seen.borrow().met >= nth
    }

    /// One of them does not join any more: nobody waits for it.
    pub fn give_up(&self) {
        self.seen.send_modify(|seen| seen.given_up = true);
    }

    /// The client wants no checkpoint any more. Those who have met for the last time do not notice.
    pub fn withdraw(&self) {
        self.seen.send_modify(|seen| {
            seen.given_up = true;
            seen.withdrawn = true;
        });
    }

    pub fn is_withdrawn(&self) -> bool {
        self.seen.borrow().withdrawn
    }

    /// For how long one has waited in vain for the others; none: nobody has.
    pub fn late(&self) -> Option<Duration> {
        self.seen.borrow().late.then_some(self.limit)
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn now<T>(work: impl Future<Output = T>) -> Option<T> {
        match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn nobody_goes_on_before_all_have_joined() {
        let meeting = Meeting::of(2, LIMIT);
        for nth in [1, 2] {
            let mut first = Box::pin(meeting.join(nth));
            assert_eq!(now(&mut first), None);
            assert_eq!(now(meeting.join(nth)), Some(true));
            assert_eq!(now(first), Some(true));
        }
    }

    #[tokio::test]
    async fn nobody_waits_for_one_that_has_given_up() {
        let meeting = Meeting::of(2, LIMIT);
        let mut first = Box::pin(meeting.join(1));
        assert_eq!(now(&mut first), None);
        meeting.give_up();
        assert_eq!(now(first), Some(false));
        assert_eq!(now(meeting.join(1)), Some(false), "it has not met anybody");
    }

    #[tokio::test]
    async fn who_has_met_the_others_goes_on_whatever_becomes_of_them() {
        let meeting = Meeting::of(2, LIMIT);
        let mut first = Box::pin(meeting.join(1));
        assert_eq!(now(&mut first), None);
        assert_eq!(now(meeting.join(1)), Some(true));
        meeting.give_up();
        assert_eq!(now(first), Some(true));
        assert_eq!(now(meeting.join(2)), Some(false));
    }
    #[tokio::test(start_paused = true)]
    async fn who_waits_in_vain_gives_up_for_all() {
        let meeting = Meeting::of(3, LIMIT);
        let begun = tokio::time::Instant::now();
        let (first, second) = tokio::join!(meeting.join(1), meeting.join(1));
        assert!(!first && !second);
        assert_eq!((begun.elapsed(), meeting.late()), (LIMIT, Some(LIMIT)));
        // The last one comes after all.
        assert_eq!(now(meeting.join(1)), Some(false));
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_met_is_not_late() {
        let meeting = Meeting::of(2, LIMIT);
        let (first, second) = tokio::join!(meeting.join(1), meeting.join(1));
        assert!(first && second);
        tokio::time::sleep(2 * LIMIT).await;
        assert_eq!(meeting.late(), None);
    }

    #[test]
    fn the_limit_is_beyond_each_participants_deadlines() {
        let all = Deadlines::default();
        let dump = 2 * all.criu_dump;
        assert!(Meeting::limit(&all) > dump + all.gpu_checkpoint + all.prepare);
    }
}
