//! Nodes and specs for unit tests, of this crate and of those above it.

use firn_gpu::{DeviceNode, Gpu, GpuUuid, Inventory, NodeType, Topology};
use serde_json::json;

use crate::Spec;

pub fn uuid(i: u8) -> GpuUuid {
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
pub fn inventory(major: u64, count: u8) -> Inventory {
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
pub fn spec(major: u64, minors: &[u64]) -> Spec {
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
        let path = format!("/dev/{name}");
        devices.push(json!({"path": path, "type": "c", "major": major, "minor": minor, "fileMode": 438}));
        rules.push(json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm"}));
    }
    Spec::from(json!({"linux": {"devices": devices, "resources": {"devices": rules}}}))
}

/// `[restore]` with these GPUs and these pairs.
pub fn config(gpus: &[&str], pairs: &[(u8, u8)]) -> firn_config::Restore {
    firn_config::Restore {
        gpus: gpus.iter().map(|&gpu| gpu.to_owned()).collect(),
        gpu_map: pairs
            .iter()
            .map(|(old, new)| format!("{}={}", uuid(*old), uuid(*new)))
            .collect(),
        ..firn_config::Restore::default()
    }
}

/// The spec as those write it whose specs nothing widens: the CRI plugin of containerd, CRI-O, and somebody
/// who is known to be neither.
pub fn pods(spec: &Spec) -> [Spec; 3] {
    let of_cris = [
        json!({"io.kubernetes.cri.container-type": "container"}),
        json!({"io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.Metadata": "{}",
            "io.container.manager": "libpod"}),
        json!({"io.kubernetes.pod.uid": "0"}),
    ];
    of_cris.map(|more| {
        let mut pod = spec.clone();
        let annotations = pod.object_mut("annotations").expect("annotations are an object");
        annotations.extend(more.as_object().cloned().unwrap_or_default());
        pod
    })
}
