//! Which GPU of the target takes the place of which GPU of the source: a pure function, decided before
//! anything starts.
//!
//! The driver wants a pair for every GPU that the checkpointed process could see, and takes a GPU only for
//! one of the same chip with enough memory. A [`GpuMap`] is therefore a bijection from all source GPUs into
//! the grant, in which every pair has the same PCI device id and model name and the new GPU has no less
//! memory than the old one. The same input gives the same map, in whatever order GPUs are listed.
//!
//! A [`MapPolicy`] chooses one of these maps. The policies that search keep NVLinks: a program that reached a
//! GPU over NVLink continues to assume that it can.

use serde::{Deserialize, Serialize};

use firn_gpu::{Gpu, GpuPair, GpuUuid, SourceGpu, Topology};

mod error;
mod fit;
mod search;
mod strategies;
#[cfg(test)]
mod tests;
mod warning;

pub use error::{MapSyntax, PlanError, Side};
pub use warning::{LostLink, Warning};

/// First driver branch whose restore can change GPUs.
const REMAP_BRANCH: u32 = 580;

/// How the map is chosen. The grant has as many GPUs as the checkpoint had, unless the policy allows more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapPolicy {
    /// GPUs that are in both grants stay, the others are chosen such that NVLinks are kept. Of several such
    /// maps, the one that keeps most GPUs near each other is chosen, in the order of minors.
    Auto,
    /// As `Auto`, from a grant that may have more GPUs than are needed.
    Subset,
    /// Every GPU stays.
    Strict,
    /// The operator's map. The grant may have GPUs that are not in it.
    Explicit(Vec<GpuPair>),
}

/// Both sides of a restore.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest<'a> {
    /// GPUs of the checkpointed container.
    pub source: &'a [SourceGpu],
    /// How they reached each other.
    pub source_topology: &'a Topology,
    /// Full driver version that made the checkpoint.
    pub source_driver: &'a str,
    /// GPUs that the target container is granted.
    pub grant: &'a [Gpu],
    /// How the GPUs of this node reach each other.
    pub target_topology: &'a Topology,
    /// Full driver version of this node.
    pub target_driver: &'a str,
    pub policy: &'a MapPolicy,
}

/// A pair for every source GPU, in the source's minor order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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

/// A map, and what the operator should know about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub map: GpuMap,
    /// What a restore with it does not keep.
    pub warnings: Vec<Warning>,
}

/// Decides the map, or why there is none.
pub fn plan(request: &PlanRequest<'_>) -> Result<Plan, PlanError> {
    if request.source_driver != request.target_driver {
        return Err(PlanError::DriverVersionMismatch {
            made: request.source_driver.to_owned(),
            here: request.target_driver.to_owned(),
        });
    }
    let mut source: Vec<&SourceGpu> = request.source.iter().collect();
    firn_host::ordered::sort_few_by_key(&mut source, |gpu| (gpu.minor, &gpu.uuid));
    let mut grant: Vec<&Gpu> = request.grant.iter().collect();
    firn_host::ordered::sort_few_by_key(&mut grant, |gpu| (gpu.minor, &gpu.uuid));
    refuse_twice_or_mig(Side::Source, source.iter().map(|gpu| (&gpu.uuid, gpu.mig)))?;
    refuse_twice_or_mig(Side::Target, grant.iter().map(|gpu| (&gpu.uuid, gpu.mig)))?;
    refuse_count(&source, &grant, request.policy)?;

    let (targets, cut) = match request.policy {
        MapPolicy::Explicit(pairs) => (strategies::explicit(&source, &grant, pairs)?, None),
        MapPolicy::Strict => (strategies::strict(&source, &grant)?, None),
        MapPolicy::Auto | MapPolicy::Subset => strategies::best(request, &source, &grant)?,
    };
    let chosen: Vec<(&SourceGpu, &Gpu)> = source
        .iter()
        .zip(&targets)
        .map(|(old, at)| (*old, grant[*at]))
        .collect();
    let map = GpuMap(chosen.iter().map(|(old, new)| pair(old, new)).collect());
    if !map.is_identity() && branch(request.target_driver).is_some_and(|branch| branch < REMAP_BRANCH) {
        return Err(PlanError::DriverTooOldForRemap {
            here: request.target_driver.to_owned(),
        });
    }
    let mut warnings = warning::of(request, &chosen);
    warnings.extend(cut);
    Ok(Plan { map, warnings })
}

fn pair(old: &SourceGpu, new: &Gpu) -> GpuPair {
    GpuPair {
        old: old.uuid.clone(),
        new: new.uuid.clone(),
    }
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

fn refuse_count(source: &[&SourceGpu], grant: &[&Gpu], policy: &MapPolicy) -> Result<(), PlanError> {
    let enough = match policy {
        MapPolicy::Subset | MapPolicy::Explicit(_) => grant.len() >= source.len(),
        MapPolicy::Auto | MapPolicy::Strict => grant.len() == source.len(),
    };
    if enough {
        return Ok(());
    }
    Err(PlanError::GpuCountMismatch {
        had: source.iter().map(|gpu| gpu.uuid.clone()).collect(),
        granted: grant.iter().map(|gpu| gpu.uuid.clone()).collect(),
    })
}

/// Every GPU of a side with whether MIG mode is on for it.
fn refuse_twice_or_mig<'a>(
    side: Side,
    gpus: impl Iterator<Item = (&'a GpuUuid, bool)>,
) -> Result<(), PlanError> {
    let mut seen = Vec::new();
    for (uuid, is_mig) in gpus {
        let is_twice = seen.contains(&uuid);
        seen.push(uuid);
        let uuid = uuid.clone();
        if is_twice {
            return Err(PlanError::GpuListedTwice { side, uuid });
        }
        if is_mig {
            return Err(PlanError::MigUnsupported { side, uuid });
        }
    }
    Ok(())
}

/// Number before the first dot of a driver version; `None` for a version of an unknown form, which refuses
/// nothing.
pub(crate) fn branch(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}
