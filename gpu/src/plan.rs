//! Which GPU of the target takes the place of which GPU of the source: a pure function, decided before anything starts.
//!
//! The driver wants a pair for every GPU that the checkpointed process could see, and takes a GPU only for one of the
//! same chip with enough memory. A [`GpuMap`] is therefore a bijection from all source GPUs into the grant, in which
//! every pair has the same PCI device id and model name and the new GPU has no less memory than the old one. The same
//! input gives the same map, in whatever order GPUs are listed.

use serde::{Deserialize, Serialize};

use crate::{Gpu, GpuPair, GpuUuid};

mod error;
#[cfg(test)]
mod tests;

pub use error::{MapSyntax, PlanError, Side};

/// First driver branch whose restore can change GPUs.
const REMAP_BRANCH: u32 = 580;

/// A GPU that the checkpointed container was granted, as the manifest keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceGpu {
    pub uuid: GpuUuid,
    /// Model name.
    pub name: String,
    /// `(device << 16) | vendor`, which stands for the chip.
    pub pci_device_id: u32,
    /// Total memory in bytes.
    pub memory_total: u64,
    /// N of `/dev/nvidiaN` on the source.
    pub minor: u32,
    /// Whether MIG mode was on.
    #[serde(default)]
    pub mig: bool,
}

impl From<&Gpu> for SourceGpu {
    fn from(gpu: &Gpu) -> Self {
        Self {
            uuid: gpu.uuid.clone(),
            name: gpu.name.clone(),
            pci_device_id: gpu.pci_device_id,
            memory_total: gpu.memory_total,
            minor: gpu.minor,
            mig: gpu.mig,
        }
    }
}

/// How the map is chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// A GPU that is in both grants stays; the others are paired in minor order, those with most memory first.
    /// Both grants have the same number of GPUs.
    Auto,
    /// The operator's map. The grant may have GPUs that are not in it.
    Explicit(Vec<GpuPair>),
}

/// Both sides of a restore.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// GPUs of the checkpointed container.
    pub source: &'a [SourceGpu],
    /// Full driver version that made the checkpoint.
    pub source_driver: &'a str,
    /// GPUs that the target container is granted.
    pub grant: &'a [Gpu],
    /// Full driver version of this node.
    pub target_driver: &'a str,
    pub policy: &'a Policy,
}

/// A pair for every source GPU, in the source's minor order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct GpuMap(Vec<GpuPair>);

impl GpuMap {
    /// All pairs.
    pub fn pairs(&self) -> &[GpuPair] {
        &self.0
    }

    /// Whether every GPU stays.
    pub fn is_identity(&self) -> bool {
        self.0.iter().all(|pair| pair.old == pair.new)
    }

    /// What the driver's restore is given: nothing when every GPU stays, else all pairs.
    pub fn for_driver(&self) -> &[GpuPair] {
        if self.is_identity() { &[] } else { &self.0 }
    }
}

/// Decides the map, or why there is none.
pub fn plan(demand: &Demand<'_>) -> Result<GpuMap, PlanError> {
    if demand.source_driver != demand.target_driver {
        return Err(PlanError::DriverVersionMismatch {
            made: demand.source_driver.to_owned(),
            here: demand.target_driver.to_owned(),
        });
    }
    let mut source: Vec<&SourceGpu> = demand.source.iter().collect();
    source.sort_by_key(|gpu| (gpu.minor, &gpu.uuid));
    let mut grant: Vec<&Gpu> = demand.grant.iter().collect();
    grant.sort_by_key(|gpu| (gpu.minor, &gpu.uuid));
    refuse_twice(Side::Source, source.iter().map(|gpu| &gpu.uuid))?;
    refuse_twice(Side::Target, grant.iter().map(|gpu| &gpu.uuid))?;
    refuse_mig(&source, &grant)?;

    let few = grant.len() < source.len();
    let map = match demand.policy {
        Policy::Explicit(_) if few => return Err(count_mismatch(&source, &grant)),
        Policy::Explicit(pairs) => explicit(&source, &grant, pairs)?,
        Policy::Auto if grant.len() != source.len() => return Err(count_mismatch(&source, &grant)),
        Policy::Auto => auto(&source, grant)?,
    };
    if !map.is_identity() && branch(demand.target_driver).is_some_and(|branch| branch < REMAP_BRANCH) {
        return Err(PlanError::DriverTooOldForRemap {
            here: demand.target_driver.to_owned(),
        });
    }
    Ok(map)
}

/// Reads `GPU-old=GPU-new,...`, the form of the annotation and of the configuration.
pub fn parse_map(text: &str) -> Result<Vec<GpuPair>, MapSyntax> {
    text.split(',')
        .map(str::trim)
        .filter(|pair| !pair.is_empty())
        .map(parse_pair)
        .collect()
}

fn parse_pair(text: &str) -> Result<GpuPair, MapSyntax> {
    let (old, new) = text
        .split_once('=')
        .ok_or_else(|| MapSyntax::NoPair(text.chars().take(100).collect()))?;
    Ok(GpuPair {
        old: old.trim().parse()?,
        new: new.trim().parse()?,
    })
}

fn count_mismatch(source: &[&SourceGpu], grant: &[&Gpu]) -> PlanError {
    PlanError::GpuCountMismatch {
        had: source.iter().map(|gpu| gpu.uuid.clone()).collect(),
        granted: grant.iter().map(|gpu| gpu.uuid.clone()).collect(),
    }
}

fn refuse_twice<'a>(side: Side, uuids: impl Iterator<Item = &'a GpuUuid>) -> Result<(), PlanError> {
    let mut seen: Vec<&GpuUuid> = uuids.collect();
    seen.sort();
    match seen.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(PlanError::GpuListedTwice {
            side,
            uuid: pair[0].clone(),
        }),
        None => Ok(()),
    }
}

fn refuse_mig(source: &[&SourceGpu], grant: &[&Gpu]) -> Result<(), PlanError> {
    if let Some(gpu) = source.iter().find(|gpu| gpu.mig) {
        return Err(PlanError::MigUnsupported {
            side: Side::Source,
            uuid: gpu.uuid.clone(),
        });
    }
    match grant.iter().find(|gpu| gpu.mig) {
        Some(gpu) => Err(PlanError::MigUnsupported {
            side: Side::Target,
            uuid: gpu.uuid.clone(),
        }),
        None => Ok(()),
    }
}

/// The operator's pairs, checked and put into the source's order.
fn explicit(source: &[&SourceGpu], grant: &[&Gpu], pairs: &[GpuPair]) -> Result<GpuMap, PlanError> {
    for (i, pair) in pairs.iter().enumerate() {
        if pairs[..i].iter().any(|earlier| earlier.old == pair.old) {
            return Err(PlanError::MapDuplicate {
                side: Side::Source,
                uuid: pair.old.clone(),
            });
        }
        if pairs[..i].iter().any(|earlier| earlier.new == pair.new) {
            return Err(PlanError::MapDuplicate {
                side: Side::Target,
                uuid: pair.new.clone(),
            });
        }
        if !source.iter().any(|gpu| gpu.uuid == pair.old) {
            return Err(PlanError::MapUnknownSource {
                uuid: pair.old.clone(),
                had: source.iter().map(|gpu| gpu.uuid.clone()).collect(),
            });
        }
    }
    let missing: Vec<GpuUuid> = source
        .iter()
        .filter(|gpu| !pairs.iter().any(|pair| pair.old == gpu.uuid))
        .map(|gpu| gpu.uuid.clone())
        .collect();
    if !missing.is_empty() {
        return Err(PlanError::MapIncomplete { missing });
    }
    let mut map = Vec::with_capacity(source.len());
    for old in source {
        // Every source GPU has a pair, as just checked.
        for pair in pairs.iter().filter(|pair| pair.old == old.uuid) {
            let new =
                grant
                    .iter()
                    .find(|gpu| gpu.uuid == pair.new)
                    .ok_or_else(|| PlanError::MapUnknownTarget {
                        uuid: pair.new.clone(),
                        granted: grant.iter().map(|gpu| gpu.uuid.clone()).collect(),
                    })?;
            fits(old, &[new])?;
            map.push(pair.clone());
        }
    }
    Ok(GpuMap(map))
}

/// GPUs of both sides stay. Of the others the one with most memory chooses first: whatever it takes, those after it
/// need no more than it does, so that a map is found whenever there is one. (Letting GPUs stay loses none either: the
/// two partners that it splits from each other fit each other, because fitting is transitive.)
fn auto(source: &[&SourceGpu], mut grant: Vec<&Gpu>) -> Result<GpuMap, PlanError> {
    let mut map: Vec<(usize, GpuPair)> = Vec::with_capacity(source.len());
    let mut rest: Vec<(usize, &SourceGpu)> = Vec::new();
    for (place, old) in source.iter().copied().enumerate() {
        match grant.iter().position(|new| new.uuid == old.uuid) {
            Some(at) => {
                let new = grant.remove(at);
                fits(old, &[new])?;
                map.push((
                    place,
                    GpuPair {
                        old: old.uuid.clone(),
                        new: new.uuid.clone(),
                    },
                ));
            }
            None => rest.push((place, old)),
        }
    }
    // Stable, so that equal ones stay in minor order.
    rest.sort_by_key(|(_, old)| std::cmp::Reverse(old.memory_total));
    for (place, old) in rest {
        let at = fits(old, &grant)?;
        let new = grant.remove(at);
        map.push((
            place,
            GpuPair {
                old: old.uuid.clone(),
                new: new.uuid.clone(),
            },
        ));
    }
    map.sort_by_key(|(place, _)| *place);
    Ok(GpuMap(map.into_iter().map(|(_, pair)| pair).collect()))
}

/// The first of `candidates` that can take the place of `old`.
fn fits(old: &SourceGpu, candidates: &[&Gpu]) -> Result<usize, PlanError> {
    let same_model = |new: &&Gpu| new.pci_device_id == old.pci_device_id && new.name == old.name;
    let found = candidates
        .iter()
        .position(|new| same_model(new) && new.memory_total >= old.memory_total);
    if let Some(at) = found {
        return Ok(at);
    }
    let largest = candidates
        .iter()
        .copied()
        .filter(same_model)
        .max_by_key(|new| new.memory_total);
    Err(match largest {
        Some(new) => PlanError::GpuMemoryTooSmall {
            old: old.uuid.clone(),
            needs: old.memory_total,
            new: new.uuid.clone(),
            has: new.memory_total,
        },
        None => PlanError::GpuModelMismatch {
            old: old.uuid.clone(),
            model: format!("{} [{:08x}]", old.name, old.pci_device_id),
            candidates: candidates
                .iter()
                .map(|new| format!("{} {} [{:08x}]", new.uuid, new.name, new.pci_device_id))
                .collect(),
        },
    })
}

/// Number before the first dot of a driver version; `None` for a version of an unknown form, which refuses nothing.
fn branch(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}
