use serde_json::json;

use super::*;

/// By the defaults of NVIDIA's toolkit, where its hook is in the spec.
fn ask(spec: Value) -> GpuRequest {
    let spec = Spec::from(spec);
    let rules = match toolkit_hook(&spec) {
        Some(_) => Rules::Hook(toolkit(true, false, &[])),
        None => Rules::Own,
    };
    GpuRequest::of(&spec, &rules)
}

fn toolkit(visible_devices: bool, volume_mounts: bool, annotations: &[&str]) -> Toolkit {
    Toolkit {
        visible_devices,
        volume_mounts,
        annotations: annotations.iter().map(ToString::to_string).collect(),
        only_full_names: true,
        ..Toolkit::default()
    }
}

fn request(source: RequestSource, devices: &[&str]) -> GpuRequest {
    GpuRequest::Named(NamedGpus {
        source,
        devices: devices.iter().map(ToString::to_string).collect(),
    })
}

fn env(value: &str) -> Value {
    json!({"env": ["PATH=/bin", format!("NVIDIA_VISIBLE_DEVICES={value}")]})
}

/// As contrib/nvidia of containerd 2.1 writes it.
fn oci_hook(words: &[&str]) -> Value {
    let begin = [
        "containerd",
        "oci-hook",
        "--",
        "/usr/bin/nvidia-container-cli",
        "--load-kmods",
        "configure",
    ];
    let args = [
        &begin,
        words,
        &["--utility", "--compute", "--pid={{pid}}", "{{rootfs}}"],
    ]
    .concat();
    json!({"createRuntime": [{"path": "/usr/bin/containerd", "args": args, "env": ["PATH=/usr/bin"]}]})
}

/// As docker writes it.
fn prestart() -> Value {
    let path = "/usr/bin/nvidia-container-runtime-hook";
    json!({"prestart": [{"path": path, "args": ["nvidia-container-runtime-hook", "prestart"]}]})
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn every_source_of_a_request_is_found() {
    let device = |path: &str| json!({"devices": [{"path": path, "type": "c", "major": 195, "minor": 0}]});
    let stands_for = |at: &str| json!({"source": "/dev/null", "destination": format!("{VOLUMES}/{at}")});
    for (spec, expected) in [
        (json!({}), GpuRequest::None),
        (json!({"linux": device("/dev/fuse")}), GpuRequest::None),
        (json!({"linux": device("/dev/kfd")}), GpuRequest::None),
        (json!({"linux": device("/dev/nvidiactl")}), GpuRequest::None),
        (json!({"linux": device("/dev/nvidia0")}), GpuRequest::Nodes),
        // Nodes of an unprivileged device plugin, or of a privileged container, and a hook for the rest.
        (
            json!({"linux": device("/dev/nvidia0"), "hooks": prestart(), "process": env("GPU-1")}),
            request(RequestSource::RuntimeHook, &["GPU-1"]),
        ),
        (
            json!({"linux": device("/dev/nvidia0"), "process": env("GPU-1")}),
            request(RequestSource::Variable, &["GPU-1"]),
        ),
        // Finished edits: CDI's own variable, also with what containerd has acted on.
        (
            json!({"linux": device("/dev/nvidia0"), "process": env("void"), "hooks": prestart()}),
            GpuRequest::Nodes,
        ),
        (
            json!({"linux": device("/dev/nvidia0"), "annotations": {"cdi.k8s.io/p": "nvidia.com/gpu=0"}}),
            GpuRequest::Nodes,
        ),
        (
            json!({"annotations": {
                "cdi.k8s.io/b": "nvidia.com/gpu=1,nvidia.com/gpu=2", "cdi.k8s.io/a": "v/c=0", "a": "b",
            }}),
            request(
                RequestSource::Annotations,
                &["v/c=0", "nvidia.com/gpu=1", "nvidia.com/gpu=2"],
            ),
        ),
        // An image older than the variable.
        (
            json!({"hooks": prestart(), "process": {"env": ["CUDA_VERSION=8.0"]}}),
            request(RequestSource::RuntimeHook, &["all"]),
        ),
        (
            json!({"hooks": prestart(), "process": {"env":
                    ["CUDA_VERSION=8.0", "NVIDIA_REQUIRE_CUDA=cuda>=8"]}}),
            GpuRequest::None,
        ),
        (
            json!({"process": {"env": ["CUDA_VERSION=8.0"]}}),
            GpuRequest::None,
        ),
        (
            json!({"hooks": oci_hook(&["--device=0,1"])}),
            request(RequestSource::Cli, &["0", "1"]),
        ),
        (
            json!({"hooks": oci_hook(&["--device=0", "--device=GPU-1"])}),
            request(RequestSource::Cli, &["0", "GPU-1"]),
        ),
        (json!({"hooks": oci_hook(&[])}), GpuRequest::None),
        (json!({"hooks": prestart()}), GpuRequest::None),
        (
            json!({"hooks": prestart(), "process": env("void")}),
            GpuRequest::None,
        ),
        (
            json!({"hooks": prestart(), "process": env("all")}),
            request(RequestSource::RuntimeHook, &["all"]),
        ),
        (
            json!({"hooks": prestart(), "process": env("GPU-2"), "mounts": [stands_for("GPU-1")]}),
            request(RequestSource::RuntimeHook, &["GPU-2"]),
        ),
        (
            json!({"process": env("all")}),
            request(RequestSource::Variable, &["all"]),
        ),
        (
            json!({"process": env(" 0, GPU-2 ,,none")}),
            request(RequestSource::Variable, &["0", "GPU-2"]),
        ),
        (json!({"process": env("0,void")}), GpuRequest::None),
        (
            json!({"process": env("nvidia.com/gpu=0")}),
            request(RequestSource::Variable, &["nvidia.com/gpu=0"]),
        ),
        (json!({"process": env("void")}), GpuRequest::None),
        (json!({"process": env("none")}), GpuRequest::None),
        (json!({"process": env("")}), GpuRequest::None),
        (
            json!({"process": env(VOLUMES), "mounts": [stands_for("GPU-1"),
                    stands_for("cdi/nvidia.com/gpu/2"),
                stands_for("cdi/nvidia.com/gpu=3"), stands_for("imex/0")]}),
            request(
                RequestSource::Volumes,
                &["GPU-1", "nvidia.com/gpu=2", "nvidia.com/gpu=3"],
            ),
        ),
        (
            json!({"mounts": [stands_for("GPU-1"), stands_for("void")]}),
            GpuRequest::None,
        ),
        (
            json!({"mounts": [{"source": "/srv", "destination": format!("{VOLUMES}/GPU-1")},
                    stands_for("a/b"), stands_for("")]}),
            GpuRequest::None,
        ),
        (
            json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void"]}}),
            GpuRequest::None,
        ),
    ] {
        assert_eq!(ask(spec.clone()), expected, "{spec}");
    }
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn nvidias_wrapper_uses_the_sources_that_its_operator_permits() {
    let default = toolkit(true, false, &["cdi.k8s.io/"]);
    let hardened = toolkit(false, true, &[]);
    let swarm = Toolkit {
        variables: vec!["DOCKER_RESOURCE_GPU".to_owned()],
        ..default.clone()
    };
    let node = json!({"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]});
    let mounts = json!([{"source": "/dev/null", "destination": format!("{VOLUMES}/GPU-2")}]);
    let annotation = json!({"cdi.k8s.io/p": "nvidia.com/gpu=3"});
    let mut privileged = env("GPU-1");
    privileged["capabilities"] = json!({"bounding": ["CAP_SYS_ADMIN"]});
    let named = |name: &str| request(RequestSource::Wrapper, &[name]);
    for (toolkit, spec, expected) in [
        (&default, json!({}), GpuRequest::None),
        (&default, json!({"process": env("void")}), GpuRequest::None),
        (&default, json!({"process": env("GPU-1")}), named("GPU-1")),
        (
            &default,
            json!({"process": {"env": ["CUDA_VERSION=8.0"]}}),
            named("all"),
        ),
        (
            &default,
            json!({"process": env("GPU-1"), "mounts": mounts}),
            named("GPU-1"),
        ),
        (
            &default,
            json!({"process": env("GPU-1"), "annotations": annotation}),
            named("nvidia.com/gpu=3"),
        ),
        // Kubernetes' device plugin with PASS_DEVICE_SPECS: the wrapper adds the libraries.
        (
            &default,
            json!({"process": env("GPU-1"), "linux": node}),
            named("GPU-1"),
        ),
        (
            &default,
            json!({"process": env("void"), "linux": node}),
            GpuRequest::Nodes,
        ),
        (
            &default,
            json!({"linux": node, "annotations": annotation}),
            GpuRequest::Nodes,
        ),
        // docker's own hook, or ctr's.
        (
            &default,
            json!({"hooks": prestart(), "process": env("GPU-1")}),
            named("GPU-1"),
        ),
        (
            &default,
            json!({"hooks": oci_hook(&["--device=0"])}),
            request(RequestSource::Cli, &["0"]),
        ),
        // Bare names leave the mode that knows annotations.
        (
            &default,
            json!({"process": env("GPU-1"), "annotations": {"cdi.k8s.io/p": "0"}}),
            named("GPU-1"),
        ),
        (
            &swarm,
            json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "DOCKER_RESOURCE_GPU=GPU-1"]}}),
            named("GPU-1"),
        ),
        (&swarm, json!({"process": env("GPU-1")}), named("GPU-1")),
        (&hardened, json!({"process": env("GPU-1")}), GpuRequest::None),
        (&hardened, json!({"process": privileged}), named("GPU-1")),
        (
            &hardened,
            json!({"process": env(VOLUMES), "mounts": mounts}),
            named("GPU-2"),
        ),
        (&hardened, json!({"annotations": annotation}), GpuRequest::None),
    ] {
        assert_eq!(
            GpuRequest::of(&Spec::from(spec.clone()), &Rules::Wrapper(toolkit.clone())),
            expected,
            "{spec}"
        );
    }
}

#[test]
fn nvidias_hook_uses_the_sources_that_its_operator_permits() {
    let hardened = toolkit(false, true, &[]);
    let swarm = Toolkit {
        variables: vec!["DOCKER_RESOURCE_GPU".to_owned(), "OTHER".to_owned()],
        ..toolkit(true, false, &[])
    };
    let both = json!({"env": ["OTHER=GPU-2", "DOCKER_RESOURCE_GPU=GPU-1"]});
    let mounts = json!([{"source": "/dev/null", "destination": format!("{VOLUMES}/GPU-2")}]);
    let mut privileged = env("GPU-1");
    privileged["capabilities"] = json!({"bounding": ["CAP_SYS_ADMIN"]});
    let old = json!({"env": ["CUDA_VERSION=8.0"]});
    let named = |name: &str| request(RequestSource::RuntimeHook, &[name]);
    for (toolkit, spec, expected) in [
        (&hardened, json!({"process": env("all")}), GpuRequest::None),
        (&hardened, json!({"process": old}), GpuRequest::None),
        (&hardened, json!({"process": privileged}), named("GPU-1")),
        (
            &hardened,
            json!({"process": env("all"), "mounts": mounts}),
            named("GPU-2"),
        ),
        (
            &toolkit(false, false, &[]),
            json!({"process": env(VOLUMES), "mounts": mounts}),
            GpuRequest::None,
        ),
        (
            &swarm,
            json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "DOCKER_RESOURCE_GPU=GPU-1"]}}),
            named("GPU-1"),
        ),
        (
            &swarm,
            json!({"process": both}),
            request(RequestSource::RuntimeHook, &["GPU-1", "GPU-2"]),
        ),
        // The wrapper goes by annotations, its hook does not.
        (
            &toolkit(false, false, &["cdi.k8s.io/"]),
            json!({"annotations": {"cdi.k8s.io/p": "nvidia.com/gpu=3"}}),
            GpuRequest::None,
        ),
    ] {
        let mut spec = spec;
        spec["hooks"] = prestart();
        let spec = Spec::from(spec);
        assert_eq!(
            GpuRequest::of(&spec, &Rules::Hook(toolkit.clone())),
            expected,
            "{spec:?}"
        );
    }
}

#[test]
fn the_settings_are_those_of_who_would_give_the_gpus() {
    let [plain, hooked] = [json!({}), json!({"hooks": prestart()})].map(Spec::from);
    let wrapper = Path::new("/nonexistent/nvidia-container-runtime");
    assert_eq!(Rules::of(&plain, None).unwrap(), Rules::Own);
    assert!(matches!(Rules::of(&hooked, None).unwrap(), Rules::Hook(_)));
    for spec in [&plain, &hooked] {
        assert!(matches!(
            Rules::of(spec, Some(wrapper)).unwrap(),
            Rules::Wrapper(_)
        ));
    }
}

#[test]
fn devices_of_other_kinds_are_found() {
    let devices = [
        "0",
        "GPU-1",
        "nvidia.com/gpu=0",
        "runtime.nvidia.com/gpu=1",
        "v/disk=a",
        "x=nvidia.com/gpu",
    ];
    let request = NamedGpus {
        source: RequestSource::Variable,
        devices: devices.map(str::to_owned).to_vec(),
    };
    let foreign: Vec<&str> = request.other_kinds().collect();
    assert_eq!(foreign, ["v/disk=a", "x=nvidia.com/gpu"]);
}

#[test]
fn names_count_only_where_the_operator_lets_them() {
    let mut create = Create::default();
    for source in [
        RequestSource::Cli,
        RequestSource::RuntimeHook,
        RequestSource::Wrapper,
    ] {
        assert!(source.is_enabled(&create), "{source:?}");
    }
    for source in [
        RequestSource::Variable,
        RequestSource::Volumes,
        RequestSource::Annotations,
    ] {
        assert!(!source.is_enabled(&create), "{source:?}");
    }
    create.hooks = Conversion::Keep;
    create.visible_devices = true;
    assert!(!RequestSource::RuntimeHook.is_enabled(&create) && RequestSource::Variable.is_enabled(&create));
    assert!(!RequestSource::Volumes.is_enabled(&create));
    create.volume_mounts = true;
    create.cdi_annotations = true;
    assert!(RequestSource::Volumes.is_enabled(&create) && RequestSource::Annotations.is_enabled(&create));
}

#[test]
fn requests_are_removed_and_nothing_else() {
    let others = json!({"path": "/usr/bin/cni", "args": ["cni"]});
    let links = json!({"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "create-symlinks"]});
    let params = json!({"path": "/usr/bin/nvidia-cdi-hook", "args":
                         ["nvidia-cdi-hook", "disable-device-node-modification"]});
    let mut spec = Spec::from(json!({
        "hooks": {
            "prestart": [others, prestart()["prestart"][0]],
            "createRuntime": [oci_hook(&["--device=0"])["createRuntime"][0]],
            "createContainer": [links, params],
        },
        "mounts": [
            {"source": "/dev/null", "destination": format!("{VOLUMES}/GPU-1")},
            {"source": "/dev/null", "destination": "/etc/null"},
        ],
        "process": {"env": ["A=b", "NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_VISIBLE_DEVICES=0"]},
    }));
    assert_eq!(remove_requests(&mut spec).unwrap(), 4);
    let expected = json!({
        "hooks": {"prestart": [others], "createRuntime": [], "createContainer": [links]},
        "mounts": [{"source": "/dev/null", "destination": "/etc/null"}],
        "process": {"env": ["A=b", "NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_VISIBLE_DEVICES=void"]},
    });
    assert_eq!(spec, Spec::from(expected.clone()));
    assert_eq!(remove_requests(&mut spec).unwrap(), 0);
    assert_eq!(spec, Spec::from(expected));
}

#[test]
fn specs_of_another_shape_ask_for_nothing() {
    for spec in [
        json!([]),
        json!({"hooks": [], "mounts": {}, "process": 3, "linux": "x"}),
        json!({"hooks": {"prestart": [3, {"path": 3, "args":
                3}, {"path": "nvidia-container-runtime-hook"}]}}),
        json!({"process": {"env": [3, "NVIDIA_VISIBLE_DEVICES"]}, "mounts": [3, {"destination": 3}]}),
    ] {
        assert_eq!(ask(spec), GpuRequest::None);
    }
}

#[test]
fn a_hook_counts_with_nodes_unless_it_has_nothing_to_do() {
    let node = json!({"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]});
    for (variable, by_hook) in [("all", true), ("GPU-1", true), ("void", false), ("none", false)] {
        let spec = Spec::from(json!({"linux": node, "hooks": prestart(), "process": env(variable)}));
        assert_eq!(spec.gpu_by_hook(), by_hook, "{variable}");
        assert!(spec.requests_gpu());
    }
    let stands_for = json!([{"source": "/dev/null", "destination": format!("{VOLUMES}/GPU-1")}]);
    for (mounts, by_hook) in [(json!([]), false), (stands_for, true)] {
        let spec = json!({"linux": node, "hooks": prestart(), "process": env(VOLUMES), "mounts": mounts});
        assert_eq!(Spec::from(spec).gpu_by_hook(), by_hook);
    }
    for (words, by_hook) in [(&["--device=0"][..], true), (&[], false)] {
        let spec = json!({"linux": node, "hooks": oci_hook(words)});
        assert_eq!(Spec::from(spec).gpu_by_hook(), by_hook, "{words:?}");
    }
}

#[test]
fn requests_beyond_gpus_are_found() {
    let with = |pair: &str| Spec::from(json!({"process": {"env": ["A=b", pair]}}));
    for (pair, expected) in [
        ("NVIDIA_VISIBLE_DEVICES=all", None),
        ("NVIDIA_GDS=disabled", None),
        ("NVIDIA_GDS=enabled", Some("NVIDIA_GDS")),
        ("NVIDIA_MOFED=enabled", Some("NVIDIA_MOFED")),
        ("NVIDIA_IMEX_CHANNELS=0", Some("NVIDIA_IMEX_CHANNELS")),
        ("NVIDIA_IMEX_CHANNELS=", None),
        (
            "NVIDIA_MIG_MONITOR_DEVICES=all",
            Some("NVIDIA_MIG_MONITOR_DEVICES"),
        ),
        ("NVIDIA_MIG_CONFIG_DEVICES=", None),
    ] {
        assert_eq!(requests_beyond_gpus(&with(pair)), expected, "{pair}");
    }
    let channel = json!({"source": "/dev/null", "destination": format!("{VOLUMES}/imex/0")});
    let spec = Spec::from(json!({ "mounts": [channel] }));
    assert_eq!(requests_beyond_gpus(&spec), Some("NVIDIA_IMEX_CHANNELS"));
}
