//! A GPU of a checkpoint's source.

use serde::{Deserialize, Serialize};

use crate::{DeviceNode, Gpu, GpuUuid};

/// A GPU that the checkpointed container was granted, as the manifest keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SourceGpu {
    /// Its UUID.
    pub uuid: GpuUuid,
    /// Model name.
    pub name: String,
    /// `(device << 16) | vendor`, which stands for the chip.
    pub pci_device_id: u32,
    /// PCI address.
    pub pci_address: String,
    /// Total memory in bytes.
    pub memory_total: u64,
    /// Bytes of it that the container's processes had, as far as NVML reported it; 0 where it is not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_used: u64,
    /// N of `/dev/nvidiaN` on the source.
    pub minor: u32,
    /// Its device node on the source.
    pub node: Option<DeviceNode>,
    /// Whether MIG mode was on. A checkpoint is refused then, so no manifest has it set.
    #[serde(skip)]
    pub mig: bool,
}

impl SourceGpu {
    /// Whether the other GPU has as much memory free as the container's processes had on this one.
    pub fn finds_room_on(&self, other: &Gpu) -> bool {
        other.memory_free >= self.memory_used
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

impl From<&Gpu> for SourceGpu {
    fn from(gpu: &Gpu) -> Self {
        Self {
            uuid: gpu.uuid.clone(),
            name: gpu.name.clone(),
            pci_device_id: gpu.pci_device_id,
            pci_address: gpu.pci_address.clone(),
            memory_total: gpu.memory_total,
            memory_used: 0,
            minor: gpu.minor,
            node: gpu.node.clone(),
            mig: gpu.mig,
        }
    }
}
