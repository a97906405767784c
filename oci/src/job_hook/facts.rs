//! What a job learns in its hooks: in variables, in files, in the body of an HTTP call.

use serde::{Deserialize, Serialize};

use super::JobHook;

/// The facts of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    pub hook: JobHook,
    /// `checkpoint`, `restore`, `pause`, `resume` or `move`.
    pub operation: String,
    /// Random id of the checkpoint: the same in all hooks of the checkpoint, and in those of its restores.
    pub checkpoint: String,
    /// Last component of the image directory's path.
    pub image: String,
    /// Host name of the node.
    pub host: String,
    /// The container's GPUs.
    pub gpus: Vec<FactsOfGpu>,
    /// Whether a GPU has another PCI address than at the checkpoint.
    pub pci_changed: bool,
    /// Why the checkpoint failed, for the hook `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A GPU at the checkpoint and after the restore. A checkpoint that holds nothing of its GPUs has no pairs:
/// those of the source have no `new`, and those of the target no `old`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FactsOfGpu {
    pub old: Option<GpuAddress>,
    /// Absent at a checkpoint and at a pause.
    pub new: Option<GpuAddress>,
}

impl FactsOfGpu {
    /// Whether it has another PCI address now.
    pub fn has_moved(&self) -> bool {
        matches!((&self.old, &self.new), (Some(old), Some(new)) if old.pci != new.pci)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuAddress {
    pub uuid: String,
    /// PCI address, as NVML prints it.
    pub pci: String,
}

impl Facts {
    /// The variables that a program gets.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let joined = |text: fn(&FactsOfGpu) -> Option<&String>| {
            let texts: Vec<&str> = self.gpus.iter().filter_map(text).map(String::as_str).collect();
            texts.join(",")
        };
        vec![
            ("FIRN_HOOK", self.hook.name().to_owned()),
            ("FIRN_OPERATION", self.operation.clone()),
            ("FIRN_CHECKPOINT", self.checkpoint.clone()),
            ("FIRN_IMAGE", self.image.clone()),
            ("FIRN_HOST", self.host.clone()),
            (
                "FIRN_OLD_GPUS",
                joined(|gpu| gpu.old.as_ref().map(|old| &old.uuid)),
            ),
            (
                "FIRN_NEW_GPUS",
                joined(|gpu| gpu.new.as_ref().map(|new| &new.uuid)),
            ),
            ("FIRN_OLD_PCI", joined(|gpu| gpu.old.as_ref().map(|old| &old.pci))),
            ("FIRN_NEW_PCI", joined(|gpu| gpu.new.as_ref().map(|new| &new.pci))),
            ("FIRN_PCI_CHANGED", u8::from(self.pci_changed).to_string()),
            ("FIRN_ERROR", self.error.clone().unwrap_or_default()),
        ]
    }
}
