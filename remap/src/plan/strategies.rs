//! The maps of the policies, as places in the grant: one for every source GPU, all of them different.
//!
//! Both sides are in the order of minors.

use firn_gpu::{Gpu, GpuPair, GpuUuid, SourceGpu};

use super::fit::{fit, own_place};
use super::search::{MOST_STEPS, search};
use super::{PlanError, PlanRequest, Side, Warning, warning};

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
    let has_pair = |gpu: &&SourceGpu| pairs.iter().any(|pair| pair.old == gpu.uuid);
    let missing = source.iter().filter(|gpu| !has_pair(gpu));
    let missing: Vec<GpuUuid> = missing.map(|gpu| gpu.uuid.clone()).collect();
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
    let missing = source.iter().filter(|old| own_place(old, grant).is_none());
    let missing: Vec<GpuUuid> = missing.map(|old| old.uuid.clone()).collect();
    if !missing.is_empty() {
        return Err(PlanError::StrictUnmet {
            missing,
            granted: grant.iter().map(|gpu| gpu.uuid.clone()).collect(),
        });
    }
    Ok(places.flatten().collect())
}

/// The best map that keeps the NVLinks. If the search reaches its limit: the best one until then, and a
/// warning.
pub(super) fn best(
    request: &PlanRequest<'_>,
    source: &[&SourceGpu],
    grant: &[&Gpu],
) -> Result<(Vec<usize>, Option<Warning>), PlanError> {
    let in_order = by_size(source, grant)?;
    let found = search(request, source, grant, MOST_STEPS);
    let cut = found.is_cut.then_some(Warning::SearchCut { steps: MOST_STEPS });
    if let Some(map) = found.map {
        return Ok((map, cut));
    }
    let chosen: Vec<_> = (source.iter().zip(&in_order))
        .map(|(old, at)| (*old, grant[*at]))
        .collect();
    match warning::lost_links(request, &chosen).into_iter().next() {
        Some(lost) if cut.is_none() => Err(PlanError::TopologyUnsatisfied { lost }),
        _ => Ok((in_order, cut)),
    }
}

/// A map that ignores links. GPUs of both sides stay. Of the others, the one with most memory chooses first:
/// whatever it takes, those after it need no more than it does, so a map is found whenever one exists. (That
/// GPUs stay loses no map either: the two partners that it separates fit each other, because fitting is
/// transitive.)
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
