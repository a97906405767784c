//! Rules about GPUs and accelerators that are not NVIDIA's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use firn_host::procfs;
use firn_oci::{OtherGpu, amd, other_gpu};
use serde::{Deserialize, Serialize};

use crate::finding::open_files;
use crate::{OtherVendors, Refusal};

/// How a container's GPUs of other vendors are dumped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OtherGpus {
    /// No process has any open.
    #[default]
    Unused,
    /// By CRIU's plugin for AMD's GPUs.
    Amd,
}

/// Refuses three cases: an accelerator; a GPU that is not NVIDIA's in a container that has NVIDIA GPUs; a
/// node in /dev/dri without an open /dev/kfd. With /dev/kfd open the node is AMD's, and CRIU's plugin dumps
/// it.
pub(crate) fn by_vendor(pids: &[i32], part: &OtherVendors) -> Result<OtherGpus, Refusal> {
    let open = open_devices(pids);
    let is_amd = open.contains_key(&OtherGpu::Amd);
    let refused = open.into_iter().filter(|(kind, _)| match kind {
        OtherGpu::Amd => part.nvidia,
        OtherGpu::Graphics => part.nvidia || !is_amd,
        OtherGpu::Accelerator => true,
    });
    let first = refused.min_by_key(|(_, device)| device.order);
    let Some((kind, Device { pid, path, .. })) = first else {
        if !is_amd {
            return Ok(OtherGpus::Unused);
        }
        return amd::plugin(part.amdgpu_plugin.as_deref(), &amd::PLUGIN_DIRS)
            .map(|_| OtherGpus::Amd)
            .map_err(Refusal::AmdPlugin);
    };
    let comm = procfs::comm(pid);
    Err(match kind {
        OtherGpu::Amd => Refusal::MixedGpus { pid, comm },
        OtherGpu::Graphics | OtherGpu::Accelerator => Refusal::UnknownGpu { pid, comm, path },
    })
}

/// A device that a process has open.
struct Device {
    /// How many devices were found before it.
    order: usize,
    pid: i32,
    path: PathBuf,
}

/// The first open device of each kind.
fn open_devices(pids: &[i32]) -> BTreeMap<OtherGpu, Device> {
    let mut open = BTreeMap::new();
    let mut order = 0_usize;
    for &pid in pids {
        // A process that has ended has nothing open. If the files cannot be listed, CRIU reports it.
        let Ok(Some(files)) = open_files(Path::new("/proc"), pid) else {
            continue;
        };
        for (_, path) in files {
            if let Some(kind) = other_gpu(&path) {
                open.entry(kind).or_insert(Device { order, pid, path });
                order += 1;
            }
        }
    }
    open
}
