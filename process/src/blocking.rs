//! Runs work that may block, such as reads of image files, off the one thread that answers clients.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_host::UnlessAbsent;
use tokio::sync::oneshot;
use tokio::task::JoinError;

use crate::OrWarn;
use crate::call;
use crate::cancel::CancellationToken;

/// Why blocking work is not awaited any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    Late,
    Cancelled,
}

/// As [`blocking`], but waits at most for `limit`, and not once `cancel` is set. The flag then stops the
/// work; if the work hangs in the kernel, its thread stays behind.
pub async fn stoppable<T: Send + 'static>(
    limit: Duration,
    cancel: &CancellationToken,
    work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
) -> Result<T, Left> {
    stoppable_until(limit, cancel.cancelled(), work).await
}

/// As [`stoppable`], but does not wait once `cancelled` resolves.
pub async fn stoppable_until<T: Send + 'static>(
    limit: Duration,
    cancelled: impl Future<Output = ()>,
    work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
) -> Result<T, Left> {
    let stop = Stop::default();
    let flag = stop.0.clone();
    tokio::select! {
        biased;
        () = cancelled => Err(Left::Cancelled),
        done = blocking(move || work(&flag)) => Ok(done),
        () = tokio::time::sleep(limit) => Err(Left::Late),
    }
}

/// Sets the flag when dropped.
#[derive(Default)]
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Deadline of work on files that are only cleaned up, or read for a message.
pub const TIDY: Duration = Duration::from_secs(10);

/// As [`blocking`], for clean-up and for details of messages: waits at most [`TIDY`] and then returns the
/// default.
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

/// Removes a file or a directory by `remove`, as [`tidy`] does it. It may have gone.
pub async fn remove(what: &'static str, path: PathBuf, remove: fn(&Path) -> io::Result<()>) {
    let at = path.clone();
    let removed = tidy(what, move || Some(remove(&at))).await.unwrap_or(Ok(()));
    let removed = removed.unless_absent();
    removed.or_warn(format_args!("cannot {what} {}", path.display()));
}

/// Runs `work` on another thread, to its end even if the caller is dropped.
///
/// Not for spawning processes: the parent-death signal would kill them when that thread ends.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, done) = oneshot::channel();
    let work = call::inherit(work);
    run(Box::new(move || drop(send.send(work())))).await;
    match done.await {
        Ok(done) => done,
        // The async runtime is shutting down, and this task with it: a panic of `work` was already resumed in
        // `run`.
        Err(_) => std::future::pending().await,
    }
}

/// Boxed, because tokio's task code is compiled once for each type of task: a tenth of the shim's code.
async fn run(work: Box<dyn FnOnce() + Send>) {
    match tokio::task::spawn_blocking(work)
        .await
        .map_err(JoinError::try_into_panic)
    {
        Ok(()) => {}
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        // Refused by an async runtime that is shutting down, and this task with it.
        Err(Err(_)) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_that_is_not_awaited_any_more_is_stopped() {
        for is_cancelled in [false, true] {
            let (report, mut stopped) = tokio::sync::mpsc::channel(1);
            let cancel = CancellationToken::default();
            let work = move |stop: &AtomicBool| {
                while !stop.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                report.blocking_send(()).unwrap();
            };
            let kill = async {
                tokio::task::yield_now().await;
                if is_cancelled {
                    cancel.cancel();
                }
            };
            let limit = if is_cancelled {
                Duration::from_secs(600)
            } else {
                Duration::from_millis(10)
            };
            let (left, ()) = tokio::join!(stoppable(limit, &cancel, work), kill);
            assert_eq!(left, Err(if is_cancelled { Left::Cancelled } else { Left::Late }));
            stopped.recv().await.unwrap();
        }
        let done = stoppable(Duration::from_secs(600), &CancellationToken::default(), |_| 7).await;
        assert_eq!(done, Ok(7));
    }
}
