//! Cutting a checkpoint or restore short because its container is to end: nothing of it is waited for any more.
//!
//! Who kills asks for it by [`Container::cut_off`](super::Container::cut_off). The transaction leaves whatever it waits
//! for, ends CRIU first, which holds the tasks by ptrace, and then the tasks; [`Cut::untraced`] tells when CRIU is gone.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

#[derive(Clone, Copy, Default)]
struct Progress {
    asked: bool,
    criu: bool,
}

/// A transaction as those see it who may cut it off; cheap to clone.
#[derive(Clone, Default)]
pub struct Cut(Arc<watch::Sender<Progress>>);

impl Cut {
    pub fn ask(&self) {
        self.0.send_modify(|progress| progress.asked = true);
    }

    /// Whether the transaction is to end.
    pub fn is_asked(&self) -> bool {
        self.0.borrow().asked
    }

    /// Waits until the transaction is to end.
    pub async fn asked(&self) {
        let mut progress = self.0.subscribe();
        let asked = progress.wait_for(|progress| progress.asked).await;
        asked.map(drop).expect("the sender lives in self");
    }

    /// CRIU is at work on the container until the guard is dropped.
    pub fn criu(&self) -> AtWork<'_> {
        self.0.send_modify(|progress| progress.criu = true);
        AtWork(self)
    }

    /// Waits until no CRIU holds the tasks, but not longer than `limit`.
    pub async fn untraced(&self, limit: Duration) {
        let mut progress = self.0.subscribe();
        let gone = progress.wait_for(|progress| !progress.criu);
        if tokio::time::timeout(limit, gone).await.is_err() {
            log::warn!("CRIU does not end");
        }
    }
}

/// CRIU is at work.
pub struct AtWork<'a>(&'a Cut);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.0.send_modify(|progress| progress.criu = false);
    }
}

/// The transaction of a container, of which there is one at a time.
#[derive(Default)]
pub(super) struct Slot(Mutex<Option<Cut>>);

impl Slot {
    pub(super) fn begin(&self) -> UnderWay<'_> {
        let cut = Cut::default();
        self.set(Some(cut.clone()));
        UnderWay { slot: self, cut }
    }

    /// Whoever gets the transaction can rely on its end: it cannot be committed any more.
    pub(super) fn cut_off(&self) -> Option<Cut> {
        let current = self.lock();
        current.clone().inspect(Cut::ask)
    }

    pub(super) fn is_taken(&self) -> bool {
        self.lock().is_some()
    }

    fn set(&self, cut: Option<Cut>) {
        *self.lock() = cut;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Cut>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A transaction is under way until this is dropped.
pub struct UnderWay<'a> {
    slot: &'a Slot,
    pub cut: Cut,
}

impl UnderWay<'_> {
    /// Ends a transaction that has succeeded, unless it was cut off: then it comes back, to be rolled back.
    ///
    /// Order matters: `publish` makes known what a kill needs from now on. Nobody comes between it and the end: who kills finds
    /// the transaction and cuts it off, or finds what was published.
    pub fn commit(self, publish: impl FnOnce()) -> Result<(), Self> {
        let mut current = self.slot.lock();
        if self.cut.is_asked() {
            drop(current);
            return Err(self);
        }
        publish();
        *current = None;
        drop(current);
        Ok(())
    }

    /// Ends a transaction that has failed. Whether it was cut off, and whoever has done that relies on the container's end.
    pub fn end(self) -> bool {
        let mut current = self.slot.lock();
        *current = None;
        self.cut.is_asked()
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.slot.set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::log::warnings;

    #[tokio::test]
    async fn only_a_transaction_that_is_under_way_is_cut_off() {
        let slot = Slot::default();
        assert!(slot.cut_off().is_none());
        let first = slot.begin();
        assert!(!first.cut.is_asked());
        assert!(slot.cut_off().is_some());
        first.cut.asked().await;
        drop(first);
        assert!(slot.cut_off().is_none());
        assert!(!slot.begin().cut.is_asked(), "the next one was cut off too");
    }

    #[tokio::test]
    async fn a_kill_cuts_a_transaction_off_or_finds_what_it_has_published() {
        let slot = Slot::default();
        let mut published = false;
        assert!(slot.begin().commit(|| published = true).is_ok() && published);
        assert!(slot.cut_off().is_none(), "a committed transaction was cut off");

        let under_way = slot.begin();
        assert!(slot.cut_off().is_some());
        let Err(under_way) = under_way.commit(|| panic!("it was published")) else {
            panic!("a transaction that was cut off was committed");
        };
        assert!(
            slot.cut_off().is_some(),
            "a rollback is no part of the transaction"
        );
        assert!(under_way.end(), "nobody hears of the kill");
        assert!(slot.cut_off().is_none());
        assert!(!slot.begin().end());
    }

    #[tokio::test]
    async fn who_kills_waits_for_criu() {
        let slot = Slot::default();
        let under_way = slot.begin();
        let criu = under_way.cut.criu();
        let cut = slot.cut_off().unwrap();
        let waiting = tokio::spawn(async move { cut.untraced(Duration::from_secs(60)).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(criu);
        waiting.await.unwrap();
    }
    /// Time passes at once.
    #[tokio::test(start_paused = true)]
    async fn a_criu_that_does_not_end_is_told_and_not_waited_for_any_longer() {
        let cut = Cut::default();
        let criu = cut.criu();
        warnings();
        cut.untraced(Duration::from_secs(60)).await;
        assert_eq!(warnings(), ["CRIU does not end"]);
        drop(criu);
        cut.untraced(Duration::from_secs(60)).await;
        assert!(warnings().is_empty());
    }
}
