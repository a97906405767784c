//! GPUs and accelerators of other vendors than NVIDIA, by their device nodes.
//!
//! That a container may open a node proves little: a privileged container may open all nodes of its host.
//! What counts is what a process has open. AMD's driver has one node for all GPUs (`/dev/kfd`) and a render
//! node for each; a plugin of CRIU's saves their state in CRIU's image. Nothing can save the state of other
//! vendors' render nodes and of accelerators.

use std::path::Path;

use crate::Spec;
use crate::device_class::{GpuPath, classify};

/// What a node opens that is not, or not only, NVIDIA's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OtherGpu {
    /// `/dev/kfd`: compute on AMD's GPUs.
    Amd,
    /// `/dev/dri/...`: the graphics side of a GPU of any vendor.
    Graphics,
    /// `/dev/accel/...`, `/dev/hl0`: an accelerator.
    Accelerator,
}

/// Directories of accelerators, relative to `/dev`: of the kernel's own class, and of drivers without it.
pub(crate) const ACCELERATORS: [&str; 3] = ["accel", "habanalabs", "tenstorrent"];

/// How the names of accelerators directly in `/dev` begin; a number follows.
const NUMBERED: [&str; 5] = ["accel", "davinci", "hl", "hl_controlD", "neuron"];

/// Classifies an absolute device path.
pub fn other_gpu(path: &Path) -> Option<OtherGpu> {
    if path == Path::new("/dev/kfd") {
        return Some(OtherGpu::Amd);
    }
    if is_accelerator(path) {
        return Some(OtherGpu::Accelerator);
    }
    (classify(path) == Some(GpuPath::Graphics)).then_some(OtherGpu::Graphics)
}

fn is_accelerator(path: &Path) -> bool {
    let Some((parent, name)) = (path.strip_prefix("/dev").ok())
        .and_then(|below| Some((below.parent()?.to_str()?, below.file_name()?.to_str()?)))
    else {
        return false;
    };
    let is_number = |rest: &str| !rest.is_empty() && rest.bytes().all(|c| c.is_ascii_digit());
    let mut numbered = NUMBERED.iter().filter_map(|start| name.strip_prefix(start));
    ACCELERATORS.contains(&parent) || parent.is_empty() && numbered.any(is_number)
}

/// Whether the path is a node of a GPU or an accelerator of any vendor, or of its driver.
pub fn is_any_accelerator(path: &Path) -> bool {
    is_gpu(path) || is_accelerator(path)
}

/// Whether the path is a node that opens a GPU of any vendor.
pub(crate) fn is_gpu(path: &Path) -> bool {
    classify(path).is_some() || other_gpu(path) == Some(OtherGpu::Amd)
}

impl Spec {
    /// Whether the spec has a node of another vendor's GPU or accelerator.
    pub fn has_other_gpus(&self) -> bool {
        self.device_paths().any(|path| other_gpu(path).is_some())
    }

    /// Whether the spec gives the container AMD's GPUs for compute.
    pub fn has_amd_gpus(&self) -> bool {
        self.device_paths()
            .any(|path| other_gpu(path) == Some(OtherGpu::Amd))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nodes_are_classified() {
        for (path, class) in [
            ("/dev/kfd", Some(OtherGpu::Amd)),
            ("/dev/dri/renderD128", Some(OtherGpu::Graphics)),
            ("/dev/dri/card0", Some(OtherGpu::Graphics)),
            ("/dev/accel/accel0", Some(OtherGpu::Accelerator)),
            ("/dev/hl0", Some(OtherGpu::Accelerator)),
            ("/dev/hl_controlD7", Some(OtherGpu::Accelerator)),
            ("/dev/habanalabs/hl1", Some(OtherGpu::Accelerator)),
            ("/dev/neuron15", Some(OtherGpu::Accelerator)),
            ("/dev/hl", None),
            ("/dev/hlx", None),
            ("/dev/accel/x/accel0", None),
            ("/data/hl0", None),
            ("/dev/dri/by-path/x", None),
            ("/dev/nvidia0", None),
            ("/dev/nvidiactl", None),
            ("/data/kfd", None),
            ("/dev/null", None),
        ] {
            assert_eq!(other_gpu(Path::new(path)), class, "{path}");
            let is_any = class.is_some() || path.starts_with("/dev/nvidia");
            assert_eq!(is_any_accelerator(Path::new(path)), is_any, "{path}");
        }
    }

    #[test]
    fn a_specs_nodes_are_found() {
        let with =
            |path: &str| Spec::from(json!({"linux": {"devices": [{"path": "/dev/fuse"}, {"path": path}]}}));
        assert!(with("/dev/kfd").has_amd_gpus() && with("/dev/kfd").has_other_gpus());
        assert!(!with("/dev/dri/renderD129").has_amd_gpus() && with("/dev/dri/renderD129").has_other_gpus());
        assert!(!with("/dev/nvidia0").has_other_gpus() && !Spec::from(json!({})).has_other_gpus());
    }
}
