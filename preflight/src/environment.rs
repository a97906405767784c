//! Refusals of a checkpoint by what lies around a container's processes, for the shim's transaction and for `firn audit`
//! alike: the driver, how the container got its GPUs, processes that a dump leaves out, room for what a checkpoint makes, mounts
//! and streams from outside, GPUs that are not NVIDIA's.
//!
//! Only /proc and figures of the host are read; nothing is touched.

mod capacity;
mod external;
mod memory_limit;
mod node;
mod process_tree;
mod vendor;

use firn_host::{Problem, Remedy, remedy};
use std::path::PathBuf;

pub use capacity::{Needs, by_room};
pub use external::{Known, by_mounts, by_stdio};
pub use memory_limit::MemoryLimit;
pub use node::{by_driver, by_hook, by_mig};
pub use process_tree::{Tree, by_outside, exec_policy};
pub use vendor::{Others, by_vendor};

/// Why a container is not checkpointed. Nothing has been touched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("driver {version} has no process checkpoint")]
    NoCheckpointApi { version: String },
    #[error("the container got its GPUs from a hook, whose mounts CRIU does not know")]
    ByHook,
    #[error("GPU {uuid} is in MIG mode, whose memory the driver cannot checkpoint")]
    Mig { uuid: String },
    #[error(
        "CUDA process {pid} ({comm}) was started by exec and is no child of init, so CRIU would leave it out"
    )]
    CudaExec { pid: i32, comm: String },
    #[error("process {pid} ({comm}) was started by exec and is no child of init, so CRIU would leave it out")]
    Exec { pid: i32, comm: String },
    #[error(
        "the driver copies {} of GPU memory into host memory{}, and the host has {} left",
        mib(*needed),
        with_image(*image),
        mib(*left)
    )]
    HostMemory { needed: u64, image: u64, left: u64 },
    #[error(
        "the driver copies {} of GPU memory into host memory, and the limit of cgroup {} leaves {}",
        mib(*needed),
        dir.display(),
        mib(*left)
    )]
    CgroupMemory { needed: u64, dir: PathBuf, left: u64 },
    #[error(
        "the checkpoint writes {} or more, and the file system of {} has {} free",
        mib(*needed),
        dir.display(),
        mib(*free)
    )]
    Space { dir: PathBuf, needed: u64, free: u64 },
    #[error(
        "{} is a mount of {} of a {fs_type} file system that is not in the spec, which CRIU cannot dump",
        point.display(),
        root.display()
    )]
    ForeignMount {
        point: PathBuf,
        fs_type: String,
        root: PathBuf,
    },
    #[error(
        "descriptor {fd} of process {pid} ({comm}) is {} on a mount that the container does not have",
        path.display()
    )]
    ForeignStdio {
        pid: i32,
        comm: String,
        fd: i32,
        path: PathBuf,
    },
    #[error("process {pid} has made more mounts than are looked at")]
    TooManyMounts { pid: i32 },
    #[error("process {pid} ({comm}) has /dev/kfd open, and the container has NVIDIA's GPUs besides AMD's")]
    MixedGpus { pid: i32, comm: String },
    #[error(
        "process {pid} ({comm}) has {} open, of a GPU or accelerator whose state nothing can carry",
        path.display()
    )]
    UnknownGpu { pid: i32, comm: String, path: PathBuf },
}

impl Problem for Refusal {
    fn remedy(&self) -> Remedy<'_> {
        match self {
            Self::NoCheckpointApi { .. } => remedy(
                "FIRN-DRIVER-TOO-OLD",
                "install driver 570 or later (580 to restore onto other GPUs)",
            ),
            Self::ByHook => remedy(
                "FIRN-GPU-HOOK",
                "start the container with CDI devices (`ctr run --device nvidia.com/gpu=0`)",
            ),
            Self::Mig { .. } => remedy(
                "FIRN-GPU-MIG",
                "use whole GPUs for containers that are to be checkpointed",
            ),
            Self::CudaExec { .. } => remedy(
                "FIRN-EXEC",
                "end the exec'd process, or start it from the container's own init",
            ),
            Self::Exec { .. } => remedy(
                "FIRN-EXEC",
                "wait for its end or end it, or let it be left out: annotation firn.dev/exec=omit, or exec = \"omit\" under \
                 [checkpoint] in the configuration",
            ),
            Self::HostMemory { .. } => remedy(
                "FIRN-HOST-MEMORY",
                "make room in the host's memory, or let the image go to a file system on disk",
            ),
            Self::CgroupMemory { .. } => remedy(
                "FIRN-HOST-MEMORY",
                "raise the memory limit, of that cgroup, by as much as the container has GPU memory",
            ),
            Self::Space { .. } => remedy(
                "FIRN-IMAGE-SPACE",
                "make room there, or let the checkpoint go to another file system",
            ),
            Self::ForeignMount { .. } => remedy(
                "FIRN-FOREIGN-MOUNT",
                "unmount it, or give it to the container in its spec",
            ),
            Self::ForeignStdio { .. } => remedy(
                "FIRN-STDIO",
                "start the process with pipes, or with files of the container",
            ),
            Self::TooManyMounts { .. } => remedy("FIRN-PROC", "unmount what the container does not need"),
            Self::MixedGpus { .. } => remedy(
                "FIRN-GPU-MIXED",
                "use GPUs of one vendor in a container that is to be checkpointed",
            ),
            Self::UnknownGpu { .. } => remedy(
                "FIRN-GPU-VENDOR",
                "close the device before the checkpoint; NVIDIA's GPUs for computing and, by CRIU's plugin, AMD's can be \
                 checkpointed",
            ),
        }
    }
}

/// Megabytes; a part of one counts as one.
fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

fn with_image(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!(" and the image takes {} of it, being on a tmpfs", mib(bytes)),
    }
}
