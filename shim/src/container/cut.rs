//! Cutting a checkpoint or restore short because its container is to end: nothing of it is waited for any more.
//!
//! Who kills asks for it by [`Container::cut_off`](super::Container::cut_off). The transaction leaves whatever it waits
//! for, ends CRIU first, which holds the tasks by ptrace, and then the tasks; [`Cut::untraced`] tells when CRIU is gone.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

#[derive(Clone, Copy, Default)]
struct Progress {
    asked: bool,
    criu: bool,
}

/// A transaction as those see it who may cut it off; cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Cut(Arc<watch::Sender<Progress>>);

impl Cut {
    pub(crate) fn ask(&self) {
        self.0.send_modify(|progress| progress.asked = true);
    }

    /// Whether the transaction is to end.
    pub(crate) fn is_asked(&self) -> bool {
        self.0.borrow().asked
    }

    /// Waits until the transaction is to end.
    pub(crate) async fn asked(&self) {
        let mut progress = self.0.subscribe();
        let asked = progress.wait_for(|progress| progress.asked).await;
        asked.map(drop).expect("the sender lives in self");
    }

    /// CRIU is at work on the container until the guard is dropped.
    pub(crate) fn criu(&self) -> AtWork<'_> {
        self.0.send_modify(|progress| progress.criu = true);
        AtWork(self)
    }

    /// Waits until no CRIU holds the tasks, but not longer than `limit`.
    pub(crate) async fn untraced(&self, limit: Duration) {
        let mut progress = self.0.subscribe();
        let gone = progress.wait_for(|progress| !progress.criu);
        if tokio::time::timeout(limit, gone).await.is_err() {
            log::warn!("CRIU does not end");
        }
    }
}

/// CRIU is at work.
pub(crate) struct AtWork<'a>(&'a Cut);

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

    pub(super) fn cut_off(&self) -> Option<Cut> {
        let cut = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        cut.inspect(Cut::ask)
    }

    fn set(&self, cut: Option<Cut>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = cut;
    }
}

/// A transaction is under way until this is dropped.
pub(crate) struct UnderWay<'a> {
    slot: &'a Slot,
    pub cut: Cut,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.slot.set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
