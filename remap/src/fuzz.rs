//! What must hold for a spec and for a manifest, whatever their bytes are.
//!
//! The fuzz targets (fuzz/) call these functions with what they make up, the unit tests with the kept corpus.
//! What is asserted is worked out from the JSON itself, not by the code that is under test.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use firn_config::{Restore, Toolkit, names};
use firn_gpu::{DeviceNode, Gpu, Inventory};
use serde_json::{Value, json};

use crate::{Basis, GpuAssignment, Grant, RequestedMap};
use firn_image::fixtures::{config, inventory, uuid};
use firn_image::manifest::Manifest;
use firn_oci::spec::parse_device;
use firn_oci::{GpuRequest, RequestSource, Rules, Spec, edit, mounts, remove_requests, requests_beyond_gpus};

/// A container's `config.json`.
pub fn spec(json: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(json) else {
        return;
    };
    if value.is_object() {
        let spec = Spec::from(value.clone());
        views(&spec);
        grants(&value, &spec);
        gpus_are_replaced(&value, &spec);
        other_edits(&spec);
    }
}

/// A checkpoint's `firn.json`: a whole file, or a body to which a fitting head is made.
pub fn manifest(bytes: &[u8]) {
    read_manifest(bytes);
    if let Ok(body) = std::str::from_utf8(bytes) {
        // JSON's own blanks: others are no part of a value, and so of what the checksum covers.
        read_manifest(&firn_image::fixtures::sealed(
            body.trim_matches([' ', '\t', '\r', '\n']),
        ));
    }
}

/// An image directory: entries apart by two NULs, each its kind (`f`ile, `l`ink, `d`irectory, `p`ipe), its
/// name, a line end, and its content or target. The manifest is a body, to which a fitting head is made.
pub fn image(bytes: &[u8]) {
    let dir = std::env::temp_dir().join(format!("firn-fuzz-image-{}", std::process::id()));
    let empty = || {
        std::fs::remove_dir_all(&dir).ok();
        std::fs::create_dir(&dir).expect("the temporary directory is writable");
    };
    empty();
    for entry in entries(bytes) {
        entry.lay(&dir);
    }
    if let Ok(Some(manifest)) = Manifest::read(&dir)
        && manifest.verify_images(&dir).is_ok()
    {
        is_whole(&manifest, &dir);
        let here = inventory(195, 4);
        expect_decision(
            &firn_image::fixtures::spec(195, &[0, 1]),
            &manifest,
            &here,
            &config(&[], &[]),
        );
    }
    std::fs::remove_dir_all(&dir).ok();
}

struct Entry<'a> {
    kind: u8,
    name: &'a str,
    content: &'a [u8],
}

fn entries(bytes: &[u8]) -> Vec<Entry<'_>> {
    let mut entries = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let end = rest.windows(2).position(|two| two == [0, 0]);
        let (entry, after) = end.map_or((rest, &[][..]), |end| (&rest[..end], &rest[end + 2..]));
        rest = after;
        let Some((kind, entry)) = entry.split_first() else {
            continue;
        };
        let line = entry
            .iter()
            .position(|byte| *byte == b'\n')
            .unwrap_or(entry.len());
        let (name, content) = (&entry[..line], entry.get(line + 1..).unwrap_or_default());
        if let Ok(name) = std::str::from_utf8(name)
            && !name.is_empty()
            && !name.contains(['/', '\0'])
            && !matches!(name, "." | "..")
        {
            entries.push(Entry {
                kind: *kind,
                name,
                content,
            });
        }
    }
    entries
}

impl Entry<'_> {
    /// Makes it, unless there is one of its name: nothing is written through a link or into a pipe.
    fn lay(&self, dir: &Path) {
        let path = dir.join(self.name);
        let write = |content: &[u8]| File::create_new(&path)?.write_all(content);
        let made = match (self.kind, std::str::from_utf8(self.content)) {
            (b'l', Ok(target)) => std::os::unix::fs::symlink(target, &path),
            (b'd', _) => std::fs::create_dir(&path),
            (b'p', _) => nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).map_err(Into::into),
            (_, Ok(body)) if self.name == "firn.json" => write(&firn_image::fixtures::sealed(
                body.trim_matches([' ', '\t', '\r', '\n']),
            )),
            _ => write(self.content),
        };
        drop(made);
    }
}

/// What the manifest lists is there, in regular files of the directory itself, and nothing else that CRIU
/// reads.
fn is_whole(manifest: &Manifest, dir: &Path) {
    for image in &manifest.images {
        let found = std::fs::symlink_metadata(dir.join(&image.name)).expect("it is there");
        assert!(
            found.is_file() && found.len() == image.size,
            "{image:?}: {found:?}"
        );
    }
    for entry in std::fs::read_dir(dir).expect("it is there").flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let read = name.ends_with(".img") || matches!(&*name, "descriptors.json" | "parent");
        assert!(
            !read || manifest.images.iter().any(|image| image.name == name),
            "{name}"
        );
    }
}

fn views(spec: &Spec) {
    if spec.gpu_by_hook() {
        assert!(spec.requests_gpu(), "a GPU by hook is a GPU that is asked for");
    }
    let toolkit = Toolkit {
        visible_devices: true,
        volume_mounts: true,
        annotations: vec!["cdi.k8s.io/".to_owned()],
        ..Toolkit::default()
    };
    for rules in [
        Rules::Own,
        Rules::Hook(toolkit.clone()),
        Rules::Wrapper(toolkit.clone()),
    ] {
        if let GpuRequest::Named(request) = GpuRequest::of(spec, &rules) {
            assert!(!request.devices.is_empty(), "nothing is asked for: {rules:?}");
        }
    }
    requests_beyond_gpus(spec);
    let mut edited = spec.clone();
    if remove_requests(&mut edited).is_ok() {
        assert!(!edited.gpu_by_hook(), "a hook is left");
        assert_eq!(remove_requests(&mut edited).ok(), Some(0), "removed twice");
        let again = GpuRequest::of(&edited, &Rules::Own);
        assert!(
            !matches!(&again, GpuRequest::Named(request) if request.source != RequestSource::Annotations),
            "{again:?} is left"
        );
    }
    if let (Ok(all), Ok(required)) = (spec.mounts(), mounts::required(spec)) {
        for needed in required {
            assert!(
                all.iter().any(|mount| mount.destination == needed.destination),
                "{needed:?} is no mount of the spec"
            );
        }
    }
    for kind in ["pid", "user"] {
        assert!(spec.namespace_path(kind).is_none() || spec.has_namespace(kind));
    }
}

/// What a spec gives by its own words: nodes of GPUs, and whether any rule opens more than one device.
struct Words<'a> {
    devices: &'a [Value],
    rules: &'a [Value],
}

impl<'a> Words<'a> {
    fn of(spec: &'a Value) -> Self {
        let list = |pointer| {
            let list = spec.pointer(pointer).and_then(Value::as_array);
            list.map_or(&[][..], Vec::as_slice)
        };
        Self {
            devices: list("/linux/devices"),
            rules: list("/linux/resources/devices"),
        }
    }

    fn names(&self, node: &DeviceNode, by_path: bool) -> bool {
        self.devices.iter().any(|device| {
            let path = device["path"].as_str().unwrap_or_default();
            let numbers = device["major"].as_u64().unwrap_or_default() == node.major
                && device["minor"].as_u64().unwrap_or_default() == node.minor;
            Path::new(path).starts_with("/dev") && (numbers || by_path && Path::new(path) == node.path)
        })
    }

    fn opens_ranges(&self) -> bool {
        let all = |number: &Value| number.as_i64().is_none_or(|number| number < 0);
        self.rules.iter().any(|rule| {
            let typed = matches!(rule["type"].as_str(), Some("b" | "c"));
            rule["allow"] == true && (!typed || all(&rule["major"]) || all(&rule["minor"]))
        })
    }
}

/// Annotations by which a spec is not that of a client of the node.
const PODS: [(&str, &str); 3] = [
    (names::ANNOTATION_CRI_TYPE, "container"),
    ("io.kubernetes.cri-o.Metadata", "{}"),
    ("io.kubernetes.pod.uid", "0"),
];

fn grants(value: &Value, spec: &Spec) {
    let here = inventory(195, 4);
    let words = Words::of(value);
    let of_spec = Grant::of_spec(spec, &here);
    if let Ok(grant) = &of_spec {
        is_given(grant, &words, &here, false);
    }
    for config in [config(&[], &[]), config(&["1", "0"], &[]), config(&[], &[(0, 2)])] {
        let Ok(map) = RequestedMap::find(spec, &config, &[uuid(0)]) else {
            continue;
        };
        let Ok(grant) = Grant::at_restore(spec, &here, &config, map.as_ref()) else {
            continue;
        };
        if !spec.author().owns_node() {
            // Neither configuration nor annotation reaches beyond what the kubelet has allocated.
            assert_eq!(Some(&grant), of_spec.as_ref().ok());
        }
        for (name, text) in PODS {
            // The same spec, of a pod.
            let mut pod = spec.clone();
            let Ok(annotations) = pod.object_mut("annotations") else {
                continue;
            };
            annotations.insert(name.to_owned(), Value::from(text));
            if let Ok(grant) = Grant::at_restore(&pod, &here, &config, map.as_ref()) {
                assert_eq!(Some(&grant), of_spec.as_ref().ok(), "{name}");
            }
            if let Ok(grant) = Grant::of_device_free(&pod, &here, &config) {
                assert_eq!(Some(&grant), of_spec.as_ref().ok(), "{name}, without devices");
            }
        }
        match grant.basis {
            Basis::Nodes | Basis::Everything => is_given(&grant, &words, &here, spec.author().owns_node()),
            Basis::Config => assert!(!config.gpus.is_empty()),
            Basis::Map(_) => assert!(map.is_some()),
        }
        for sources in [&[0][..], &[0, 1], &[9]] {
            expect_decision(spec, &firn_image::fixtures::manifest(sources), &here, &config);
        }
    }
}

fn is_given(grant: &Grant, words: &Words<'_>, here: &Inventory, by_path: bool) {
    for gpu in &grant.gpus {
        assert!(here.gpus.contains(gpu));
        let node = gpu.node.as_ref().expect("every GPU of the fixture has a node");
        let given = match grant.basis {
            Basis::Everything => words.opens_ranges(),
            _ => words.names(node, by_path),
        };
        assert!(given, "{node:?} is granted and the spec does not give it");
    }
}

/// Whatever the manifest contains, the container gets GPUs of its grant only, each for one GPU of the
/// checkpoint.
fn expect_decision(spec: &Spec, manifest: &Manifest, here: &Inventory, config: &Restore) {
    let Ok(decision) = GpuAssignment::make(spec, manifest, here, config) else {
        return;
    };
    let targets = decision.targets();
    assert_eq!(decision.map.pairs().len(), manifest.gpus.len());
    assert_eq!(targets.len(), manifest.gpus.len());
    assert!(
        targets
            .iter()
            .all(|gpu| decision.grant.gpus.contains(gpu) && here.gpus.contains(gpu))
    );
    for gpu in &manifest.gpus {
        assert!(decision.map.pairs().iter().any(|pair| pair.old == gpu.uuid));
    }
}

/// After [`edit::replace_gpus`] the container has the targets' nodes, and can open nothing that it could not
/// before.
fn gpus_are_replaced(before: &Value, spec: &Spec) {
    let there = inventory(240, 2);
    let mut edited = spec.clone();
    if edit::replace_gpus(&mut edited, &there.gpus, &there.common_nodes).is_err() {
        return;
    }
    let after = edited.value().clone();
    let nodes = nodes_of(&after);
    let targets = there.gpus.iter().filter_map(|gpu| gpu.node.as_ref());
    for target in targets.clone() {
        assert!(nodes.contains(target), "{target:?} is missing");
    }
    let old = Words::of(before);
    for node in &nodes {
        let known = nodes_of(before).contains(node);
        let of_host = targets
            .clone()
            .chain(&there.common_nodes)
            .any(|given| given == node);
        assert!(known || of_host, "{node:?} comes from nowhere");
    }
    for rule in Words::of(&after)
        .rules
        .iter()
        .filter(|rule| !old.rules.contains(rule))
    {
        let exact = nodes.iter().any(|node| {
            rule["type"] == json!(node.kind) && rule["major"] == node.major && rule["minor"] == node.minor
        });
        assert!(exact && rule["allow"] == true, "{rule} was added");
    }
    let apart = |mut spec: Value| {
        for (parent, key) in [("/linux", "devices"), ("/linux/resources", "devices")] {
            if let Some(object) = spec.pointer_mut(parent).and_then(Value::as_object_mut) {
                object.remove(key);
            }
        }
        // Objects that the edit had to make.
        for (parent, key) in [("/linux", "resources"), ("", "linux")] {
            if let Some(object) = spec.pointer_mut(parent).and_then(Value::as_object_mut)
                && object
                    .get(key)
                    .is_some_and(|made| made.is_null() || *made == json!({}))
            {
                object.remove(key);
            }
        }
        spec
    };
    assert_eq!(apart(before.clone()), apart(after), "something else was changed");

    let once = edited.clone();
    let again = edit::replace_gpus(&mut edited, &there.gpus, &there.common_nodes);
    assert!(
        again.is_ok_and(|edit| edit.is_empty()),
        "a second edit changes nothing"
    );
    assert_eq!(edited, once);
}

fn nodes_of(spec: &Value) -> Vec<DeviceNode> {
    let devices = Words::of(spec).devices.iter();
    devices
        .filter_map(|entry| Some(parse_device(entry).ok()??.node))
        .collect()
}

fn other_edits(spec: &Spec) {
    let twice = |edit: &dyn Fn(&mut Spec) -> bool| {
        let mut edited = spec.clone();
        if edit(&mut edited) {
            let once = edited.clone();
            assert!(edit(&mut edited));
            assert_eq!(edited, once, "a second edit changes nothing");
            return Some(once);
        }
        None
    };
    if let Some(stripped) = twice(&|spec| edit::strip_gpu_hooks(spec).is_ok()) {
        assert!(!stripped.gpu_by_hook());
    }
    twice(&|spec| edit::add_restore_hook(spec, Path::new("/usr/bin/firn-hook")).is_ok());
    let file = Path::new("/run/bundle").join(names::BUNDLE_CRIU_CONFIG);
    if let Some(set) = twice(&|spec| edit::set_criu_config(spec, &file).is_ok()) {
        assert_eq!(
            set.annotation(names::ANNOTATION_CRIU_CONFIG).map(Path::new),
            Some(&*file)
        );
    }
    if let Some(renamed) = twice(&|spec| edit::rename_cgroup(spec, "c1").is_ok()) {
        let (old, new) = (spec.cgroups_path(), renamed.cgroups_path());
        assert_eq!(old.is_some(), new.is_some());
        assert!(new.is_none_or(|path| path.rsplit(['/', ':']).next() == Some("c1")));
    }
}

fn read_manifest(bytes: &[u8]) {
    let nowhere = Path::new("/nonexistent/checkpoint");
    let Ok(manifest) = Manifest::decode(bytes, nowhere) else {
        return;
    };
    let encoded = manifest.encode(nowhere).expect("what is read can be written");
    let again = Manifest::decode(&encoded, nowhere).expect("what is written can be read");
    assert_eq!(again, manifest);
    assert_eq!(again.encode(nowhere).ok(), Some(encoded));
    for image in &manifest.images {
        assert_eq!(
            nowhere.join(&image.name).parent(),
            Some(nowhere),
            "{}",
            image.name
        );
    }
    assert!(manifest.verify_images(nowhere).is_err(), "there are no images");

    let here = inventory(195, 4);
    let given = firn_image::fixtures::spec(195, &[0, 1]);
    let may: Vec<&Gpu> = here.gpus.iter().take(2).collect();
    expect_decision(&given, &manifest, &here, &config(&[], &[]));
    if let Ok(decision) = GpuAssignment::make(&given, &manifest, &here, &config(&[], &[])) {
        assert!(decision.targets().iter().all(|gpu| may.contains(&gpu)));
    }
    let (mut mounted, empty) = (given.clone(), Path::new("/empty"));
    let driver = mounts::Driver {
        version: &here.driver_version,
        dirs: &["/nonexistent/lib"],
    };
    let needs = mounts::Needs {
        mounts: &manifest.mounts,
        device_free: manifest.is_device_free(),
    };
    let resolved = mounts::resolve(&given, nowhere, needs, driver, empty);
    match resolved.and_then(|mut resolved| Ok(resolved.apply(&mut mounted)?)) {
        Ok(_) => assert!(
            mounted
                .mounts()
                .is_ok_and(|all| all.iter().all(|mount| mount.source == empty)),
            "the spec mounts nothing, so there is nothing but empty files to mount"
        ),
        Err(_) => assert_eq!(mounted, given, "a refusal changes nothing"),
    }
}

#[cfg(test)]
#[path = "../../fuzz/kept.rs"]
mod kept;

#[cfg(test)]
mod tests {
    #[test]
    fn corpus_of_specs() {
        super::kept::run("config_json", super::spec);
    }

    #[test]
    fn corpus_of_images() {
        super::kept::run("image", super::image);
    }

    #[test]
    fn corpus_of_manifests() {
        super::kept::run("manifest", super::manifest);
    }
}
