//! The gates of a benchmark: `bench/gates.toml`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::Case;

/// The file, built in: this program also runs without its sources.
const GATES: &str = include_str!("../gates.toml");

/// Gates by benchmark and case.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct Gates(BTreeMap<String, BTreeMap<String, Gate>>);

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Gate {
    /// The most that firn's median may be of the stock shim's: of times and memory.
    MaxRatio(f64),
    /// The least that firn's median may be of the stock shim's: of rates.
    MinRatio(f64),
    /// The most that any reading of firn may be, whatever the stock shim's are.
    Max(f64),
}

impl Gates {
    /// The gates that this program was built with.
    pub(crate) fn read() -> Result<Self> {
        toml::from_str(GATES).context("bench/gates.toml is not valid")
    }

    /// The missed gates of the `wanted` cases of `bench`, as messages. A gate whose case was not measured is
    /// missed too.
    pub(crate) fn missed(&self, bench: &str, cases: &[Case], wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let gates = self.0.get(bench).into_iter().flatten();
        gates
            .filter(|(name, _)| wanted(name))
            .filter_map(
                |(name, gate)| match cases.iter().find(|case| case.case == *name) {
                    None => Some(format!("{bench} {name}: there is no such case")),
                    Some(case) => gate.missed(case).map(|why| format!("{bench} {name}: {why}")),
                },
            )
            .collect()
    }
}

impl Gate {
    fn missed(self, case: &Case) -> Option<String> {
        let (stock, firn) = (case.stock.median, case.firn.median);
        // Without a division: where the stock shim has zero, firn must have zero too.
        let (met, gate) = match self {
            Self::MaxRatio(most) => (firn <= most * stock, format!("at most {most} of stock's")),
            Self::MinRatio(least) => (firn >= least * stock, format!("at least {least} of stock's")),
            Self::Max(most) => (case.firn.max <= most, format!("at most {most}")),
        };
        let ratio = case
            .ratio
            .map_or(String::new(), |ratio| format!(", ratio {ratio:.3}"));
        (!met).then(|| {
            format!(
                "firn {firn:.2} {unit} (up to {:.2}), stock {stock:.2} {unit}{ratio}; the gate is {gate}",
                case.firn.max,
                unit = case.unit
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missed(gates: &str, stock: &[f64], firn: &[f64]) -> Vec<String> {
        let case = Case::new("shim", "rss", "MiB", stock.into(), firn.into()).unwrap();
        let gates = toml::from_str::<Gates>(gates).unwrap();
        gates.missed("shim", &[case], |_| true)
    }

    #[test]
    fn a_ratio_above_the_gate_and_a_case_that_is_not_there_are_missed() {
        let gate = "[shim]\nrss = { max-ratio = 0.25 }\n";
        assert!(missed(gate, &[20.0], &[5.0]).is_empty());
        let misses = missed(gate, &[20.0], &[6.0]);
        assert!(
            misses.len() == 1 && misses[0].contains("ratio 0.300; the gate is at most 0.25 of"),
            "{misses:?}"
        );
        assert_eq!(
            missed("[shim]\nspeed = { max-ratio = 1.0 }\n", &[1.0], &[1.0]).len(),
            1
        );
        assert!(missed("[other]\nrss = { max-ratio = 0.1 }\n", &[1.0], &[1.0]).is_empty());
    }

    #[test]
    fn a_rate_must_reach_its_gate() {
        let gate = "[shim]\nrss = { min-ratio = 1.0 }\n";
        assert!(missed(gate, &[500.0], &[500.0]).is_empty());
        assert_eq!(missed(gate, &[500.0], &[499.0]).len(), 1);
    }

    #[test]
    fn a_limit_counts_for_the_worst_reading_and_without_the_stock_shim() {
        let gate = "[shim]\nrss = { max = 0 }\n";
        assert!(missed(gate, &[7.0], &[0.0]).is_empty());
        assert_eq!(missed(gate, &[0.0], &[0.0, 0.0, 1.0]).len(), 1);
    }

    #[test]
    fn zero_of_both_meets_the_gate() {
        assert!(missed("[shim]\nrss = { max-ratio = 0.5 }\n", &[0.0], &[0.0]).is_empty());
        assert_eq!(
            missed("[shim]\nrss = { max-ratio = 0.5 }\n", &[0.0], &[0.1]).len(),
            1
        );
    }

    #[test]
    fn gates_of_cases_that_were_not_picked_do_not_count() {
        let gates = toml::from_str::<Gates>("[shim]\nrss = { max-ratio = 0.1 }\n").unwrap();
        assert!(gates.missed("shim", &[], |case| case == "pss").is_empty());
        assert_eq!(gates.missed("shim", &[], |_| true).len(), 1);
    }

    #[test]
    fn a_gate_has_one_condition() {
        for wrong in [
            "{}",
            "{ max = 1, min-ratio = 1 }",
            "{ maximum = 1 }",
            "{ max = \"1\" }",
        ] {
            assert!(
                toml::from_str::<Gates>(&format!("[shim]\nrss = {wrong}\n")).is_err(),
                "{wrong}"
            );
        }
    }

    #[test]
    fn every_gate_of_the_repository_is_of_a_case() {
        let gates = Gates::read().unwrap();
        let shim = crate::shim::cases().map(str::to_owned).collect();
        for (bench, known) in [("shim", shim), ("image", crate::image::cases())] {
            let known: Vec<String> = known;
            for name in gates.0[bench].keys() {
                assert!(known.contains(name), "{bench} {name}");
            }
        }
    }
}
