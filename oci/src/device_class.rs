//! Which device nodes and hooks of a spec belong to NVIDIA GPUs.
//!
//! firn classifies a node by its path in the container: every tool that writes specs for GPUs keeps the
//! host's names there. Which device the node opens is decided by its numbers.

use std::path::Path;

use serde_json::Value;

/// What a device node of a container is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuPath {
    /// `/dev/nvidiaN`: one GPU.
    Gpu,
    /// Other nodes of NVIDIA's driver: `/dev/nvidiactl`, `/dev/nvidia-uvm`, `/dev/nvidia-caps/...`.
    Control,
    /// `/dev/dri/cardN`, `/dev/dri/renderDN`: the graphics side of some GPU.
    Graphics,
}

/// Directories that hold nodes of GPUs, relative to `/dev`.
pub(crate) const DIRECTORIES: [&str; 4] = [".", "nvidia-caps", "nvidia-caps-imex-channels", GRAPHICS];

/// The directory of graphics nodes.
pub(crate) const GRAPHICS: &str = "dri";

/// Classifies an absolute device path.
pub fn classify(path: &Path) -> Option<GpuPath> {
    let below_dev = path.strip_prefix("/dev").ok()?;
    let name = below_dev.file_name()?.to_str()?;
    match below_dev.parent()?.to_str()? {
        "" => {
            let rest = name.strip_prefix("nvidia")?;
            let is_number = !rest.is_empty() && rest.bytes().all(|c| c.is_ascii_digit());
            Some(if is_number { GpuPath::Gpu } else { GpuPath::Control })
        }
        "nvidia-caps" | "nvidia-caps-imex-channels" => Some(GpuPath::Control),
        "dri" => (name.starts_with("card") || name.starts_with("renderD")).then_some(GpuPath::Graphics),
        _ => None,
    }
}

/// Whether the path is a node of NVIDIA's driver.
pub(crate) fn is_nvidia(path: &Path) -> bool {
    matches!(classify(path), Some(GpuPath::Gpu | GpuPath::Control))
}

pub(crate) fn arguments(hook: &Value) -> impl Iterator<Item = &str> {
    let args = hook["args"].as_array().into_iter().flatten();
    args.filter_map(Value::as_str)
}

/// Whether a hook of the spec runs one of NVIDIA's programs, directly or through containerd's `oci-hook`.
pub(crate) fn is_nvidia_hook(hook: &Value) -> bool {
    const PROGRAMS: [&str; 5] = [
        "nvidia-container-runtime-hook",
        "nvidia-container-toolkit",
        "nvidia-container-cli",
        "nvidia-cdi-hook",
        "nvidia-ctk",
    ];
    let words = arguments(hook).chain(hook["path"].as_str());
    let mut names = words.filter_map(|word| Path::new(word).file_name()?.to_str());
    names.any(|name| PROGRAMS.contains(&name))
}

/// Whether this is the hook that limits the GPU memory of a container, by variables of it. Such a hook of
/// NVIDIA's CDI files gives no GPU.
pub(crate) fn limits_memory(hook: &Value) -> bool {
    is_nvidia_hook(hook) && arguments(hook).any(|word| word == "apply-cuda-memory-limits")
}

/// Whether a hook that runs before the container's own program gives it GPUs.
pub(crate) fn gives_gpus(hook: &Value) -> bool {
    is_nvidia_hook(hook) && !limits_memory(hook)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_classified() {
        use GpuPath::{Control, Gpu, Graphics};
        for (path, class) in [
            ("/dev/nvidia0", Some(Gpu)),
            ("/dev/nvidia15", Some(Gpu)),
            ("/dev/nvidiactl", Some(Control)),
            ("/dev/nvidia-uvm", Some(Control)),
            ("/dev/nvidia-caps/nvidia-cap1", Some(Control)),
            ("/dev/dri/card1", Some(Graphics)),
            ("/dev/dri/renderD128", Some(Graphics)),
            ("/dev/dri/by-path/x", None),
            ("/dev/fuse", None),
            ("/dev/x/nvidia0", None),
            ("/nvidia0", None),
            ("/dev", None),
            ("dev/nvidia0", None),
        ] {
            assert_eq!(classify(Path::new(path)), class, "{path}");
        }
    }
}
