//! Work on a disk or a store while a container stands still, which must not take for ever.

use std::io;
use std::time::Duration;

use firn_config::{Config, Keys};
use tokio::sync::oneshot;

use super::error::CheckpointError;

/// As long as CRIU may take for a dump, which goes to the same disks.
fn limit() -> Duration {
    let config = Config::load(Keys::CRIU);
    config
        .map(|config| config.deadlines)
        .unwrap_or_default()
        .criu_dump
}

/// Does the work in a thread of its own, which is left behind when the time is over or the caller gives up.
pub async fn aside<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, CheckpointError> {
    within(what, limit(), work).await
}

async fn within<T: Send + 'static>(
    what: &'static str,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, CheckpointError> {
    let (send, done) = oneshot::channel();
    std::thread::spawn(move || drop(send.send(work())));
    match tokio::time::timeout(limit, done).await {
        Ok(done) => done.map_err(|error| CheckpointError::Signals(io::Error::other(error))),
        Err(_) => Err(CheckpointError::Slow { what, limit }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_takes_too_long_is_left() {
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let slow = within("sync", Duration::from_millis(1), move || held.recv());
        let slow = crate::containerd::block_on(slow);
        assert!(matches!(
            slow.unwrap(),
            Err(CheckpointError::Slow { what: "sync", .. })
        ));
        drop(hold);
        let quick = crate::containerd::block_on(within("sync", Duration::MAX, || 1));
        assert!(matches!(quick.unwrap(), Ok(1)));
    }
}
