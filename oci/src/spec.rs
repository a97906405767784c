//! A container's spec, `config.json` of its bundle.
//!
//! Kept as the JSON that containerd wrote: what this crate does not know survives an edit. Accessors give typed views
//! of the parts that matter here; an entry that is not what the runtime specification says is an error where firn
//! would act on it, and runc's affair everywhere else.

mod privileges;

use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_gpu::{DeviceNode, NodeType};
use serde::Deserialize;
use serde_json::{Map, Value};

pub use self::privileges::{CAPABILITIES, capability};
use crate::{device_class, gpu_request};
use firn_host::{Problem, Remedy, atomic_file, remedy};

/// Largest spec that is read. Specs of pods with hundreds of mounts stay below 1 MiB.
const MAX_BYTES: u64 = 16 << 20;

/// A spec that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The file cannot be read.
    #[error("cannot read spec {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The file is too large to be a spec.
    #[error("spec {} is larger than {MAX_BYTES} bytes", path.display())]
    TooLarge { path: PathBuf },
    /// The file is not JSON.
    #[error("spec {} is not valid JSON", path.display())]
    Json {
        path: PathBuf,
        source: serde_json::Error,
    },
    /// The file is JSON but no object.
    #[error("spec {} is not a JSON object", path.display())]
    NotAnObject { path: PathBuf },
    /// A part that firn has to act on is not what the runtime specification says.
    #[error("spec has a malformed entry in {part}")]
    Malformed {
        part: &'static str,
        source: Option<serde_json::Error>,
    },
    /// The file cannot be written.
    #[error("cannot write spec {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl Problem for SpecError {
    fn remedy(&self) -> Remedy<'_> {
        match self {
            Self::Read { .. } => remedy(
                "FIRN-SPEC-UNREADABLE",
                "check that the bundle exists and is readable for root",
            ),
            Self::TooLarge { .. } | Self::Json { .. } | Self::NotAnObject { .. } | Self::Malformed { .. } => {
                remedy(
                    "FIRN-SPEC-INVALID",
                    "create the container again with a valid spec",
                )
            }
            Self::Write { .. } => remedy(
                "FIRN-SPEC-UNWRITABLE",
                "check that the bundle's file system is writable and not full",
            ),
        }
    }
}

/// A container's spec.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    value: Value,
}

/// An entry of `linux.devices`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecDevice {
    /// Path in the container, type and numbers.
    pub node: DeviceNode,
    /// Permission bits, 0666 unless given.
    pub mode: u32,
    /// Owner in the container.
    pub uid: u32,
    /// Group in the container.
    pub gid: u32,
}

/// An entry of `linux.resources.devices`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct DeviceRule {
    /// Allow or deny.
    pub allow: bool,
    /// `a`, `b`, `c`; absent means all.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Absent or -1: all.
    pub major: Option<i64>,
    /// Absent or -1: all.
    pub minor: Option<i64>,
    /// Some of `r`, `w`, `m`.
    #[serde(default)]
    pub access: String,
}

/// An entry of `mounts`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct SpecMount {
    /// Path in the container.
    pub destination: PathBuf,
    /// File system type.
    #[serde(rename = "type", default)]
    pub kind: String,
    /// Path on the host for bind mounts.
    #[serde(default)]
    pub source: PathBuf,
    /// Mount options.
    #[serde(default)]
    pub options: Vec<String>,
}

impl SpecMount {
    /// Whether the mount shows a file or directory of the host.
    pub fn is_bind(&self) -> bool {
        self.kind == "bind" || self.options.iter().any(|o| o == "bind" || o == "rbind")
    }
}

impl DeviceRule {
    /// Whether the rule speaks about this device and others too.
    pub fn is_wildcard(&self) -> bool {
        let all = |number: Option<i64>| number.is_none_or(|n| n < 0);
        let typed = matches!(self.kind.as_deref(), Some("b" | "c"));
        !typed || all(self.major) || all(self.minor)
    }

    /// Whether the rule speaks about all devices, to read and to write.
    fn speaks_of_all(&self) -> bool {
        let all = |number: Option<i64>| number.is_none_or(|n| n < 0);
        matches!(self.kind.as_deref(), None | Some("" | "a"))
            && all(self.major)
            && all(self.minor)
            && self.access.contains('r')
            && self.access.contains('w')
    }

    /// Whether these rules, in order, let the device be opened for reading or writing.
    pub fn open(rules: &[Self], node: &DeviceNode) -> bool {
        let mut open = (false, false);
        for rule in rules.iter().filter(|rule| rule.covers(node)) {
            let (reads, writes) = (rule.access.contains('r'), rule.access.contains('w'));
            open = match rule.allow {
                true => (open.0 || reads, open.1 || writes),
                false => (open.0 && !reads, open.1 && !writes),
            };
        }
        open.0 || open.1
    }

    /// Whether the rule speaks about this device alone.
    pub fn is_exactly(&self, node: &DeviceNode) -> bool {
        !self.is_wildcard() && self.covers(node)
    }

    /// Whether the rule speaks about this device, alone or among others.
    fn covers(&self, node: &DeviceNode) -> bool {
        let kind = match self.kind.as_deref() {
            None | Some("" | "a") => true,
            Some("b") => node.kind == NodeType::Block,
            Some(_) => node.kind == NodeType::Char,
        };
        let number =
            |rule: Option<i64>, of_node: u64| rule.is_none_or(|n| n < 0 || u64::try_from(n) == Ok(of_node));
        kind && number(self.major, node.major) && number(self.minor, node.minor)
    }
}

impl Spec {
    /// Reads the spec of a bundle.
    pub fn load(bundle: &Path) -> Result<Self, SpecError> {
        Self::load_file(&bundle.join(names::BUNDLE_SPEC))
    }

    /// Reads a spec file of any name.
    pub fn load_file(path: &Path) -> Result<Self, SpecError> {
        let path = || path.to_owned();
        let mut bytes = Vec::new();
        std::fs::File::open(path())
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
            .map_err(|source| SpecError::Read { path: path(), source })?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(SpecError::TooLarge { path: path() });
        }
        let value: Value =
            serde_json::from_slice(&bytes).map_err(|source| SpecError::Json { path: path(), source })?;
        if !value.is_object() {
            return Err(SpecError::NotAnObject { path: path() });
        }
        Ok(Self { value })
    }

    /// Replaces the spec of a bundle, keeping the file's permissions.
    pub fn save(&self, bundle: &Path) -> Result<(), SpecError> {
        let path = bundle.join(names::BUNDLE_SPEC);
        let mode = path
            .metadata()
            .map_or(0o600, |meta| meta.permissions().mode() & 0o777);
        serde_json::to_vec(&self.value)
            .map_err(io::Error::from)
            .and_then(|bytes| atomic_file::write(bundle, names::BUNDLE_SPEC, &bytes, mode))
            .map_err(|source| SpecError::Write { path, source })
    }

    /// A cheap look: whether the spec asks for an NVIDIA GPU at all, by a device node, or by a hook that would inject
    /// one. False: firn leaves the container to runc as it is.
    pub fn requests_gpu(&self) -> bool {
        let devices = self.array("/linux/devices").iter();
        let by_node = devices
            .filter_map(|d| d["path"].as_str())
            .any(|path| device_class::is_nvidia(Path::new(path)));
        by_node || self.gpu_hooks().next().is_some()
    }

    /// Whether hooks run when the container is created, in its namespaces. A restore runs none of them.
    pub fn has_create_hooks(&self) -> bool {
        !self.array("/hooks/createContainer").is_empty()
    }

    /// Whether a hook of NVIDIA's injects the GPU, or its libraries, behind the spec's back, instead of CDI's edits.
    /// Such a container cannot be restored: runc restore knows nothing of what the hook has mounted.
    pub fn gpu_by_hook(&self) -> bool {
        let devices = self.array("/linux/devices").iter();
        let mut nodes = devices
            .filter_map(|d| d["path"].as_str())
            .filter(|p| device_class::is_nvidia(Path::new(p)));
        nodes.next().is_none() && self.gpu_hooks().next().is_some() || gpu_request::hook_has_names(self)
    }

    fn gpu_hooks(&self) -> impl Iterator<Item = &Value> {
        let early = ["/hooks/prestart", "/hooks/createRuntime"];
        early
            .into_iter()
            .flat_map(|kind| self.array(kind))
            .filter(|hook| device_class::is_nvidia_hook(hook))
    }

    /// Value of an annotation.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations()?.get(key)?.as_str()
    }

    pub fn annotations(&self) -> Option<&Map<String, Value>> {
        self.value.get("annotations")?.as_object()
    }

    /// Whether the CRI plugin wrote this spec: it then holds what the kubelet granted on this node, and nothing in it
    /// may be widened.
    pub fn is_cri(&self) -> bool {
        self.annotation(names::ANNOTATION_CRI_TYPE).is_some()
    }

    /// Device nodes of the container, without fifos.
    pub fn devices(&self) -> Result<Vec<SpecDevice>, SpecError> {
        self.array("/linux/devices")
            .iter()
            .filter_map(|entry| parse_device(entry).transpose())
            .collect()
    }

    /// Rules of the device cgroup, in the order in which they apply.
    pub fn device_rules(&self) -> Result<Vec<DeviceRule>, SpecError> {
        self.list("/linux/resources/devices", "linux.resources.devices")
    }

    /// Whether its rules open every device of the host: it is privileged, and its nodes are no choice of anybody's.
    pub fn opens_all_devices(&self) -> bool {
        let rules = self.device_rules().unwrap_or_default();
        let last = rules.iter().rfind(|rule| rule.speaks_of_all());
        last.is_some_and(|rule| rule.allow)
    }

    /// Mounts, in order.
    pub fn mounts(&self) -> Result<Vec<SpecMount>, SpecError> {
        self.list("/mounts", "mounts")
    }

    /// The mounts as they are written.
    pub fn written_mounts(&self) -> serde_json::Value {
        self.value.get("mounts").cloned().unwrap_or_default()
    }

    /// Paths that the runtime hides or makes read-only, by a mount each.
    pub fn hidden_paths(&self) -> impl Iterator<Item = &Path> {
        let kinds = ["/linux/maskedPaths", "/linux/readonlyPaths"];
        kinds
            .into_iter()
            .flat_map(|kind| self.array(kind))
            .filter_map(|path| path.as_str().map(Path::new))
    }

    /// The container's cgroup as the spec names it.
    pub fn cgroups_path(&self) -> Option<&str> {
        self.value.pointer("/linux/cgroupsPath")?.as_str()
    }

    /// Whether the container has a namespace of this type other than the runtime's.
    pub fn has_namespace(&self, kind: &str) -> bool {
        self.array("/linux/namespaces")
            .iter()
            .any(|ns| ns["type"] == kind)
    }

    /// Path of the namespace of this type that the container joins; absent when it gets a new one, or none.
    pub fn namespace_path(&self, kind: &str) -> Option<&Path> {
        let namespaces = self.array("/linux/namespaces").iter();
        let path = namespaces
            .filter(|ns| ns["type"] == kind)
            .find_map(|ns| ns["path"].as_str())?;
        (!path.is_empty()).then(|| Path::new(path))
    }

    /// Whether the container's process has a terminal.
    pub fn terminal(&self) -> bool {
        self.value
            .pointer("/process/terminal")
            .and_then(Value::as_bool)
            .unwrap_or(false)
    }

    /// The root file system, as given: absolute, or relative to the bundle.
    pub fn root_path(&self) -> Option<&Path> {
        Some(Path::new(self.value.pointer("/root/path")?.as_str()?))
    }

    /// The JSON.
    pub fn into_value(self) -> Value {
        self.value
    }

    /// The JSON as it stands.
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// Array at a JSON pointer; empty when there is none.
    pub fn array(&self, pointer: &str) -> &[Value] {
        self.value
            .pointer(pointer)
            .and_then(Value::as_array)
            .map_or(&[], Vec::as_slice)
    }

    /// Object at the path of keys, made where it is missing.
    pub fn object_mut(
        &mut self,
        keys: &[&str],
        part: &'static str,
    ) -> Result<&mut Map<String, Value>, SpecError> {
        let malformed = || SpecError::Malformed { part, source: None };
        let mut object = self.value.as_object_mut().ok_or_else(malformed)?;
        for key in keys {
            let entry = object.entry(*key).or_insert(Value::Null);
            if entry.is_null() {
                *entry = Value::Object(Map::new());
            }
            object = entry.as_object_mut().ok_or_else(malformed)?;
        }
        Ok(object)
    }

    fn list<T: serde::de::DeserializeOwned>(
        &self,
        pointer: &str,
        part: &'static str,
    ) -> Result<Vec<T>, SpecError> {
        let entries = self.array(pointer).iter();
        entries
            .map(|entry| {
                T::deserialize(entry).map_err(|e| SpecError::Malformed {
                    part,
                    source: Some(e),
                })
            })
            .collect()
    }
}

impl From<Value> for Spec {
    fn from(value: Value) -> Self {
        Self { value }
    }
}

/// Reads an entry of `linux.devices`; a fifo has no numbers and is left out.
pub fn parse_device(entry: &Value) -> Result<Option<SpecDevice>, SpecError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Raw {
        path: PathBuf,
        #[serde(rename = "type")]
        kind: String,
        #[serde(default)]
        major: u64,
        #[serde(default)]
        minor: u64,
        file_mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
    }
    const PART: &str = "linux.devices";
    let raw = Raw::deserialize(entry).map_err(|e| SpecError::Malformed {
        part: PART,
        source: Some(e),
    })?;
    let kind = match raw.kind.as_str() {
        "c" | "u" => NodeType::Char,
        "b" => NodeType::Block,
        "p" => return Ok(None),
        _ => {
            return Err(SpecError::Malformed {
                part: PART,
                source: None,
            });
        }
    };
    let node = DeviceNode {
        path: raw.path,
        kind,
        major: raw.major,
        minor: raw.minor,
    };
    Ok(Some(SpecDevice {
        node,
        mode: raw.file_mode.unwrap_or(0o666) & 0o777,
        uid: raw.uid.unwrap_or(0),
        gid: raw.gid.unwrap_or(0),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_firn_does_not_know_survives_load_and_save() {
        let bundle = tempfile::tempdir().unwrap();
        let file = bundle.path().join("config.json");
        let written = json!({"ociVersion": "9.9", "future": {"a": [1, 2.5, 18446744073709551615u64]}, "annotations": {"k": "v"}});
        std::fs::write(&file, written.to_string()).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        Spec::load(bundle.path()).unwrap().save(bundle.path()).unwrap();
        let read: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(read, written);
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o640);
    }

    #[test]
    fn a_spec_that_cannot_be_written_leaves_the_old_one() {
        let bundle = tempfile::tempdir().unwrap();
        let old = Spec::from(json!({"old": true}));
        old.save(bundle.path()).unwrap();
        // Root writes where it may not; a directory in the way of the temporary file stops it, too.
        std::fs::create_dir(bundle.path().join(".config.json.tmp")).unwrap();
        let error = Spec::from(json!({})).save(bundle.path()).unwrap_err();
        assert_eq!(error.code(), "FIRN-SPEC-UNWRITABLE");
        assert_eq!(Spec::load(bundle.path()).unwrap(), old);
    }

    #[test]
    fn what_is_no_spec_is_refused() {
        let bundle = tempfile::tempdir().unwrap();
        assert_eq!(
            Spec::load(bundle.path()).unwrap_err().code(),
            "FIRN-SPEC-UNREADABLE"
        );
        let deep = "[".repeat(100_000);
        for text in ["", "{", "[]", "\"x\"", "{\"a\":1} trailing", deep.as_str()] {
            std::fs::write(bundle.path().join("config.json"), text).unwrap();
            let error = Spec::load(bundle.path()).unwrap_err();
            assert_eq!(error.code(), "FIRN-SPEC-INVALID", "{:.20}", text);
        }
    }

    #[test]
    fn rules_that_open_everything_are_those_of_privileged_containers() {
        let opens = |rules: Value| {
            Spec::from(json!({"linux": {"resources": {"devices": rules}}})).opens_all_devices()
        };
        let all = json!({"allow": true, "type": "a", "access": "rwm"});
        let none = json!({"allow": false, "access": "rwm"});
        let one = json!({"allow": false, "type": "c", "major": 1, "minor": 3, "access": "rwm"});
        assert!(opens(json!([none, all])) && opens(json!([all, one])));
        assert!(!opens(json!([all, none])) && !opens(json!([])) && !opens(json!([one])));
        for (key, value) in [
            ("type", json!("c")),
            ("major", json!(195)),
            ("access", json!("rm")),
            ("access", json!("wm")),
            ("minor", json!(0)),
        ] {
            let mut less = all.clone();
            less[key] = value;
            assert!(!opens(json!([less])), "{less}");
        }
        assert!(!opens(json!([3])));
    }

    #[test]
    fn only_specs_with_nvidia_nodes_or_hooks_ask_for_a_gpu() {
        let asks = |value: Value| Spec::from(value).requests_gpu();
        assert!(!asks(json!({})));
        assert!(!asks(
            json!({"linux": {"devices": [{"path": "/dev/fuse"}, {"path": "/dev/dri/card0"}]}})
        ));
        assert!(!asks(json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}})));
        assert!(asks(
            json!({"linux": {"devices": [{"path": "/dev/fuse"}, {"path": "/dev/nvidia0"}]}})
        ));
        assert!(asks(json!({"linux": {"devices": [{"path": "/dev/nvidiactl"}]}})));
        let hook = |args: Value| json!({"hooks": {"createRuntime": [{"path": "/usr/bin/containerd", "args": args}]}});
        assert!(asks(hook(json!([
            "containerd",
            "oci-hook",
            "--",
            "nvidia-container-cli",
            "--load-kmods"
        ]))));
        assert!(!asks(hook(json!(["containerd", "oci-hook", "--", "cni-thing"]))));
    }

    #[test]
    fn a_hook_without_nodes_is_told_from_cdi() {
        let hooks = json!({"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]});
        let devices = json!({"devices": [{"path": "/dev/nvidia0"}]});
        assert!(Spec::from(json!({"hooks": hooks})).gpu_by_hook());
        assert!(!Spec::from(json!({"hooks": hooks, "linux": devices})).gpu_by_hook());
        assert!(!Spec::from(json!({})).gpu_by_hook());
    }

    #[test]
    fn devices_are_read_with_their_defaults() {
        let spec = Spec::from(json!({"linux": {"devices": [
            {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 432, "uid": 1, "gid": 44},
            {"path": "/dev/pipe", "type": "p"},
            {"path": "/dev/b", "type": "b", "major": 8, "minor": 1},
        ]}}));
        let devices = spec.devices().unwrap();
        assert_eq!(devices.len(), 2);
        assert_eq!((devices[0].mode, devices[0].uid, devices[0].gid), (0o660, 1, 44));
        assert_eq!((devices[1].mode, devices[1].node.kind), (0o666, NodeType::Block));
    }

    #[test]
    fn malformed_devices_are_errors_not_skipped() {
        for entry in [
            json!({"type": "c"}),
            json!({"path": "/dev/x", "type": "q"}),
            json!({"path": "/dev/x", "type": "c", "major": -1}),
            json!(3),
        ] {
            let spec = Spec::from(json!({"linux": {"devices": [entry]}}));
            assert_eq!(spec.devices().unwrap_err().code(), "FIRN-SPEC-INVALID");
        }
    }

    #[test]
    fn namespaces_and_terminal() {
        let spec = Spec::from(json!({
            "process": {"terminal": true}, "root": {"path": "rootfs"},
            "linux": {"cgroupsPath": "/a/b", "namespaces": [{"type": "pid"}, {"type": "network", "path": "/run/netns/x"}]},
        }));
        assert!(spec.terminal() && spec.has_namespace("pid") && !spec.has_namespace("user"));
        assert_eq!(spec.namespace_path("network"), Some(Path::new("/run/netns/x")));
        assert_eq!(spec.namespace_path("pid"), None);
        assert_eq!(
            (spec.cgroups_path(), spec.root_path()),
            (Some("/a/b"), Some(Path::new("rootfs")))
        );
    }
}
