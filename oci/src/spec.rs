//! A container's spec, `config.json` of its bundle.
//!
//! The spec is kept as the JSON that containerd wrote, so that fields which firn does not know survive an
//! edit. Accessors read single entries through the types of oci-spec, never the whole spec: a field that
//! oci-spec refuses and runc accepts must not stop a container for which that field does not matter. A
//! malformed entry is an error where firn would act on it; everywhere else it is left to runc.

mod author;
mod device_changes;
mod devices;
mod privileges;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use firn_config::names;
use oci_spec::runtime::{Hook, Mount};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

pub use self::author::Author;
pub use self::device_changes::{Access, DeviceChange};
pub use self::devices::{DeviceRule, SpecDevice, parse_device};
pub use self::privileges::{Asks, Profile, capability};
use crate::device_class;
use firn_host::bounded::read_at_most;
use firn_host::ordered::map_of;
use firn_host::{Problem, atomic_file};

/// Where shared memory is mounted.
const SHM: &str = "/dev/shm";

/// Largest spec that is read. Specs of pods with hundreds of mounts stay below 1 MiB.
const MAX_BYTES: u64 = 16 << 20;

/// A spec that cannot be used.
#[derive(Debug, thiserror::Error, Problem)]
#[problem("FIRN-SPEC-INVALID", "create the container again with a valid spec")]
pub enum SpecError {
    /// The file cannot be read.
    #[error("cannot read spec {}", path.display())]
    #[problem(
        "FIRN-SPEC-UNREADABLE",
        "check that the bundle exists and is readable for root"
    )]
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
    /// A part that firn has to act on does not follow the runtime specification.
    #[error("spec has a malformed entry in {part}")]
    Malformed {
        part: &'static str,
        source: Option<serde_json::Error>,
    },
    /// The file cannot be written.
    #[error("cannot write spec {}", path.display())]
    #[problem(
        "FIRN-SPEC-UNWRITABLE",
        "check that the bundle's file system is writable and not full"
    )]
    Write { path: PathBuf, source: io::Error },
}

/// A container's spec.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    value: Value,
}

/// An entry of `mounts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecMount {
    /// Path in the container.
    pub destination: PathBuf,
    /// File system type, empty when there is none.
    pub kind: String,
    /// Path on the host for bind mounts.
    pub source: PathBuf,
    /// Mount options.
    pub options: Vec<String>,
}

/// Restrictions of a mount, as specs and the kernel name them: the word that sets one, the word that unsets
/// it, and the kernel's flag.
pub const RESTRICTIONS: [(&str, &str, u32); 4] = [
    ("ro", "rw", 1),
    ("nosuid", "suid", 2),
    ("nodev", "dev", 4),
    ("noexec", "exec", 8),
];

impl SpecMount {
    /// How the mount is restricted: the sum of flags of [`RESTRICTIONS`]. A word for the whole tree counts,
    /// too.
    pub fn restrictions(&self) -> u32 {
        let last = |set: &str, unset: &str| {
            let is_word =
                |word: &&String| [set, unset].contains(&&***word) || word.strip_prefix('r') == Some(set);
            self.options
                .iter()
                .rev()
                .find(is_word)
                .is_some_and(|word| word != unset)
        };
        let is_set = |(set, unset, _): &&(&str, &str, u32)| last(set, unset);
        RESTRICTIONS.iter().filter(is_set).map(|(.., flag)| flag).sum()
    }

    /// How the mounts below it are restricted that a recursive bind mount brings along: by `rro`, `rnosuid`,
    /// `rnodev`, `rnoexec`.
    pub fn restrictions_below(&self) -> u32 {
        let is_set = |(set, unset, _): &&(&str, &str, u32)| {
            let is_word = |word: &&String| {
                word.strip_prefix('r')
                    .is_some_and(|word| [*set, *unset].contains(&word))
            };
            let last = self.options.iter().rev().find(is_word);
            last.is_some_and(|word| word.strip_prefix('r') == Some(set))
        };
        RESTRICTIONS.iter().filter(is_set).map(|(.., flag)| flag).sum()
    }

    /// The destination as the kernel lists it: without doubled slashes and without one at the end.
    pub fn point(&self) -> PathBuf {
        self.destination.components().collect()
    }

    /// Whether the mount shows a file or directory of the host.
    pub fn is_bind(&self) -> bool {
        self.kind == "bind" || self.options.iter().any(|o| o == "bind" || o == "rbind")
    }
}

impl SpecError {
    pub(crate) fn malformed(part: &'static str, source: Option<serde_json::Error>) -> Self {
        Self::Malformed { part, source }
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
        let bytes = std::fs::File::open(path())
            .and_then(|file| read_at_most(file, MAX_BYTES))
            .map_err(|source| SpecError::Read { path: path(), source })?
            .ok_or_else(|| SpecError::TooLarge { path: path() })?;
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

    /// Hooks that run when the container is created, in its namespaces. `runc restore` runs none of them.
    pub fn create_hooks(&self) -> impl Iterator<Item = Hook> {
        self.well_formed("/hooks/createContainer")
    }

    /// Programs of the hooks that `runc restore` runs on the node, without those that give GPUs: firn removes
    /// them.
    pub fn restore_hooks(&self) -> impl Iterator<Item = &Path> {
        let stages = ["/hooks/prestart", "/hooks/createRuntime"];
        let hooks = stages.into_iter().flat_map(|stage| self.array(stage));
        let is_run = |hook: &&Value| !device_class::gives_gpus(hook) && !device_class::limits_memory(hook);
        hooks
            .filter(is_run)
            .filter_map(|hook| hook["path"].as_str().map(Path::new))
    }

    /// Files of the namespaces that the container joins.
    pub fn namespace_paths(&self) -> impl Iterator<Item = &Path> {
        let namespaces = self.array("/linux/namespaces").iter();
        let paths = namespaces.filter_map(|namespace| namespace["path"].as_str());
        paths.filter(|path| !path.is_empty()).map(Path::new)
    }

    /// Values of an environment variable. Programs disagree about which of several counts.
    pub(crate) fn variables<'s>(&'s self, name: &'s str) -> impl DoubleEndedIterator<Item = &'s str> {
        let pairs = self.array("/process/env").iter().filter_map(Value::as_str);
        pairs.filter_map(move |pair| pair.strip_prefix(name)?.strip_prefix('='))
    }

    /// The arguments of the first process.
    pub fn args(&self) -> impl Iterator<Item = &str> {
        self.array("/process/args").iter().filter_map(Value::as_str)
    }

    /// Value of an annotation.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations()?.get(key)?.as_str()
    }

    pub fn annotations(&self) -> Option<&Map<String, Value>> {
        self.value.get("annotations")?.as_object()
    }

    /// Mounts, in order.
    pub fn mounts(&self) -> Result<Vec<SpecMount>, SpecError> {
        let mounts: Vec<Mount> = self.list("/mounts", "mounts")?;
        let mount = |mount: &Mount| SpecMount {
            destination: mount.destination().clone(),
            kind: mount.typ().clone().unwrap_or_default(),
            source: mount.source().clone().unwrap_or_default(),
            options: mount.options().clone().unwrap_or_default(),
        };
        Ok(mounts.iter().map(mount).collect())
    }

    /// Mount points of the tmpfs whose files are in a checkpoint: those that the runtime makes for the
    /// container, and the /dev/shm of its pod.
    pub fn kept_tmpfs(&self) -> Result<Vec<PathBuf>, SpecError> {
        let mounts = self.mounts()?;
        // A later mount covers an earlier one.
        let by_destination = map_of(mounts.iter().map(|mount| (mount.point(), mount)));
        let own = |mount: &SpecMount| mount.kind == "tmpfs" && !mount.is_bind();
        let own = by_destination.into_iter().filter(|(_, mount)| own(mount));
        let of_pod = self.pod_shm()?.map(|_| PathBuf::from(SHM));
        Ok(own.map(|(destination, _)| destination).chain(of_pod).collect())
    }

    /// Where the files of the pod's /dev/shm are, if the container may write there: the pod's own, or an
    /// `emptyDir`. None for the node's /dev/shm and for other mounts from outside.
    pub fn pod_shm(&self) -> Result<Option<PathBuf>, SpecError> {
        let mounts = self.mounts()?;
        // A later mount covers an earlier one.
        let is_shm = |mount: &SpecMount| mount.point() == Path::new(SHM);
        let last = mounts.into_iter().rev().find(is_shm);
        let may_write = |mount: &SpecMount| mount.is_bind() && !mount.options.iter().any(|o| o == "ro");
        let source = last.filter(may_write).map(|mount| mount.source);
        Ok(source.filter(|source| self.is_of_pod(source)))
    }

    /// Whether containerd or the kubelet has made this directory for the container's pod. Both ids are made
    /// up after the pod is written, so no `hostPath` can have them.
    fn is_of_pod(&self, source: &Path) -> bool {
        let with_id = |annotation, before: &str, after: &str| {
            let id = self.annotation(annotation).filter(|id| !id.is_empty());
            id.map(|id| Path::new(before).join(id).join(after))
        };
        let cri = with_id(
            names::ANNOTATION_CRI_SANDBOX,
            "io.containerd.grpc.v1.cri/sandboxes",
            "shm",
        );
        let kubelet = with_id(
            names::ANNOTATION_CRI_UID,
            "pods",
            "volumes/kubernetes.io~empty-dir",
        );
        let volumes = source.parent().unwrap_or(source);
        cri.is_some_and(|dir| source.ends_with(dir)) || kubelet.is_some_and(|dir| volumes.ends_with(dir))
    }

    /// Path of the container's cgroup: absolute, or `slice:prefix:name` for the systemd driver.
    pub fn cgroups_path(&self) -> Option<&str> {
        self.value.pointer("/linux/cgroupsPath")?.as_str()
    }

    /// Whether the container has a namespace of this type other than the runtime's.
    pub fn has_namespace(&self, kind: &str) -> bool {
        self.array("/linux/namespaces")
            .iter()
            .any(|ns| ns["type"] == kind)
    }

    /// Path of the namespace of this type that the container joins; none when it gets a new one, or none at
    /// all.
    pub fn namespace_path(&self, kind: &str) -> Option<&Path> {
        let namespaces = self.array("/linux/namespaces").iter();
        let path = namespaces
            .filter(|ns| ns["type"] == kind)
            .find_map(|ns| ns["path"].as_str())?;
        (!path.is_empty()).then(|| Path::new(path))
    }

    /// Whether the container gets a user namespace of its own, with the maps of the spec.
    pub fn makes_user_namespace(&self) -> bool {
        self.has_namespace("user") && self.namespace_path("user").is_none()
    }

    /// Whether the container's process has a terminal.
    pub fn terminal(&self) -> bool {
        self.is_set("/process/terminal")
    }

    /// Whether the value at a JSON pointer is true.
    fn is_set(&self, pointer: &str) -> bool {
        self.value.pointer(pointer) == Some(&Value::Bool(true))
    }

    /// Path of the root file system: absolute, or relative to the bundle.
    pub fn root_path(&self) -> Option<&Path> {
        Some(Path::new(self.value.pointer("/root/path")?.as_str()?))
    }

    /// The JSON.
    pub fn into_value(self) -> Value {
        self.value
    }

    /// A reference to the JSON.
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

    /// The object at a path of keys, `linux.resources`, created where it is missing.
    pub fn object_mut(&mut self, path: &'static str) -> Result<&mut Map<String, Value>, SpecError> {
        let object = self.make(path, Value::Object(Map::new()))?.as_object_mut();
        object.ok_or_else(|| SpecError::malformed(path, None))
    }

    /// The list at a path of keys, `linux.devices`, created where it is missing.
    pub fn list_mut(&mut self, path: &'static str) -> Result<&mut Vec<Value>, SpecError> {
        let list = self.make(path, Value::Array(Vec::new()))?.as_array_mut();
        list.ok_or_else(|| SpecError::malformed(path, None))
    }

    /// Removes entries of a list and returns their number. A spec that has none of them is not touched.
    pub(crate) fn remove(
        &mut self,
        path: &'static str,
        which: impl Fn(&Value) -> bool,
    ) -> Result<usize, SpecError> {
        let pointer = format!("/{}", path.replace('.', "/"));
        if !self.array(&pointer).iter().any(&which) {
            return Ok(0);
        }
        let list = self.list_mut(path)?;
        let before = list.len();
        list.retain(|entry| !which(entry));
        Ok(before - list.len())
    }

    fn make(&mut self, path: &'static str, empty: Value) -> Result<&mut Value, SpecError> {
        let mut value = &mut self.value;
        for key in path.split('.') {
            if value.is_null() {
                *value = Value::Object(Map::new());
            }
            let object = value.as_object_mut();
            let object = object.ok_or_else(|| SpecError::malformed(path, None))?;
            value = object.entry(key).or_insert(Value::Null);
        }
        if value.is_null() {
            *value = empty;
        }
        Ok(value)
    }

    /// The entries of a list; an error when one is malformed.
    fn list<T: DeserializeOwned>(&self, pointer: &str, part: &'static str) -> Result<Vec<T>, SpecError> {
        let entries = self.array(pointer).iter();
        entries
            .map(|entry| T::deserialize(entry).map_err(|error| SpecError::malformed(part, Some(error))))
            .collect()
    }

    /// The entries of a list that are well-formed. runc refuses a spec with any other.
    pub(crate) fn well_formed<T: DeserializeOwned>(&self, pointer: &str) -> impl Iterator<Item = T> {
        let entries = self.array(pointer).iter();
        entries.filter_map(|entry| T::deserialize(entry).ok())
    }
}

impl From<Value> for Spec {
    fn from(value: Value) -> Self {
        Self { value }
    }
}

#[cfg(test)]
mod tests;
