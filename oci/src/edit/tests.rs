use super::*;
use crate::fixtures::{inventory, spec};

fn paths(spec: &Spec) -> Vec<String> {
    spec.devices()
        .unwrap()
        .iter()
        .map(|d| d.node.path.display().to_string())
        .collect()
}

/// Rules that name one device, as `major:minor`.
fn allowed(spec: &Spec) -> Vec<String> {
    let rules = spec.array("/linux/resources/devices").iter();
    let allowing = rules.filter(|rule| rule["allow"] == true);
    allowing
        .map(|rule| format!("{}:{}", rule["major"], rule["minor"]))
        .collect()
}

fn edited(spec: &Spec, on: &firn_gpu::Inventory, targets: &[usize]) -> (Spec, DeviceEdit) {
    let mut spec = spec.clone();
    let gpus: Vec<Gpu> = targets.iter().map(|&i| on.gpus[i].clone()).collect();
    let edit = replace_gpus(&mut spec, &gpus, &on.common_nodes).unwrap();
    let mut again = spec.clone();
    assert!(
        replace_gpus(&mut again, &gpus, &on.common_nodes)
            .unwrap()
            .is_empty(),
        "not idempotent"
    );
    assert_eq!(again, spec, "not idempotent");
    (spec, edit)
}

#[test]
fn a_spec_that_fits_is_left_as_it_is() {
    let before = spec(195, &[0, 2]);
    let (after, edit) = edited(&before, &inventory(195, 4), &[0, 2]);
    assert_eq!(after, before);
    assert!(edit.is_empty());
    let (after, _) = edited(&before, &inventory(195, 4), &[2, 0]);
    assert_eq!(after, before, "the order of the targets is the map's affair");
}

#[test]
fn a_rule_that_stands_twice_stays_so() {
    let mut value = spec(195, &[0]).value().clone();
    let rules = &mut value["linux"]["resources"]["devices"];
    let twice = json!({"allow": true, "type": "c", "major": 195, "minor": 2, "access": "rwm"});
    rules.as_array_mut().unwrap().extend([twice.clone(), twice]);
    let (after, _) = edited(&Spec::from(value), &inventory(195, 4), &[0, 2]);
    assert_eq!(allowed(&after).iter().filter(|rule| *rule == "195:2").count(), 2);
}

#[test]
fn another_gpu_of_the_same_node_takes_the_place_of_the_first() {
    let (after, edit) = edited(&spec(195, &[0]), &inventory(195, 4), &[3]);
    assert_eq!(
        paths(&after),
        [
            "/dev/fuse",
            "/dev/nvidia-uvm",
            "/dev/nvidia-uvm-tools",
            "/dev/nvidiactl",
            "/dev/nvidia3"
        ]
    );
    assert_eq!(allowed(&after), ["10:229", "196:0", "196:1", "195:255", "195:3"]);
    assert_eq!((edit.added.len(), edit.dropped.len()), (1, 1));
}

#[test]
fn the_numbers_of_another_node_are_replaced_everywhere() {
    let (after, _) = edited(&spec(240, &[0, 1]), &inventory(195, 4), &[2, 3]);
    assert_eq!(paths(&after)[4..], ["/dev/nvidia2", "/dev/nvidia3"]);
    assert_eq!(
        allowed(&after),
        ["10:229", "196:0", "196:1", "195:255", "195:2", "195:3"]
    );
}

/// The source's GPU 1 has the numbers that GPU 0 has here.
#[test]
fn numbers_that_mean_another_gpu_here_do_not_leak() {
    let mut here = inventory(195, 2);
    for gpu in &mut here.gpus {
        let node = gpu.node.as_mut().unwrap();
        node.minor = 1 - node.minor;
    }
    let (after, _) = edited(&spec(195, &[1]), &here, &[1]);
    assert_eq!(allowed(&after), ["10:229", "196:0", "196:1", "195:255", "195:0"]);
}

#[test]
fn fewer_and_more_gpus() {
    let (after, edit) = edited(&spec(195, &[0, 1, 2]), &inventory(195, 4), &[1]);
    assert_eq!(paths(&after)[4..], ["/dev/nvidia1"]);
    assert_eq!(allowed(&after).last().unwrap(), "195:1");
    assert_eq!((edit.added.len(), edit.dropped.len()), (0, 2));

    let (after, _) = edited(&spec(195, &[1]), &inventory(195, 4), &[0, 1, 3]);
    assert_eq!(
        paths(&after)[4..],
        ["/dev/nvidia1", "/dev/nvidia0", "/dev/nvidia3"]
    );
    assert_eq!(allowed(&after)[4..], ["195:1", "195:0", "195:3"]);
}

#[test]
fn mode_owner_and_unknown_fields_stay() {
    let mut before = spec(240, &[0]);
    let devices = before.object_mut("linux").unwrap()["devices"]
        .as_array_mut()
        .unwrap();
    let gpu = devices.last_mut().unwrap().as_object_mut().unwrap();
    gpu.extend([
        ("gid".to_owned(), json!(44)),
        ("fileMode".to_owned(), json!(0o660)),
        ("future".to_owned(), json!(1)),
    ]);
    let (after, _) = edited(&before, &inventory(195, 4), &[2, 3]);
    for entry in &after.array("/linux/devices")[4..] {
        assert_eq!(
            (&entry["gid"], &entry["fileMode"], &entry["future"]),
            (&json!(44), &json!(0o660), &json!(1))
        );
    }
}

#[test]
fn graphics_nodes_go_only_when_the_gpus_change() {
    let mut before = spec(195, &[0]);
    let devices = before.object_mut("linux").unwrap()["devices"]
        .as_array_mut()
        .unwrap();
    devices.push(json!({"path": "/dev/dri/card1", "type": "c", "major": 226, "minor": 1}));
    let rules = before.object_mut("linux.resources").unwrap()["devices"]
        .as_array_mut()
        .unwrap();
    rules.push(json!({"allow": true, "type": "c", "major": 226, "minor": 1, "access": "rwm"}));
    assert_eq!(edited(&before, &inventory(195, 4), &[0]).0, before);
    let (after, edit) = edited(&before, &inventory(195, 4), &[1]);
    assert!(!paths(&after).contains(&"/dev/dri/card1".to_owned()));
    assert!(!allowed(&after).contains(&"226:1".to_owned()));
    assert!(edit.dropped.iter().any(|node| node.path.ends_with("card1")));
}

#[test]
fn common_nodes_that_the_host_lacks_are_dropped_and_none_are_added() {
    let mut before = spec(240, &[0]);
    let devices = before.object_mut("linux").unwrap()["devices"]
        .as_array_mut()
        .unwrap();
    devices.push(json!({"path": "/dev/nvidia-modeset", "type": "c", "major": 240, "minor": 254}));
    devices.retain(|d| d["path"] != "/dev/nvidia-uvm-tools");
    let (after, _) = edited(&before, &inventory(195, 1), &[0]);
    assert_eq!(
        paths(&after),
        ["/dev/fuse", "/dev/nvidia-uvm", "/dev/nvidiactl", "/dev/nvidia0"]
    );
}

#[test]
fn a_privileged_spec_gets_nodes_and_no_rules() {
    let devices = json!([{"path": "/dev/nvidia0", "type": "c", "major": 240, "minor": 0}]);
    let rules = json!([{"allow": true, "access": "rwm"}]);
    let before = Spec::from(json!({"linux": {"devices": devices, "resources": {"devices": rules}}}));
    let (after, _) = edited(&before, &inventory(195, 2), &[0, 1]);
    assert_eq!(paths(&after), ["/dev/nvidia0", "/dev/nvidia1"]);
    assert_eq!(after.array("/linux/resources/devices"), rules.as_array().unwrap());
}

#[test]
fn a_spec_without_rules_gets_rules_for_its_gpus_only() {
    let devices = json!([
        {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0},
        {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229},
    ]);
    let (after, _) = edited(
        &Spec::from(json!({"linux": {"devices": devices}})),
        &inventory(195, 2),
        &[0],
    );
    assert_eq!(allowed(&after), ["195:0"]);
}

#[test]
fn a_gpu_without_node_is_named() {
    let mut here = inventory(195, 1);
    here.gpus[0].node = None;
    let error = replace_gpus(&mut spec(195, &[0]), &here.gpus, &here.common_nodes).unwrap_err();
    assert_eq!(error.code(), "FIRN-GPU-NO-NODE");
    assert!(error.to_string().contains(here.gpus[0].uuid.as_str()));
}

#[test]
fn only_early_hooks_of_nvidia_are_stripped() {
    let nvidia = json!({"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache"]});
    let other = json!({"path": "/opt/cni/hook"});
    let mut spec = Spec::from(json!({"hooks": {
        "prestart": [nvidia], "createRuntime": [other, nvidia],
        "createContainer": [nvidia], "poststop": [nvidia],
    }}));
    assert_eq!(strip_gpu_hooks(&mut spec).unwrap(), 2);
    assert_eq!(strip_gpu_hooks(&mut spec).unwrap(), 0);
    assert_eq!(spec.array("/hooks/createRuntime"), [other]);
    assert_eq!(
        (
            spec.array("/hooks/createContainer").len(),
            spec.array("/hooks/poststop").len()
        ),
        (1, 1)
    );

    let mut plain = Spec::from(json!({}));
    assert_eq!(strip_gpu_hooks(&mut plain).unwrap(), 0);
    assert_eq!(plain, Spec::from(json!({})));
}

/// As NVIDIA's CDI files have it, one for each GPU.
fn limited(environment: &[&str]) -> Spec {
    let hook = |gpu: &str| {
        json!({"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "apply-cuda-memory-limits",
            "--driver-root", "", "--gpu-id", gpu], "env": ["NVIDIA_CTK_DEBUG=false"]})
    };
    let hooks = [hook("GPU-1"), json!({"path": "/opt/cni/hook"}), hook("GPU-2")];
    Spec::from(json!({"process": {"env": environment}, "hooks": {"createRuntime": hooks}}))
}

#[test]
fn limits_of_memory_hold_for_the_gpus_of_the_restored_container() {
    let here = inventory(195, 1);
    let uuid = &here.gpus[0].uuid;
    let mut spec = limited(&["NVIDIA_GPU_MEMORY_LIMIT=64"]);
    assert_eq!(strip_gpu_hooks(&mut spec).unwrap(), 0, "it gives no GPU");
    for _ in 0..2 {
        replace_gpus(&mut spec, &here.gpus, &here.common_nodes).unwrap();
        let hooks = spec.array("/hooks/createRuntime");
        assert_eq!(hooks.len(), 2);
        let args = ["nvidia-cdi-hook", "apply-cuda-memory-limits", "--driver-root", ""];
        let args = [&args.map(str::to_owned)[..], &[format!("--gpu-id={uuid}")]].concat();
        assert_eq!(hooks[1]["args"], json!(args));
        assert_eq!(hooks[1]["env"], json!(["NVIDIA_CTK_DEBUG=false"]));
    }
    // Nothing is limited, or there is no GPU.
    let other = [json!({"path": "/opt/cni/hook"})];
    let mut spec = limited(&[]);
    replace_gpus(&mut spec, &here.gpus, &here.common_nodes).unwrap();
    assert_eq!(spec.array("/hooks/createRuntime"), other);
    let mut spec = limited(&["NVIDIA_GPU_MEMORY_REQUEST=64"]);
    drop_nodes(&mut spec).unwrap();
    assert_eq!(spec.array("/hooks/createRuntime"), other);
}

#[test]
fn the_restore_hook_is_added_last_and_once() {
    let mut spec = Spec::from(json!({"hooks": {"createRuntime": [{"path": "/opt/cni/hook"}]}}));
    add_restore_hook(&mut spec, Path::new("/usr/bin/firn-hook")).unwrap();
    add_restore_hook(&mut spec, Path::new("/usr/bin/firn-hook")).unwrap();
    let hooks = spec.array("/hooks/createRuntime");
    assert_eq!(hooks.len(), 2);
    assert_eq!(hooks[1]["args"], json!(["firn-hook", "createRuntime"]));

    let mut bare = Spec::from(json!({"hooks": null}));
    add_restore_hook(&mut bare, Path::new("/usr/bin/firn-hook")).unwrap();
    assert_eq!(bare.array("/hooks/createRuntime").len(), 1);
    let mut wrong = Spec::from(json!({"hooks": {"createRuntime": 3}}));
    assert_eq!(
        add_restore_hook(&mut wrong, Path::new("/x")).unwrap_err().code(),
        "FIRN-SPEC-INVALID"
    );
}

#[test]
fn the_criu_configuration_is_named() {
    let mut spec = Spec::from(json!({"annotations": {"k": "v", "org.criu.config": "/old"}}));
    set_criu_config(&mut spec, Path::new("/b/firn-criu.conf")).unwrap();
    assert_eq!(spec.annotation("org.criu.config"), Some("/b/firn-criu.conf"));
    assert_eq!(spec.annotation("k"), Some("v"));
    set_criu_config(&mut spec, Path::new("/c/firn-criu.conf")).unwrap();
    assert_eq!(spec.annotation("org.criu.config"), Some("/c/firn-criu.conf"));
    assert_eq!(
        spec.annotations().unwrap().len(),
        2,
        "nothing else is noted in it"
    );
}

/// What firn notes for itself is never taken from a spec, whatever the name is.
#[test]
fn a_given_spec_keeps_the_annotations_of_specs_alone() {
    let unknown = ["firn.dev/", "firn.dev/tomorrow", "firn.dev/criu-config/x"];
    let internal = [&names::NEVER_IN_SPECS[..], &unknown].concat();
    for name in &internal {
        let mut spec = Spec::from(json!({"annotations": {*name: "/x", "firn.devel/x": "", "k": "v"}}));
        assert_eq!(drop_internal_annotations(&mut spec).unwrap(), [*name]);
        let left: Vec<&String> = spec.annotations().unwrap().keys().collect();
        assert_eq!(left, ["firn.devel/x", "k"], "{name}");
    }
    let kept: Map<String, Value> = names::ANNOTATIONS_OF_SPECS
        .iter()
        .map(|name| ((*name).to_owned(), json!("x")))
        .collect();
    for annotations in [json!(kept), json!({}), Value::Null] {
        let given = Spec::from(json!({"annotations": annotations}));
        let mut spec = given.clone();
        assert_eq!(drop_internal_annotations(&mut spec).unwrap(), [""; 0]);
        assert_eq!(spec, given);
    }
}

#[test]
fn a_cgroup_is_renamed_in_both_forms() {
    for (path, renamed) in [
        ("/default/old", "/default/new"),
        ("system.slice:ctr:old", "system.slice:ctr:new"),
        ("old", "new"),
    ] {
        let mut spec = Spec::from(json!({"linux": {"cgroupsPath": path}}));
        rename_cgroup(&mut spec, "new").unwrap();
        assert_eq!(spec.cgroups_path(), Some(renamed));
    }
    let mut without = Spec::from(json!({}));
    rename_cgroup(&mut without, "new").unwrap();
    assert_eq!(without.cgroups_path(), None);
}

fn entry(path: &str, major: u64, minor: u64) -> Value {
    json!({"path": path, "type": "c", "major": major, "minor": minor, "fileMode": 0o660})
}

fn rule(major: u64, minor: u64) -> Value {
    json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": "rw"})
}

fn given(devices: &[Value], rules: &[Value]) -> Spec {
    Spec::from(json!({"linux": {"devices": devices, "resources": {"devices": rules}}}))
}

fn nodes(nodes: &[(&str, u64, u64)]) -> Vec<DeviceNode> {
    let node = |&(path, major, minor): &(&str, u64, u64)| DeviceNode {
        path: path.into(),
        kind: NodeType::Char,
        major,
        minor,
    };
    nodes.iter().map(node).collect()
}

/// `spec` as it is under a host with these nodes, and what was done; once more it is nothing.
fn with_hosts_nodes(spec: &Spec, host: &[(&str, u64, u64)]) -> (Spec, DeviceEdit) {
    let mut after = spec.clone();
    let edit = replace_other_gpus(&mut after, &nodes(host)).unwrap();
    let again = after.clone();
    assert!(replace_other_gpus(&mut after, &nodes(host)).unwrap().is_empty());
    assert_eq!(after, again, "not idempotent");
    (after, edit)
}

const KFD: &str = "/dev/kfd";

#[test]
fn amds_common_node_gets_the_number_of_this_host() {
    let render = "/dev/dri/renderD129";
    let fuse = entry("/dev/fuse", 10, 229);
    let before = given(
        &[fuse.clone(), entry(KFD, 511, 0), entry(render, 226, 129)],
        &[rule(511, 0), rule(10, 229), rule(226, 129)],
    );
    let (after, edit) = with_hosts_nodes(&before, &[(KFD, 507, 0), (render, 226, 129)]);
    let expected = given(
        &[fuse, entry(KFD, 507, 0), entry(render, 226, 129)],
        &[rule(507, 0), rule(10, 229), rule(226, 129)],
    );
    assert_eq!(after, expected);
    assert_eq!(
        edit.to_string(),
        "/dev/kfd (511:0) is gone, /dev/kfd (507:0) is new"
    );

    let (after, edit) = with_hosts_nodes(&before, &[(render, 226, 129)]);
    assert_eq!(edit.to_string(), "/dev/kfd (511:0) is gone");
    assert_eq!(paths(&after), ["/dev/fuse", render]);
    assert_eq!(allowed(&after), ["10:229", "226:129"]);
}

/// The container has the second GPU of its host under the name of the first.
#[test]
fn a_node_under_another_name_stays_the_device_that_was_granted() {
    let (first, second) = ("/dev/dri/renderD128", "/dev/dri/renderD129");
    let before = given(
        &[entry(KFD, 511, 0), entry(first, 226, 129)],
        &[rule(511, 0), rule(226, 129)],
    );
    let host = [(KFD, 511, 0), (first, 226, 128), (second, 226, 129)];
    let (after, edit) = with_hosts_nodes(&before, &host);
    assert_eq!((after, edit.is_empty()), (before.clone(), true));

    let unknown_name = given(&[entry("/dev/dri/renderD140", 226, 129)], &[rule(226, 129)]);
    assert_eq!(with_hosts_nodes(&unknown_name, &host).0, unknown_name);

    // A host that has only the first: it is another's.
    let (after, edit) = with_hosts_nodes(&before, &host[..2]);
    assert_eq!(
        (paths(&after), allowed(&after)),
        (vec![KFD.to_owned()], vec!["511:0".to_owned()])
    );
    assert_eq!(edit.to_string(), "/dev/dri/renderD128 (226:129) is gone");
}

#[test]
fn what_no_rule_opens_is_not_opened_and_accelerators_are_left() {
    let render = "/dev/dri/renderD128";
    let accel = "/dev/accel/accel0";
    let before = given(
        &[entry(KFD, 511, 0), entry(render, 226, 128), entry(accel, 261, 0)],
        &[rule(511, 0)],
    );
    let (after, _) = with_hosts_nodes(&before, &[(KFD, 507, 0), (render, 226, 128)]);
    assert_eq!(paths(&after), [KFD, render, accel]);
    assert_eq!(allowed(&after), ["507:0"]);
}

#[test]
fn the_drivers_nodes_go_with_their_rules_and_nothing_else() {
    let mut spec = spec(240, &[0, 1]);
    for _ in 0..2 {
        drop_nodes(&mut spec).unwrap();
        assert_eq!(paths(&spec), ["/dev/fuse"]);
        assert_eq!(allowed(&spec), ["10:229"]);
        let denied = spec
            .device_rules()
            .unwrap()
            .iter()
            .filter(|rule| !rule.is_allow())
            .count();
        assert_eq!(denied, 1, "the rule that closes all others is gone");
    }
}

/// Nothing is held of any device: what this host does not have is dropped, also an accelerator.
#[test]
fn a_container_without_devices_gets_the_accelerators_of_this_host() {
    let (accel, hl) = ("/dev/accel/accel0", "/dev/hl0");
    let mut spec = given(
        &[entry(accel, 261, 0), entry(hl, 500, 0), entry(KFD, 511, 0)],
        &[rule(261, 0), rule(500, 0), rule(511, 0)],
    );
    let (left, edit) = with_hosts_nodes(&spec, &[(accel, 260, 3), (KFD, 511, 0)]);
    assert_eq!((left, edit), (spec.clone(), DeviceEdit::default()));
    let host = nodes(&[(accel, 260, 3), ("/dev/accel/accel1", 260, 4)]);
    replace_released(&mut spec, &host).unwrap();
    assert_eq!(spec, given(&[entry(accel, 260, 3)], &[rule(260, 3)]));
}
