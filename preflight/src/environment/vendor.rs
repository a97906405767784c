//! GPUs and accelerators that are not NVIDIA's: what processes have open of them, and what that means for a checkpoint.

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

use super::Refusal;
use firn_host::procfs;
use firn_oci::{OtherGpu, other_gpu};

/// How a container's GPUs are dumped that are not NVIDIA's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Others {
    /// No process has any open.
    Unused,
    /// By CRIU's plugin for AMD's GPUs.
    Amd,
}

/// Looks at what the processes have open. With NVIDIA's GPUs (`nvidia`) a container must have nothing else open, and nodes
/// of graphics are AMD's only where AMD's driver is open too.
pub fn by_vendor(pids: &[i32], nvidia: bool) -> Result<Others, Refusal> {
    // The first of each kind, and how many others came before it.
    let mut open = BTreeMap::new();
    let mut count = 0_usize;
    for &pid in pids {
        // A process that has ended has nothing open; one that cannot be looked at is CRIU's to complain about.
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        let links = entries
            .flatten()
            .filter_map(|entry| fs::read_link(entry.path()).ok());
        for path in links {
            if let Some(kind) = other_gpu(&path) {
                open.entry(kind).or_insert((count, pid, path));
                count += 1;
            }
        }
    }
    let is_amd = open.contains_key(&OtherGpu::Amd);
    let strangers = open.into_iter().filter(|(kind, _)| match kind {
        OtherGpu::Amd => nvidia,
        OtherGpu::Graphics => nvidia || !is_amd,
        OtherGpu::Accelerator => true,
    });
    let stranger = strangers.min_by_key(|(_, (before, ..))| *before);
    match stranger {
        None if is_amd => Ok(Others::Amd),
        None => Ok(Others::Unused),
        Some((kind, (_, pid, path))) => {
            let comm = procfs::comm(pid);
            Err(match kind {
                OtherGpu::Amd => Refusal::MixedGpus { pid, comm },
                OtherGpu::Graphics | OtherGpu::Accelerator => Refusal::UnknownGpu { pid, comm, path },
            })
        }
    }
}
