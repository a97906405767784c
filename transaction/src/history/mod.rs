//! The history of the node's transactions: a line of JSON for each that has ended, in a file of bounded size.
//!
//! It is written when a transaction has ended, by its shim or by firn-runc, and read by `firn`. What cannot
//! be written is logged: no transaction fails for its history. It has no paths, messages or environments;
//! CRIU's logs of the last failures, which have, are next to it.

mod file;
mod logs;
mod totals;

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use firn_host::{Rfc3339, clock};
use serde::{Deserialize, Serialize};

pub use file::{History, HistoryDir, LIMIT};
pub use logs::LOGS;
pub use totals::{BUCKETS, Durations, Totals};

use firn_host::procfs;
use firn_process::blocking::blocking;
use firn_process::panics::lock;

use crate::container::{Container, InitState};
use crate::journal::{Operation, Record};
pub use crate::recording::PhaseTime;
use firn_process::OrWarn;

use crate::recording::{Recording, millis};

/// How long the file system of the history may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// A transaction that has ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// When it began, UTC.
    pub time: String,
    /// The same in milliseconds since 1970.
    pub at: u64,
    /// Random id, as in the log.
    pub id: String,
    /// The operation: `checkpoint`, `restore`, `pause`, `resume`, `move`.
    pub kind: String,
    pub container: String,
    /// containerd's namespace; empty for firn-runc.
    pub namespace: String,
    /// The container's image, if it is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image: String,
    /// `done`, `failed`, `ended` (with its container), `suspended`, `killed` (with its shim).
    pub outcome: String,
    /// FIRN code of the error; empty if it has none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub code: String,
    /// How long all of it took.
    pub ms: f64,
    pub phases: Vec<PhaseTime>,
    /// GPU memory that the driver has copied.
    #[serde(skip_serializing_if = "is_zero")]
    pub gpu_bytes: u64,
    /// Size of the image, with what is in a store.
    #[serde(skip_serializing_if = "is_zero")]
    pub image_bytes: u64,
    /// Name of CRIU's log below [`LOGS`], as long as it is there; empty if CRIU has not failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub criu_log: String,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Entry {
    /// Whether the client got what it wanted.
    pub fn is_done(&self) -> bool {
        self.outcome == "done"
    }

    /// Of a transaction whose shim was killed, by its journal.
    fn of_killed(record: &Record) -> Option<Self> {
        let origin = record.origin.clone()?;
        let after = |at: u64| millis(Duration::from_millis(at.saturating_sub(record.begun)));
        let now = clock::now();
        let ends = record.entered_at.iter().skip(1).map(|(_, at)| *at).chain([now]);
        let last = record.entered_at.len().saturating_sub(1);
        let phases = record.entered_at.iter().zip(ends).enumerate();
        let phases = phases.map(|(nth, ((phase, from), to))| PhaseTime {
            name: phase.name().to_owned(),
            at_ms: after(*from),
            ms: millis(Duration::from_millis(to.saturating_sub(*from))),
            failed: nth == last,
        });
        Some(Self {
            time: time(record.begun),
            at: record.begun,
            id: origin.id,
            kind: record.begin.op.name().to_owned(),
            container: record.begin.container.clone(),
            namespace: origin.namespace,
            outcome: "killed".to_owned(),
            ms: after(now),
            phases: phases.collect(),
            gpu_bytes: record.memory.values().sum(),
            ..Self::default()
        })
    }
}

/// The code that the text of an error begins with, if it has one.
pub fn code_of(error: &impl Display) -> Option<String> {
    let text = error.to_string();
    let (code, _) = text.split_once(':')?;
    code.starts_with("FIRN-").then(|| code.to_owned())
}

/// A time in milliseconds since 1970 as text.
pub(crate) fn time(at: u64) -> String {
    Rfc3339(Duration::from_millis(at)).to_string()
}

/// Appends an entry, and then keeps CRIU's log of it. Waits for each no longer than [`PATIENCE`].
pub async fn write(place: &HistoryDir, mut entry: Entry, log: Option<File>) {
    let (at, id) = (place.clone(), entry.id.clone());
    if log.is_some() {
        entry.criu_log = logs::name(&entry);
    }
    let name = entry.criu_log.clone();
    patiently(format!("write {id} into the history"), move || at.append(&entry)).await;
    if let Some(log) = log {
        let at = place.clone();
        patiently(format!("keep CRIU's log of {id}"), move || {
            at.keep_log(&log, &name)
        })
        .await;
    }
}

/// Waits for work of the file system. `what`: for a warning.
async fn patiently(what: String, work: impl FnOnce() -> io::Result<()> + Send + 'static) {
    match tokio::time::timeout(PATIENCE, blocking(work)).await {
        Ok(done) => drop(done.or_warn(format_args!("cannot {what}"))),
        Err(_) => log::warn!("cannot {what} within {PATIENCE:?}"),
    }
}

/// Writes the transaction of the container in `bundle` whose shim was killed; once, however often it is
/// called.
pub async fn write_killed(place: &HistoryDir, bundle: &Path) {
    let record = Record::read(bundle).ok().flatten();
    let killed = record.filter(|record| record.outcome.is_none());
    if let Some(entry) = killed.as_ref().and_then(Entry::of_killed) {
        write(place, entry, None).await;
    }
}

impl Recording {
    /// What it came to, as the history has it.
    pub fn outcome(&self, container: &Container, is_done: bool) -> &'static str {
        match (self.operation, container.state()) {
            _ if is_done => "done",
            // Nothing is left of it.
            (Operation::Restore, _) => "failed",
            (_, InitState::Suspended) => "suspended",
            _ if !procfs::is_alive(container.init.pid()) => "ended",
            _ => "failed",
        }
    }

    /// What the history has of it, which ends here. The name of the container's image is left to the caller.
    pub fn entry(&self, outcome: &'static str, code: Option<String>) -> Entry {
        self.end(outcome == "done");
        let measured = lock(&self.measured);
        Entry {
            time: time(self.at),
            at: self.at,
            id: self.id.clone(),
            kind: self.operation.name().to_owned(),
            container: self.container.clone(),
            namespace: self.namespace.clone(),
            image: String::new(),
            outcome: outcome.to_owned(),
            code: code.unwrap_or_default(),
            ms: millis(self.begun.elapsed()),
            phases: measured.phases.clone(),
            gpu_bytes: measured.gpu_bytes,
            image_bytes: measured.image_bytes,
            criu_log: String::new(),
        }
    }
}

#[cfg(test)]
mod tests;
