//! Checkpoint and restore of GPU memory: one private anonymous region per GPU while the process holds no
//! device.

use std::collections::{BTreeMap, BTreeSet};

use simgpu_model::{Control, GpuInfo, Mapping, Uuid};

use crate::error::Error;
use crate::hardware::{self, Hardware};
use crate::process::{Allocation, Backing, Process, State};

const PAGE: usize = 4096;

/// Bytes that an allocation takes in the saved region of its GPU.
fn saved_size(allocation: &Allocation) -> usize {
    allocation.size.next_multiple_of(PAGE)
}

/// Copies GPU memory into the process and leaves the devices.
pub(crate) fn checkpoint(process: &mut Process) -> Result<(), Error> {
    if process.is_poisoned {
        return Err(Error::UNKNOWN);
    }
    if process.has_managed() {
        process.is_poisoned = true;
        return Err(Error::NOT_SUPPORTED);
    }
    let mut regions = Vec::new();
    for gpu in 0..process.seen.len() {
        let size = own(&process.allocations, gpu)
            .map(|(allocation, _)| saved_size(allocation))
            .sum();
        let region = (size > 0).then(|| Mapping::anonymous(size)).transpose();
        let region = region.map_err(|_| Error::OUT_OF_MEMORY)?;
        let mut done = 0;
        for (allocation, mapping) in own(&process.allocations, gpu) {
            let Some(region) = &region else {
                return Err(Error::UNKNOWN);
            };
            copy(
                mapping.at(0, allocation.size),
                region.at(done, allocation.size),
                allocation.size,
            );
            done += saved_size(allocation);
        }
        regions.push(region);
    }
    process.pieces.save().map_err(|_| Error::OUT_OF_MEMORY)?;
    process.saved = regions;
    for allocation in process.allocations.values_mut() {
        if let Backing::Imported { mapping } = &mut allocation.backing {
            *mapping = None;
        }
    }
    reserve(process)?;
    // Order matters: the mappings are gone before the memory behind them is freed.
    if let Some(hardware) = process.hardware.take() {
        hardware.leave();
    }
    process.nodes.clear();
    process.state = State::Checkpointed;
    Ok(())
}

/// Opens the devices again and copies GPU memory back; the process stays checkpointed when anything fails.
pub(crate) fn restore(process: &mut Process, pairs: &[(Uuid, Uuid)], token: u64) -> Result<(), Error> {
    if process.is_spoilt {
        return Err(Error::OPERATING_SYSTEM);
    }
    if process.has_imported() || process.has_large_peer_memory() {
        return Err(Error::INVALID_VALUE);
    }
    if process.seen.is_empty() {
        process.nodes = hardware::open_nodes();
        process.state = State::Locked;
        return Ok(());
    }
    // A control device that cannot be opened was not measured; a GPU's gives the same.
    let control = hardware::open_control().ok_or(Error::INVALID_VALUE)?;
    let targets = targets(process, &control, pairs)?;
    let exposed = exposed(process, &control, &targets, pairs)?;
    let memories: Result<Vec<_>, _> = targets.iter().map(hardware::open_gpu).collect();
    let mut hardware = Hardware::enter(control, memories.map_err(|_| Error::INVALID_VALUE)?, token)?;
    let gpus: BTreeSet<usize> = process.contexts.values().map(|context| context.gpu).collect();
    let mapped = gpus.into_iter().try_for_each(|gpu| hardware.map_base(gpu));
    let uuids: Vec<Uuid> = targets.iter().map(|gpu| gpu.uuid).collect();
    let loaded = mapped
        .and_then(|()| load(process, &hardware))
        .and_then(|()| process.pieces.load(&hardware, &uuids));
    if let Err(error) = loaded {
        let reserved = reserve(process);
        process.pieces.unload().map_err(|_| Error::OUT_OF_MEMORY)?;
        hardware.leave();
        reserved?;
        // Seen on an H100: it is never restored after that, also when there is room again, and its nodes stay
        // open.
        if error == Error::OUT_OF_MEMORY {
            process.is_spoilt = true;
            process.nodes = hardware::open_nodes();
        }
        return Err(error);
    }
    process.saved.iter_mut().for_each(|region| *region = None);
    process.pieces.forget_saved();
    process.current = uuids;
    process.exposed = exposed;
    process.hardware = Some(hardware);
    process.state = State::Locked;
    Ok(())
}

/// The GPUs that the process was not given and can open after this restore. Those that it could open after
/// an earlier one need pairs, as seen of driver 580 in a container whose device rules allowed every node.
fn exposed(
    process: &Process,
    control: &Control,
    targets: &[GpuInfo],
    pairs: &[(Uuid, Uuid)],
) -> Result<Vec<Uuid>, Error> {
    let moved = |gpu: &Uuid| match pairs.iter().find(|(old, _)| old == gpu) {
        Some((_, new)) => Ok(*new),
        // Not measured without a map.
        None if pairs.is_empty() => Ok(*gpu),
        None => Err(Error::INVALID_VALUE),
    };
    let mut exposed = process.exposed.iter().map(moved).collect::<Result<Vec<_>, _>>()?;
    for gpu in control.table.gpus.iter().filter(|gpu| hardware::is_open_to(gpu)) {
        if !exposed.contains(&gpu.uuid) {
            exposed.push(gpu.uuid);
        }
    }
    exposed.retain(|gpu| targets.iter().all(|target| target.uuid != *gpu));
    Ok(exposed)
}

/// First driver branch that takes a map.
const REMAP_BRANCH: u32 = 580;

/// The GPU that each of the process's GPUs becomes.
fn targets(process: &Process, control: &Control, pairs: &[(Uuid, Uuid)]) -> Result<Vec<GpuInfo>, Error> {
    // Not measured: the documentation has no map before 580, where its place in the arguments was reserved.
    if control.table.branch() < REMAP_BRANCH && !pairs.is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    let mut targets: Vec<GpuInfo> = Vec::new();
    for (current, seen) in process.current.iter().zip(&process.seen) {
        let wanted = match pairs.iter().find(|(old, _)| old == current) {
            Some((_, new)) => *new,
            None if pairs.is_empty() => *current,
            None => return Err(Error::NOT_SUPPORTED),
        };
        let target = control.table.gpu(wanted).ok_or(Error::INVALID_VALUE)?;
        // Neither two GPUs becoming one nor another model was measured; the documentation excludes both.
        if targets.iter().any(|other| other.uuid == wanted) || target.name != seen.name {
            return Err(Error::INVALID_VALUE);
        }
        targets.push(target.clone());
    }
    Ok(targets)
}

/// Allocates and fills everything on the new devices, at the addresses that it had.
fn load(process: &Process, hardware: &Hardware) -> Result<(), Error> {
    let mut done = vec![0; process.seen.len()];
    for allocation in process.allocations.values() {
        let Backing::Device { id, mapping } = &allocation.backing else {
            continue;
        };
        let gpu = hardware.gpu(allocation.gpu);
        let runs = gpu
            .memory
            .allocate(gpu.slot, *id, allocation.size)
            .ok_or(Error::OUT_OF_MEMORY)?;
        let mapped = gpu.memory.map_over(&runs, mapping);
        mapped.map_err(|_| Error::OUT_OF_MEMORY)?;
        let region = process.saved[allocation.gpu].as_ref().ok_or(Error::UNKNOWN)?;
        let offset = &mut done[allocation.gpu];
        copy(
            region.at(*offset, allocation.size),
            mapping.at(0, allocation.size),
            allocation.size,
        );
        *offset += saved_size(allocation);
    }
    Ok(())
}

/// Keeps the addresses of all memory on devices, and nothing behind them.
fn reserve(process: &Process) -> Result<(), Error> {
    let mut own = process
        .allocations
        .values()
        .filter_map(|allocation| match &allocation.backing {
            Backing::Device { mapping, .. } => Some(mapping),
            _ => None,
        });
    let reserved = own.try_for_each(Mapping::reserve);
    reserved.map_err(|_| Error::OUT_OF_MEMORY)
}

/// The process's own allocations on one GPU, in the order of their addresses.
fn own(allocations: &BTreeMap<u64, Allocation>, gpu: usize) -> impl Iterator<Item = (&Allocation, &Mapping)> {
    allocations
        .values()
        .filter(move |allocation| allocation.gpu == gpu)
        .filter_map(|allocation| match &allocation.backing {
            Backing::Device { mapping, .. } => Some((allocation, mapping)),
            _ => None,
        })
}

fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: both ranges were checked by `Mapping::at`, belong to different mappings, and no other thread
    // uses them: the gate is closed.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}
