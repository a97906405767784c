//! The history of this shim's transactions. It is written after the client has its answer, for which a
//! workload may stand still, and in the order of the answers.

use std::fs::File;
use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use firn_transaction::history::{Entry, HistoryDir, write};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Writes entries one after the other.
pub struct History {
    place: HistoryDir,
    /// The last entry that is to be written.
    last: Mutex<Option<JoinHandle<()>>>,
}

impl History {
    /// Writes to `place`.
    pub fn new(place: HistoryDir) -> Self {
        Self {
            place,
            last: Mutex::default(),
        }
    }

    pub(crate) fn place(&self) -> &HistoryDir {
        &self.place
    }

    /// Writes the entry in the background, with the name of its container's image once that is known, and
    /// keeps CRIU's log.
    pub(crate) fn write(
        &self,
        entry: Entry,
        log: Option<File>,
        image: impl Future<Output = String> + Send + 'static,
    ) {
        let place = self.place.clone();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let before = last.take();
        *last = Some(tokio::spawn(async move {
            let image = image.await;
            if let Some(before) = before {
                // One that has panicked is lost, and no other.
                let _ = before.await;
            }
            write(&place, Entry { image, ..entry }, log).await;
        }));
    }

    /// Waits until all entries are written, no longer than `limit`. Returns whether they are.
    pub async fn flush(&self, limit: Duration) -> bool {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).take();
        match last {
            Some(last) => timeout(limit, last).await.is_ok(),
            None => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn entry(id: &str) -> Entry {
        Entry {
            id: id.to_owned(),
            ..Entry::default()
        }
    }

    #[tokio::test]
    async fn entries_are_written_in_order_and_nobody_waits_for_them() {
        let dir = tempfile::tempdir().unwrap();
        let place = HistoryDir::new(dir.path().join("history"));
        let history = History::new(place.clone());
        let (known, image) = oneshot::channel();
        history.write(entry("first"), None, async { image.await.unwrap_or_default() });
        history.write(entry("second"), None, async { String::new() });
        tokio::task::yield_now().await;
        assert!(
            place.read().unwrap().entries.is_empty(),
            "the first waits for its image"
        );
        known.send("docker.io/job".to_owned()).unwrap();
        assert!(history.flush(Duration::from_secs(10)).await);
        let written = place.read().unwrap().entries;
        let written: Vec<_> = written.iter().map(|entry| (&*entry.id, &*entry.image)).collect();
        assert_eq!(written, [("first", "docker.io/job"), ("second", "")]);
    }

    #[tokio::test]
    async fn a_containerd_that_does_not_answer_delays_the_end_by_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let history = History::new(HistoryDir::new(dir.path().join("history")));
        assert!(history.flush(Duration::ZERO).await, "nothing to write");
        history.write(entry("first"), None, std::future::pending());
        assert!(!history.flush(Duration::from_millis(1)).await);
    }
}
