//! What a benchmark must reach: `bench/gates.toml`.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::Case;
use crate::workspace;

/// Gates by benchmark and case.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub(super) struct Gates(BTreeMap<String, BTreeMap<String, Gate>>);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Gate {
    /// The most that firn may take of what the stock shim takes.
    max_ratio: f64,
}

impl Gates {
    /// Reads the file.
    pub(super) fn read() -> Result<Self> {
        let path = workspace()?.join("bench/gates.toml");
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("{} is not valid", path.display()))
    }

    /// Every gate of `bench` that is not met, in words. A gate without a reading is missed too.
    pub(super) fn missed(&self, bench: &str, cases: &[Case]) -> Vec<String> {
        let gates = self.0.get(bench).into_iter().flatten();
        gates
            .filter_map(|(name, gate)| match cases.iter().find(|case| case.case == name) {
                None => Some(format!("{bench} {name}: there is no such case")),
                Some(case) if case.ratio <= gate.max_ratio => None,
                Some(case) => Some(format!(
                    "{bench} {name}: ratio {:.3}, gate {:.3} (firn {:.2} {unit}, stock {:.2} {unit})",
                    case.ratio,
                    gate.max_ratio,
                    case.firn.median,
                    case.stock.median,
                    unit = case.unit
                )),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missed(gates: &str, stock: f64, firn: f64) -> Vec<String> {
        let case = Case::new("shim", "rss", "MiB", vec![stock], vec![firn]).unwrap();
        toml::from_str::<Gates>(gates).unwrap().missed("shim", &[case])
    }

    #[test]
    fn a_ratio_above_the_gate_and_a_case_that_is_not_there_are_missed() {
        let gate = "[shim]\nrss = { max-ratio = 0.25 }\n";
        assert!(missed(gate, 20.0, 5.0).is_empty());
        let said = missed(gate, 20.0, 6.0);
        assert!(
            said.len() == 1 && said[0].contains("ratio 0.300, gate 0.250"),
            "{said:?}"
        );
        assert_eq!(missed("[shim]\nspeed = { max-ratio = 1.0 }\n", 1.0, 1.0).len(), 1);
        assert!(missed("[other]\nrss = { max-ratio = 0.1 }\n", 1.0, 1.0).is_empty());
    }

    #[test]
    fn the_file_of_the_repository_is_valid() {
        assert!(Gates::read().unwrap().0.contains_key("shim"));
    }
}
