//! The demo's figures, as tables and as JSON.

use std::time::Duration;

use firn_lab::SimGpu;
use serde::{Deserialize, Serialize};

use crate::printer::Printer;
use crate::proof::Proof;

/// The figures of a run.
#[derive(Serialize)]
pub(crate) struct Figures {
    pub(crate) suite: &'static str,
    /// Versions of containerd, runc and CRIU.
    pub(crate) tools: Vec<String>,
    pub(crate) source_gpu: String,
    pub(crate) target_gpu: String,
    pub(crate) checkpoint: Step,
    pub(crate) image_bytes: u64,
    pub(crate) move_ms: f64,
    pub(crate) restore: Step,
    pub(crate) proof: Proof,
    pub(crate) total_s: f64,
}

/// A checkpoint or restore, as measured by the client and by the shim.
#[derive(Serialize)]
pub(crate) struct Step {
    pub(crate) client_ms: f64,
    pub(crate) shim: Transaction,
}

/// `firn-timings.json` in the bundle.
#[derive(Deserialize, Serialize)]
pub(crate) struct Transaction {
    phases: Vec<Phase>,
    total_ms: f64,
}

#[derive(Clone, Deserialize, Serialize)]
struct Phase {
    name: String,
    ms: f64,
}

impl Figures {
    /// Prints the proof.
    pub(crate) fn conclude(&self, printer: &Printer) {
        let proof = &self.proof;
        let rows = [
            ("GPU", &self.source_gpu, &self.target_gpu),
            (
                "iteration",
                &proof.frozen_after.iteration.to_string(),
                &proof.after.iteration.to_string(),
            ),
            ("checksum", &proof.frozen_after.checksum, &proof.after.checksum),
        ];
        printer.title("The proof");
        printer.line(&before_and_after(&rows));
        printer.line(&format!(
            "      On node A iteration {} has the checksum {} too: the counter ran on there after the \
             checkpoint.\n\
             \x20     {} iterations since the restore, {} to {}: none missing or repeated, every element of \
             its \
             memory correct in each.\n\n\
             The workload was not changed and took no part in it. The demo took {:.0} s.",
            proof.source_got.iteration,
            proof.source_got.checksum,
            proof.verified,
            proof.after.iteration,
            proof.last.iteration,
            self.total_s,
        ));
    }
}

/// A table of values before and after the move.
pub(crate) fn before_and_after(rows: &[(&str, &String, &String)]) -> String {
    let row = |name: &str, before: &str, after: &str| format!("      {name:<12}  {before:<42}  {after}\n");
    let head = row("", "before", "after");
    rows.iter().fold(head, |table, (name, before, after)| {
        table + &row(name, before, after)
    })
}

impl Step {
    /// From the time that the client measured, and the phases, all in milliseconds.
    pub(crate) fn new(client_ms: f64, phases: Vec<(String, f64)>, total_ms: f64) -> Self {
        let phases = phases.into_iter().map(|(name, ms)| Phase { name, ms }).collect();
        let shim = Transaction { phases, total_ms };
        Self { client_ms, shim }
    }

    /// A table of the phases.
    pub(crate) fn table(&self) -> String {
        let mut phases: Vec<Phase> = Vec::new();
        for phase in &self.shim.phases {
            // A phase that was entered twice is one line.
            match phases.iter_mut().find(|known| known.name == phase.name) {
                Some(known) => known.ms += phase.ms,
                None => phases.push(phase.clone()),
            }
        }
        let row = |name: &str, ms: f64, what: &str| format!("      {ms:>8.1} ms  {name:<16}{what}\n");
        let mut table: String = phases
            .iter()
            .map(|phase| row(&phase.name, phase.ms, meaning(&phase.name)))
            .collect();
        let rest = self.client_ms - self.shim.total_ms;
        table += &row("the rest", rest, "ctr, containerd, images and snapshots");
        table += &row("together", self.client_ms, "as the user waits");
        table
    }
}

/// The phases in their order, each with a short description.
const PHASES: [(&str, &str); 14] = [
    (
        "inspect",
        "find the CUDA processes, refuse what cannot be restored",
    ),
    (
        "gpu-lock",
        "the driver finishes the work on the GPU and accepts no more",
    ),
    ("gpu-checkpoint", "the driver moves GPU memory into host memory"),
    ("freeze", "no thread runs from here on"),
    (
        "criu-dump",
        "CRIU writes the processes, with their GPU memory, to files",
    ),
    ("manifest", "firn writes the description that the restore reads"),
    ("sync", "the files are written to their disk"),
    ("end", "the container ends"),
    ("criu-restore", "CRIU restores the processes, stopped"),
    (
        "compare",
        "their privileges are compared with the container's spec",
    ),
    ("dev-repair", "the container's /dev gets the node of the new GPU"),
    ("gpu-restore", "the driver copies the memory onto the GPU"),
    ("gpu-unlock", "the GPU accepts work again"),
    ("continue", "all threads run"),
];

fn meaning(phase: &str) -> &'static str {
    PHASES
        .iter()
        .find(|(name, _)| *name == phase)
        .map_or("", |(_, what)| what)
}

/// The position of a phase in the order of all; unknown ones are last.
pub(crate) fn position(phase: &str) -> usize {
    PHASES
        .iter()
        .position(|(name, _)| *name == phase)
        .unwrap_or(PHASES.len())
}

/// Milliseconds of a duration.
pub(crate) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// A GPU in words.
pub(crate) fn gpu(gpu: &SimGpu) -> String {
    format!("{} ({}, {} MiB)", gpu.uuid, gpu.name, gpu.mib)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_adds_up_and_names_a_phase_once() {
        let text = r#"{"op":"checkpoint","phases":[{"name":"inspect","ms":1.0},{"name":"gpu-lock","ms":2.0},
            {"name":"inspect","ms":3.0}],"total_ms":6.0,"ok":true}"#;
        let step = Step {
            client_ms: 10.0,
            shim: serde_json::from_str(text).unwrap(),
        };
        let table = step.table();
        assert_eq!(table.matches("inspect ").count(), 1, "{table}");
        let expected = [
            "     4.0 ms  inspect",
            "     2.0 ms  gpu-lock",
            "     4.0 ms  the rest",
            "    10.0 ms  together",
        ];
        for row in expected {
            assert!(table.contains(row), "{row:?} is not in\n{table}");
        }
    }
}
