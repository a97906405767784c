//! Whether a GPU of the grant can take the place of a GPU of the checkpoint, links aside.

use firn_gpu::{Gpu, SourceGpu};

use super::PlanError;

/// Where the GPU itself is in the grant.
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
pub(super) fn fit(old: &SourceGpu, candidates: &[&Gpu]) -> Result<usize, PlanError> {
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
