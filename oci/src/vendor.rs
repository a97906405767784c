//! GPUs and accelerators that are not NVIDIA's, by the nodes that open them.
//!
//! A node that a container may open says little: a privileged one has all of its host. What counts is what a process has
//! open. AMD's driver is one node for all GPUs (`/dev/kfd`) and a render node for each; its state travels in CRIU's images,
//! by a plugin of CRIU's. For render nodes of others, and for accelerators, there is nothing that could carry their state.

use std::path::Path;

use crate::Spec;
use crate::device_class::{GpuPath, classify};

/// What a node opens that no NVIDIA driver is behind, or not only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OtherGpu {
    /// `/dev/kfd`: computing on AMD's GPUs.
    Amd,
    /// `/dev/dri/...`: the graphics side of a GPU of any vendor.
    Graphics,
    /// `/dev/accel/...`: an accelerator.
    Accelerator,
}

/// What the node at this path of a container opens.
pub fn other_gpu(path: &Path) -> Option<OtherGpu> {
    if path == Path::new("/dev/kfd") {
        return Some(OtherGpu::Amd);
    }
    if path.parent() == Some(Path::new("/dev/accel")) {
        return Some(OtherGpu::Accelerator);
    }
    (classify(path) == Some(GpuPath::Graphics)).then_some(OtherGpu::Graphics)
}

impl Spec {
    /// Whether a node of the spec opens such a GPU.
    pub fn has_other_gpus(&self) -> bool {
        self.node_paths().any(|path| other_gpu(path).is_some())
    }

    /// Whether the spec gives the container AMD's GPUs to compute on.
    pub fn has_amd_gpus(&self) -> bool {
        self.node_paths()
            .any(|path| other_gpu(path) == Some(OtherGpu::Amd))
    }

    fn node_paths(&self) -> impl Iterator<Item = &Path> {
        let devices = self.array("/linux/devices").iter();
        devices.filter_map(|device| device["path"].as_str().map(Path::new))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nodes_are_told_apart() {
        for (path, class) in [
            ("/dev/kfd", Some(OtherGpu::Amd)),
            ("/dev/dri/renderD128", Some(OtherGpu::Graphics)),
            ("/dev/dri/card0", Some(OtherGpu::Graphics)),
            ("/dev/accel/accel0", Some(OtherGpu::Accelerator)),
            ("/dev/dri/by-path/x", None),
            ("/dev/nvidia0", None),
            ("/dev/nvidiactl", None),
            ("/data/kfd", None),
            ("/dev/null", None),
        ] {
            assert_eq!(other_gpu(Path::new(path)), class, "{path}");
        }
    }

    #[test]
    fn a_spec_is_asked_for_its_nodes() {
        let with =
            |path: &str| Spec::from(json!({"linux": {"devices": [{"path": "/dev/fuse"}, {"path": path}]}}));
        assert!(with("/dev/kfd").has_amd_gpus() && with("/dev/kfd").has_other_gpus());
        assert!(!with("/dev/dri/renderD129").has_amd_gpus() && with("/dev/dri/renderD129").has_other_gpus());
        assert!(!with("/dev/nvidia0").has_other_gpus() && !Spec::from(json!({})).has_other_gpus());
    }
}
