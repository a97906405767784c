//! Transactions of several containers that wait for each other, so that all stand still at one moment.

use tokio::sync::watch;

/// A checkpoint of several containers. Each joins three times: before anything is locked, when it stands
/// still, and when its image is there.
pub struct Meeting {
    /// How many containers take part.
    count: usize,
    seen: watch::Sender<Seen>,
}

#[derive(Clone, Copy, Default)]
struct Seen {
    joined: usize,
    /// How often all have joined.
    met: usize,
    given_up: bool,
    withdrawn: bool,
}

impl Meeting {
    pub fn of(count: usize) -> Self {
        let seen = watch::Sender::new(Seen::default());
        Self { count, seen }
    }

    /// Joins for the `nth` time, the first being 1, and waits until all have. False if one has given up
    /// before.
    pub async fn join(&self, nth: usize) -> bool {
        self.seen.send_modify(|seen| {
            seen.joined += 1;
            if !seen.given_up && seen.joined == nth * self.count {
                seen.met = nth;
            }
        });
        let mut seen = self.seen.subscribe();
        let last = seen.wait_for(|seen| seen.given_up || seen.met >= nth).await;
        last.is_ok_and(|seen| seen.met >= nth)
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
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn now<T>(work: impl Future<Output = T>) -> Option<T> {
        match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }

    #[test]
    fn nobody_goes_on_before_all_have_joined() {
        let meeting = Meeting::of(2);
        for nth in [1, 2] {
            let mut first = Box::pin(meeting.join(nth));
            assert_eq!(now(&mut first), None);
            assert_eq!(now(meeting.join(nth)), Some(true));
            assert_eq!(now(first), Some(true));
        }
    }

    #[test]
    fn nobody_waits_for_one_that_has_given_up() {
        let meeting = Meeting::of(2);
        let mut first = Box::pin(meeting.join(1));
        assert_eq!(now(&mut first), None);
        meeting.give_up();
        assert_eq!(now(first), Some(false));
        assert_eq!(now(meeting.join(1)), Some(false), "it has not met anybody");
    }

    #[test]
    fn who_has_met_the_others_goes_on_whatever_becomes_of_them() {
        let meeting = Meeting::of(2);
        let mut first = Box::pin(meeting.join(1));
        assert_eq!(now(&mut first), None);
        assert_eq!(now(meeting.join(1)), Some(true));
        meeting.give_up();
        assert_eq!(now(first), Some(true));
        assert_eq!(now(meeting.join(2)), Some(false));
    }
}
