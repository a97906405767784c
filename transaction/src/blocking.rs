//! The way for work that may block, as on files of an image: beside the one thread that answers clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinError;

use crate::cancel::CancellationToken;

/// Why work that blocks is not waited for any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    Late,
    Cancelled,
}

/// As [`blocking`], but not waited for longer than `limit` and once the container is to end. The work is told
/// by the flag that it is to stop; where it hangs in the kernel, its thread is left.
pub async fn stoppable<T: Send + 'static>(
    limit: Duration,
    cancel: &CancellationToken,
    work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
) -> Result<T, Left> {
    let stop = Stop::default();
    let heeded = stop.0.clone();
    tokio::select! {
        biased;
        () = cancel.cancelled() => Err(Left::Cancelled),
        done = blocking(move || work(&heeded)) => Ok(done),
        () = tokio::time::sleep(limit) => Err(Left::Late),
    }
}

/// Set when it is dropped.
#[derive(Default)]
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How long files are waited for that are only tidied away, or read for a message.
pub const TIDY: Duration = Duration::from_secs(10);

/// As [`blocking`], for what changes nothing but a message or what lies about: nobody waits longer than
/// [`TIDY`] for it.
pub async fn tidy<T: Default + Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    match tokio::time::timeout(TIDY, blocking(work)).await {
        Ok(done) => done,
        Err(_) => {
            log::warn!("cannot {what} within {} s: a file system hangs", TIDY.as_secs());
            T::default()
        }
    }
}

/// Runs `work` on another thread, to its end also if the caller goes away.
///
/// Not for spawning processes, which the kernel ends together with the thread that spawned them.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, done) = oneshot::channel();
    run(Box::new(move || drop(send.send(work())))).await;
    match done.await {
        Ok(done) => done,
        // The runtime is shutting down, and this task with it: `run` has panicked otherwise.
        Err(_) => std::future::pending().await,
    }
}

/// Boxed, because tokio's own code for a task is compiled once more for each kind of task: a tenth of the
/// shim.
async fn run(work: Box<dyn FnOnce() + Send>) {
    match tokio::task::spawn_blocking(work)
        .await
        .map_err(JoinError::try_into_panic)
    {
        Ok(()) => {}
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        // Refused by a runtime that is shutting down, and this task with it.
        Err(Err(_)) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_that_is_left_is_told_to_stop() {
        for asked in [false, true] {
            let (said, mut stopped) = tokio::sync::mpsc::channel(1);
            let cancel = CancellationToken::default();
            let work = move |stop: &AtomicBool| {
                while !stop.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                said.blocking_send(()).unwrap();
            };
            let kill = async {
                tokio::task::yield_now().await;
                if asked {
                    cancel.cancel();
                }
            };
            let limit = if asked {
                Duration::from_secs(600)
            } else {
                Duration::from_millis(10)
            };
            let (left, ()) = tokio::join!(stoppable(limit, &cancel, work), kill);
            assert_eq!(left, Err(if asked { Left::Cancelled } else { Left::Late }));
            stopped.recv().await.unwrap();
        }
        let done = stoppable(Duration::from_secs(600), &CancellationToken::default(), |_| 7).await;
        assert_eq!(done, Ok(7));
    }
}
