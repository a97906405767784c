use std::path::Path;

use firn_config::{Create, Toolkit};
use serde_json::{Value, json};

use super::fuzz::{Case, check};
use super::*;
use crate::CdiFile;

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

/// What `ctr --device`, nerdctl's `--gpus`, and containerd for Kubernetes' device plugin and resource claims
/// write.
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
        assert!(spec.requests_gpu() && !spec.gpu_by_hook());
        for rules in [Rules::Own, Rules::Wrapper(toolkit())] {
            assert_eq!(GpuRequest::of(&spec, &rules), GpuRequest::Nodes, "{device}");
            let after = convert(spec.clone(), &config, &rules, false).unwrap();
            assert_eq!((&after.spec, after.names.len()), (&spec, 0), "{device}");
        }
    }
}

/// What Kubernetes' device plugin asks for, by its strategies: each ends in the edits of one GPU and asks for
/// nothing more.
#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn every_strategy_of_the_device_plugin_ends_in_the_same_edits() {
    let uuid = "GPU-b7e94d13-2c65-4a8b-9f21-55aa66bb77c1";
    let root = "/var/run/nvidia-container-devices";
    let env = |value: &str| json!([format!("NVIDIA_VISIBLE_DEVICES={value}")]);
    let stands_for = json!([{"source": "/dev/null", "destination": format!("{root}/{uuid}")}]);
    let annotation = json!({"cdi.k8s.io/nvidia-device-plugin_x": format!("nvidia.com/gpu={uuid}")});
    let (_dir, config) = node("two-gpus.yaml");
    let rules = Rules::Wrapper(toolkit());
    let mut all = Vec::new();
    for (pointer, value, variable) in [
        ("/none", json!(null), uuid),
        ("/mounts", stands_for, root),
        ("/annotations", annotation, "void"),
    ] {
        let mut spec = json!({"linux": {"devices": []}, "mounts": [], "annotations": {}});
        spec["process"] = json!({"env": env(variable)});
        if let Some(place) = spec.pointer_mut(pointer) {
            *place = value;
        }
        let edited = convert(Spec::from(spec), &config, &rules, false).unwrap();
        assert_eq!((edited.names.len(), edited.left_out.len()), (1, 0), "{pointer}");
        for rules in [&Rules::Own, &rules] {
            assert_eq!(
                GpuRequest::of(&edited.spec, rules),
                GpuRequest::Nodes,
                "{pointer}"
            );
        }
        let mut edited = edited.spec.into_value();
        edited["annotations"] = json!({});
        all.push(edited);
    }
    assert!(all.iter().all(|edited| *edited == all[0]), "{all:#?}");

    // With PASS_DEVICE_SPECS the nodes are the grant, and the name adds what goes with them.
    let nodes: Vec<Value> = [
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidia-modeset",
        "nvidia1",
    ]
    .map(|name| json!({"path": format!("/dev/{name}"), "type": "c", "major": 195, "minor": 1}))
    .to_vec();
    let spec =
        json!({"linux": {"devices": nodes}, "mounts": [], "annotations": {}, "process": {"env": env(uuid)}});
    let edited = convert(Spec::from(spec), &config, &rules, false).unwrap();
    let left: Vec<&str> = edited.left_out.iter().map(String::as_str).collect();
    assert_eq!(
        left,
        [
            "/dev/dri/card2",
            "/dev/dri/renderD129",
            "/run/nvidia-persistenced/socket"
        ]
    );
    let edited = edited.spec.into_value();
    assert_eq!(edited["linux"], json!({"devices": nodes}));
    let is_socket = |mount: &Value| mount["destination"] == "/run/nvidia-persistenced/socket";
    let mut mounts = all[0]["mounts"].as_array().unwrap().clone();
    mounts.retain(|mount| !is_socket(mount));
    assert_eq!(edited["mounts"], json!(mounts));
    assert_eq!(edited["process"], all[0]["process"]);
    let hooks = edited["hooks"]["createContainer"].to_string();
    assert!(hooks.contains("update-ldcache") && hooks.contains("create-symlinks"));
}

fn gpu(minor: u64) -> Value {
    json!({"path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor})
}

fn file(kind: &str, name: &str, edits: Value, common: Value) -> CdiFile {
    let devices = [json!({"name": name, "containerEdits": edits})];
    let text = json!({"cdiVersion": "1.1.0", "kind": kind, "devices": devices, "containerEdits": common});
    CdiFile::parse(
        &Path::new("/etc/cdi").join(format!("{name}.json")),
        text.to_string().as_bytes(),
    )
    .unwrap()
}

/// With `visible-devices = true`, a variable with these names in a container that has GPU 0, and these edits
/// in the file of `0`.
fn given_nodes(common: Value) -> Result<Converted, ConvertError> {
    let process = json!({"env": ["NVIDIA_VISIBLE_DEVICES=0"], "user": {"additionalGids": [7]}});
    let spec = json!({"process": process, "linux": {"devices": [gpu(0)]}});
    let mut config = Config::default();
    config.create.visible_devices = true;
    let nvidia = file(KIND, "0", json!({"deviceNodes": [gpu(0)]}), common);
    convert_by(spec.into(), &config, &Rules::Own, false, || {
        Registry::of([nvidia])
    })
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn an_edit_that_widens_the_grant_of_nodes_is_refused_with_its_file() {
    let mount = |options: &[&str], kind: &str| {
        let mount = json!({"hostPath": "/srv", "containerPath": "/srv", "options": options, "type": kind});
        json!({ "mounts": [mount] })
    };
    let hook = |stage: &str, path: &str, verb: &str| {
        json!({"hooks": [{"hookName": stage, "path":
                                                             path, "args": ["x", verb]}]})
    };
    for (edits, expected) in [
        (json!({"deviceNodes": [gpu(1)]}), "device node /dev/nvidia1"),
        (
            json!({"deviceNodes": [{"path": "/dev/sda", "type": "b", "major": 8, "minor": 0}]}),
            "device node /dev/sda",
        ),
        (mount(&["rbind"], "bind"), "mount of /srv at /srv"),
        (mount(&["rbind", "rw"], ""), "mount of /srv at /srv"),
        (mount(&["rbind", "ro", "rw"], ""), "mount of /srv at /srv"),
        (mount(&["ro"], "ext4"), "mount of /srv at /srv"),
        (mount(&["ro"], ""), "mount of /srv at /srv"),
        (
            json!({"mounts": [{"hostPath": "/dev/sda", "containerPath": "/x", "options": ["bind", "ro"]}]}),
            "mount of /dev/sda at /x",
        ),
        (
            json!({"mounts": [{"hostPath": "/usr/../dev/sda", "containerPath": "/x", "options":
                    ["bind", "ro"]}]}),
            "mount of /usr/../dev/sda",
        ),
        (
            json!({"mounts": [{"hostPath": "dev/sda", "containerPath": "/x", "options": ["bind", "ro"]}]}),
            "mount of dev/sda",
        ),
        (
            json!({"hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk",
                "args": ["nvidia-ctk", "hook", "chmod"]}]}),
            "createContainer hook /usr/bin/nvidia-ctk",
        ),
        (
            hook("createRuntime", "/usr/bin/nvidia-cdi-hook", "update-ldcache"),
            "createRuntime hook /usr/bin/nvidia-cdi-hook",
        ),
        (
            hook("createContainer", "/usr/bin/other", "update-ldcache"),
            "createContainer hook /usr/bin/other",
        ),
        (
            hook("createContainer", "/usr/bin/nvidia-cdi-hook", "chmod"),
            "createContainer hook /usr/bin/nvidia-cdi-hook",
        ),
    ] {
        let error = given_nodes(edits.clone()).unwrap_err();
        assert_eq!(error.code(), "FIRN-CDI-GRANT", "{edits}");
        let message = error.to_string();
        assert!(
            message.starts_with(expected) && message.contains("/etc/cdi/0.json"),
            "{edits}: {message}"
        );
    }
    for (edits, left) in [
        (mount(&["rbind", "ro"], ""), &[][..]),
        (mount(&["rro"], "bind"), &[]),
        (mount(&["bind", "ro"], "none"), &[]),
        (
            json!({"hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk",
                "args": ["nvidia-ctk", "hook", "update-ldcache"]}]}),
            &[],
        ),
        (
            hook("createContainer", "/usr/bin/nvidia-cdi-hook", "update-ldcache"),
            &[],
        ),
        (json!({"additionalGids": [44]}), &["group 44"]),
        (
            json!({"deviceNodes": [{"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255}]}),
            &["/dev/nvidiactl"],
        ),
        (
            json!({"mounts": [{"hostPath": "/tmp/nvidia-mps", "containerPath": "/tmp/nvidia-mps",
                "options": ["rbind"]}]}),
            &["/tmp/nvidia-mps"],
        ),
    ] {
        let made = given_nodes(edits.clone()).unwrap();
        assert!(made.left_out.iter().eq(left), "{edits}: {:?}", made.left_out);
        assert_eq!(made.names.len(), 1);
    }
    let made = given_nodes(json!({"env": ["A=b"], "additionalGids": [7]})).unwrap();
    assert!(
        made.left_out.is_empty(),
        "the process has the group: {:?}",
        made.left_out
    );
    let made = made.spec.into_value();
    assert_eq!(
        made["process"]["env"],
        json!(["NVIDIA_VISIBLE_DEVICES=void", "A=b"])
    );
    assert_eq!(made["process"]["user"], json!({"additionalGids": [7]}));
}

#[test]
fn the_runtimes_own_kind_means_the_same_gpus_unless_a_file_describes_it() {
    let mut config = Config::default();
    config.create.visible_devices = true;
    let of = |kind: &str, minor: u64| file(kind, "0", json!({"deviceNodes": [gpu(minor)]}), json!({}));
    let given = |files: Vec<CdiFile>| {
        let spec = json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=runtime.nvidia.com/gpu=0"]}});
        let made = convert_by(spec.into(), &config, &Rules::Own, false, || Registry::of(files)).unwrap();
        made.names[0].to_string()
    };
    assert_eq!(given(vec![of(KIND, 0)]), "nvidia.com/gpu=0");
    let described = of(RUNTIME_KIND, 1);
    assert_eq!(given(vec![of(KIND, 0), described]), "runtime.nvidia.com/gpu=0");
}

/// Every node of the host is a privileged container's, which no one has chosen.
#[test]
fn nodes_of_a_privileged_container_are_no_grant() {
    let mut config = Config::default();
    config.create.visible_devices = true;
    let socket = json!({"mounts": [{"hostPath": "/s", "containerPath": "/s", "options": ["bind"]}]});
    let convert = |rules: Value| {
        let spec = json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}, "linux": {
            "devices": [gpu(0)],
            "resources": {"devices": rules},
        }});
        let nvidia = file(KIND, "0", json!({"deviceNodes": [gpu(0)]}), socket.clone());
        convert_by(spec.into(), &config, &Rules::Own, false, || {
            Registry::of([nvidia])
        })
    };
    let all = json!({"allow": true, "access": "rwm"});
    let none = json!({"allow": false, "access": "rwm"});
    convert(json!([none, all])).unwrap();
    for rules in [
        json!([]),
        json!([all, none]),
        json!([{"allow": true, "access": "m"}]),
        json!([{"allow": true, "type": "c", "access": "rwm"}]),
    ] {
        assert_eq!(
            convert(rules.clone()).unwrap_err().code(),
            "FIRN-CDI-GRANT",
            "{rules}"
        );
    }
}

#[test]
fn devices_of_another_kind_are_refused_unless_containerd_has_given_them() {
    let nic = || {
        file(
            "vendor.example/nic",
            "a",
            json!({"deviceNodes": [{"path": "/dev/nic", "type": "c", "major": 9, "minor": 9}]}),
            json!({}),
        )
    };
    let nvidia = || file(KIND, "0", json!({"deviceNodes": [gpu(0)]}), json!({}));
    let mut config = Config::default();
    config.create.cdi_annotations = true;
    let convert = |spec: Spec| {
        convert_by(spec, &config, &Rules::Own, false, || {
            Registry::of([nic(), nvidia()])
        })
    };
    let annotated = json!({"annotations": {"cdi.k8s.io/a": "vendor.example/nic=a"}});
    let error = convert(annotated.clone().into()).unwrap_err();
    assert_eq!(error.code(), "FIRN-CDI-KIND");
    assert!(error.to_string().contains("vendor.example/nic=a"), "{error}");
    assert!(error.hint().contains("ctr run --device"));
    // One that no file describes was not given either.
    let unknown = json!({"annotations": {"cdi.k8s.io/a": "vendor.example/other=a"}});
    assert_eq!(convert(unknown.into()).unwrap_err().code(), "FIRN-CDI-KIND");

    let mut acted_on = annotated;
    Registry::of([nic()])
        .inject(&mut acted_on, &["vendor.example/nic=a".parse().unwrap()])
        .unwrap();
    let left = convert(acted_on.clone().into()).unwrap();
    assert_eq!((left.names.len(), left.spec), (0, acted_on.clone().into()));
    acted_on["annotations"]["cdi.k8s.io/b"] = json!("nvidia.com/gpu=0");
    let given = convert(acted_on.into()).unwrap();
    assert_eq!(given.names, ["nvidia.com/gpu=0".parse().unwrap()]);
}

/// What a name in a spec is worth at a restore, where the spec may be another node's.
#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn at_a_restore_specs_of_another_node_lose_their_nodes_and_those_of_pods_are_grants() {
    let nvidia = || {
        let of = |minor: u64| {
            file(
                KIND,
                &minor.to_string(),
                json!({"deviceNodes": [gpu(minor)]}),
                json!({}),
            )
        };
        Registry::of([of(0), of(1)])
    };
    let hook = json!({"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook", "args":
                       ["hook", "prestart"]}]});
    let hooked = |mut spec: Value| {
        spec["hooks"] = hook.clone();
        spec
    };
    let pod = |mut spec: Value| {
        spec["annotations"] = json!({"io.kubernetes.cri.container-type": "container"});
        spec
    };
    let named = |devices: Value| {
        let env = ["NVIDIA_VISIBLE_DEVICES=0"];
        json!({"process": {"env": env}, "linux": {"devices": devices}})
    };
    let (bare, with_node) = (named(json!([])), named(json!([gpu(1)])));
    let in_pool = |pool: &[&str]| {
        let mut config = Config::default();
        config.create.visible_devices = true;
        config.restore.gpus = pool.iter().map(ToString::to_string).collect();
        config
    };
    let none = &[][..];
    for (spec, restores, pool, expected) in [
        (bare.clone(), true, none, Ok(&["/dev/nvidia0"][..])),
        (bare.clone(), true, &["1"], Ok(&["/dev/nvidia1"])),
        (bare.clone(), false, &["1"], Ok(&["/dev/nvidia0"])),
        (pod(bare.clone()), true, &["1"], Ok(&["/dev/nvidia0"])),
        // A variable adds nothing to nodes that may be another node's.
        (with_node.clone(), true, none, Ok(&["/dev/nvidia1"])),
        (with_node.clone(), true, &["0"], Ok(&["/dev/nvidia1"])),
        (with_node.clone(), false, none, Err("FIRN-CDI-GRANT")),
        (pod(with_node.clone()), true, none, Err("FIRN-CDI-GRANT")),
        // A hook's devices take their place.
        (hooked(with_node.clone()), true, none, Ok(&["/dev/nvidia0"])),
        (hooked(with_node.clone()), true, &["1"], Ok(&["/dev/nvidia1"])),
        (
            hooked(with_node.clone()),
            true,
            &["1", "0"],
            Ok(&["/dev/nvidia0", "/dev/nvidia1"]),
        ),
        (hooked(with_node.clone()), false, none, Err("FIRN-CDI-GRANT")),
        (
            pod(hooked(with_node.clone())),
            true,
            &["0"],
            Err("FIRN-CDI-GRANT"),
        ),
    ] {
        let rules = match spec.get("hooks") {
            Some(_) => Rules::Hook(toolkit()),
            None => Rules::Own,
        };
        let converted = convert_by(spec.clone().into(), &in_pool(pool), &rules, restores, nvidia);
        let gpus = converted
            .as_ref()
            .map(|converted| converted.spec.gpu_nodes().into_iter().collect::<Vec<_>>());
        let gpus = gpus.as_deref().map_err(|error| error.code());
        assert_eq!(gpus, expected, "{spec}, {restores}, {pool:?}");
    }
}

mod random;

/// Made by `nvidia-ctk cdi generate` of version 1.20: a mount that stands for no device, and a hook that
/// limits memory.
#[test]
fn device_nodes_and_a_name_get_what_the_newest_files_add() {
    let hook = |stage: &str, verb: &str| {
        let path = "/usr/bin/nvidia-cdi-hook";
        json!({"hookName": stage, "path": path, "args": ["nvidia-cdi-hook", verb, "--gpu-id", "GPU-1"]})
    };
    let limits = "apply-cuda-memory-limits";
    let edits = json!({"deviceNodes": [gpu(0)], "hooks": [hook("createRuntime", limits)]});
    let void = json!({"hostPath": "/dev/null", "options": ["ro", "nosuid", "nodev", "bind"],
        "containerPath": "/var/run/nvidia-container-devices/void"});
    let registry = || {
        Registry::of(vec![file(
            "nvidia.com/gpu",
            "0",
            edits.clone(),
            json!({"mounts": [void]}),
        )])
    };
    let mut config = Config::default();
    config.create.visible_devices = true;
    let env = json!(["NVIDIA_VISIBLE_DEVICES=0"]);
    for devices in [json!([gpu(0)]), json!([])] {
        let spec = json!({"linux": {"devices": devices}, "process": {"env": env}});
        let edited = convert_by(Spec::from(spec), &config, &Rules::Own, false, registry).unwrap();
        assert!(edited.left_out.is_empty());
        assert_eq!(edited.spec.array("/mounts"), [json!(null); 0]);
        assert_eq!(edited.spec.array("/hooks/createRuntime").len(), 1, "{devices}");
    }
    // Nothing else is permitted there.
    let edits = json!({"hooks": [hook("createRuntime", "update-ldcache")]});
    let registry = || Registry::of(vec![file("nvidia.com/gpu", "0", edits.clone(), json!({}))]);
    let spec = json!({"linux": {"devices": [gpu(0)]}, "process": {"env": env}});
    let refused = convert_by(Spec::from(spec), &config, &Rules::Own, false, registry);
    assert_eq!(refused.unwrap_err().code(), "FIRN-CDI-GRANT");
}
