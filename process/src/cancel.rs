//! Cancels a checkpoint or restore because its container is to end: no phase of it is awaited any more. Or
//! withdraws a checkpoint, which is rolled back then: its container continues.
//!
//! Kill cancels it by [`Slot::cancel`]. The
//! transaction then stops waiting, kills CRIU first (`runc::run_criu`), which holds the tasks by ptrace, and
//! then the tasks; [`CancellationToken::untraced`] resolves when CRIU has ended.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;

use crate::panics::lock;

#[derive(Clone, Copy, Default)]
struct Progress {
    cancelled: bool,
    withdrawn: bool,
    criu: bool,
}

/// Cancels a transaction; cheap to clone.
#[derive(Clone, Default)]
pub struct CancellationToken(Arc<watch::Sender<Progress>>);

impl CancellationToken {
    pub fn cancel(&self) {
        self.0.send_modify(|progress| progress.cancelled = true);
    }

    /// Whether the transaction was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.borrow().cancelled
    }

    /// Waits until the transaction is cancelled.
    pub async fn cancelled(&self) {
        let mut progress = self.0.subscribe();
        let changed = progress.wait_for(|progress| progress.cancelled).await;
        changed.map(drop).expect("the sender lives in self");
    }

    /// Whether the client wants the checkpoint no more.
    pub fn is_withdrawn(&self) -> bool {
        self.0.borrow().withdrawn
    }

    /// Waits until the transaction is cancelled or withdrawn.
    pub async fn stopped(&self) {
        let mut progress = self.0.subscribe();
        let changed = progress.wait_for(|progress| progress.cancelled || progress.withdrawn);
        changed.await.map(drop).expect("the sender lives in self");
    }

    /// Waits until the transaction was cancelled this long ago.
    pub async fn cancelled_for(&self, grace: Duration) {
        self.cancelled().await;
        tokio::time::sleep(grace).await;
    }

    /// Waits for `work`; none once the transaction is cancelled. The work is boxed: an async function has
    /// room for a future that it is given twice, and these calls are nested.
    pub fn unless_cancelled<T>(&self, work: impl Future<Output = T>) -> impl Future<Output = Option<T>> {
        let work = Box::pin(work);
        async move {
            tokio::select! {
                biased;
                () = self.cancelled() => None,
                done = work => Some(done),
            }
        }
    }

    /// Waits for `work` that can be left at any point and rolled back; none once the transaction is cancelled
    /// or withdrawn.
    pub fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> impl Future<Output = Option<T>> {
        let work = Box::pin(work);
        async move {
            tokio::select! {
                biased;
                () = self.stopped() => None,
                done = work => Some(done),
            }
        }
    }

    /// CRIU runs on the container until the guard is dropped.
    pub fn criu(&self) -> AtWork<'_> {
        self.0.send_modify(|progress| progress.criu = true);
        AtWork(self)
    }

    /// Waits until no CRIU holds the tasks, at most for `limit`.
    pub async fn untraced(&self, limit: Duration) {
        let mut progress = self.0.subscribe();
        let gone = progress.wait_for(|progress| !progress.criu);
        if tokio::time::timeout(limit, gone).await.is_err() {
            log::warn!("CRIU does not end");
        }
    }
}

/// Guard while CRIU runs.
pub struct AtWork<'a>(&'a CancellationToken);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.0.send_modify(|progress| progress.criu = false);
    }
}

/// Why work that a cancellation ends has no result. It keeps the cancellation out of the work's own errors.
#[derive(Debug, thiserror::Error)]
pub enum Interrupted<E> {
    /// The transaction was cancelled meanwhile.
    #[error("the container was killed")]
    Cancelled,
    /// The work has failed.
    #[error(transparent)]
    Failed(#[from] E),
}

/// The transaction of a container, which has one at a time.
#[derive(Default)]
pub struct Slot(Mutex<Option<CancellationToken>>);

impl Slot {
    pub fn begin(&self) -> TransactionGuard<'_> {
        let cancel = CancellationToken::default();
        *lock(&self.0) = Some(cancel.clone());
        TransactionGuard { slot: self, cancel }
    }

    /// Cancels the transaction in progress, if there is one: it cannot be committed any more.
    pub fn cancel(&self) -> Option<CancellationToken> {
        let current = lock(&self.0);
        current.clone().inspect(CancellationToken::cancel)
    }

    /// Withdraws the checkpoint in progress, if there is one: of what writes its image nothing is awaited any
    /// more but CRIU, if it has begun.
    pub fn withdraw(&self) {
        if let Some(token) = &*lock(&self.0) {
            token.0.send_modify(|progress| progress.withdrawn = true);
        }
    }

    pub fn is_taken(&self) -> bool {
        lock(&self.0).is_some()
    }
}

/// A transaction is in progress until the guard is dropped.
pub struct TransactionGuard<'a> {
    slot: &'a Slot,
    pub cancel: CancellationToken,
}

impl TransactionGuard<'_> {
    /// Ends a transaction that has succeeded. Returns the guard if the transaction was cancelled; the caller
    /// then rolls it back.
    ///
    /// Order matters: `publish` sets the state that a kill needs from now on, under the same lock as the end.
    /// A kill therefore either finds the transaction and cancels it, or finds the published state.
    pub fn commit(self, publish: impl FnOnce()) -> Result<(), Self> {
        let mut current = lock(&self.slot.0);
        if self.cancel.is_cancelled() {
            drop(current);
            return Err(self);
        }
        publish();
        *current = None;
        drop(current);
        Ok(())
    }

    /// Ends a transaction that has failed. Returns whether it was cancelled: the canceller then relies on the
    /// container's end.
    pub fn end(self) -> bool {
        let mut current = lock(&self.slot.0);
        *current = None;
        self.cancel.is_cancelled()
    }
}

impl Drop for TransactionGuard<'_> {
    fn drop(&mut self) {
        *lock(&self.slot.0) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::log::warnings;

    #[tokio::test]
    async fn only_a_transaction_in_progress_is_cancelled() {
        let slot = Slot::default();
        assert!(slot.cancel().is_none());
        let first = slot.begin();
        assert!(!first.cancel.is_cancelled());
        assert!(slot.cancel().is_some());
        first.cancel.cancelled().await;
        drop(first);
        assert!(slot.cancel().is_none());
        assert!(
            !slot.begin().cancel.is_cancelled(),
            "the next one was cancelled too"
        );
    }

    #[tokio::test]
    async fn a_kill_cancels_a_transaction_or_finds_its_published_state() {
        let slot = Slot::default();
        let mut published = false;
        assert!(slot.begin().commit(|| published = true).is_ok() && published);
        assert!(slot.cancel().is_none(), "a committed transaction was cancelled");

        let guard = slot.begin();
        assert!(slot.cancel().is_some());
        let Err(guard) = guard.commit(|| panic!("it was published")) else {
            panic!("a cancelled transaction was committed");
        };
        assert!(
            slot.cancel().is_some(),
            "a rollback is no part of the transaction"
        );
        assert!(guard.end(), "the cancellation is not reported");
        assert!(slot.cancel().is_none());
        assert!(!slot.begin().end());
    }

    #[tokio::test]
    async fn a_checkpoint_that_is_withdrawn_is_no_killed_container() {
        let slot = Slot::default();
        slot.withdraw();
        let guard = slot.begin();
        assert!(!guard.cancel.is_withdrawn(), "it was withdrawn before it began");
        slot.withdraw();
        assert!(guard.cancel.is_withdrawn() && !guard.cancel.is_cancelled());
        let never = std::future::pending::<()>();
        assert_eq!(guard.cancel.unless_stopped(never).await, None);
        assert_eq!(guard.cancel.unless_cancelled(async { 1 }).await, Some(1));
    }

    #[tokio::test]
    async fn a_kill_waits_for_criu() {
        let slot = Slot::default();
        let guard = slot.begin();
        let criu = guard.cancel.criu();
        let cancel = slot.cancel().unwrap();
        let waiting = tokio::spawn(async move { cancel.untraced(Duration::from_secs(60)).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(criu);
        waiting.await.unwrap();
    }
    /// Paused time: timers fire at once.
    #[tokio::test(start_paused = true)]
    async fn a_criu_that_does_not_end_is_logged_and_not_awaited_any_longer() {
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
