//! What is counted of the history: as many numbers as there are kinds, outcomes, codes and phases, however
//! many transactions there were.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Entry;

/// Upper bounds of the buckets of durations, in seconds.
pub const BUCKETS: [f64; 12] = [
    0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0,
];

/// How many durations are in each bucket, the last for those above all bounds, and their sum.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Durations {
    pub counts: [u64; BUCKETS.len() + 1],
    pub seconds: f64,
}

/// Keys are words with slashes between them: `checkpoint/failed/FIRN-DUMP`, `checkpoint/criu-dump`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Id of the last transaction that was added from a file that is no more.
    through: String,
    /// By kind, outcome and code.
    pub transactions: BTreeMap<String, u64>,
    /// By kind.
    pub durations: BTreeMap<String, Durations>,
    /// By kind and phase.
    pub phases: BTreeMap<String, Durations>,
    /// By kind.
    pub gpu_bytes: BTreeMap<String, u64>,
    /// By kind.
    pub image_bytes: BTreeMap<String, u64>,
}

impl Durations {
    fn add(&mut self, ms: f64) {
        let seconds = ms / 1e3;
        let bucket = BUCKETS.iter().position(|bound| seconds <= *bound);
        self.counts[bucket.unwrap_or(BUCKETS.len())] += 1;
        self.seconds += seconds;
    }
}

impl Totals {
    /// Adds the entries of a file, if that was not done before. Returns whether it was done.
    pub(super) fn add_all(&mut self, entries: &[Entry]) -> bool {
        let Some(last) = entries.last() else { return false };
        if last.id == self.through {
            return false;
        }
        entries.iter().for_each(|entry| self.add(entry));
        self.through.clone_from(&last.id);
        true
    }

    fn add(&mut self, entry: &Entry) {
        let kind = &entry.kind;
        let count = format!("{kind}/{}/{}", entry.outcome, entry.code);
        *self.transactions.entry(count).or_default() += 1;
        self.durations.entry(kind.clone()).or_default().add(entry.ms);
        // A phase that was entered twice is one.
        let mut phases: BTreeMap<&str, f64> = BTreeMap::new();
        for phase in &entry.phases {
            *phases.entry(&phase.name).or_default() += phase.ms;
        }
        for (name, ms) in phases {
            self.phases.entry(format!("{kind}/{name}")).or_default().add(ms);
        }
        *self.gpu_bytes.entry(kind.clone()).or_default() += entry.gpu_bytes;
        *self.image_bytes.entry(kind.clone()).or_default() += entry.image_bytes;
    }
}
