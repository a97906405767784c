//! Cutting a checkpoint or restore short because its container is to end: nothing of it is waited for any more.
//!
//! Who kills asks for it by [`Container::cut_off`](super::Container::cut_off). The transaction leaves whatever it waits
//! for, ends CRIU first, which holds the tasks by ptrace, and then the tasks; [`CancellationToken::untraced`] tells when CRIU is gone.

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
pub struct CancellationToken(Arc<watch::Sender<Progress>>);

impl CancellationToken {
    pub fn cancel(&self) {
        self.0.send_modify(|progress| progress.asked = true);
    }

    /// Whether the transaction is to end.
    pub fn is_cancelled(&self) -> bool {
        self.0.borrow().asked
    }

    /// Waits until the transaction is to end.
    pub async fn cancelled(&self) {
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
pub struct AtWork<'a>(&'a CancellationToken);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.0.send_modify(|progress| progress.criu = false);
    }
}

/// The transaction of a container, of which there is one at a time.
#[derive(Default)]
pub(super) struct Slot(Mutex<Option<CancellationToken>>);

impl Slot {
    pub(super) fn begin(&self) -> TransactionGuard<'_> {
        let cancel = CancellationToken::default();
        self.set(Some(cancel.clone()));
        TransactionGuard { slot: self, cancel }
    }

    /// Whoever gets the transaction can rely on its end: it cannot be committed any more.
    pub(super) fn cancel_transaction(&self) -> Option<CancellationToken> {
        let current = self.lock();
        current.clone().inspect(CancellationToken::cancel)
    }

    pub(super) fn is_taken(&self) -> bool {
        self.lock().is_some()
    }

    fn set(&self, cancel: Option<CancellationToken>) {
        *self.lock() = cancel;
    }

    fn lock(&self) -> MutexGuard<'_, Option<CancellationToken>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A transaction is under way until this is dropped.
pub struct TransactionGuard<'a> {
    slot: &'a Slot,
    pub cancel: CancellationToken,
}

impl TransactionGuard<'_> {
    /// Ends a transaction that has succeeded, unless it was cut off: then it comes back, to be rolled back.
    ///
    /// Order matters: `publish` makes known what a kill needs from now on. Nobody comes between it and the end: who kills finds
    /// the transaction and cuts it off, or finds what was published.
    pub fn commit(self, publish: impl FnOnce()) -> Result<(), Self> {
        let mut current = self.slot.lock();
        if self.cancel.is_cancelled() {
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
        self.cancel.is_cancelled()
    }
}

impl Drop for TransactionGuard<'_> {
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
        assert!(slot.cancel_transaction().is_none());
        let first = slot.begin();
        assert!(!first.cancel.is_cancelled());
        assert!(slot.cancel_transaction().is_some());
        first.cancel.cancelled().await;
        drop(first);
        assert!(slot.cancel_transaction().is_none());
        assert!(
            !slot.begin().cancel.is_cancelled(),
            "the next one was cancel off too"
        );
    }

    #[tokio::test]
    async fn a_kill_cuts_a_transaction_off_or_finds_what_it_has_published() {
        let slot = Slot::default();
        let mut published = false;
        assert!(slot.begin().commit(|| published = true).is_ok() && published);
        assert!(
            slot.cancel_transaction().is_none(),
            "a committed transaction was cancel off"
        );

        let guard = slot.begin();
        assert!(slot.cancel_transaction().is_some());
        let Err(guard) = guard.commit(|| panic!("it was published")) else {
            panic!("a transaction that was cancel off was committed");
        };
        assert!(
            slot.cancel_transaction().is_some(),
            "a rollback is no part of the transaction"
        );
        assert!(guard.end(), "nobody hears of the kill");
        assert!(slot.cancel_transaction().is_none());
        assert!(!slot.begin().end());
    }

    #[tokio::test]
    async fn who_kills_waits_for_criu() {
        let slot = Slot::default();
        let guard = slot.begin();
        let criu = guard.cancel.criu();
        let cancel = slot.cancel_transaction().unwrap();
        let waiting = tokio::spawn(async move { cancel.untraced(Duration::from_secs(60)).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(criu);
        waiting.await.unwrap();
    }
    /// Time passes at once.
    #[tokio::test(start_paused = true)]
    async fn a_criu_that_does_not_end_is_told_and_not_waited_for_any_longer() {
        let cancel = CancellationToken::default();
        let criu = cancel.criu();
        warnings();
        cancel.untraced(Duration::from_secs(60)).await;
        assert_eq!(warnings(), ["CRIU does not end"]);
        drop(criu);
        cancel.untraced(Duration::from_secs(60)).await;
        assert!(warnings().is_empty());
    }
}
