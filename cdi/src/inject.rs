//! Adds the edits of devices to a container's spec.
//!
//! Idempotent except for hooks: a device node or mount replaces the one at the same path, a variable the one
//! of the same name, and rules and groups are not doubled. Nothing is changed if a device cannot be added.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nix::sys::stat::{major, minor};
use serde_json::{Map, Value, json};

use crate::file::{DeviceNode, Edits, Hook, Mount};
use crate::{CdiError, DeviceName, Registry};

type Object = Map<String, Value>;

impl Registry {
    /// Adds these devices to a container's spec.
    pub fn inject(&self, spec: &mut Value, names: &[DeviceName]) -> Result<(), CdiError> {
        self.inject_edits(spec, names, |_, _, edits, _| Ok(edits.clone()))
    }

    /// Adds those edits of each device and of its file that `choose` returns for them and the unedited spec.
    pub(crate) fn inject_edits(
        &self,
        spec: &mut Value,
        names: &[DeviceName],
        mut choose: impl FnMut(&Path, &DeviceName, &Edits, &Value) -> Result<Edits, CdiError>,
    ) -> Result<(), CdiError> {
        let (mut files, mut given) = (BTreeSet::new(), BTreeSet::new());
        let mut all = Vec::new();
        for name in names {
            let (file, device) = self.device(name)?;
            if !given.insert(name) {
                continue;
            }
            if files.insert(&file.path) {
                all.push((&file.path, name, &file.edits));
            }
            all.push((&file.path, name, &device.edits));
        }
        let mut edited = spec.clone();
        for (file, name, edits) in all {
            choose(file, name, edits, spec)?.apply(&mut edited, name)?;
        }
        *spec = edited;
        Ok(())
    }
}

impl Edits {
    fn apply(&self, spec: &mut Value, of: &DeviceName) -> Result<(), CdiError> {
        for pair in &self.env {
            set_env(list(object(spec, &["process"])?, "env")?, pair);
        }
        for node in &self.device_nodes {
            node.on_host(of)?.add(spec)?;
        }
        if !self.mounts.is_empty() {
            self.mount(spec)?;
        }
        for hook in &self.hooks {
            list(object(spec, &["hooks"])?, &hook.hook_name)?.push(hook.entry());
        }
        for gid in self.additional_gids.iter().filter(|gid| **gid != 0) {
            let gids = list(object(spec, &["process", "user"])?, "additionalGids")?;
            if !gids.contains(&json!(gid)) {
                gids.push(json!(gid));
            }
        }
        Ok(())
    }

    fn mount(&self, spec: &mut Value) -> Result<(), CdiError> {
        let idmapped = has_user_namespace(spec);
        let mounts = list(object(spec, &[])?, "mounts")?;
        for mount in &self.mounts {
            mounts.retain(|other| other["destination"] != json!(mount.container_path));
            mounts.push(mount.entry(idmapped));
        }
        // What lies deeper is mounted later.
        mounts.sort_by_key(|mount| depth(mount["destination"].as_str().unwrap_or_default()));
        Ok(())
    }
}

impl Mount {
    fn entry(&self, idmapped: bool) -> Value {
        let mut entry = json!({"destination": self.container_path, "source": self.host_path});
        let mut options = self.options.clone();
        if idmapped {
            options.extend(self.idmap().map(str::to_owned));
        }
        if !options.is_empty() {
            entry["options"] = json!(options);
        }
        if let Some(kind) = &self.kind {
            entry["type"] = json!(kind);
        }
        entry
    }

    /// The option that shows files of the host with the container's users.
    fn idmap(&self) -> Option<&'static str> {
        let has = |name: &str| self.options.iter().any(|option| option == name);
        if has("idmap") || has("ridmap") {
            return None;
        }
        let plain = has("bind") || self.kind.as_deref() == Some("bind");
        if has("rbind") {
            Some("ridmap")
        } else {
            plain.then_some("idmap")
        }
    }
}

impl Hook {
    /// The spec has the same fields, and the name as the key of their list.
    fn entry(&self) -> Value {
        let mut entry = json!(self);
        entry.as_object_mut().and_then(|entry| entry.remove("hookName"));
        entry
    }
}

impl DeviceNode {
    /// The node with what the file leaves open taken from the host's. A node that the file describes need not
    /// be there.
    fn on_host(&self, of: &DeviceName) -> Result<Self, CdiError> {
        let mut whole = self.clone();
        let kind = self.kind.as_deref().unwrap_or_default();
        let described = kind == "p" || !kind.is_empty() && self.major.is_some_and(|major| major != 0);
        let path = Path::new(self.host_path.as_deref().unwrap_or(&self.path));
        let host = match look(path) {
            Ok(host) => host,
            Err(_) if described => return Ok(whole),
            Err(source) => {
                return Err(CdiError::Node {
                    name: of.to_string(),
                    path: path.to_owned(),
                    source,
                });
            }
        };
        whole.file_mode = whole.file_mode.or(Some(host.mode));
        if described {
            return Ok(whole);
        }
        match kind {
            "" => whole.kind = Some(host.kind.to_owned()),
            "u" if host.kind == "c" => {}
            same if same == host.kind => {}
            other => {
                return Err(CdiError::NodeType {
                    name: of.to_string(),
                    path: path.to_owned(),
                    wanted: other.to_owned(),
                    found: host.kind,
                });
            }
        }
        if whole.kind.as_deref() != Some("p") {
            (whole.major, whole.minor) = (Some(host.major), Some(host.minor));
        }
        Ok(whole)
    }

    fn add(&self, spec: &mut Value) -> Result<(), CdiError> {
        let user = spec.pointer("/process/user");
        let owner = |key: &str| {
            let id = user.and_then(|user| user.get(key)).and_then(Value::as_u64);
            id.and_then(|id| u32::try_from(id).ok()).filter(|id| *id > 0)
        };
        let (uid, gid) = (self.uid.or(owner("uid")), self.gid.or(owner("gid")));
        let (major, minor) = self.number();
        let mut entry = json!({"path": self.path, "type": self.kind, "major": major, "minor": minor});
        for (key, value) in [("fileMode", self.file_mode), ("uid", uid), ("gid", gid)] {
            if let Some(value) = value {
                entry[key] = json!(value);
            }
        }
        let devices = list(object(spec, &["linux"])?, "devices")?;
        devices.retain(|other| other["path"] != json!(self.path));
        devices.push(entry);
        match self.kind.as_deref() {
            Some("b" | "c") => self.allow(spec),
            _ => Ok(()),
        }
    }

    fn number(&self) -> (i64, i64) {
        (self.major.unwrap_or_default(), self.minor.unwrap_or_default())
    }

    fn allow(&self, spec: &mut Value) -> Result<(), CdiError> {
        let access = match self.permissions.as_deref() {
            None | Some("") => "rwm",
            // The node alone, which cannot be opened.
            Some("none") => return Ok(()),
            Some(some) => some,
        };
        let (major, minor) = self.number();
        let rule =
            json!({"allow": true, "type": self.kind, "major": major, "minor": minor, "access": access});
        let rules = list(object(spec, &["linux", "resources"])?, "devices")?;
        if !rules.contains(&rule) {
            rules.push(rule);
        }
        Ok(())
    }
}

/// What a device node of the host is.
struct Look {
    kind: &'static str,
    major: i64,
    minor: i64,
    mode: u32,
}

fn look(path: &Path) -> io::Result<Look> {
    let found = std::fs::symlink_metadata(path)?;
    let kind = found.file_type();
    let kind = if kind.is_char_device() {
        "c"
    } else if kind.is_block_device() {
        "b"
    } else if kind.is_fifo() {
        "p"
    } else {
        return Err(io::Error::other("it is no device node"));
    };
    let number = |number: u64| i64::try_from(number).map_err(io::Error::other);
    Ok(Look {
        kind,
        major: number(major(found.rdev()))?,
        minor: number(minor(found.rdev()))?,
        mode: found.mode() & 0o7777,
    })
}

fn set_env(env: &mut Vec<Value>, pair: &str) {
    let key = |pair: &str| pair.split('=').next().unwrap_or_default().to_owned();
    let same = |other: &Value| other.as_str().is_some_and(|other| key(other) == key(pair));
    let mut is_set = false;
    // A spec may have it twice, where the last one counts.
    env.retain_mut(|other| {
        if !same(other) {
            return true;
        }
        *other = json!(pair);
        !std::mem::replace(&mut is_set, true)
    });
    if !is_set {
        env.push(json!(pair));
    }
}

fn has_user_namespace(spec: &Value) -> bool {
    let namespaces = spec.pointer("/linux/namespaces").and_then(Value::as_array);
    namespaces.is_some_and(|all| all.iter().any(|namespace| namespace["type"] == "user"))
}

fn depth(path: &str) -> usize {
    let parts = Path::new(path).components();
    parts
        .filter(|part| matches!(part, std::path::Component::Normal(_)))
        .count()
}

/// The object at this place, made where it is missing.
fn object<'s>(spec: &'s mut Value, keys: &[&'static str]) -> Result<&'s mut Object, CdiError> {
    let malformed = |part| CdiError::Spec { part };
    let mut object = spec.as_object_mut().ok_or(malformed("its root"))?;
    for key in keys {
        let entry = object.entry(*key).or_insert(Value::Null);
        if entry.is_null() {
            *entry = json!({});
        }
        object = entry.as_object_mut().ok_or(malformed(key))?;
    }
    Ok(object)
}

/// The list under this key, made where it is missing.
fn list<'s>(object: &'s mut Object, key: &str) -> Result<&'s mut Vec<Value>, CdiError> {
    let entry = object.entry(key).or_insert(Value::Null);
    if entry.is_null() {
        *entry = json!([]);
    }
    entry.as_array_mut().ok_or(CdiError::Spec { part: "a list" })
}

#[cfg(test)]
mod tests;
