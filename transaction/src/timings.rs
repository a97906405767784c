//! How long each phase of a transaction took, as a file in the bundle for people and scripts.
//!
//! The figures are those of [`Recording`]: they are measured once.

use std::path::Path;
use std::time::Duration;

use firn_process::OrWarn;
use firn_process::blocking::blocking;
use firn_process::panics::lock;
use serde::Serialize;

use crate::recording::{self, PhaseTime, Recording, millis};

/// File in the bundle with the timings of the last transaction. The next transaction replaces it.
pub const FILE: &str = "firn-timings.json";

/// How long the bundle's file system may take.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Serialize)]
struct Timings {
    op: &'static str,
    container: String,
    phases: Vec<Timing>,
    total_ms: f64,
    ok: bool,
}

/// A phase, with all of its parts.
#[derive(Serialize)]
struct Timing {
    name: String,
    ms: f64,
}

impl Timings {
    /// Of a transaction that has ended.
    fn of(recording: &Recording, ok: bool) -> Self {
        Self {
            op: recording.operation.name(),
            container: recording.container.clone(),
            phases: sums(&lock(&recording.measured).phases),
            total_ms: millis(recording.begun.elapsed()),
            ok,
        }
    }
}

/// One figure for each phase, also if it was entered twice.
fn sums(phases: &[PhaseTime]) -> Vec<Timing> {
    let mut sums: Vec<Timing> = Vec::new();
    for PhaseTime { name, ms, .. } in phases {
        match sums.iter_mut().find(|sum| sum.name == *name) {
            Some(sum) => sum.ms += ms,
            None => sums.push(Timing {
                name: name.clone(),
                ms: *ms,
            }),
        }
    }
    sums
}

/// The phase of this call's transaction that is in progress has failed, and what follows makes up for it.
pub(crate) fn fail() {
    if let Some(recording) = recording::current() {
        recording.fail_open();
    }
}

/// The phases of this call's transaction are over: what follows belongs to none.
pub(crate) fn stop(ok: bool) {
    if let Some(recording) = recording::current() {
        recording.end(ok);
    }
}

/// Writes the figures of this call's transaction to the bundle. A failure to write them, such as a full disk,
/// fails no transaction.
pub(crate) async fn write(bundle: &Path, ok: bool) {
    let Some(recording) = recording::current() else {
        return;
    };
    let timings = Timings::of(&recording, ok);
    let Timings {
        op,
        container,
        total_ms,
        ..
    } = &timings;
    log::info!("op={op} container={container} ok={ok} ms={total_ms:.1}");
    let file = bundle.join(FILE);
    let written = blocking(move || std::fs::write(file, serde_json::to_vec(&timings)?));
    match tokio::time::timeout(PATIENCE, written).await {
        Ok(written) => drop(written.or_warn(format_args!("cannot write {FILE}"))),
        Err(_) => log::warn!("cannot write {FILE} within {PATIENCE:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phase::{Operation, Phase};

    #[tokio::test]
    async fn a_phase_that_is_entered_twice_has_one_figure() {
        let bundle = tempfile::tempdir().unwrap();
        let call = recording::within_call(async {
            let recording = recording::begin(Operation::Checkpoint, "c", "default");
            for phase in [Phase::Inspect, Phase::GpuLock, Phase::Inspect] {
                recording.enter(phase);
            }
            stop(true);
            write(bundle.path(), true).await;
        });
        call.await;
        let written = std::fs::read(bundle.path().join(FILE)).unwrap();
        let written: serde_json::Value = serde_json::from_slice(&written).unwrap();
        let names: Vec<_> = written["phases"]
            .as_array()
            .unwrap()
            .iter()
            .map(|phase| phase["name"].clone())
            .collect();
        assert_eq!(names, ["inspect", "gpu-lock"]);
        assert_eq!(written["ok"], true);
    }
}
