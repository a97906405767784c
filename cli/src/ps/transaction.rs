//! What is in progress for a container, by its journal.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use firn_config::names;
use firn_host::{clock, procfs};
use firn_image::memory::progress::Progress;
use firn_transaction::journal::{Outcome, Record};
use firn_transaction::phase::Phase;
use firn_transaction::timings;
use serde::{Deserialize, Serialize};

use crate::text;

/// Programs that own transactions, as the kernel has their names.
const OWNERS: [&str; 2] = ["containerd-shim", "firn-runc"];

/// A transaction.
pub struct Transaction {
    pub record: Record,
    /// Of bytes that are copied at the moment.
    copy: Option<Progress>,
    /// How long the container's last transaction of the kind took.
    last: Option<Duration>,
}

/// What its journal shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum State {
    /// It is in progress.
    Running,
    /// The container is frozen, and a resume tries again.
    Suspended,
    /// The shim is gone, and containerd cleans up.
    Killed,
}

/// A transaction.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TransactionRow<'a> {
    /// `checkpoint`, `restore`, `pause`, `resume` or `move`.
    operation: &'a str,
    /// The phase that it is in.
    phase: &'a str,
    /// Whether it continues.
    state: State,
    /// How long it lasts, in milliseconds.
    ms: u64,
    /// How long this phase lasts, in milliseconds.
    phase_ms: u64,
    /// Bytes that are copied; absent while nothing is copied.
    copied: Option<u64>,
    /// Bytes that are to be copied; absent while nothing is copied.
    of: Option<u64>,
    /// Bytes copied in a second; absent while nothing is copied, or too little for a rate.
    per_s: Option<u64>,
    /// Seconds that are left, by the rate of the copy or by the container's last transaction of the kind;
    /// absent if neither is known.
    left_s: Option<u64>,
    /// The image directory of the checkpoint; absent for an operation without one.
    image: Option<&'a Path>,
    /// Why the container is suspended; absent otherwise.
    reason: Option<&'a str>,
}

/// The timings of the last transaction, as far as they are used.
#[derive(Deserialize)]
struct Last {
    op: String,
    total_ms: f64,
    ok: bool,
}

impl Transaction {
    /// None where nothing is in progress. `memory` gives the bytes of the container's processes.
    pub fn of(bundle: &Path, memory: impl FnOnce() -> u64) -> io::Result<Option<Self>> {
        Ok(Record::read(bundle)?.map(|record| {
            let copy = Progress::read(&bundle.join(names::BUNDLE_PROGRESS)).or_else(|| {
                let dumps = record.phase == Some(Phase::CriuDump) && record.outcome.is_none();
                dumps.then(|| dumped(&record, memory())).flatten()
            });
            let op = record.begin.op.name();
            Self {
                last: last(bundle)
                    .filter(|last| last.ok && last.op == op)
                    .map(|last| Duration::try_from_secs_f64(last.total_ms / 1000.0).unwrap_or_default()),
                copy,
                record,
            }
        }))
    }

    pub fn state(&self) -> State {
        let owner = procfs::comm(self.record.shim.cast_signed());
        let lives = || OWNERS.iter().any(|name| owner.starts_with(name));
        match self.record.outcome {
            Some(Outcome::Suspended) => State::Suspended,
            _ if self.record.same_boot && lives() => State::Running,
            _ => State::Killed,
        }
    }

    pub fn operation(&self) -> &'static str {
        self.record.begin.op.name()
    }

    pub fn phase(&self) -> &str {
        match (&self.copy, self.record.phase) {
            (Some(copy), _) => &copy.phase,
            (None, Some(phase)) => phase.name(),
            (None, None) => "begin",
        }
    }

    /// Since when it is in the phase.
    pub fn in_phase(&self) -> Duration {
        clock::since(self.copy.as_ref().map_or(self.record.entered, |copy| copy.begun))
    }

    pub fn elapsed(&self) -> Duration {
        clock::since(self.record.begun)
    }

    /// Bytes that are copied, and that are to be copied.
    pub fn copied(&self) -> Option<(u64, u64)> {
        self.copy.as_ref().map(|copy| (copy.done, copy.all))
    }

    pub fn rate(&self) -> Option<u64> {
        self.copy.as_ref().and_then(Progress::rate)
    }

    /// How long it will still take: by the rate of the copy, or by the container's last transaction.
    pub fn left(&self) -> Option<Duration> {
        let by_last = || self.last?.checked_sub(self.elapsed());
        match &self.copy {
            Some(copy) => copy.left(),
            None if self.state() == State::Running => by_last(),
            None => None,
        }
    }

    /// GPU memory that the processes had when they were locked.
    pub fn gpu_memory(&self) -> Option<u64> {
        let memory = &self.record.memory;
        (!memory.is_empty()).then(|| memory.values().copied().fold(0, u64::saturating_add))
    }

    pub fn shown(&self) -> TransactionRow<'_> {
        let (copied, of) = self.copied().unzip();
        TransactionRow {
            operation: self.operation(),
            phase: self.phase(),
            state: self.state(),
            ms: text::ms(self.elapsed()),
            phase_ms: text::ms(self.in_phase()),
            copied,
            of,
            per_s: self.rate(),
            left_s: self.left().map(|left| left.as_secs()),
            image: Some(&*self.record.begin.image).filter(|image| !image.as_os_str().is_empty()),
            reason: self.record.reason.as_deref(),
        }
    }
}

fn last(bundle: &Path) -> Option<Last> {
    serde_json::from_slice(&fs::read(bundle.join(timings::FILE)).ok()?).ok()
}

/// How far CRIU is: by the files of the image, and by the memory of the processes.
fn dumped(record: &Record, memory: u64) -> Option<Progress> {
    let files = fs::read_dir(&record.begin.image).ok()?.flatten();
    let done = files.filter_map(|file| Some(file.metadata().ok()?.len())).sum();
    Some(Progress {
        phase: Phase::CriuDump.name().to_owned(),
        begun: record.entered,
        done,
        all: memory.max(done),
    })
}
