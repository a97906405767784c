//! The words that every part uses for GPUs and for CUDA processes.
//!
//! Owned by this crate, used by `oci` (manifest, grants), `shim`, `cli` and by the worker's line protocol.
//! Plain data: no I/O here. Sizes are bytes, process ids are those of the pid namespace of whoever asks.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Topology;

#[cfg(test)]
mod tests;

/// UUID of a GPU in the form that NVML and `nvidia-smi` print: `GPU-` and 36 lower-case characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(try_from = "String")]
pub struct GpuUuid(String);

/// A text that is no GPU UUID.
#[derive(Debug, thiserror::Error)]
#[error("not a GPU UUID: {0:?}")]
pub struct BadUuid(String);

impl GpuUuid {
    /// From the 16 bytes that `cuDeviceGetUuid` gives.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let hex = format!("{:032x}", u128::from_be_bytes(bytes));
        let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &hex[part]);
        Self(format!("GPU-{a}-{b}-{c}-{d}-{e}"))
    }

    /// The 16 bytes that the driver's restore call takes.
    pub fn to_bytes(&self) -> [u8; 16] {
        let hex = self.0.trim_start_matches("GPU-").replace('-', "");
        let number = u128::from_str_radix(&hex, 16);
        number.expect("a UUID is hexadecimal").to_be_bytes()
    }

    /// The text, `GPU-...`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for GpuUuid {
    type Err = BadUuid;

    fn from_str(text: &str) -> Result<Self, BadUuid> {
        let bad = || BadUuid(text.chars().take(64).collect());
        let body = text.strip_prefix("GPU-").ok_or_else(bad)?;
        let shaped = body.len() == 36
            && body.bytes().enumerate().all(|(i, c)| match i {
                8 | 13 | 18 | 23 => c == b'-',
                _ => c.is_ascii_hexdigit(),
            });
        if !shaped {
            return Err(bad());
        }
        Ok(Self(format!("GPU-{}", body.to_ascii_lowercase())))
    }
}

impl TryFrom<String> for GpuUuid {
    type Error = BadUuid;

    fn try_from(text: String) -> Result<Self, BadUuid> {
        text.parse()
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Type of a device node, as in the `type` field of an OCI device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum NodeType {
    /// Character device.
    #[serde(rename = "c")]
    Char,
    /// Block device.
    #[serde(rename = "b")]
    Block,
}

/// A device node of the host: where it is and which device it opens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceNode {
    /// Path on the host, `/dev/nvidia0`.
    pub path: PathBuf,
    /// Character or block device.
    #[serde(rename = "type")]
    pub kind: NodeType,
    /// Major number.
    pub major: u64,
    /// Minor number.
    pub minor: u64,
}

/// Which device a node opens. Written as `["c", 195, 0]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "(NodeType, u64, u64)", into = "(NodeType, u64, u64)")]
pub struct DeviceId {
    /// Character or block device.
    pub kind: NodeType,
    /// Major number.
    pub major: u64,
    /// Minor number.
    pub minor: u64,
}

impl From<(NodeType, u64, u64)> for DeviceId {
    fn from((kind, major, minor): (NodeType, u64, u64)) -> Self {
        Self { kind, major, minor }
    }
}

impl From<DeviceId> for (NodeType, u64, u64) {
    fn from(id: DeviceId) -> Self {
        (id.kind, id.major, id.minor)
    }
}

impl DeviceNode {
    /// Which device it opens.
    pub fn id(&self) -> DeviceId {
        DeviceId {
            kind: self.kind,
            major: self.major,
            minor: self.minor,
        }
    }
}

/// One GPU of the node, as NVML and the host's /dev show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Gpu {
    /// The only key that the driver's restore call knows.
    pub uuid: GpuUuid,
    /// Model name, `NVIDIA H200`.
    pub name: String,
    /// PCI device id and vendor id as NVML's `pciDeviceId` gives them: `(device << 16) | vendor`.
    pub pci_device_id: u32,
    /// PCI address, `00000000:17:00.0`.
    pub pci_address: String,
    /// Total memory in bytes.
    pub memory_total: u64,
    /// Free memory in bytes at the time of asking.
    pub memory_free: u64,
    /// NVML minor number: N of `/dev/nvidiaN`.
    pub minor: u32,
    /// Whether MIG mode is on.
    pub mig: bool,
    /// Whether persistence mode is on.
    pub persistence: bool,
    /// `/dev/nvidiaN` of the host; absent when the host has no such node.
    pub node: Option<DeviceNode>,
}

/// What the worker knows of the node's driver and GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Inventory {
    /// Full driver version, `580.159.04`.
    pub driver_version: String,
    /// CUDA version of the driver as `cuDriverGetVersion` codes it (13000 is 13.0); 0 when libcuda is
    /// missing.
    pub cuda_version: i32,
    /// Whether libcuda has the process checkpoint calls (driver 570 and later).
    pub checkpoint_api: bool,
    /// GPUs in NVML order.
    pub gpus: Vec<Gpu>,
    /// How they reach each other, as far as the driver reports it.
    #[serde(default, skip_serializing_if = "Topology::is_empty")]
    pub topology: Topology,
    /// The driver's nodes that belong to no single GPU and exist on the host: `/dev/nvidiactl`,
    /// `/dev/nvidia-uvm`, ...
    pub common_nodes: Vec<DeviceNode>,
}

/// A process that uses CUDA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaProcess {
    pub pid: i32,
    /// The thread that carries out the driver's checkpoint and restore.
    pub restore_tid: i32,
}

/// State of a CUDA process as the driver's `cuCheckpointProcessGetState` gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CudaState {
    /// 0: the process uses the GPU freely.
    Running,
    /// 1: its calls into the driver wait.
    Locked,
    /// 2: its GPU state lies in its own memory, no GPU is held.
    Checkpointed,
    /// 3: lost; only killing it remains.
    Failed,
    /// A value that this version does not know.
    Unknown(i32),
}

/// One pair of the map given to the driver's restore call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GpuPair {
    /// GPU that the process had at the checkpoint.
    pub old: GpuUuid,
    /// GPU that it gets.
    pub new: GpuUuid,
}
