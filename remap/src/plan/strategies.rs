//! The maps of the policies, as places in the grant: one for every source GPU, all of them different.
//!
//! Both sides are in the order of minors.

use super::search::{self, Outcome};
use super::{Demand, PlanError, Side, Warning, warning};
use firn_gpu::SourceGpu;
use firn_gpu::{Gpu, GpuPair, GpuUuid};

/// The operator's pairs, checked.
pub(super) fn explicit(
    source: &[&SourceGpu],
    grant: &[&Gpu],
    pairs: &[GpuPair],
) -> Result<Vec<usize>, PlanError> {
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
    let partner = |old: &&SourceGpu| {
        // Every source GPU has a pair, as just checked.
        let pair = pairs.iter().find(|pair| pair.old == old.uuid);
        let uuid = &pair.map_or(&old.uuid, |pair| &pair.new);
        let at = grant.iter().position(|gpu| gpu.uuid == **uuid);
        let at = at.ok_or_else(|| PlanError::MapUnknownTarget {
            uuid: (*uuid).clone(),
            granted: grant.iter().map(|gpu| gpu.uuid.clone()).collect(),
        })?;
        fit(old, &[grant[at]])?;
        Ok(at)
    };
    source.iter().map(partner).collect()
}

/// Every GPU in its own place.
pub(super) fn strict(source: &[&SourceGpu], grant: &[&Gpu]) -> Result<Vec<usize>, PlanError> {
    let places = source.iter().map(|old| own_place(old, grant));
    let missing: Vec<GpuUuid> = (source.iter().zip(places.clone()))
        .filter(|(_, at)| at.is_none())
        .map(|(old, _)| old.uuid.clone())
        .collect();
    if !missing.is_empty() {
        return Err(PlanError::StrictUnmet {
            missing,
            granted: grant.iter().map(|gpu| gpu.uuid.clone()).collect(),
        });
    }
    Ok(places.flatten().collect())
}

/// By the order of minors alone.
pub(super) fn index(source: &[&SourceGpu], grant: &[&Gpu]) -> Result<Vec<usize>, PlanError> {
    let in_place = |(at, old): (usize, &&SourceGpu)| fit(old, &[grant[at]]).map(|_| at);
    source.iter().enumerate().map(in_place).collect()
}

/// The best map that keeps the NVLinks. When the search for it is cut short, what was found by then, which is told.
pub(super) fn best(
    demand: &Demand<'_>,
    source: &[&SourceGpu],
    grant: &[&Gpu],
) -> Result<(Vec<usize>, Option<Warning>), PlanError> {
    let in_order = by_size(source, grant)?;
    let steps = search::MOST_STEPS;
    match search::search(demand, source, grant, steps) {
        Outcome::Best(targets) => Ok((targets, None)),
        Outcome::SoFar(targets) => Ok((targets, Some(Warning::SearchCut { steps }))),
        Outcome::Cut => Ok((in_order, Some(Warning::SearchCut { steps }))),
        Outcome::None => {
            let chosen: Vec<_> = (source.iter().zip(&in_order))
                .map(|(old, at)| (*old, grant[*at]))
                .collect();
            match warning::lost_links(demand, &chosen).into_iter().next() {
                Some(lost) => Err(PlanError::TopologyUnsatisfied { lost }),
                // Not so: the map in order would have been found.
                None => Ok((in_order, None)),
            }
        }
    }
}

/// Whatever the links: GPUs of both sides stay. Of the others the one with most memory chooses first: whatever it takes,
/// those after it need no more than it does, so that a map is found whenever there is one. (Letting GPUs stay loses none
/// either: the two partners that it splits from each other fit each other, because fitting is transitive.)
fn by_size(source: &[&SourceGpu], grant: &[&Gpu]) -> Result<Vec<usize>, PlanError> {
    let mut targets: Vec<Option<usize>> = vec![None; source.len()];
    let mut free: Vec<usize> = (0..grant.len()).collect();
    for (old, target) in source.iter().zip(&mut targets) {
        if let Some(at) = own_place(old, grant) {
            fit(old, &[grant[at]])?;
            free.retain(|place| *place != at);
            *target = Some(at);
        }
    }
    let mut rest: Vec<usize> = (0..source.len()).filter(|at| targets[*at].is_none()).collect();
    // Stable, so that equal ones stay in minor order.
    firn_host::ordered::sort_few_by_key(&mut rest, |at| std::cmp::Reverse(source[*at].memory_total));
    for old in rest {
        let candidates: Vec<&Gpu> = free.iter().map(|at| grant[*at]).collect();
        let at = fit(source[old], &candidates)?;
        targets[old] = Some(free.remove(at));
    }
    Ok(targets.into_iter().flatten().collect())
}

pub(super) fn own_place(old: &SourceGpu, grant: &[&Gpu]) -> Option<usize> {
    grant.iter().position(|new| new.uuid == old.uuid)
}

fn is_same_model(old: &SourceGpu, new: &Gpu) -> bool {
    new.pci_device_id == old.pci_device_id && new.name == old.name
}

/// Whether one GPU can take the place of another, links aside.
pub(super) fn fits(old: &SourceGpu, new: &Gpu) -> bool {
    is_same_model(old, new) && new.memory_total >= old.memory_total
}

/// The first of `candidates` that can take the place of `old`.
fn fit(old: &SourceGpu, candidates: &[&Gpu]) -> Result<usize, PlanError> {
    if let Some(at) = candidates.iter().position(|new| fits(old, new)) {
        return Ok(at);
    }
    let largest = candidates
        .iter()
        .copied()
        .filter(|new| is_same_model(old, new))
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
