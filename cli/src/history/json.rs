//! The history as JSON.

use std::path::PathBuf;

use firn_transaction::history::{Entry, HistoryDir, PhaseTime};
use serde::Serialize;

use crate::output::printed;
use crate::text::{rounded, some};

/// The transactions that have ended on this node.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct History<'a> {
    /// One for each, the oldest first.
    transactions: Vec<Transaction<'a>>,
}

printed! { History<'_>: "history" }

/// A transaction that has ended.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Transaction<'a> {
    /// When it began, UTC.
    #[cfg_attr(test, schemars(extend("format" = "date-time")))]
    time: &'a str,
    /// The same in milliseconds since 1970.
    at: u64,
    /// Random id of the transaction, as in the log.
    id: &'a str,
    /// The operation: `checkpoint`, `restore`, `pause` (that gives GPUs free), `resume` or `move` (to other
    /// GPUs of the node).
    kind: &'a str,
    /// Id of the container.
    container: &'a str,
    /// containerd's namespace of the container; absent for a container of firn-runc.
    namespace: Option<&'a str>,
    /// Name of the image that the container began with; absent if it is not known.
    image: Option<&'a str>,
    /// `done`, `failed` (rolled back), `ended` (the container ended meanwhile), `suspended` or `killed` (the
    /// shim was killed).
    outcome: &'a str,
    /// Code of the error, `FIRN-...`; absent if there was none, or one without a code.
    code: Option<&'a str>,
    /// How long it took, in milliseconds with up to three digits behind the point.
    ms: f64,
    /// The phases that were entered, in their order.
    phases: Vec<Phase<'a>>,
    /// Bytes of GPU memory that the driver has copied into host memory; absent if it has copied none, as in a
    /// restore.
    gpu_bytes: Option<u64>,
    /// Size of the checkpoint in bytes, with what is in a store; absent if it has no manifest.
    image_bytes: Option<u64>,
    /// CRIU's log, if CRIU has failed and the log is kept: an absolute path.
    criu_log: Option<PathBuf>,
}

/// A phase of a transaction.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Phase<'a> {
    /// Its name, as in the log.
    name: &'a str,
    /// When it began, in milliseconds after the begin of the transaction.
    at_ms: f64,
    /// How long it took, in milliseconds with up to three digits behind the point.
    ms: f64,
    /// True in the phase that has failed; absent in others.
    failed: Option<bool>,
}

impl<'a> History<'a> {
    pub fn of(place: &HistoryDir, entries: &'a [Entry]) -> Self {
        let of = |entry| Transaction::of(place, entry);
        Self {
            transactions: entries.iter().map(of).collect(),
        }
    }
}

impl<'a> Transaction<'a> {
    fn of(place: &HistoryDir, entry: &'a Entry) -> Self {
        let bytes = |bytes: u64| Some(bytes).filter(|bytes| *bytes > 0);
        Self {
            time: &entry.time,
            at: entry.at,
            id: &entry.id,
            kind: &entry.kind,
            container: &entry.container,
            namespace: some(&entry.namespace),
            image: some(&entry.image),
            outcome: &entry.outcome,
            code: some(&entry.code),
            ms: rounded(entry.ms),
            phases: entry.phases.iter().map(Phase::of).collect(),
            gpu_bytes: bytes(entry.gpu_bytes),
            image_bytes: bytes(entry.image_bytes),
            criu_log: place.log_of(entry),
        }
    }
}

impl<'a> Phase<'a> {
    fn of(phase: &'a PhaseTime) -> Self {
        Self {
            name: &phase.name,
            at_ms: rounded(phase.at_ms),
            ms: rounded(phase.ms),
            failed: phase.failed.then_some(true),
        }
    }
}
