//! A manifest for unit tests, of this crate and of those above it, with the node and spec that fit it.

use firn_gpu::{Backend, CudaState, SourceGpu, Topology};
pub use firn_oci::fixtures::{config, inventory, pods, spec, uuid};
use firn_oci::mounts::RequiredMount;

use crate::manifest::{CheckpointedProcess, DriverVersion, DumpFlags, Manifest, Versions};
use firn_store::block_hash::sha256;

/// The manifest of a container with these GPUs and one CUDA process.
pub fn manifest(gpus: &[u8]) -> Manifest {
    let count = gpus.iter().max().map_or(0, |highest| highest + 1);
    let source = inventory(195, count);
    Manifest {
        checkpoint: String::new(),
        backend: Backend::Nvidia,
        dump: DumpFlags {
            open_tcp: true,
            ..DumpFlags::default()
        },
        driver: Some(DriverVersion {
            driver: source.driver_version.clone(),
            cuda: source.cuda_version,
        }),
        gpus: gpus
            .iter()
            .map(|i| SourceGpu::from(&source.gpus[usize::from(*i)]))
            .collect(),
        inherited_gpus: Vec::new(),
        released_gpus: None,
        origin: None,
        bulk: None,
        hooks: Default::default(),
        processes: vec![CheckpointedProcess {
            pid: 1,
            restore_tid: 4,
            state: CudaState::Running,
        }],
        mounts: vec![RequiredMount {
            destination: "/data".into(),
            source_name: "data".into(),
            in_use: true,
        }],
        topology: Topology::default(),
        cpu: Default::default(),
        versions: Versions {
            firn: "0.1.0".into(),
            ..Versions::default()
        },
        images: vec![],
    }
}

/// A manifest's file with this body, the need of a GPU image, and a checksum that fits.
pub fn sealed(body: &str) -> Vec<u8> {
    with_checksum(body, &["nvidia"])
}

/// The same with these needs.
pub fn with_checksum(body: &str, needs: &[&str]) -> Vec<u8> {
    let (sha256, needs) = (sha256(body.as_bytes()), serde_json::json!(needs));
    let head = format!(r#""format":"firn-checkpoint","major":1,"minor":0,"needs":{needs}"#);
    format!(r#"{{{head},"sha256":"{sha256}","body":{body}}}"#).into_bytes()
}
