//! `cargo xtask bench image`: checkpoints and restores of memory under either shim.
//!
//! One program holds the memory and verifies a checksum over all of it, in the original that continues and in
//! the copy: any other verdict than OK fails the benchmark. Under firn its container is granted a simulated
//! GPU, because firn copies the memory of such containers alone; the program has no GPU state. What is
//! compared is the copy of the same memory.
//!
//! Images, containerd's content and the stores lie in memory, but those of the group `disk`. A program holds
//! the free memory between the timed steps and frees it as they need it: a virtual machine may give free
//! memory back to its host at once, and the measurement would be of that.

mod alone;
mod by_ctr;
mod hog;
mod machine;

use std::cell::RefCell;
use std::collections::BTreeMap;

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use firn_lab::{Built, FIRN, GpuHost, Profile, STOCK, SimGpu};
use firn_node::{Node, Suite};

use machine::Pool;

use crate::progress::Progress;
use crate::{Case, Output, Phase, Stats};

/// The benchmark's name in its output and in the gates.
pub(crate) const NAME: &str = "image";

/// Checkpoints and restores of large memory, through the image and by the store
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub(crate) output: Output,
    /// Readings of each way
    #[arg(short, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    n: u32,
    /// Sizes of the memory; 8192 needs a machine with 40 GiB
    #[arg(long, value_delimiter = ',', default_values_t = [2048, 4096],
          value_parser = clap::value_parser!(u32).range(128..))]
    mib: Vec<u32>,
    /// Measure only this group; may be given several times
    #[arg(long = "only", value_name = "GROUP",
          value_parser = PossibleValuesParser::new(GROUPS.iter().map(|group| group.name)))]
    picked: Vec<String>,
}

impl Options {
    /// Whether this case is to be compared with its gate.
    pub(crate) fn wants(&self, case: &str) -> bool {
        self.jobs()
            .any(|(group, mib)| group.cases(mib).any(|(name, ..)| name == case))
    }

    fn jobs(&self) -> impl Iterator<Item = (&'static Group, u32)> {
        let wanted =
            |group: &&Group| self.picked.is_empty() || self.picked.iter().any(|name| name == group.name);
        let sizes = |group| self.mib.iter().map(move |mib| (group, *mib));
        GROUPS.iter().filter(wanted).flat_map(sizes)
    }
}

/// Names of all cases of the default sizes.
#[cfg(test)]
pub(crate) fn cases() -> Vec<String> {
    let sizes = GROUPS
        .iter()
        .flat_map(|group| [2048, 4096].map(|mib| (group, mib)));
    sizes
        .flat_map(|(group, mib)| group.cases(mib).map(|(name, ..)| name))
        .collect()
}

/// Where the memory goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// Through CRIU and containerd, by the stock shim.
    Stock,
    /// By firn, into the image.
    Inline,
    /// By firn, into a store on a tmpfs with huge pages.
    Store,
    /// By firn, into a store on a tmpfs with pages of 4 KiB.
    Store4k,
    /// By firn, into a store on a disk.
    Disk,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Inline => "inline",
            Self::Store => "store",
            Self::Store4k => "store4k",
            Self::Disk => "disk",
        }
    }

    fn runtime(self) -> &'static str {
        match self {
            Self::Stock => STOCK,
            _ => FIRN,
        }
    }

    /// Where its store is on the node.
    fn store(self) -> Option<&'static str> {
        match self {
            Self::Stock | Self::Inline => None,
            Self::Store => Some("/srv/store-huge"),
            Self::Store4k => Some("/srv/store"),
            // The node's only directory that lies on the disk itself.
            Self::Disk => Some("/var/lib/containerd/firn-store"),
        }
    }
}

/// What is read of a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Measure {
    Checkpoint,
    Restore,
    /// Of what containerd keeps.
    Content,
    /// Of what the store keeps.
    Extents,
    /// What the node's memory grows by at most.
    CheckpointPeak,
    RestorePeak,
    Write,
    Read,
}

impl Measure {
    /// Its name and its unit.
    fn name(self) -> (&'static str, &'static str) {
        match self {
            Self::Checkpoint => ("checkpoint", "s"),
            Self::Restore => ("restore", "s"),
            Self::Content => ("content", "MiB"),
            Self::Extents => ("extents", "MiB"),
            Self::CheckpointPeak => ("checkpoint-peak", "MiB"),
            Self::RestorePeak => ("restore-peak", "MiB"),
            Self::Write => ("write", "MiB/s"),
            Self::Read => ("read", "MiB/s"),
        }
    }
}

use Measure::{Checkpoint, CheckpointPeak, Content, Extents, Read, Restore, RestorePeak, Write};

/// The memory that is copied.
#[derive(Clone, Copy, Debug)]
struct Memory {
    fill: &'static str,
    huge: bool,
    mib: u32,
}

/// What one checkpoint and one restore took, and the parts of firn's.
#[derive(Default)]
struct Reading {
    values: Vec<(Measure, f64)>,
    phases: Vec<(Measure, Vec<(String, f64)>)>,
}

/// Ways that are measured together.
struct Group {
    name: &'static str,
    what: &'static str,
    fill: &'static str,
    huge: bool,
    /// The first is what the others are compared with.
    ways: &'static [Way],
    measures: &'static [Measure],
    take: fn(&Lab, Way, Memory) -> Result<Reading>,
}

const BY_CTR: &[Measure] = &[Checkpoint, Restore, Content, Extents, CheckpointPeak, RestorePeak];
const ALONE: &[Measure] = &[Checkpoint, Restore, CheckpointPeak, RestorePeak];

static GROUPS: &[Group] = &[
    Group {
        name: "random",
        what: "random data by ctr",
        fill: "random",
        huge: false,
        ways: &[Way::Stock, Way::Inline, Way::Store, Way::Store4k],
        measures: BY_CTR,
        take: by_ctr::reading,
    },
    Group {
        name: "huge",
        what: "random data in huge pages by ctr",
        fill: "random",
        huge: true,
        ways: &[Way::Stock, Way::Store],
        measures: BY_CTR,
        take: by_ctr::reading,
    },
    Group {
        name: "half-zero",
        what: "half of it zero, by ctr",
        fill: "half-zero",
        huge: false,
        ways: &[Way::Stock, Way::Inline, Way::Store],
        measures: BY_CTR,
        take: by_ctr::reading,
    },
    Group {
        name: "zero",
        what: "zeros by ctr",
        fill: "zero",
        huge: false,
        ways: &[Way::Stock, Way::Inline, Way::Store],
        measures: BY_CTR,
        take: by_ctr::reading,
    },
    Group {
        name: "alone",
        what: "random data by the shims alone",
        fill: "random",
        huge: false,
        ways: &[Way::Stock, Way::Inline, Way::Store],
        measures: ALONE,
        take: alone::reading,
    },
    Group {
        name: "disk",
        what: "a store on a disk, and dd with O_DIRECT",
        fill: "random",
        huge: false,
        ways: &[Way::Stock, Way::Disk],
        measures: &[Write, Read],
        take: alone::disk,
    },
];

impl Group {
    /// Names of the cases, and what they are.
    fn cases(&self, mib: u32) -> impl Iterator<Item = (String, Way, Measure)> {
        let size = if mib.is_multiple_of(1024) {
            format!("{}g", mib / 1024)
        } else {
            format!("{mib}m")
        };
        let ways = self.ways[1..].iter();
        ways.flat_map(|way| self.measures.iter().map(|measure| (*way, *measure)))
            .map(move |(way, measure)| {
                let name = match way {
                    Way::Disk => format!("{}-{size}-{}", self.name, measure.name().0),
                    way => format!("{}-{size}-{}-{}", self.name, way.name(), measure.name().0),
                };
                (name, way, measure)
            })
    }

    fn measure(&self, lab: &Lab, mib: u32, n: u32) -> Result<Vec<Case>> {
        let memory = Memory {
            fill: self.fill,
            huge: self.huge,
            mib,
        };
        let mut record = Record::default();
        let mut progress = Progress::begin(&format!("{} MiB of {}, {n} times", mib, self.what), n);
        for round in 0..n {
            let mut ways = self.ways.to_vec();
            if !round.is_multiple_of(2) {
                ways.reverse();
            }
            for way in ways {
                let reading = (self.take)(lab, way, memory);
                record.add(
                    way,
                    reading.with_context(|| format!("{} MiB, {}", mib, way.name()))?,
                );
            }
            progress.step();
        }
        progress.end();
        let case = |(name, way, measure): (String, Way, Measure)| {
            record
                .case(&name, way, measure)
                .with_context(|| format!("no reading of {name}"))
        };
        self.cases(mib).map(case).collect()
    }
}

/// All readings of a group.
#[derive(Default)]
struct Record {
    values: BTreeMap<(Way, Measure), Vec<f64>>,
    phases: BTreeMap<(Way, Measure), Vec<PhaseReadings>>,
}

/// A phase and its milliseconds.
type PhaseReadings = (String, Vec<f64>);

impl Record {
    fn add(&mut self, way: Way, reading: Reading) {
        for (measure, value) in reading.values {
            self.values.entry((way, measure)).or_default().push(value);
        }
        for (measure, phases) in reading.phases {
            let known = self.phases.entry((way, measure)).or_default();
            for (name, ms) in phases {
                match known.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, readings)) => readings.push(ms),
                    None => known.push((name, vec![ms])),
                }
            }
        }
    }

    fn case(&self, name: &str, way: Way, measure: Measure) -> Option<Case> {
        let of = |way| self.values.get(&(way, measure)).cloned();
        let unit = measure.name().1;
        let case = Case::new(NAME, name, unit, of(Way::Stock)?, of(way)?)?;
        let phases = self.phases.get(&(way, measure)).into_iter().flatten();
        let phase = |(name, readings): &PhaseReadings| {
            Some(Phase {
                name: name.clone(),
                ms: Stats::of(readings.clone())?.median,
            })
        };
        Some(Case {
            phases: phases.filter_map(phase).collect(),
            ..case
        })
    }
}

/// The nodes of the measurements.
struct Lab {
    host: GpuHost,
    pool: RefCell<Pool>,
}

impl Lab {
    fn begin(built: &Built, on_disk: bool) -> Result<Self> {
        let gpus = [SimGpu::h200(1)];
        let name = format!("bench-image-{}", std::process::id());
        let host = if on_disk {
            GpuHost::start_on_disk(built, Suite::Forky, &name, &gpus)?
        } else {
            GpuHost::start(built, Suite::Forky, &name, &gpus)?
        };
        let pool = Pool::begin(built)?.into();
        let lab = Self { host, pool };
        for (options, way) in [("huge=always", Way::Store), ("huge=never", Way::Store4k)] {
            let at = way.store().unwrap_or_default();
            lab.node().run(&["mkdir", "-p", at])?;
            let options = format!("mode=0700,{options}");
            lab.node()
                .run(&["mount", "-t", "tmpfs", "-o", &options, "bench-store", at])?;
        }
        Ok(lab)
    }

    fn node(&self) -> &Node {
        self.host.node()
    }

    /// Before each timed step.
    fn fill_pool(&self) -> Result<()> {
        self.pool.borrow_mut().fill()
    }

    /// Lets firn copy this way from now on.
    fn configure(&self, way: Way) -> Result<()> {
        self.host.configure(&match way.store() {
            None => "[images]\ninline-copy = \"firn\"\n".to_owned(),
            Some(store) => format!("[images]\nbulk = \"store\"\nstore = {store:?}\n"),
        })
    }

    /// Removes what the store of this way holds.
    fn empty_store(&self, way: Way) -> Result<()> {
        let Some(store) = way.store() else {
            return Ok(());
        };
        let all = ["find", store, "-mindepth", "1", "-delete"];
        self.node().run(&all).map(drop)
    }
}

/// Measures the picked groups.
pub(crate) fn measure(options: &Options) -> Result<Vec<Case>> {
    eprintln!("building release programs");
    let built = Built::build(Profile::Release)?;
    let mut cases = Vec::new();
    let mut lab: Option<(bool, Lab)> = None;
    for (group, mib) in options.jobs() {
        let on_disk = group.ways.contains(&Way::Disk);
        let kept = lab.take().filter(|(disk, _)| *disk == on_disk);
        let (_, lab) = lab.insert(match kept {
            Some(lab) => lab,
            None => (on_disk, Lab::begin(&built, on_disk)?),
        });
        let measured = group.measure(lab, mib, options.n);
        cases.extend(measured.with_context(|| group.what.to_owned())?);
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_case_has_a_name_of_its_own() {
        let mut names = cases();
        assert!(
            names.contains(&"random-4g-store-checkpoint".to_owned()),
            "{names:?}"
        );
        assert!(names.contains(&"disk-2g-write".to_owned()), "{names:?}");
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_case_compares_a_way_with_the_stock_shim_and_has_the_medians_of_its_phases() {
        let mut record = Record::default();
        let reading = |value: f64| Reading {
            values: vec![(Checkpoint, value)],
            phases: vec![(Checkpoint, vec![("criu-dump".to_owned(), value * 10.0)])],
        };
        assert!(record.case("x", Way::Store, Checkpoint).is_none());
        for value in [1.0, 3.0, 2.0] {
            record.add(
                Way::Stock,
                Reading {
                    phases: Vec::new(),
                    ..reading(8.0)
                },
            );
            record.add(Way::Store, reading(value));
        }
        let case = record.case("x", Way::Store, Checkpoint).unwrap();
        assert_eq!((case.ratio, case.unit), (Some(0.25), "s"));
        assert_eq!(
            (case.phases[0].name.as_str(), case.phases[0].ms),
            ("criu-dump", 20.0)
        );
        assert!(record.case("x", Way::Store, Restore).is_none());
    }
}
