//! Legacy IPC: one process's device memory opened by another. Lock and checkpoint do not mind; the importer
//! cannot be restored.

use simgpu_model::Uuid;

use super::give;
use crate::abi::IpcMemHandle;
use crate::driver;
use crate::error::{Error, answer};
use crate::process::Backing;

/// What a handle contains: which GPU, whose memory (slot and token), which allocation, how large.
struct Exported {
    gpu: Uuid,
    token: u64,
    size: u64,
    slot: u32,
    id: u32,
}

impl Exported {
    fn encode(&self) -> IpcMemHandle {
        let mut reserved = [0; 64];
        let fields = [
            &self.gpu.0[..],
            &self.token.to_le_bytes(),
            &self.size.to_le_bytes(),
            &self.slot.to_le_bytes(),
            &self.id.to_le_bytes(),
        ]
        .concat();
        reserved[..fields.len()].copy_from_slice(&fields);
        IpcMemHandle { reserved }
    }

    fn decode(handle: &IpcMemHandle) -> Self {
        fn take<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
            let (field, rest) = bytes.split_first_chunk().expect("a handle has 64 bytes");
            *bytes = rest;
            *field
        }
        let mut bytes = &handle.reserved[..];
        Self {
            gpu: Uuid(take(&mut bytes)),
            token: u64::from_le_bytes(take(&mut bytes)),
            size: u64::from_le_bytes(take(&mut bytes)),
            slot: u32::from_le_bytes(take(&mut bytes)),
            id: u32::from_le_bytes(take(&mut bytes)),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut IpcMemHandle, address: u64) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let process = entered.process();
        let allocation = process.allocations.get(&address).ok_or(Error::INVALID_VALUE)?;
        let Backing::Device { id, .. } = allocation.backing else {
            return Err(Error::INVALID_VALUE);
        };
        let open = process.open_gpu(allocation.gpu)?;
        let owner = open
            .memory
            .slots()
            .owners()
            .into_iter()
            .find(|(slot, _)| *slot == open.slot);
        let (slot, token) = owner.ok_or(Error::UNKNOWN)?;
        let exported = Exported {
            gpu: process.current[allocation.gpu],
            token,
            size: allocation.size as u64,
            slot: u32::try_from(slot).map_err(|_| Error::UNKNOWN)?,
            id,
        };
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(handle, exported.encode()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcMemHandle, _flags: u32) -> i32 {
    answer(|| {
        let exported = Exported::decode(&handle);
        let entered = driver::enter()?;
        let mut process = entered.process();
        let gpu = process
            .current
            .iter()
            .position(|uuid| *uuid == exported.gpu)
            .ok_or(Error::INVALID_VALUE)?;
        let open = process.open_gpu(gpu)?;
        let slot = exported.slot as usize;
        if !open.memory.slots().owners().contains(&(slot, exported.token)) {
            return Err(Error::INVALID_VALUE);
        }
        let runs = open.memory.runs(slot, exported.id);
        let mapping = open.memory.map(&runs).map_err(|_| Error::INVALID_VALUE)?;
        let size = simgpu_model::index(exported.size);
        if mapping.size() < size {
            return Err(Error::INVALID_VALUE);
        }
        let made = process.insert(
            gpu,
            size,
            Backing::Imported {
                mapping: Some(mapping),
            },
        );
        // SAFETY: the caller keeps the driver API's contract.
        unsafe { give(address, made) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: u64) -> i32 {
    answer(|| {
        let entered = driver::enter()?;
        let mut process = entered.process();
        match process.allocations.get(&address) {
            Some(allocation) if matches!(allocation.backing, Backing::Imported { .. }) => {
                process.free(address)
            }
            _ => Err(Error::INVALID_VALUE),
        }
    })
}
