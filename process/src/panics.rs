//! Catches panics, so that a transaction can be rolled back after one, and locks that survive them.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;

/// The payload of a caught panic; its message is already on stderr.
pub type Panic = Box<dyn Any + Send>;

/// Runs `work` to its end or to its panic, and drops it.
pub async fn caught<T>(work: impl Future<Output = T>) -> Result<T, Panic> {
    let mut work = pin!(work);
    poll_fn(
        // State that a panic left inconsistent is used only by the rollback, which works from the files on
        // disk.
        |context| match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))) {
            Ok(Poll::Ready(done)) => Poll::Ready(Ok(done)),
            Ok(Poll::Pending) => Poll::Pending,
            Err(panic) => Poll::Ready(Err(panic)),
        },
    )
    .await
}

/// Runs work that may be repeated; once more if it panics. None: it has panicked twice.
pub async fn twice<F: Future>(mut work: impl FnMut() -> F) -> Option<F::Output> {
    for _ in 0..2 {
        if let Ok(done) = caught(work()).await {
            return Some(done);
        }
    }
    None
}

/// Locks data that is consistent after each statement that changes it, and thus also after a panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_after_a_pause_is_caught() {
        let quiet = caught(async {
            tokio::task::yield_now().await;
            7
        });
        assert_eq!(quiet.await.unwrap(), 7);
        let panics = caught(async {
            tokio::task::yield_now().await;
            panic!("on purpose");
        });
        assert!(panics.await.is_err());
    }
}
