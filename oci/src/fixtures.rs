//! Nodes and specs for the tests of this crate.

use firn_gpu::{CudaState, DeviceNode, Gpu, GpuUuid, Inventory, NodeType, Topology};
use serde_json::json;

use crate::Spec;
use crate::manifest::{CudaProcess, DriverVersion, DumpFlags, Manifest, RequiredMount, SourceGpu, Versions};

pub(crate) fn uuid(i: u8) -> GpuUuid {
    GpuUuid::from_bytes([i; 16])
}

fn node(path: String, major: u64, minor: u64) -> DeviceNode {
    DeviceNode {
        path: path.into(),
        kind: NodeType::Char,
        major,
        minor,
    }
}

/// A node with `count` GPUs, UUID and minor counted from 0, nodes with this major number. The major number of
/// nvidia-uvm is `major + 1`.
pub(crate) fn inventory(major: u64, count: u8) -> Inventory {
    let gpu = |i: u8| Gpu {
        uuid: uuid(i),
        name: "Simulated GPU".into(),
        pci_device_id: 0x1234_10de,
        pci_address: format!("00000000:0{i}:00.0"),
        memory_total: 8 << 30,
        memory_free: 8 << 30,
        minor: i.into(),
        mig: false,
        persistence: true,
        node: Some(node(format!("/dev/nvidia{i}"), major, i.into())),
    };
    Inventory {
        driver_version: "580.95.05".into(),
        cuda_version: 13000,
        checkpoint_api: true,
        gpus: (0..count).map(gpu).collect(),
        topology: Topology::default(),
        common_nodes: vec![
            node("/dev/nvidia-uvm".into(), major + 1, 0),
            node("/dev/nvidia-uvm-tools".into(), major + 1, 1),
            node("/dev/nvidiactl".into(), major, 255),
        ],
    }
}

/// A spec as a CDI injection leaves it on a node with these major numbers: the common nodes, then the GPUs.
pub(crate) fn spec(major: u64, minors: &[u64]) -> Spec {
    let common = [
        ("nvidia-uvm", major + 1, 0),
        ("nvidia-uvm-tools", major + 1, 1),
        ("nvidiactl", major, 255),
    ];
    let gpus = minors
        .iter()
        .map(|minor| (format!("nvidia{minor}"), major, *minor));
    let all: Vec<(String, u64, u64)> = common
        .into_iter()
        .map(|(name, major, minor)| (name.to_owned(), major, minor))
        .chain(gpus)
        .collect();
    let mut devices =
        vec![json!({"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 384})];
    let mut rules = vec![
        json!({"allow": false, "access": "rwm"}),
        json!({"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rwm"}),
    ];
    for (name, major, minor) in all {
        devices.push(
            json!({"path": format!("/dev/{name}"), "type": "c", "major": major, "minor": minor, "fileMode": 438}),
        );
        rules.push(json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm"}));
    }
    Spec::from(json!({"linux": {"devices": devices, "resources": {"devices": rules}}}))
}

/// `[restore]` with these GPUs and these pairs.
pub(crate) fn config(gpus: &[&str], pairs: &[(u8, u8)]) -> firn_config::Restore {
    firn_config::Restore {
        gpus: gpus.iter().map(|&gpu| gpu.to_owned()).collect(),
        gpu_map: pairs
            .iter()
            .map(|(old, new)| format!("{}={}", uuid(*old), uuid(*new)))
            .collect(),
        ..firn_config::Restore::default()
    }
}

/// The manifest of a container with these GPUs and one CUDA process.
pub(crate) fn manifest(gpus: &[u8]) -> Manifest {
    let count = gpus.iter().max().map_or(0, |highest| highest + 1);
    let source = inventory(195, count);
    Manifest {
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
        processes: vec![CudaProcess {
            pid: 1,
            restore_tid: 4,
            state: CudaState::Running,
        }],
        job: None,
        mounts: vec![RequiredMount {
            destination: "/data".into(),
            source_name: "data".into(),
            in_use: true,
        }],
        topology: Topology::default(),
        versions: Versions {
            firn: "0.1.0".into(),
            ..Versions::default()
        },
        images: vec![],
    }
}
