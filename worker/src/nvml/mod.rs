//! What libnvidia-ml reports about the node's GPUs, behind a safe trait.
//!
//! The library is opened and initialised once and never shut down: the worker that uses it lives for one
//! transaction.

mod links;
mod names;
mod raw;

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_uint};

use crate::sys::{Library, LoadError};
use firn_gpu::protocol::GpuMemory;
use firn_gpu::{Gpu, GpuUuid, Link};
use raw::{Device, LIBRARY, Memory, PciInfo, ProcessInfo, Return, Table};

/// `NVML_ERROR_INVALID_ARGUMENT`.
const INVALID_ARGUMENT: Return = 2;

/// `NVML_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: Return = 3;

/// `NVML_ERROR_INSUFFICIENT_SIZE`.
const INSUFFICIENT_SIZE: Return = 7;

/// `NVML_VALUE_NOT_AVAILABLE` as a number of bytes.
const NOT_AVAILABLE: u64 = u64::MAX;

/// Processes on one GPU of which NVML is asked at most.
const MOST_PROCESSES: usize = 4096;

/// Buffer sizes of nvml.h for the texts read here: driver version, UUID and name need at most 80, 96 and 96.
const TEXT: usize = 128;

/// An answer of NVML that is not `NVML_SUCCESS`, or that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    /// The library cannot be used at all.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A call failed.
    #[error("{call} answered {name}")]
    Call {
        call: &'static str,
        code: i32,
        name: String,
    },
    /// A UUID of an unknown form.
    #[error("nvmlDeviceGetUUID answered a text that is no UUID")]
    Uuid(#[from] firn_gpu::BadUuid),
}

/// NVML of this node.
pub trait Nvml: Send + Sync {
    /// Full driver version, `580.159.04`.
    fn driver_version(&self) -> Result<String, NvmlError>;

    /// GPUs in NVML's order, without their nodes; one that does not answer (lost, no permission) is an error
    /// in its place.
    fn gpus(&self) -> Result<Vec<Result<Gpu, NvmlError>>, NvmlError>;

    /// GPU memory in use by each process. Processes whose memory NVML does not report are left out; in some
    /// virtual machines these are all.
    fn memory_in_use(&self) -> Result<BTreeMap<i32, GpuMemory>, NvmlError>;

    /// The links between GPUs, as far as NVML reports them.
    fn links(&self) -> Vec<Link>;
}

/// libnvidia-ml.so.1, opened and initialised.
pub(crate) struct NvmlLibrary {
    table: Table,
}

impl NvmlLibrary {
    pub(crate) fn open() -> Result<Self, NvmlError> {
        let table = Table::load(Library::open(LIBRARY)?)?;
        // SAFETY: nvmlInit_v2 has no arguments and no precondition.
        check("nvmlInit_v2", unsafe { (table.init)() })?;
        Ok(Self { table })
    }

    fn count(&self) -> Result<c_uint, NvmlError> {
        read("nvmlDeviceGetCount_v2", |count| {
            // SAFETY: the library is initialised, and `read` gives a live unsigned int.
            unsafe { (self.table.count)(count) }
        })
    }

    fn device(&self, index: c_uint) -> Result<Device, NvmlError> {
        read("nvmlDeviceGetHandleByIndex_v2", |device| {
            // SAFETY: the library is initialised, and `read` gives a live handle, which the call sets.
            unsafe { (self.table.handle_by_index)(index, device) }
        })
    }

    /// The processes that compute on a GPU; none where NVML cannot list them.
    fn processes(&self, device: Device) -> Result<Vec<ProcessInfo>, NvmlError> {
        let call = "nvmlDeviceGetComputeRunningProcesses_v3";
        let Some(list) = self.table.processes else {
            return Ok(Vec::new());
        };
        let mut found = vec![ProcessInfo::default(); 64];
        loop {
            let mut count = c_uint::try_from(found.len()).unwrap_or_default();
            // SAFETY: `device` comes from the library, and the buffer has room for `count` entries.
            let result = unsafe { list(device, &raw mut count, found.as_mut_ptr()) };
            if result == INSUFFICIENT_SIZE && found.len() < MOST_PROCESSES {
                found.resize(found.len() * 2, ProcessInfo::default());
                continue;
            }
            let listed = if supported(call, result)? { count } else { 0 };
            found.truncate(usize::try_from(listed).unwrap_or_default());
            return Ok(found);
        }
    }

    fn uuid(&self, device: Device) -> Result<GpuUuid, NvmlError> {
        let uuid = text("nvmlDeviceGetUUID", |buffer, length| {
            // SAFETY: `device` comes from the library, and `text` gives a live buffer and its length.
            unsafe { (self.table.uuid)(device, buffer, length) }
        })?;
        Ok(uuid.parse()?)
    }

    fn gpu(&self, index: c_uint) -> Result<Gpu, NvmlError> {
        let table = &self.table;
        let device = self.device(index)?;

        let uuid = self.uuid(device)?;
        let name = text("nvmlDeviceGetName", |buffer, length| {
            // SAFETY: `device` comes from the library, and `text` gives a live buffer and its length.
            unsafe { (table.name)(device, buffer, length) }
        })?;

        let pci: PciInfo = read("nvmlDeviceGetPciInfo_v3", |pci| {
            // SAFETY: `device` comes from the library; the struct is live and has the layout of the _v3 call.
            unsafe { (table.pci_info)(device, pci) }
        })?;
        let memory: Memory = read("nvmlDeviceGetMemoryInfo", |memory| {
            // SAFETY: `device` comes from the library; the struct is live and has the layout of nvmlMemory_t.
            unsafe { (table.memory_info)(device, memory) }
        })?;
        let minor = read("nvmlDeviceGetMinorNumber", |minor| {
            // SAFETY: `device` comes from the library, and `read` gives a live unsigned int.
            unsafe { (table.minor_number)(device, minor) }
        })?;

        Ok(Gpu {
            uuid,
            name,
            pci_device_id: pci.pci_device_id,
            pci_address: until_nul(&pci.bus_id),
            memory_total: memory.total,
            memory_free: memory.free,
            minor,
            mig: self.mig(device)?,
            persistence: self.persistence(device)?,
            node: None,
        })
    }

    fn mig(&self, device: Device) -> Result<bool, NvmlError> {
        let Some(mig_mode) = self.table.mig_mode else {
            return Ok(false);
        };
        let (mut current, mut pending): (c_uint, c_uint) = (0, 0);
        // SAFETY: `device` comes from the library and both pointers are to live unsigned ints.
        let result = unsafe { mig_mode(device, &raw mut current, &raw mut pending) };
        Ok(supported("nvmlDeviceGetMigMode", result)? && current == 1)
    }

    fn persistence(&self, device: Device) -> Result<bool, NvmlError> {
        let Some(persistence_mode) = self.table.persistence_mode else {
            return Ok(false);
        };
        let mut mode: c_uint = 0;
        // SAFETY: `device` comes from the library and the pointer is to a live unsigned int.
        let result = unsafe { persistence_mode(device, &raw mut mode) };
        Ok(supported("nvmlDeviceGetPersistenceMode", result)? && mode == 1)
    }
}

impl Nvml for NvmlLibrary {
    fn driver_version(&self) -> Result<String, NvmlError> {
        text("nvmlSystemGetDriverVersion", |buffer, length| {
            // SAFETY: the library is initialised, and `text` gives a live buffer and its length.
            unsafe { (self.table.driver_version)(buffer, length) }
        })
    }

    fn gpus(&self) -> Result<Vec<Result<Gpu, NvmlError>>, NvmlError> {
        Ok((0..self.count()?).map(|index| self.gpu(index)).collect())
    }

    fn links(&self) -> Vec<Link> {
        self.all_links()
    }

    fn memory_in_use(&self) -> Result<BTreeMap<i32, GpuMemory>, NvmlError> {
        let mut used = BTreeMap::new();
        for index in 0..self.count()? {
            // A GPU that does not answer is left out of the inventory too.
            let Ok(device) = self.device(index) else { continue };
            let processes = self.processes(device)?;
            if processes.is_empty() {
                continue;
            }
            let uuid = self.uuid(device)?;
            for info in processes {
                add(&mut used, &uuid, info);
            }
        }
        Ok(used)
    }
}

fn add(used: &mut BTreeMap<i32, GpuMemory>, gpu: &GpuUuid, info: ProcessInfo) {
    let ProcessInfo {
        pid,
        used_gpu_memory: bytes,
        ..
    } = info;
    if let Ok(pid) = i32::try_from(pid)
        && bytes != NOT_AVAILABLE
    {
        let sum: &mut u64 = used.entry(pid).or_default().entry(gpu.clone()).or_default();
        *sum = sum.saturating_add(bytes);
    }
}

/// The one place where an `nvmlReturn_t` becomes a `Result`.
fn check(call: &'static str, code: Return) -> Result<(), NvmlError> {
    if code == 0 {
        return Ok(());
    }
    let name = names::name(code).map_or_else(|| format!("nvmlReturn {code}"), str::to_owned);
    Err(NvmlError::Call { call, code, name })
}

/// What `fill` writes to a live value.
fn read<T: Default>(call: &'static str, fill: impl FnOnce(*mut T) -> Return) -> Result<T, NvmlError> {
    let mut value = T::default();
    check(call, fill(&raw mut value))?;
    Ok(value)
}

/// Like [`check`], with "not supported" as an answer instead of an error.
fn supported(call: &'static str, code: Return) -> Result<bool, NvmlError> {
    if code == NOT_SUPPORTED {
        return Ok(false);
    }
    check(call, code).map(|()| true)
}

/// Text that `fill` writes into a buffer of the given length.
fn text(call: &'static str, fill: impl FnOnce(*mut c_char, c_uint) -> Return) -> Result<String, NvmlError> {
    let mut buffer = [0u8; TEXT];
    // One byte is kept back, so that the text ends in NUL whatever the library does.
    let length = c_uint::try_from(TEXT - 1).unwrap_or_default();
    check(call, fill(buffer.as_mut_ptr().cast(), length))?;
    Ok(until_nul(&buffer))
}

fn until_nul(bytes: &[u8]) -> String {
    match CStr::from_bytes_until_nul(bytes) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(bytes).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_become_named_errors() {
        assert!(check("nvmlInit_v2", 0).is_ok());
        let error = check("nvmlInit_v2", 9).unwrap_err();
        assert_eq!(
            error.to_string(),
            "nvmlInit_v2 answered NVML_ERROR_DRIVER_NOT_LOADED"
        );
        let error = check("nvmlInit_v2", 4711).unwrap_err();
        assert_eq!(error.to_string(), "nvmlInit_v2 answered nvmlReturn 4711");
    }

    #[test]
    fn not_supported_is_an_answer() {
        assert!(!supported("nvmlDeviceGetMigMode", NOT_SUPPORTED).unwrap());
        assert!(supported("nvmlDeviceGetMigMode", 0).unwrap());
        assert!(supported("nvmlDeviceGetMigMode", 15).is_err());
    }

    #[test]
    fn memory_of_a_process_is_summed_and_what_is_not_available_is_left_out() {
        let mut used = BTreeMap::new();
        let gpu = |n: u8| GpuUuid::from_bytes([n; 16]);
        for (pid, used_gpu_memory) in [(7, 5), (8, NOT_AVAILABLE), (7, 6), (9, 1), (u32::MAX, 1)] {
            add(
                &mut used,
                &gpu(u8::from(pid == 9)),
                ProcessInfo {
                    pid,
                    used_gpu_memory,
                    ..ProcessInfo::default()
                },
            );
        }
        let one = |n: u8, bytes: u64| GpuMemory::from([(gpu(n), bytes)]);
        assert_eq!(used, BTreeMap::from([(7, one(0, 11)), (9, one(1, 1))]));
    }

    #[test]
    fn text_ends_at_the_nul_or_at_the_end() {
        assert_eq!(until_nul(b"580.1\0junk"), "580.1");
        assert_eq!(until_nul(b"full"), "full");
    }
}
