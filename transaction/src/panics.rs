//! Code that panics must not leave half done what it has begun.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

/// What a caught panic carries; its message is on stderr by then.
pub type Panic = Box<dyn Any + Send>;

/// Runs `work` to its end or to its panic, after which nothing of it is left.
pub async fn caught<T>(work: impl Future<Output = T>) -> Result<T, Panic> {
    let mut work = pin!(work);
    poll_fn(
        // Nobody sees what a panic has left half done but those who take it back by what is on disk.
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
            panic!("told to");
        });
        assert!(panics.await.is_err());
    }
}
