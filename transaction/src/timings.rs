//! How long each phase of a transaction took.
//!
//! Measured once. The figures go to the log and, as JSON, to a file in the bundle for people and scripts.

use std::path::Path;
use std::time::Instant;

use serde::Serialize;

use crate::phase::Phase;
use crate::recording;
use crate::warn::OrWarn;

/// File in the bundle with the timings of the last transaction. The next transaction replaces it.
pub const FILE: &str = "firn-timings.json";

#[derive(Serialize)]
struct Timing {
    name: Phase,
    ms: f64,
}

/// How long the phases of one transaction took.
#[derive(Serialize)]
pub(crate) struct PhaseTimings {
    op: &'static str,
    container: String,
    phases: Vec<Timing>,
    total_ms: f64,
    ok: bool,
    #[serde(skip)]
    begun: Instant,
    #[serde(skip)]
    last: Instant,
}

impl PhaseTimings {
    /// Starts the clock of a transaction.
    pub fn begin(op: &'static str, container: &str) -> Self {
        let now = Instant::now();
        Self {
            op,
            container: container.to_owned(),
            phases: Vec::new(),
            total_ms: 0.0,
            ok: false,
            begun: now,
            last: now,
        }
    }

    /// Counts the time since the last mark as time of `phase`.
    pub fn mark(&mut self, phase: Phase) {
        if let Some(recording) = recording::current() {
            recording.mark(phase);
        }
        self.count(phase);
    }

    /// The same for a phase that has failed. The history has it from the rollback.
    pub fn mark_failed(&mut self, phase: Phase) {
        self.count(phase);
    }

    fn count(&mut self, phase: Phase) {
        let now = Instant::now();
        let ms = now.duration_since(self.last).as_secs_f64() * 1000.0;
        self.last = now;
        let (op, container, name) = (self.op, &self.container, phase.name());
        log::info!("op={op} container={container} phase={name} ms={ms:.1}");
        match self.phases.iter_mut().find(|timing| timing.name == phase) {
            Some(timing) => timing.ms += ms,
            None => self.phases.push(Timing { name: phase, ms }),
        }
    }

    /// Writes the figures to the bundle. A failure to write them, such as a full disk, fails no transaction.
    pub fn end(&mut self, bundle: &Path, ok: bool) {
        self.total_ms = self.begun.elapsed().as_secs_f64() * 1000.0;
        self.ok = ok;
        let (op, container, ms) = (self.op, &self.container, self.total_ms);
        log::info!("op={op} container={container} ok={ok} ms={ms:.1}");
        let written = serde_json::to_vec(self)
            .map_err(std::io::Error::from)
            .and_then(|json| std::fs::write(bundle.join(FILE), json));
        written.or_warn(format_args!("cannot write {FILE}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_that_is_entered_twice_has_one_figure() {
        let bundle = tempfile::tempdir().unwrap();
        let mut timings = PhaseTimings::begin("checkpoint", "c");
        for phase in [Phase::Inspect, Phase::GpuLock, Phase::Inspect] {
            timings.mark(phase);
        }
        timings.end(bundle.path(), true);
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
