//! What is counted of the history: as many numbers as there are kinds, outcomes, codes and phases, however
//! many transactions there were.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// Upper bounds of the buckets of durations, in seconds.
pub const BUCKETS: [f64; 12] = [
    0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0,
];

/// How many durations are in each bucket, the last for those above all bounds, and their sum.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Durations {
    pub counts: [u64; BUCKETS.len() + 1],
    pub seconds: f64,
}

/// Keys are words with slashes between them: `checkpoint/failed/FIRN-DUMP`, `checkpoint/criu-dump`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Totals {
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

/// Adds the entries of a file, if that was not done before. Returns whether it was done.
///
/// Shims do this when a file is full. So it works on JSON as it is: code that reads types is a large part of
/// a small program.
pub(super) fn add_all(totals: &mut Value, entries: &[Value]) -> bool {
    let id = entries.last().map(|last| &last["id"]);
    let Some(id) = id.filter(|id| **id != totals["through"]) else {
        return false;
    };
    entries.iter().for_each(|entry| add(totals, entry));
    totals["through"] = id.clone();
    true
}

fn add(totals: &mut Value, entry: &Value) {
    let text = |of: &Value, key: &str| of[key].as_str().unwrap_or_default().to_owned();
    let kind = text(entry, "kind");
    let count = format!("{kind}/{}/{}", text(entry, "outcome"), text(entry, "code"));
    more(&mut totals["transactions"][count], 1);
    duration(&mut totals["durations"][&kind], entry["ms"].as_f64());
    // A phase that was entered twice is one.
    let mut phases = Value::Null;
    for phase in entry["phases"].as_array().into_iter().flatten() {
        let sum = &mut phases[text(phase, "name")];
        *sum = (sum.as_f64().unwrap_or_default() + phase["ms"].as_f64().unwrap_or_default()).into();
    }
    for (name, ms) in phases.as_object().into_iter().flatten() {
        duration(&mut totals["phases"][format!("{kind}/{name}")], ms.as_f64());
    }
    for bytes in ["gpu_bytes", "image_bytes"] {
        more(
            &mut totals[bytes][&kind],
            entry[bytes].as_u64().unwrap_or_default(),
        );
    }
}

fn more(number: &mut Value, by: u64) {
    *number = (number.as_u64().unwrap_or_default() + by).into();
}

fn duration(of: &mut Value, ms: Option<f64>) {
    let seconds = ms.unwrap_or_default() / 1e3;
    if of["counts"].is_null() {
        of["counts"] = vec![0_u64; BUCKETS.len() + 1].into();
    }
    let bucket = BUCKETS.iter().position(|bound| seconds <= *bound);
    if let Some(count) = of["counts"].get_mut(bucket.unwrap_or(BUCKETS.len())) {
        more(count, 1);
    }
    of["seconds"] = (of["seconds"].as_f64().unwrap_or_default() + seconds).into();
}
