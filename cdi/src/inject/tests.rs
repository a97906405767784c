use std::path::PathBuf;

use super::*;
use firn_host::Problem;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn read(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

/// A node with this CDI file alone.
fn node(file: &str) -> Registry {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture(file), dir.path().join(file)).unwrap();
    Registry::read(&[dir.path()])
}

fn names(devices: &[&str]) -> Vec<DeviceName> {
    devices.iter().map(|device| device.parse().unwrap()).collect()
}

fn injected(file: &str, spec: &str, devices: &[&str]) -> Value {
    let mut spec = read(spec);
    node(file).inject(&mut spec, &names(devices)).unwrap();
    spec
}

/// Without what firn leaves out on purpose: rules that are there already, and rules that allow nothing.
fn without_idle_rules(mut spec: Value) -> Value {
    if let Some(rules) = spec
        .pointer_mut("/linux/resources/devices")
        .and_then(Value::as_array_mut)
    {
        let mut kept: Vec<Value> = Vec::new();
        for rule in rules.drain(..) {
            if rule["access"].is_string() && !kept.contains(&rule) {
                kept.push(rule);
            }
        }
        *rules = kept;
    }
    spec
}

#[test]
fn gives_what_the_reference_implementation_gives() {
    for (file, spec, devices, expected) in [
        (
            "two-gpus.yaml",
            "bare.json",
            &["nvidia.com/gpu=0"][..],
            "one-gpu.json",
        ),
        (
            "two-gpus.yaml",
            "bare.json",
            &[
                "nvidia.com/gpu=GPU-b7e94d13-2c65-4a8b-9f21-55aa66bb77c1",
                "nvidia.com/gpu=0",
            ],
            "both-gpus.json",
        ),
        ("target.yaml", "bare.json", &["nvidia.com/gpu=all"], "target.json"),
        (
            "other-driver.yaml",
            "bare.json",
            &["nvidia.com/gpu=1"],
            "other-driver.json",
        ),
        ("amd.json", "bare.json", &["amd.com/gpu=0"], "amd.json"),
        (
            "everything.yaml",
            "bare.json",
            &["example.org/all.edits=one", "example.org/all.edits=two"],
            "everything.json",
        ),
        (
            "two-gpus.yaml",
            "in-user-namespace.json",
            &["nvidia.com/gpu=0"],
            "in-user-namespace.json",
        ),
        (
            "everything.yaml",
            "in-user-namespace.json",
            &["example.org/all.edits=one"],
            "everything-in-user-namespace.json",
        ),
    ] {
        let expected = without_idle_rules(read(&format!("injected/{expected}")));
        let ours = injected(file, spec, devices);
        assert_eq!(
            serde_json::to_string_pretty(&ours).unwrap(),
            serde_json::to_string_pretty(&expected).unwrap(),
            "{file} {spec} {devices:?}"
        );
    }
}

#[test]
fn asking_twice_changes_nothing_but_hooks() {
    let both = [
        "nvidia.com/gpu=0",
        "nvidia.com/gpu=0",
        "nvidia.com/gpu=GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a50",
    ];
    let without_hooks = |mut spec: Value| {
        spec.as_object_mut().unwrap().remove("hooks");
        spec
    };
    let once = injected("two-gpus.yaml", "bare.json", &both[..1]);
    assert_eq!(
        injected("two-gpus.yaml", "bare.json", &both[..2]),
        once,
        "the same name"
    );
    assert_eq!(
        without_hooks(injected("two-gpus.yaml", "bare.json", &both)),
        without_hooks(once.clone()),
        "two names of one device"
    );
    let mut again = once.clone();
    node("two-gpus.yaml")
        .inject(&mut again, &names(&both[..1]))
        .unwrap();
    assert_eq!(without_hooks(again), without_hooks(once));
}

#[test]
fn what_nobody_knows_survives() {
    let mut spec = read("bare.json");
    spec["future"] = json!({"a": [1.5, 18_446_744_073_709_551_615_u64]});
    spec["linux"]["devices"][0]["flavour"] = json!("old");
    spec["linux"]["devices"][0]["path"] = json!("/dev/kept");
    node("two-gpus.yaml")
        .inject(&mut spec, &names(&["nvidia.com/gpu=0"]))
        .unwrap();
    assert_eq!(spec["future"]["a"][1], json!(18_446_744_073_709_551_615_u64));
    assert_eq!(spec["linux"]["devices"][0]["flavour"], "old");
}

#[test]
fn a_variable_that_is_set_twice_is_set_once() {
    let mut env = vec![json!("A=1"), json!("B=2"), json!("A=3")];
    set_env(&mut env, "A=new=");
    assert_eq!(env, ["A=new=", "B=2"]);
    set_env(&mut env, "C=");
    assert_eq!(env, ["A=new=", "B=2", "C="]);
}

#[test]
fn a_device_that_is_not_on_the_host_is_named_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let device =
        |node: Value| json!({"name": "d", "containerEdits": {"env": ["A=b"], "deviceNodes": [node]}});
    for (at, file) in [
        json!({"path": "/dev/absent"}),
        json!({"path": "/dev/x", "hostPath": "/absent/y", "type": "c"}),
        json!({"path": "/dev/null", "type": "b"}),
        json!({"path": "/etc/passwd"}),
    ]
    .into_iter()
    .enumerate()
    {
        let text = json!({"cdiVersion": "0.5.0", "kind": format!("v/c{at}"), "devices": [device(file)]});
        std::fs::write(dir.path().join(format!("{at}.json")), text.to_string()).unwrap();
    }
    let registry = Registry::read(&[dir.path()]);
    assert_eq!(registry.broken().len(), 0, "{:?}", registry.broken());
    for (at, word) in [
        "/dev/absent",
        "/absent/y",
        "to be of type b, and it is of type c",
        "/etc/passwd",
    ]
    .into_iter()
    .enumerate()
    {
        let mut spec = read("bare.json");
        let error = registry
            .inject(&mut spec, &names(&[&format!("v/c{at}=d")]))
            .unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        assert_eq!((error.code(), spec), ("FIRN-CDI-DEVICE", read("bare.json")));
    }
}

#[test]
fn specs_of_another_shape_are_refused() {
    for spec in [
        json!([]),
        json!({"mounts": {}}),
        json!({"linux": []}),
        json!({"process": {"env": "A=b"}}),
    ] {
        let mut edited = spec.clone();
        let error = node("two-gpus.yaml")
            .inject(&mut edited, &names(&["nvidia.com/gpu=0"]))
            .unwrap_err();
        assert_eq!((error.code(), edited), ("FIRN-SPEC-INVALID", spec));
    }
}
