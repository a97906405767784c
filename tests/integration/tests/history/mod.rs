//! What a node remembers of its transactions, and what operators see of it: `firn history`, the metrics of
//! Prometheus, the log.

mod kept;
mod metrics;

use std::time::Duration;

use anyhow::{Context, Result};
use firn_lab::{GpuHost, SimGpu, cases, matrix};
use firn_node::{Platform, wait_for};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const DIR: &str = "/var/lib/firn/history";

/// A node with one GPU that no other node has.
fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
}

/// What `firn history --json` shows with these options.
fn history(host: &GpuHost, options: &[&str]) -> Result<Vec<Value>> {
    let shown = host.firn(&[&["history"], options].concat())?;
    let transactions = shown["transactions"].as_array().context("no transactions")?;
    Ok(transactions.clone())
}

/// As [`history`], once it has so many transactions: they are written after their clients have an answer.
fn history_of(host: &GpuHost, options: &[&str], count: usize) -> Result<Vec<Value>> {
    wait_for("the transactions", LIMIT, || {
        let transactions = history(host, options)?;
        Ok((transactions.len() >= count).then_some(transactions))
    })
}

/// Kind and outcome of each, with the code of an error.
fn outcomes(transactions: &[Value]) -> Vec<String> {
    let text = |of: &Value, key: &str| of[key].as_str().unwrap_or_default().to_owned();
    let outcome = |of: &Value| {
        let words = ["kind", "outcome", "code"].map(|key| text(of, key));
        words.join(" ").trim_end().to_owned()
    };
    transactions.iter().map(outcome).collect()
}

/// The names of the phases, and which has failed.
fn phases(transaction: &Value) -> (Vec<&str>, Option<&str>) {
    let phases = transaction["phases"].as_array().map_or(&[][..], Vec::as_slice);
    let names = phases.iter().filter_map(|phase| phase["name"].as_str()).collect();
    let failed = phases.iter().find(|phase| phase["failed"] == true);
    (names, failed.and_then(|phase| phase["name"].as_str()))
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        kept::transactions_are_kept_with_phases_and_codes [FORKY, TRIXIE];
        kept::criu_s_log_outlives_the_bundle [FORKY, TRIXIE];
        kept::a_killed_shim_is_remembered [FORKY];
        kept::a_full_disk_costs_the_history_alone [FORKY];
        kept::the_history_is_bounded_whatever_is_in_it [FORKY];
        metrics::metrics_are_printed_and_written [FORKY];
    })
}
