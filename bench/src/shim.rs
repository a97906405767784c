//! `cargo xtask bench shim`: the costs of a container under either shim.
//!
//! Times are measured inside the node around `ctr`. They include `ctr`, containerd and runc, as for a user,
//! but not entering the node. Only the output of an exec is read here, from a fifo as containerd makes it.
//! Memory is that of shims whose containers have slept for a while, several of each at a time: a single shim
//! would be charged for all pages of its program.

mod crowd;
mod idle;
mod lost;
mod process;
mod single;
mod stdout;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use firn_lab::{Built, FIRN, GpuHost, Profile, STOCK, SimGpu};
use firn_node::{Node, Suite};

use crate::progress::Progress;
use crate::{Case, Output};

/// The benchmark's name in its output and in the gates.
pub(crate) const NAME: &str = "shim";

/// Start, stop, output, events and memory of containers without GPU
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub(crate) output: Output,
    /// Readings of each shim; fewer of cases that take long
    #[arg(short, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    n: u32,
    /// Measure only this case, with those of its group; may be given several times
    #[arg(long = "case", value_name = "NAME", value_parser = PossibleValuesParser::new(cases()))]
    picked: Vec<String>,
}

impl Options {
    /// Whether this case is to be printed and compared with its gate.
    pub(crate) fn wants(&self, case: &str) -> bool {
        self.picked.is_empty() || self.picked.iter().any(|picked| picked == case)
    }
}

/// Names of all cases.
pub(crate) fn cases() -> impl Iterator<Item = &'static str> {
    GROUPS.iter().flat_map(|group| group.cases).map(|(name, _)| *name)
}

/// Names and units.
type Cases = &'static [(&'static str, &'static str)];

/// Cases that are measured together.
struct Group {
    what: &'static str,
    cases: Cases,
    way: Way,
}

enum Way {
    /// One reading per round, of one shim after the other. So many readings of the option `-n` make one
    /// round.
    Rounds(u32, fn(&Lab<'_>, Shim) -> Result<Readings>),
    /// All readings at once, of both shims together, in so many steps.
    Once(u32, fn(&Lab<'_>, &mut Record, &mut Progress) -> Result<()>),
}

static GROUPS: &[Group] = &[
    Group {
        what: "start and end of a container",
        cases: &[("run", "ms"), ("kill-delete", "ms"), ("run-delete", "ms")],
        way: Way::Rounds(1, single::start_and_end),
    },
    Group {
        what: "exec in a running container",
        cases: &[("exec", "ms")],
        way: Way::Rounds(4, single::execs),
    },
    Group {
        what: "20 starts at a time",
        cases: &[("starts-20", "ms")],
        way: Way::Rounds(2, crowd::twenty),
    },
    Group {
        what: "100 starts at a time",
        cases: &[("starts-100", "ms")],
        way: Way::Rounds(4, crowd::hundred),
    },
    Group {
        what: "a pod of 10 containers, started one by one and at a time",
        cases: &[("pod", "ms"), ("pod-at-once", "ms")],
        way: Way::Rounds(2, crowd::pods),
    },
    Group {
        what: "300 MB of output",
        cases: &[("stdout", "MB/s"), ("stdout-cpu", "ms")],
        way: Way::Rounds(2, stdout::throughput),
    },
    Group {
        what: "events of 100 short containers",
        cases: &[("lost-events", "events")],
        way: Way::Once(2 * lost::RUNS, lost::events),
    },
    Group {
        what: "idle shims",
        cases: &[
            ("rss", "MiB"),
            ("pss", "MiB"),
            ("private", "MiB"),
            ("idle-cpu", "us/s"),
            ("idle-switches", "1/s"),
        ],
        way: Way::Once(idle::steps(idle::SINGLE), idle::single),
    },
    Group {
        what: "idle shims of pods of 10 containers",
        cases: &[
            ("pod-rss", "MiB"),
            ("pod-pss", "MiB"),
            ("pod-private", "MiB"),
            ("pod-idle-cpu", "us/s"),
            ("pod-idle-switches", "1/s"),
        ],
        way: Way::Once(idle::steps(idle::PODS), idle::pods),
    },
    Group {
        what: "shims that have run 250 execs and made a checkpoint",
        cases: &[
            ("used-rss", "MiB"),
            ("used-pss", "MiB"),
            ("used-private", "MiB"),
            ("used-idle-cpu", "us/s"),
            ("used-idle-switches", "1/s"),
        ],
        way: Way::Once(idle::steps(idle::USED), idle::after_execs),
    },
    Group {
        what: "programs",
        cases: &[("binary", "MiB")],
        way: Way::Once(1, sizes),
    },
];

/// The shims that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shim {
    Stock,
    Firn,
}

impl Shim {
    /// containerd's name for it.
    fn runtime(self) -> &'static str {
        match self {
            Self::Stock => STOCK,
            Self::Firn => FIRN,
        }
    }

    /// For names of containers.
    fn short(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Firn => "firn",
        }
    }

    /// Both, in the other order every round.
    fn in_turn(round: u32) -> [Self; 2] {
        if round.is_multiple_of(2) {
            [Self::Stock, Self::Firn]
        } else {
            [Self::Firn, Self::Stock]
        }
    }
}

/// The node of the measurements.
struct Lab<'a> {
    host: &'a GpuHost,
    shim: &'a Path,
}

impl Lab<'_> {
    fn node(&self) -> &Node {
        self.host.node()
    }

    /// `ctr run` with these options and arguments.
    fn run(&self, shim: Shim, options: &[&str], rest: &[&str]) -> Vec<String> {
        let runtime = ["--runtime", shim.runtime()];
        words(&[&["ctr", "run"], &runtime, self.host.limits(), options, rest])
    }

    /// `ctr containers create` with these options and arguments. It sets no limits, which the node may not
    /// support.
    fn create(shim: Shim, options: &[&str], rest: &[&str]) -> Vec<String> {
        let runtime = ["--runtime", shim.runtime()];
        words(&[&["ctr", "containers", "create"], &runtime, options, rest])
    }
}

fn words(parts: &[&[&str]]) -> Vec<String> {
    parts.concat().into_iter().map(str::to_owned).collect()
}

/// One reading of each of a group's cases.
type Readings = Vec<(&'static str, f64)>;

/// All readings of a group, by case and shim.
struct Record {
    cases: Cases,
    readings: BTreeMap<&'static str, [Vec<f64>; 2]>,
}

impl Record {
    fn new(cases: Cases) -> Self {
        let readings = BTreeMap::new();
        Self { cases, readings }
    }

    fn add(&mut self, case: &'static str, shim: Shim, reading: f64) {
        let [stock, firn] = self.readings.entry(case).or_default();
        match shim {
            Shim::Stock => stock.push(reading),
            Shim::Firn => firn.push(reading),
        }
    }

    fn into_cases(mut self) -> Result<Vec<Case>> {
        let case = |&(name, unit)| {
            let [stock, firn] = self.readings.remove(name).unwrap_or_default();
            Case::new(NAME, name, unit, stock, firn).with_context(|| format!("no reading of {name}"))
        };
        self.cases.iter().map(case).collect()
    }
}

/// Measures the groups of the wanted cases.
pub(crate) fn measure(options: &Options) -> Result<Vec<Case>> {
    eprintln!("building release programs");
    let built = Built::build(Profile::Release)?;
    let name = format!("bench-shim-{}", std::process::id());
    let host = GpuHost::start(&built, Suite::Forky, &name, &[SimGpu::h200(1)])?;
    let lab = Lab {
        host: &host,
        shim: built.shim(),
    };
    let mut cases = Vec::new();
    for group in GROUPS {
        if group.cases.iter().any(|(name, _)| options.wants(name)) {
            let measured = group
                .measure(&lab, options.n)
                .with_context(|| group.what.to_owned())?;
            cases.extend(measured.into_iter().filter(|case| options.wants(&case.case)));
        }
    }
    Ok(cases)
}

impl Group {
    fn measure(&self, lab: &Lab<'_>, n: u32) -> Result<Vec<Case>> {
        let mut record = Record::new(self.cases);
        match self.way {
            Way::Once(steps, measure) => {
                let mut progress = Progress::begin(self.what, steps);
                measure(lab, &mut record, &mut progress)?;
                progress.end();
            }
            Way::Rounds(share, measure) => {
                let rounds = n.div_ceil(share);
                let mut progress = Progress::begin(&format!("{}, {rounds} times", self.what), rounds);
                // The first round fills caches and does not count.
                for round in 0..=rounds {
                    for shim in Shim::in_turn(round) {
                        for (case, reading) in
                            measure(lab, shim).with_context(|| format!("under {}", shim.short()))?
                        {
                            if round > 0 {
                                record.add(case, shim, reading);
                            }
                        }
                    }
                    if round > 0 {
                        progress.step();
                    }
                }
                progress.end();
            }
        }
        record.into_cases()
    }
}

/// The stock shim of the node.
const STOCK_SHIM: &str = "/usr/bin/containerd-shim-runc-v2";

fn sizes(lab: &Lab<'_>, record: &mut Record, progress: &mut Progress) -> Result<()> {
    let programs = [
        (Shim::Stock, lab.node().path(STOCK_SHIM)),
        (Shim::Firn, lab.shim.to_owned()),
    ];
    for (shim, path) in programs {
        let bytes = fs::metadata(&path)
            .with_context(|| format!("look at {}", path.display()))?
            .len();
        #[expect(clippy::cast_precision_loss, reason = "exact below 2^53")]
        record.add("binary", shim, bytes as f64 / f64::from(1 << 20));
    }
    progress.step();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_shim_is_first_every_other_time() {
        assert_eq!(Shim::in_turn(0), [Shim::Stock, Shim::Firn]);
        assert_eq!(Shim::in_turn(1), [Shim::Firn, Shim::Stock]);
    }

    #[test]
    fn no_name_is_given_twice() {
        let names: Vec<&str> = cases().collect();
        let different: BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(names.len(), different.len(), "{names:?}");
    }

    #[test]
    fn a_case_without_readings_of_both_shims_is_an_error() {
        let group = GROUPS.last().unwrap();
        let mut record = Record::new(group.cases);
        record.add("binary", Shim::Stock, 10.0);
        assert!(record.into_cases().is_err());
        let mut record = Record::new(group.cases);
        record.add("binary", Shim::Firn, 5.0);
        record.add("binary", Shim::Stock, 10.0);
        let cases = record.into_cases().unwrap();
        assert_eq!((cases.len(), cases[0].ratio), (1, Some(0.5)));
    }
}
