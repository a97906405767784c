//! The demo's figures, and how people and programs get to see them.

use std::time::Duration;

use firn_lab::SimGpu;
use serde::{Deserialize, Serialize};

use super::proof::Proof;
use super::voice::Voice;

/// Everything that the demo has measured.
#[derive(Serialize)]
pub(super) struct Account {
    pub(super) suite: &'static str,
    /// First line of what `containerd`, `runc` and `criu` say of their version.
    pub(super) tools: Vec<String>,
    pub(super) source_gpu: String,
    pub(super) target_gpu: String,
    pub(super) checkpoint: Step,
    pub(super) image_bytes: u64,
    pub(super) move_ms: f64,
    pub(super) restore: Step,
    pub(super) proof: Proof,
    pub(super) total_s: f64,
}

/// A step as the client saw it, and what the shim says of it.
#[derive(Serialize)]
pub(super) struct Step {
    pub(super) client_ms: f64,
    pub(super) shim: Transaction,
}

/// `firn-account.json` in the bundle.
#[derive(Deserialize, Serialize)]
pub(super) struct Transaction {
    phases: Vec<Phase>,
    total_ms: f64,
}

#[derive(Clone, Deserialize, Serialize)]
struct Phase {
    name: String,
    ms: f64,
}

impl Account {
    /// Says what has been shown.
    pub(super) fn conclude(&self, voice: &Voice) {
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
        voice.title("The proof");
        voice.say(&before_and_after(&rows));
        voice.say(&format!(
            "      On node A iteration {} got the checksum {} too: the counter went on there after the checkpoint.\n\
             \x20     {} iterations since the restore, {} to {}: none left out or repeated, every element of its \
             memory right in each.\n\n\
             The workload was not told, and did nothing for it. All of this took {:.0} s.",
            proof.source_got.iteration,
            proof.source_got.checksum,
            proof.verified,
            proof.after.iteration,
            proof.last.iteration,
            self.total_s,
        ));
    }
}

/// A table of what something was and is.
pub(super) fn before_and_after(rows: &[(&str, &String, &String)]) -> String {
    let row = |name: &str, before: &str, after: &str| format!("      {name:<12}  {before:<42}  {after}\n");
    let head = row("", "before", "after");
    rows.iter().fold(head, |table, (name, before, after)| {
        table + &row(name, before, after)
    })
}

impl Step {
    /// From what the client waited, and phases in milliseconds.
    pub(super) fn new(client_ms: f64, phases: Vec<(String, f64)>, total_ms: f64) -> Self {
        let phases = phases.into_iter().map(|(name, ms)| Phase { name, ms }).collect();
        let shim = Transaction { phases, total_ms };
        Self { client_ms, shim }
    }

    /// A table of the phases.
    pub(super) fn table(&self) -> String {
        let mut phases: Vec<Phase> = Vec::new();
        for phase in &self.shim.phases {
            // A phase that was gone through twice is one line.
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

/// The phases in their order, and what each is, for whoever reads of it for the first time.
const PHASES: [(&str, &str); 14] = [
    (
        "inspect",
        "find the CUDA processes, refuse what cannot be restored",
    ),
    (
        "lock",
        "the driver finishes what runs on the GPU and stops taking work",
    ),
    ("inspect-again", "look for processes that came meanwhile"),
    ("gpu-checkpoint", "the driver moves GPU memory into host memory"),
    ("freeze", "no thread runs from here on"),
    ("dump", "CRIU writes the processes, GPU memory within, to files"),
    ("manifest", "firn writes what the restore will need to know"),
    ("end", "the container ends"),
    ("criu-restore", "CRIU makes the processes again, stopped"),
    ("compare", "they have no more than the container's spec allows"),
    ("dev-repair", "/dev of the container gets the node of the new GPU"),
    ("gpu-restore", "the driver moves GPU memory back"),
    ("unlock", "the GPU takes work again"),
    ("continue", "all threads run"),
];

fn meaning(phase: &str) -> &'static str {
    PHASES
        .iter()
        .find(|(name, _)| *name == phase)
        .map_or("", |(_, what)| what)
}

/// Where a phase stands among all; unknown ones come last.
pub(super) fn position(phase: &str) -> usize {
    PHASES
        .iter()
        .position(|(name, _)| *name == phase)
        .unwrap_or(PHASES.len())
}

/// Milliseconds of a duration.
pub(super) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// A GPU for people.
pub(super) fn gpu(gpu: &SimGpu) -> String {
    format!("{} ({}, {} MiB)", gpu.uuid, gpu.name, gpu.mib)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_adds_up_and_names_a_phase_once() {
        let text = r#"{"op":"checkpoint","phases":[{"name":"inspect","ms":1.0},{"name":"lock","ms":2.0},
            {"name":"inspect","ms":3.0}],"total_ms":6.0,"ok":true}"#;
        let step = Step {
            client_ms: 10.0,
            shim: serde_json::from_str(text).unwrap(),
        };
        let table = step.table();
        assert_eq!(table.matches("inspect ").count(), 1, "{table}");
        let expected = [
            "     4.0 ms  inspect",
            "     2.0 ms  lock",
            "     4.0 ms  the rest",
            "    10.0 ms  together",
        ];
        for row in expected {
            assert!(table.contains(row), "{row:?} is not in\n{table}");
        }
    }
}
