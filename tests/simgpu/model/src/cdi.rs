//! CDI specification of the node's simulated GPUs, so that containers get them as they get real ones.

use serde_json::{Value, json};
use simgpu_model::{Node, NodeTable, paths};

/// The specification, for `/etc/cdi/nvidia.json`.
pub fn specification(table: &NodeTable) -> Value {
    let mut devices = Vec::new();
    for (index, gpu) in table.gpus.iter().enumerate() {
        let edits = json!({"deviceNodes": [device_node(&gpu.node)]});
        devices.push(json!({"name": index.to_string(), "containerEdits": edits.clone()}));
        devices.push(json!({"name": gpu.uuid.to_string(), "containerEdits": edits}));
    }
    let all: Vec<Value> = table.gpus.iter().map(|gpu| device_node(&gpu.node)).collect();
    devices.push(json!({"name": "all", "containerEdits": {"deviceNodes": all}}));
    let common: Vec<Value> = table.common.iter().map(device_node).collect();
    let mounts: Vec<Value> = ["libcuda.so", "libnvidia-ml.so"]
        .iter()
        .flat_map(|library| {
            let file = format!("{}/{library}.{}", paths::LIBRARY_DIR, table.driver_version);
            let link = format!("{}/{library}.1", paths::LIBRARY_DIR);
            [mount(&file, &file), mount(&file, &link)]
        })
        .collect();
    json!({
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": devices,
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": common,
            "mounts": mounts,
        },
    })
}

fn device_node(node: &Node) -> Value {
    json!({
        "path": format!("/dev/{}", node.name),
        "type": "b",
        "major": node.major,
        "minor": node.minor,
        "fileMode": 0o666,
        "permissions": "rwm",
    })
}

fn mount(host: &str, container: &str) -> Value {
    let options = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
    json!({"hostPath": host, "containerPath": container, "options": options})
}

#[cfg(test)]
mod tests {
    use simgpu_model::{GpuInfo, Node, NodeTable};

    use super::specification;

    #[test]
    fn names_each_gpu_by_index_and_uuid() {
        let node = |name: &str, minor| Node {
            name: name.into(),
            major: 7,
            minor,
        };
        let uuid = "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a50";
        let gpu = GpuInfo {
            uuid: uuid.parse().unwrap(),
            name: "NVIDIA H200".into(),
            pci_address: "00000000:17:00.0".into(),
            pci_device_id: 0x2335_10de,
            memory: 1 << 30,
            minor: 3,
            mig: false,
            persistence: true,
            node: node("nvidia3", 12),
        };
        let common = vec![node("nvidiactl", 9), node("nvidia-uvm", 10)];
        let table = NodeTable {
            driver_version: "580.159.04".into(),
            cuda_version: 13000,
            common,
            gpus: vec![gpu],
            links: vec![],
        };
        let spec = specification(&table);
        let names: Vec<&str> = spec["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| device["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["0", uuid, "all"]);
        let device = &spec["devices"][1]["containerEdits"]["deviceNodes"][0];
        assert_eq!(
            (device["path"].as_str(), device["minor"].as_u64()),
            (Some("/dev/nvidia3"), Some(12))
        );
        assert_eq!(spec["containerEdits"]["deviceNodes"][0]["type"], "b");
    }
}
