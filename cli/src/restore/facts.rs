//! What is known of a running container for the node that would restore it.

use std::collections::BTreeMap;

use firn_config::{Config, Keys};
use firn_gpu::protocol::GpuMemory;
use firn_gpu::{Backend, CudaState, Gpu, GpuUuid, Inventory, SourceGpu};
use firn_host::ProblemReport;
use firn_image::manifest::{CheckpointedProcess, DriverVersion, DumpFlags, Manifest, Versions};
use firn_oci::{Spec, job_hook, mounts};
use firn_preflight::{Tree, image_bytes};
use firn_process::cgroup::Cgroup;
use serde::{Deserialize, Serialize};

use super::error::RestoreError;
use crate::program;

/// What a checkpoint of the container would hold. The firn that reads it is of the same release: it has no
/// schema.
#[derive(Serialize, Deserialize)]
pub struct Facts {
    pub spec: serde_json::Value,
    /// None if it has no GPU.
    pub manifest: Option<Manifest>,
    /// Least size of the checkpoint, and of the memory that its processes need.
    pub bytes: u64,
    /// Chain id of the layers that it began with; none if they are no image's.
    pub chain: Option<String>,
}

impl Facts {
    /// Of the container with this spec and init. Runs firn-gpu: not to be called by a future.
    ///
    /// # Errors
    /// Why it cannot be checkpointed here.
    pub fn of(spec: Spec, init: i32, chain: Option<String>) -> Result<Self, ProblemReport> {
        let members = Cgroup::of_pid(init).and_then(|cgroup| cgroup.pids());
        let tree: Vec<i32> = Tree::of(init, &members.unwrap_or_default())
            .dumped
            .into_iter()
            .collect();
        let (manifest, used) = if spec.requests_gpu() {
            let (here, used) = gpus_of(&tree)?;
            (Some(manifest_of(&spec, &here, &used)?), used)
        } else {
            (None, GpuMemory::new())
        };
        Ok(Self {
            spec: spec.into_value(),
            manifest,
            bytes: image_bytes(&tree, used.values().copied().fold(0, u64::saturating_add)),
            chain,
        })
    }
}

/// This node's GPUs, and what the processes have of their memory.
fn gpus_of(pids: &[i32]) -> Result<(Inventory, GpuMemory), RestoreError> {
    let config = Config::load(Keys::RESTORE)?;
    let unread = |error: anyhow::Error| RestoreError::Node(format!("{error:#}"));
    let inventory = program::inventory(&config).map_err(unread)?;
    let mut used = GpuMemory::new();
    for process in program::discover(&config, pids).map_err(unread)? {
        for (uuid, bytes) in process.gpu_memory {
            let of_gpu = used.entry(uuid).or_default();
            *of_gpu = of_gpu.saturating_add(bytes);
        }
    }
    Ok((inventory, used))
}

/// The manifest that a checkpoint would have, as far as a plan needs it. `used`: what its processes have of
/// each GPU.
pub fn manifest_of(spec: &Spec, here: &Inventory, used: &GpuMemory) -> Result<Manifest, ProblemReport> {
    let node = firn_preflight::check_node(here, Some(spec)).accepted()?;
    let source = |gpu: &Gpu| SourceGpu {
        memory_used: used.get(&gpu.uuid).copied().unwrap_or_default(),
        ..gpu.into()
    };
    let gpus: Vec<_> = node.gpus.iter().map(source).collect();
    let uuids: Vec<GpuUuid> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let manifest = Manifest {
        checkpoint: String::new(),
        origin: None,
        hooks: BTreeMap::new(),
        backend: Backend::Nvidia,
        dump: DumpFlags::default(),
        driver: Some(DriverVersion {
            driver: here.driver_version.clone(),
            cuda: here.cuda_version,
        }),
        topology: here.topology.of(&uuids),
        gpus,
        // One is enough for the image to have GPU state.
        processes: vec![CheckpointedProcess {
            pid: 1,
            restore_tid: 1,
            state: CudaState::Running,
        }],
        inherited_gpus: Vec::new(),
        released_gpus: None,
        bulk: None,
        mounts: mounts::required(spec)?,
        versions: Versions::default(),
        images: Vec::new(),
    };
    Ok(if job_hook::releases_devices(spec) {
        manifest.without_devices()
    } else {
        manifest
    })
}
