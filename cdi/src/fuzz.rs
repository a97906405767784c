//! What must hold for a CDI file, for names of devices in a spec and for a loader's cache, whatever their
//! bytes are.
//!
//! The fuzz targets (fuzz/) call these functions with what they make up, the unit tests with the kept corpus.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::bounded::MAX_VALUES;
use crate::file::Edits;
use crate::ldcache::{self, Library};
use crate::{CdiFile, DeviceName, Registry};

pub use crate::convert::fuzz::gpu_requests;

/// A CDI file, read as JSON and as YAML.
pub fn cdi_file(bytes: &[u8]) {
    for name in ["x.json", "x.yaml"] {
        let Ok(file) = CdiFile::parse(Path::new(name), bytes) else {
            continue;
        };
        let edits = file
            .devices
            .iter()
            .map(|device| &device.edits)
            .chain([&file.edits]);
        let values: usize = edits.map(values).sum();
        assert!(values <= MAX_VALUES.max(bytes.len()), "it has grown to {values}");
        let names: BTreeSet<DeviceName> = file
            .devices
            .iter()
            .map(|device| DeviceName::new(&file.kind, &device.name).expect("it was checked"))
            .collect();
        assert_eq!(names.len(), file.devices.len(), "two devices have one name");
        let registry = Registry::of([file]);
        for name in names {
            let mut spec = json!({"mounts": [{"destination": "/proc"}], "process": {"env": ["A=a", "A=b"]}});
            if registry.inject(&mut spec, std::slice::from_ref(&name)).is_err() {
                continue;
            }
            is_injected(&registry, &name, &spec);
            let mut again = spec.clone();
            registry
                .inject(&mut again, &[name])
                .expect("it has been done before");
            // Hooks are appended, whatever is there.
            for spec in [&mut spec, &mut again] {
                spec.as_object_mut().expect("it was one").remove("hooks");
            }
            assert_eq!(again, spec, "the second time changes something");
        }
    }
}

/// How many bytes the edits' texts have, and one for each.
fn values(edits: &Edits) -> usize {
    fn of(value: &Value) -> usize {
        match value {
            Value::String(text) => 1 + text.len(),
            Value::Array(values) => 1 + values.iter().map(of).sum::<usize>(),
            Value::Object(fields) => 1 + fields.values().map(of).sum::<usize>(),
            _ => 1,
        }
    }
    of(&json!(edits.env))
        + of(&json!(edits.mounts))
        + of(&json!(edits.device_nodes))
        + of(&json!(edits.hooks))
}

/// All that the device and its file ask for is in the spec, once.
fn is_injected(registry: &Registry, name: &DeviceName, spec: &Value) {
    let (file, device) = registry.device(name).expect("it was given");
    let list = |pointer: &str| {
        spec.pointer(pointer)
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default()
    };
    let all = |key: &str, pointer: &str| -> Vec<String> {
        let entries = list(pointer).into_iter();
        entries
            .filter_map(|entry| Some(entry[key].as_str()?.to_owned()))
            .collect()
    };
    let once = |there: &[String], wanted: &str| {
        assert_eq!(
            there.iter().filter(|text| *text == wanted).count(),
            1,
            "{wanted:?} in {there:?}"
        );
    };
    let (mounts, nodes) = (all("destination", "/mounts"), all("path", "/linux/devices"));
    let depths: Vec<usize> = mounts
        .iter()
        .map(|path| Path::new(path).iter().filter(|part| *part != "/").count())
        .collect();
    assert!(depths.is_sorted(), "{mounts:?}");
    let keys: Vec<String> = list("/process/env")
        .iter()
        .filter_map(|pair| Some(pair.as_str()?.split('=').next()?.to_owned()))
        .collect();
    for edits in [&file.edits, &device.edits] {
        edits
            .mounts
            .iter()
            .for_each(|mount| once(&mounts, &mount.container_path));
        edits
            .device_nodes
            .iter()
            .for_each(|node| once(&nodes, &node.path));
        for pair in &edits.env {
            once(&keys, pair.split('=').next().unwrap_or_default());
        }
    }
}

/// A loader's cache.
pub fn ld_so_cache(bytes: &[u8]) {
    let Some(libraries) = ldcache::parse(bytes) else {
        return;
    };
    let texts = |library: &Library| [library.name.clone(), library.path.clone()];
    let total: usize = libraries.iter().flat_map(texts).map(|text| text.len()).sum();
    assert!(total <= bytes.len() * 4, "it has grown to {total}");
    for text in libraries.iter().flat_map(texts).take(64) {
        let ended = [text.as_bytes(), &[0]].concat();
        assert!(
            bytes.windows(ended.len()).any(|window| window == ended),
            "{text:?} is not in it"
        );
    }
    let written = ldcache::write(&libraries).expect("it is no larger");
    let read = ldcache::parse(&written).expect("it is ours");
    assert!(read.iter().all(|library| libraries.contains(library)));
    assert_eq!(
        ldcache::write(&read).as_ref(),
        Some(&written),
        "the second time changes something"
    );
}

#[cfg(test)]
#[path = "../../fuzz/kept.rs"]
mod kept;

#[cfg(test)]
mod tests {
    #[test]
    fn the_kept_inputs_pass() {
        super::kept::run("cdi_file", super::cdi_file);
        super::kept::run("gpu_requests", super::gpu_requests);
        super::kept::run("ld_so_cache", super::ld_so_cache);
    }
}
