//! What carries a container's GPU state through a checkpoint.

use serde::{Deserialize, Serialize};

/// Decided once, when a container is created, and kept in the manifest of its checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// The container has no GPU. CRIU alone makes the image.
    None,
    /// The NVIDIA driver copies GPU memory into host memory, at the request of firn-gpu.
    Nvidia,
    /// A plugin of CRIU writes the state of other GPUs (AMD's) into CRIU's own files.
    CriuPlugin,
}
