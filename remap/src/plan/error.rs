//! Why there is no map. Every error has a stable code, names both sides and what the operator can do.

use std::fmt;

use super::warning::LostLink;
use firn_gpu::{BadUuid, GpuUuid};
use firn_host::Problem;

/// The node that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Where the checkpoint was made.
    Source,
    /// Where it is restored.
    Target,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Target => "target",
        })
    }
}

impl Side {
    /// What to do about a GPU that is listed twice there.
    fn list_once(self) -> &'static str {
        match self {
            Self::Source => "the manifest is damaged; take the checkpoint again",
            Self::Target => "name every GPU once in the target's specification",
        }
    }
}

/// A restore that cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Problem)]
pub enum PlanError {
    #[error("the checkpoint was made with driver {made}, this node has driver {here}")]
    #[problem(
        "FIRN-DRIVER-VERSION",
        "restore on a node with the driver version of the checkpoint; the driver accepts no other"
    )]
    DriverVersionMismatch { made: String, here: String },
    #[error("the restore needs other GPUs than the checkpoint had, and driver {here} cannot change GPUs")]
    #[problem(
        "FIRN-DRIVER-TOO-OLD",
        "grant the GPUs of the checkpoint, or use driver 580 or later on both nodes"
    )]
    DriverTooOldForRemap { here: String },
    #[error("MIG mode is on for GPU {uuid} of the {side}")]
    #[problem(
        "FIRN-GPU-MIG",
        "grant a GPU with MIG mode off; the driver cannot checkpoint MIG devices"
    )]
    MigUnsupported { side: Side, uuid: GpuUuid },
    #[error("GPU {uuid} is listed twice on the {side}")]
    #[problem("FIRN-GPU-LISTED-TWICE", side.list_once())]
    GpuListedTwice { side: Side, uuid: GpuUuid },
    #[error(
        "the checkpointed container had {} GPU(s) ({}), the target is granted {} ({})",
        had.len(), list(had), granted.len(), list(granted)
    )]
    #[problem(
        "FIRN-GPU-COUNT",
        "grant as many GPUs as the container had; of more, the policy subset uses some"
    )]
    GpuCountMismatch {
        had: Vec<GpuUuid>,
        granted: Vec<GpuUuid>,
    },
    #[error(
        "GPU {old} is a {model}, and no such GPU is left in the target's grant ({})",
        list(candidates)
    )]
    #[problem("FIRN-GPU-MODEL", "grant GPUs of the same model as those of the checkpoint")]
    GpuModelMismatch {
        old: GpuUuid,
        model: String,
        candidates: Vec<String>,
    },
    #[error(
        "GPU {old} has {} MiB, GPU {new} of the target has only {} MiB",
        needs >> 20, has >> 20
    )]
    #[problem("FIRN-GPU-MEMORY", "grant a GPU with at least as much memory")]
    GpuMemoryTooSmall {
        old: GpuUuid,
        needs: u64,
        new: GpuUuid,
        has: u64,
    },
    #[error(
        "the policy strict wants the GPUs of the checkpoint, and the target is not granted {} (but {})",
        list(missing),
        list(granted)
    )]
    #[problem(
        "FIRN-GPU-STRICT",
        "restore with the GPUs of the checkpoint, or choose another policy: firn.dev/remap-policy"
    )]
    StrictUnmet {
        missing: Vec<GpuUuid>,
        granted: Vec<GpuUuid>,
    },
    #[error("no choice of the granted GPUs keeps the NVLinks of the checkpoint: in order, {lost}")]
    #[problem(
        "FIRN-GPU-TOPOLOGY",
        "grant GPUs with as many NVLinks; if the program needs none, write a map: firn.dev/gpu-map"
    )]
    TopologyUnsatisfied { lost: LostLink },
    #[error("the GPU map has no pair for {} of the checkpoint", list(missing))]
    #[problem(
        "FIRN-MAP-INCOMPLETE",
        "give every GPU of the checkpoint a pair, also those that stay"
    )]
    MapIncomplete { missing: Vec<GpuUuid> },
    #[error("the GPU map names {uuid}, which the checkpoint did not have ({})", list(had))]
    #[problem(
        "FIRN-MAP-UNKNOWN-SOURCE",
        "the left side of each pair is a GPU of the checkpoint"
    )]
    MapUnknownSource { uuid: GpuUuid, had: Vec<GpuUuid> },
    #[error(
        "the GPU map names {uuid}, which the target is not granted ({})",
        list(granted)
    )]
    #[problem(
        "FIRN-MAP-UNKNOWN-TARGET",
        "grant that GPU to the target, or map to one that it has"
    )]
    MapUnknownTarget { uuid: GpuUuid, granted: Vec<GpuUuid> },
    #[error("the GPU map names {uuid} twice as {side}")]
    #[problem("FIRN-MAP-DUPLICATE", "name every GPU at most once on each side of the map")]
    MapDuplicate { side: Side, uuid: GpuUuid },
}

/// A text that is no GPU map.
#[derive(Debug, thiserror::Error, Problem)]
#[problem(
    "FIRN-MAP-SYNTAX",
    "write GPU-old=GPU-new,GPU-old=GPU-new with the UUIDs that nvidia-smi -L prints"
)]
pub enum MapSyntax {
    #[error("{0:?} in the GPU map is not of the form GPU-old=GPU-new")]
    NoPair(String),
    #[error("bad UUID in the GPU map")]
    Uuid(#[from] BadUuid),
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    if items.is_empty() {
        return "none".to_owned();
    }
    items
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}
