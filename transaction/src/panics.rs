//! Catches panics, so that a transaction can be rolled back after one.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
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
