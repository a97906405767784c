//! Names in a spec never give more than the operator grants, whatever the spec and the node's CDI files are.
//!
//! What is asserted is worked out from the JSON itself, not by the code that is under test.

use std::collections::BTreeSet;
use std::path::Path;

use firn_config::{Config, Conversion, Create, Toolkit};
use firn_host::Problem;
use firn_oci::{Rules, Spec};
use serde_json::{Value, json};

use super::convert_by;
use crate::{CdiFile, Registry};

/// What a container is made of, and by whose settings.
pub(crate) struct Case {
    pub spec: Value,
    pub files: Vec<CdiFile>,
    pub create: Create,
    pub rules: Rules,
}

/// A spec, CDI files and settings, as one JSON object.
pub fn gpu_requests(bytes: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else {
        return;
    };
    let flag = |pointer: &str| value.pointer(pointer) == Some(&json!(true));
    let files = value["cdi"].as_array().into_iter().flatten().enumerate();
    let files = files.filter_map(|(at, file)| {
        CdiFile::parse(Path::new(&format!("{at}.json")), file.to_string().as_bytes()).ok()
    });
    let toolkit = Toolkit {
        visible_devices: flag("/toolkit/visible_devices"),
        volume_mounts: flag("/toolkit/volume_mounts"),
        annotations: if flag("/toolkit/annotations") {
            vec!["cdi.k8s.io/".to_owned()]
        } else {
            Vec::new()
        },
        ..Toolkit::default()
    };
    let case = Case {
        spec: value["spec"].clone(),
        files: files.collect(),
        create: Create {
            visible_devices: flag("/create/visible_devices"),
            volume_mounts: flag("/create/volume_mounts"),
            cdi_annotations: flag("/create/cdi_annotations"),
            ..Create::default()
        },
        rules: match value["by"].as_str() {
            Some("wrapper") => Rules::Wrapper(toolkit),
            Some("hook") => Rules::Hook(toolkit),
            _ => Rules::Own,
        },
    };
    if case.spec.is_object() {
        let _ = check(case);
    }
}

/// Converts a pod's container, which is not privileged. Whether it was given anything, or the code of its
/// refusal.
pub(crate) fn check(case: Case) -> Option<Result<bool, String>> {
    let Case {
        mut spec,
        files,
        create,
        rules,
    } = case;
    let annotations = spec.as_object_mut()?.entry("annotations").or_insert(json!({}));
    annotations
        .as_object_mut()?
        .insert("io.kubernetes.cri.container-type".to_owned(), json!("container"));
    let before = spec.clone();
    if list(&before, "/linux/resources/devices")
        .iter()
        .any(|rule| rule["allow"] == true && !matches!(rule["type"].as_str(), Some("b" | "c")))
    {
        return None;
    }
    let lets = lets_names_count(&before, &create, &rules);
    let of_gpus: Vec<CdiFile> = files
        .iter()
        .filter(|file| matches!(&*file.kind, "nvidia.com/gpu" | "runtime.nvidia.com/gpu"))
        .cloned()
        .collect();
    let config = Config {
        create,
        ..Config::default()
    };
    let converted = convert_by(Spec::from(spec), &config, &rules, false, || Registry::of(files));
    let converted = match converted {
        Ok(converted) => converted,
        Err(error) => return Some(Err(error.code().to_owned())),
    };
    let (names, after) = (converted.names, converted.spec.into_value());
    if names.is_empty() || !lets {
        assert_eq!(after, before, "nobody lets names count, or none was given");
        return Some(Ok(false));
    }
    if nodes(&before).iter().any(|(path, _)| is_gpu(path)) {
        gives_no_more(&before, &after)
    } else {
        gives_only_edits_of_files(&before, &after, &of_gpus)
    }
    Some(Ok(true))
}

/// Whether the operator has let any name of a spec give devices.
fn lets_names_count(spec: &Value, create: &Create, rules: &Rules) -> bool {
    let hooks = create.hooks == Conversion::Convert;
    let is_admin = list(spec, "/process/capabilities/bounding").contains(&json!("CAP_SYS_ADMIN"));
    let by_cli = spec["hooks"].to_string().contains("nvidia-container-cli");
    let by_toolkit = |toolkit: &Toolkit| {
        toolkit.visible_devices || toolkit.volume_mounts || !toolkit.annotations.is_empty() || is_admin
    };
    match rules {
        Rules::Own => {
            create.visible_devices || create.volume_mounts || create.cdi_annotations || hooks && by_cli
        }
        Rules::Hook(toolkit) | Rules::Wrapper(toolkit) => hooks && (by_cli || by_toolkit(toolkit)),
    }
}

fn list(spec: &Value, pointer: &str) -> Vec<Value> {
    let list = spec.pointer(pointer).and_then(Value::as_array);
    list.cloned().unwrap_or_default()
}

fn is_gpu(path: &str) -> bool {
    let number = path.strip_prefix("/dev/nvidia");
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|c| c.is_ascii_digit()))
}

/// Nodes as path and the whole entry.
fn nodes(spec: &Value) -> BTreeSet<(String, String)> {
    let devices = list(spec, "/linux/devices").into_iter();
    devices
        .map(|node| {
            (
                node["path"].as_str().unwrap_or_default().to_owned(),
                node.to_string(),
            )
        })
        .collect()
}

fn texts(entries: Vec<Value>) -> BTreeSet<String> {
    entries.iter().map(ToString::to_string).collect()
}

/// Mounts through which something can be written, or a device be opened.
fn writable(spec: &Value) -> BTreeSet<String> {
    let mounts = list(spec, "/mounts").into_iter();
    let is_writable = |mount: &Value| {
        let has = |name: &str| list(mount, "/options").contains(&json!(name));
        let is_bind = has("bind") || has("rbind") || mount["type"] == "bind";
        let is_device = ["source", "destination"]
            .iter()
            .any(|key| mount[key].as_str().is_some_and(|path| path.starts_with("/dev")));
        !is_bind || has("rw") || !has("ro") && !has("rro") || is_device
    };
    texts(mounts.filter(is_writable).collect())
}

/// Nothing is there that the nodes do not grant.
fn gives_no_more(before: &Value, after: &Value) {
    assert_eq!(nodes(after), nodes(before));
    for rest in [
        "/linux/resources/devices",
        "/process/user/additionalGids",
        "/hooks/createRuntime",
        "/hooks/startContainer",
        "/hooks/poststart",
        "/hooks/poststop",
        "/hooks/prestart",
    ] {
        let (after, before) = (texts(list(after, rest)), texts(list(before, rest)));
        assert!(after.is_subset(&before), "{rest}: {after:?}");
    }
    for rest in ["/linux/netDevices", "/linux/intelRdt"] {
        assert_eq!(after.pointer(rest), before.pointer(rest));
    }
    assert!(writable(after).is_subset(&writable(before)), "{after:#}");
    let had = texts(list(before, "/hooks/createContainer"));
    for hook in list(after, "/hooks/createContainer") {
        let path = hook["path"].as_str().unwrap_or_default();
        let known = ["/nvidia-cdi-hook", "/nvidia-ctk", "/firn-hook"]
            .iter()
            .any(|end| path.ends_with(end) || path == &end[1..]);
        assert!(known || had.contains(&hook.to_string()), "{hook}");
    }
}

/// All that is new is written in a file of NVIDIA's GPUs.
fn gives_only_edits_of_files(before: &Value, after: &Value, files: &[CdiFile]) {
    let edits = || {
        files.iter().flat_map(|file| {
            file.devices
                .iter()
                .map(|device| &device.edits)
                .chain([&file.edits])
        })
    };
    let in_files = |path: &str| edits().any(|edits| edits.device_nodes.iter().any(|node| node.path == path));
    for (path, _) in nodes(after).difference(&nodes(before)) {
        assert!(in_files(path), "node {path}");
    }
    let had = texts(list(before, "/mounts"));
    for mount in list(after, "/mounts") {
        let is_of_file = edits().any(|edits| {
            let mut mounts = edits.mounts.iter();
            mounts.any(|m| mount["destination"] == m.container_path && mount["source"] == m.host_path)
        });
        assert!(is_of_file || had.contains(&mount.to_string()), "{mount}");
    }
    let stages = after["hooks"].as_object().into_iter().flatten();
    for hook in stages.flat_map(|(_, hooks)| hooks.as_array().into_iter().flatten()) {
        let is_of_file = edits().any(|edits| edits.hooks.iter().any(|h| hook["path"] == h.path));
        assert!(
            is_of_file || before["hooks"].to_string().contains(&hook.to_string()),
            "{hook}"
        );
    }
}
