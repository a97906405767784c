//! The way for work that may block, as on files of an image: beside the one thread that answers clients.

/// Runs `work` on another thread, to its end also if the caller goes away.
///
/// Not for spawning processes, which the kernel ends together with the thread that spawned them.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| error.try_into_panic())
    {
        Ok(done) => done,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        // Refused by a runtime that is shutting down, and this task with it.
        Err(Err(_)) => std::future::pending().await,
    }
}
