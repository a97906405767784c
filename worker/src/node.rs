//! The node that a worker works on: driver libraries, /proc and /dev.
//!
//! The libraries are opened when first needed, so that a request about processes without CUDA opens none.

use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::cuda::{Checkpointer, CopierError, Cuda, Driver};
use crate::nvml::{Nvml, NvmlError, NvmlLibrary};
use crate::sys::LoadError;
use firn_gpu::GpuUuid;
use firn_gpu::protocol::DriverError;

/// Where the driver comes from.
pub(super) trait Libraries: Send + Sync {
    /// libcuda, opened.
    fn driver(&self) -> Result<&dyn Driver, LoadError>;

    /// NVML, opened and initialised.
    fn nvml(&self) -> Result<&dyn Nvml, NvmlError>;
}

/// The node's own libraries. A failure to open one is not kept: the next request tries again.
#[derive(Default)]
pub(super) struct HostLibraries {
    cuda: OnceLock<Cuda>,
    nvml: OnceLock<NvmlLibrary>,
}

impl Libraries for HostLibraries {
    fn driver(&self) -> Result<&dyn Driver, LoadError> {
        if let Some(cuda) = self.cuda.get() {
            return Ok(cuda);
        }
        let cuda = Cuda::open()?;
        Ok(self.cuda.get_or_init(|| cuda))
    }

    fn nvml(&self) -> Result<&dyn Nvml, NvmlError> {
        if let Some(nvml) = self.nvml.get() {
            return Ok(nvml);
        }
        let nvml = NvmlLibrary::open()?;
        Ok(self.nvml.get_or_init(|| nvml))
    }
}

/// Libraries, and where /proc, /dev and /sys are.
pub(super) struct Node {
    pub libraries: Box<dyn Libraries>,
    pub proc_root: PathBuf,
    pub dev_root: PathBuf,
    pub sys_root: PathBuf,
    /// The answer of cuInit, once it was called.
    pub initialised: OnceLock<Result<(), DriverError>>,
}

impl Node {
    /// This machine.
    pub(super) fn host() -> Self {
        Self {
            libraries: Box::<HostLibraries>::default(),
            proc_root: "/proc".into(),
            dev_root: "/dev".into(),
            sys_root: "/sys".into(),
            initialised: OnceLock::new(),
        }
    }

    /// cuInit, once in the life of the process.
    pub(super) fn init(&self, driver: &dyn Driver) -> Result<(), DriverError> {
        self.initialised.get_or_init(|| driver.init()).clone()
    }

    /// libcuda and its process checkpoint calls.
    pub(super) fn checkpointer(&self) -> Result<(&dyn Driver, &dyn Checkpointer), Refusal<'_>> {
        let driver = self.libraries.driver().map_err(Refusal::Library)?;
        let checkpointer = driver.checkpointer().map_err(Refusal::NoCheckpointCalls)?;
        Ok((driver, checkpointer))
    }
}

/// Why a request as a whole was not carried out. Nothing was done to any process.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal<'a> {
    #[error("malformed request")]
    Malformed(#[source] serde_json::Error),
    #[error("the request is longer than {limit} bytes")]
    TooLong { limit: usize },
    #[error("{0} is no process id")]
    BadPid(i32),
    #[error("no CUDA driver")]
    Library(#[source] LoadError),
    #[error("the CUDA driver cannot checkpoint processes: {0}")]
    NoCheckpointCalls(&'a LoadError),
    #[error("the CUDA driver cannot be initialised for the restore")]
    Init(#[source] DriverError),
    #[error("no inventory of GPUs")]
    Nvml(#[source] NvmlError),
    #[error("cannot read {}", path.display())]
    Interposer { path: PathBuf, source: io::Error },
    #[error("descriptors of GPU memory do not pass")]
    Descriptors(#[source] io::Error),
    #[error("no socket for descriptors of GPU memory")]
    NoSocket,
    #[error("the CUDA driver cannot copy GPU memory for the move")]
    Copier(#[source] CopierError),
    #[error("{gpu} has {free} bytes of memory free, and {needed} are needed")]
    NoMemory { gpu: GpuUuid, free: u64, needed: u64 },
}

impl Refusal<'_> {
    /// What the operator can do.
    pub(super) fn hint(&self) -> &'static str {
        match self {
            Self::Malformed(_)
            | Self::TooLong { .. }
            | Self::BadPid(_)
            | Self::Interposer { .. }
            | Self::Descriptors(_)
            | Self::NoSocket => "the shim and its firn-gpu must be of the same version",
            Self::Library(_) | Self::Nvml(NvmlError::Load(_)) => {
                "install the NVIDIA driver, or set LD_LIBRARY_PATH of the shim to the directory of its \
                 libraries"
            }
            Self::Copier(_) => "see whether nvidia-smi works, and whether dmesg has the driver's reason",
            Self::NoCheckpointCalls(_) => "driver 570 or later is needed, 580 or later to change GPUs",
            Self::Init(_) => "see whether nvidia-smi works, or turn on persistence mode: nvidia-smi -pm 1",
            Self::Nvml(_) => "see whether nvidia-smi works and the nvidia kernel module is loaded",
            Self::NoMemory { .. } => "end what uses the GPU: nvidia-smi lists it",
        }
    }
}
