//! `cargo xtask bench`: firn against the stock shim. It is no part of `cargo xtask test`: a busy machine is
//! no failure.
//!
//! Both are measured in the same node on the same containerd, in turns and in alternating order, so that
//! other load affects both. Figures that do not compare the two are not reported.
#![forbid(unsafe_code)]

mod gates;
mod image;
mod progress;
mod shim;
mod timed;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Subcommand;
use nix::unistd::geteuid;
use serde::Serialize;

use gates::Gates;

/// Compare firn with the stock shim
///
/// Builds release programs and measures in a test node (forky, containerd 2.1). Needs root, and a machine
/// with nothing else to do.
#[derive(clap::Args)]
pub struct Cmd {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    Shim(shim::Options),
    Image(image::Options),
}

impl Bench {
    fn output(&self) -> &Output {
        match self {
            Self::Shim(options) => &options.output,
            Self::Image(options) => &options.output,
        }
    }

    /// Its name in its output and in the gates, and its cases.
    fn measure(&self) -> Result<(&'static str, Vec<Case>)> {
        match self {
            Self::Shim(options) => Ok((shim::NAME, shim::measure(options)?)),
            Self::Image(options) => Ok((image::NAME, image::measure(options)?)),
        }
    }

    /// Whether this case is to be compared with its gate.
    fn wants(&self, case: &str) -> bool {
        match self {
            Self::Shim(options) => options.wants(case),
            Self::Image(options) => options.wants(case),
        }
    }
}

#[derive(clap::Args)]
struct Output {
    /// Print one JSON object per case instead of the table
    #[arg(long)]
    json: bool,
    /// Compare with bench/gates.toml; exit status 1 when a gate is missed
    #[arg(long)]
    check: bool,
}

/// Runs the benchmark, prints its cases and compares them with the gates.
pub fn run(cmd: Cmd) -> Result<ExitCode> {
    let bench = cmd.bench;
    ensure!(
        geteuid().is_root(),
        "test nodes need root\nhint: run it by sudo -E"
    );
    // Read before anything is measured, which takes a while.
    let gates = bench.output().check.then(Gates::read).transpose()?;
    let (name, cases) = bench.measure()?;
    if bench.output().json {
        for case in &cases {
            println!("{}", serde_json::to_string(case)?);
        }
    } else {
        table(&cases);
    }
    let missed = gates.map_or_else(Vec::new, |gates| {
        gates.missed(name, &cases, |case| bench.wants(case))
    });
    for miss in &missed {
        eprintln!("gate missed: {miss}");
    }
    Ok(if missed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The result of a case.
#[derive(Debug, Serialize)]
struct Case {
    bench: &'static str,
    case: String,
    unit: &'static str,
    stock: Stats,
    firn: Stats,
    /// firn / stock, of the medians; absent where the stock shim's is zero.
    ratio: Option<f64>,
    /// What firn's reading consists of, where that is known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    phases: Vec<Phase>,
}

/// A part of a transaction of firn's: the median of its times.
#[derive(Debug, Serialize)]
struct Phase {
    name: String,
    ms: f64,
}

impl Case {
    /// `None` when one of the two has no reading.
    fn new(
        bench: &'static str,
        case: impl Into<String>,
        unit: &'static str,
        stock: Vec<f64>,
        firn: Vec<f64>,
    ) -> Option<Self> {
        let (stock, firn) = (Stats::of(stock)?, Stats::of(firn)?);
        let ratio = (stock.median > 0.0).then(|| firn.median / stock.median);
        Some(Self {
            bench,
            case: case.into(),
            unit,
            ratio,
            stock,
            firn,
            phases: Vec::new(),
        })
    }
}

/// Statistics of the readings of one shim.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Stats {
    median: f64,
    min: f64,
    max: f64,
    n: usize,
}

impl Stats {
    fn of(mut readings: Vec<f64>) -> Option<Self> {
        readings.sort_by(f64::total_cmp);
        let (min, max) = (*readings.first()?, *readings.last()?);
        let (n, half) = (readings.len(), readings.len() / 2);
        let median = match n % 2 {
            1 => readings[half],
            _ => f64::midpoint(readings[half - 1], readings[half]),
        };
        Some(Self { median, min, max, n })
    }
}

fn table(cases: &[Case]) {
    let shown = |stats: &Stats| format!("{:.2} ({:.2}..{:.2})", stats.median, stats.min, stats.max);
    let width = cases
        .iter()
        .map(|case| case.case.len())
        .max()
        .unwrap_or(0)
        .max(14);
    println!(
        "{:<width$} {:>6}  {:>28}  {:>28}  {:>5}  {:>3}",
        "case", "", "stock", "firn", "ratio", "n"
    );
    for case in cases {
        let ratio = case.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        println!(
            "{:<width$} {:>6}  {:>28}  {:>28}  {ratio:>5}  {:>3}",
            case.case,
            case.unit,
            shown(&case.stock),
            shown(&case.firn),
            case.firn.n
        );
    }
    for case in cases.iter().filter(|case| !case.phases.is_empty()) {
        let parts = case
            .phases
            .iter()
            .map(|phase| format!("{} {:.0}", phase.name, phase.ms));
        println!(
            "{} of firn, ms: {}",
            case.case,
            parts.collect::<Vec<_>>().join(", ")
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_reading_or_the_mean_of_two() {
        let three = Stats::of(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!((three.median, three.min, three.max, three.n), (2.0, 1.0, 3.0, 3));
        assert_eq!(Stats::of(vec![4.0, 1.0, 3.0, 2.0]).unwrap().median, 2.5);
        assert_eq!(Stats::of(vec![]), None);
    }

    #[test]
    fn a_case_is_one_json_object_with_the_fields_of_the_format() {
        let case = Case::new("shim", "run", "ms", vec![100.0, 120.0], vec![55.0]).unwrap();
        assert_eq!(
            serde_json::to_value(&case).unwrap(),
            serde_json::json!({
                "bench": "shim", "case": "run", "unit": "ms", "ratio": 0.5,
                "stock": { "median": 110.0, "min": 100.0, "max": 120.0, "n": 2 },
                "firn": { "median": 55.0, "min": 55.0, "max": 55.0, "n": 1 },
            })
        );
    }

    #[test]
    fn a_case_of_which_stock_has_zero_has_no_ratio() {
        let case = Case::new("shim", "lost-events", "events", vec![0.0], vec![1.0]).unwrap();
        assert_eq!(
            serde_json::to_value(&case).unwrap()["ratio"],
            serde_json::Value::Null
        );
    }
}
