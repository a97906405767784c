use std::path::Path;

use serde_json::{Value, json};

use super::*;

/// A node with this CDI file alone.
fn node(file: &str) -> (tempfile::TempDir, Config) {
    let dir = tempfile::tempdir().unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    std::fs::copy(fixtures.join(file), dir.path().join(file)).unwrap();
    let mut config = Config::default();
    config.create.cdi_dirs = vec![dir.path().to_owned()];
    (dir, config)
}

fn bare() -> Value {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/bare.json");
    serde_json::from_slice(&std::fs::read(fixture).unwrap()).unwrap()
}

fn toolkit() -> Toolkit {
    Toolkit {
        visible_devices: true,
        volume_mounts: true,
        annotations: vec!["cdi.k8s.io/".to_owned()],
        ..Toolkit::default()
    }
}

/// What `ctr --device`, nerdctl's `--gpus`, and containerd for Kubernetes' device plugin and resource claims write.
#[test]
fn finished_edits_of_every_kind_are_left_as_they_are() {
    for (file, device) in [
        ("two-gpus.yaml", "nvidia.com/gpu=0"),
        ("two-gpus.yaml", "nvidia.com/gpu=all"),
        (
            "device-plugin.json",
            "k8s.device-plugin.nvidia.com/gpu=GPU-b7e94d13-2c65-4a8b-9f21-55aa66bb77c1",
        ),
        (
            "dra-claim.json",
            "k8s.gpu.nvidia.com/claim=7c1d5a0e-40c1-4e0a-9d42-3b0f4f5a8f11-gpu-0",
        ),
    ] {
        let (_dir, config) = node(file);
        let mut spec = bare();
        // Of the image, and of the annotation that containerd may pass on when it has acted on it.
        spec["process"]["env"] = json!(["NVIDIA_VISIBLE_DEVICES=all"]);
        spec["annotations"] = json!({"cdi.k8s.io/nvidia-device-plugin_x": device});
        let registry = Registry::read(&config.create.cdi_dirs);
        registry.inject(&mut spec, &[device.parse().unwrap()]).unwrap();
        let spec = Spec::from(spec);
        assert_eq!(Ask::of(&spec), Ask::Nodes, "{device}");
        assert!(spec.asks_for_gpu() && !spec.gpu_by_hook());
        for wrapper in [None, Some(&toolkit())] {
            let (after, names) = convert(spec.clone(), &config, wrapper, false).unwrap();
            assert_eq!((&after, names.len()), (&spec, 0), "{device}");
        }
    }
}

/// What Kubernetes' device plugin asks for, by its strategies: each ends in the edits of one GPU and asks for nothing more.
#[test]
fn every_strategy_of_the_device_plugin_ends_in_the_same_edits() {
    let uuid = "GPU-b7e94d13-2c65-4a8b-9f21-55aa66bb77c1";
    let root = "/var/run/nvidia-container-devices";
    let env = |value: &str| json!([format!("NVIDIA_VISIBLE_DEVICES={value}")]);
    let node_of_it = json!([{"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}]);
    let stands_for = json!([{"source": "/dev/null", "destination": format!("{root}/{uuid}")}]);
    let annotation = json!({"cdi.k8s.io/nvidia-device-plugin_x": format!("nvidia.com/gpu={uuid}")});
    let (_dir, config) = node("two-gpus.yaml");
    let mut all = Vec::new();
    for (pointer, value, variable) in [
        ("/none", json!(null), uuid),
        ("/linux/devices", node_of_it, uuid),
        ("/mounts", stands_for, root),
        ("/annotations", annotation, "void"),
    ] {
        let mut spec = json!({"linux": {"devices": []}, "mounts": [], "annotations": {}});
        spec["process"] = json!({"env": env(variable)});
        if let Some(place) = spec.pointer_mut(pointer) {
            *place = value;
        }
        let (edited, names) = convert(Spec::from(spec), &config, Some(&toolkit()), false).unwrap();
        assert_eq!(names.len(), 1, "{pointer}");
        assert_eq!(Ask::of(&edited), Ask::Nodes, "{pointer}");
        assert_eq!(Ask::of_wrapped(&edited, &toolkit()), Ask::Nodes, "{pointer}");
        let mut edited = edited.into_value();
        edited["annotations"] = json!({});
        all.push(edited);
    }
    assert!(all.iter().all(|edited| *edited == all[0]), "{all:#?}");
}
