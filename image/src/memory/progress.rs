//! How far a copy is: counted by its threads, and shown in a file to whoever waits for it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use firn_host::bounded::read_at_most;
use firn_host::clock::{now, since};
use serde::{Deserialize, Serialize};

/// How often the file is written.
const STEP: Duration = Duration::from_secs(1);

/// Size limit of a file that is read.
const LIMIT: u64 = 4096;

/// Bytes that the threads of a copy have done, of those that they are to do.
#[derive(Debug, Default)]
pub struct Counter {
    done: AtomicU64,
    all: AtomicU64,
}

impl Counter {
    /// So many bytes are to be done in addition.
    pub(super) fn expect(&self, bytes: u64) {
        self.all.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many more are done.
    pub(super) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The file that shows how far a copy is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProgressFile {
    /// The file, whose directory is there. Whoever waits for the copy removes it.
    pub file: PathBuf,
    /// The phase of the transaction that the copy belongs to.
    pub phase: String,
}

/// How far a copy is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// As in [`ProgressFile`].
    pub phase: String,
    /// When it began, in milliseconds since 1970.
    pub begun: u64,
    /// Bytes that are done.
    pub done: u64,
    /// Bytes that are to be done, as far as that is known.
    pub all: u64,
}

impl Progress {
    /// What the file shows; none where there is none.
    pub fn read(file: &Path) -> Option<Self> {
        let bytes = read_at_most(fs::File::open(file).ok()?, LIMIT).ok()??;
        serde_json::from_slice(&bytes).ok()
    }

    /// How long it has taken so far.
    pub fn elapsed(&self) -> Duration {
        since(self.begun)
    }

    /// Bytes in a second, from its beginning; none at its beginning.
    pub fn rate(&self) -> Option<u64> {
        rate(self.done, self.elapsed())
    }

    /// How long it will still take at this rate.
    pub fn left(&self) -> Option<Duration> {
        let left = self.all.saturating_sub(self.done);
        Some(Duration::from_secs(left.div_ceil(self.rate()?)))
    }

    fn write(&self, file: &Path) -> io::Result<()> {
        // Not synced: it means nothing after a crash.
        let new = temporary(file);
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, file)
    }
}

fn rate(done: u64, elapsed: Duration) -> Option<u64> {
    let rate = u128::from(done) * 1000 / elapsed.as_millis().max(1);
    u64::try_from(rate).ok().filter(|rate| *rate > 0)
}

/// Removes the file, and what a killed copy may have left of it.
pub fn remove(file: &Path) -> io::Result<()> {
    let _ = fs::remove_file(temporary(file));
    fs::remove_file(file)
}

fn temporary(file: &Path) -> PathBuf {
    file.with_extension("new")
}

/// Does the work, and shows meanwhile what it counts. A file that cannot be written is none of its concern.
pub fn showing<T>(shown: Option<&ProgressFile>, work: impl FnOnce(&Counter) -> T) -> T {
    let counter = Counter::default();
    let Some(ProgressFile { file, phase }) = shown else {
        return work(&counter);
    };
    let begun = now();
    let show = || {
        let progress = Progress {
            phase: phase.clone(),
            begun,
            done: counter.done.load(Ordering::Relaxed),
            all: counter.all.load(Ordering::Relaxed),
        };
        let _ = progress.write(file);
    };
    thread::scope(|scope| {
        let (working, ended) = channel::<()>();
        let showing = thread::Builder::new().spawn_scoped(scope, move || {
            show();
            while ended.recv_timeout(STEP) == Err(RecvTimeoutError::Timeout) {
                show();
            }
        });
        let done = work(&counter);
        drop(working);
        drop(showing);
        done
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_shown_while_it_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("progress.json");
        let shown = ProgressFile {
            file: file.clone(),
            phase: "copy-memory".to_owned(),
        };
        let seen = showing(Some(&shown), |counter| {
            counter.expect(30);
            counter.expect(70);
            counter.add(40);
            let deadline = std::time::Instant::now() + Duration::from_secs(20);
            loop {
                let seen = Progress::read(&file).filter(|seen| seen.done > 0);
                if seen.is_some() || std::time::Instant::now() > deadline {
                    break seen;
                }
                thread::sleep(Duration::from_millis(5));
            }
        });
        let seen = seen.unwrap();
        assert_eq!(
            (seen.phase.as_str(), seen.done, seen.all),
            ("copy-memory", 40, 100)
        );
        fs::write(temporary(&file), "half").unwrap();
        remove(&file).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(Progress::read(&file), None);
    }

    #[test]
    fn a_file_that_cannot_be_written_costs_the_work_nothing() {
        let shown = ProgressFile {
            file: "/proc/none/progress.json".into(),
            phase: String::new(),
        };
        assert_eq!(showing(Some(&shown), |_| 7), 7);
        assert_eq!(showing(None, |_| 8), 8);
    }

    #[test]
    fn the_estimate_follows_from_the_rate() {
        assert_eq!(rate(3 << 30, Duration::from_secs(3)), Some(1 << 30));
        assert_eq!(rate(0, Duration::from_secs(3)), None);
        assert_eq!(rate(5, Duration::ZERO), Some(5000));
        let progress = |done| Progress {
            phase: String::new(),
            begun: now() - 10_000,
            done,
            all: 4000,
        };
        let left = progress(1000).left().unwrap();
        assert!(
            (Duration::from_secs(30)..Duration::from_secs(32)).contains(&left),
            "{left:?}"
        );
        assert_eq!(progress(0).left(), None);
        // A total that was not known whole.
        assert_eq!(progress(5000).left(), Some(Duration::ZERO));
    }
}
