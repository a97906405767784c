//! What Create has decided about a restore, for Start.

use std::path::PathBuf;
use std::sync::Arc;

use firn_config::Config;
use firn_gpu::GpuPair;
use firn_gpu::protocol::GpuMemory;
use firn_image::manifest::{CheckpointedProcess, DumpFlags, InheritedGpus, Verified};
use firn_image::memory::call::Stored;
use firn_oci::criu_config::CriuConfig;
use firn_oci::job_hook::Facts;

/// A checkpoint that Start can restore.
pub struct PreparedRestore {
    /// Id of the container.
    pub id: String,
    /// CRIU image directory.
    pub image: PathBuf,
    /// Flags of the dump, which the restore repeats.
    pub flags: DumpFlags,
    /// The image's files as they were verified; absent without a manifest.
    pub verified: Option<Arc<Verified>>,
    /// Bytes of the image, as far as a manifest has them.
    pub bytes: u64,
    /// CRIU's settings for an image without GPU state.
    pub plain: PlainPart,
    /// For the job's hook `restored`; absent where the container names no hook, or gets no GPU from an image
    /// that is not without devices.
    pub facts: Option<Facts>,
    /// Absent when the source had no GPU and was no job without devices.
    pub gpu: Option<GpuPart>,
}

/// The restore of an image without GPU state.
#[derive(Default)]
pub struct PlainPart {
    /// CRIU's plugins for AMD's GPUs; absent: CRIU's own choice.
    pub plugins: Option<PathBuf>,
    /// Absent where the runtime is not runc.
    pub criu: Option<CriuConfig>,
}

/// The GPU side of a restore.
pub struct GpuPart {
    /// The image holds nothing of any device.
    pub device_free: bool,
    /// Whether this node's NVIDIA driver is asked about the restored processes.
    pub has_nvidia: bool,
    /// The GPU map for the driver; empty if every GPU stays the same.
    pub pairs: Vec<GpuPair>,
    /// GPU memory that its processes need on the GPUs that they get, as far as the image has it.
    pub needs: GpuMemory,
    /// Processes whose GPU state the image holds, by their pids in the container.
    pub processes: Vec<CheckpointedProcess>,
    /// What other processes had inherited, by their pids in the container.
    pub inherited: Vec<InheritedGpus>,
    /// Memory that is in this node's store.
    pub stored: Option<Stored>,
    pub criu: CriuConfig,
    pub config: Config,
    /// The driver worker.
    pub worker: PathBuf,
    /// firn-hook.
    pub hook: PathBuf,
}
