//! The content of a CDI file: devices of one kind, and the edits of a container's spec that each needs.
//!
//! Files belong to root, but they may be broken: sizes are bounded, and a file is used as a whole or not at
//! all. Unknown fields are ignored, so that files of newer tools can be used if their version is known. An
//! edit that firn does not make (`netDevices`, `intelRdt`) is an error.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::FileError;

/// Largest number of entries in a list of edits. A node of eight GPUs has some 100 mounts.
const MAX_ENTRIES: usize = 4096;

/// Stages at which the OCI runtime runs hooks.
const HOOKS: [&str; 6] = [
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
];

/// A CDI file.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct CdiFile {
    /// Where it is.
    #[serde(skip)]
    pub path: PathBuf,
    /// The version of the CDI specification that it follows.
    #[serde(rename = "cdiVersion")]
    pub version: String,
    /// `vendor/class` of all of its devices.
    pub kind: String,
    /// Its devices, in the order of the file.
    #[serde(deserialize_with = "or_default")]
    pub devices: Vec<Device>,
    /// Edits that are made once, if any of the devices is added.
    #[serde(rename = "containerEdits", deserialize_with = "or_default")]
    pub edits: Edits,
}

/// A device.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Device {
    /// Name without the kind.
    pub name: String,
    /// Its edits.
    #[serde(rename = "containerEdits", deserialize_with = "or_default")]
    pub edits: Edits,
}

/// Changes of a container's spec.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Edits {
    /// `KEY=value`.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Mounts.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Hooks.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Groups of the container's process.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

/// A device node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// In the container.
    pub path: String,
    /// On the host, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// `b`, `c`, `u` or `p`.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Read from the host's node if there is no type, or if the number is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// See the major number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Permission bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Of the device cgroup: some of `rwm`, or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// On the host.
    pub host_path: String,
    /// In the container.
    pub container_path: String,
    /// Options.
    #[serde(
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub options: Vec<String>,
    /// File system.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
}

/// A hook.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// When it is run.
    pub hook_name: String,
    /// The program.
    pub path: String,
    /// Its arguments, the first one is its name.
    #[serde(
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub args: Vec<String>,
    /// Its environment.
    #[serde(
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub env: Vec<String>,
    /// Seconds that it may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
}

/// Go writes an empty list or object as `null`.
fn or_default<'de, T: Default + Deserialize<'de>, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl Edits {
    pub(crate) fn check(&self, of: &str) -> Result<(), FileError> {
        match self.fault() {
            None => Ok(()),
            Some(what) => Err(FileError::Edit {
                of: of.to_owned(),
                what,
            }),
        }
    }

    /// The first edit that is invalid for every spec.
    fn fault(&self) -> Option<String> {
        self.size_fault()
            .or_else(|| env_fault(&self.env))
            .or_else(|| self.device_nodes.iter().find_map(DeviceNode::fault))
            .or_else(|| self.hooks.iter().find_map(Hook::fault))
            .or_else(|| {
                let empty = |mount: &&Mount| mount.host_path.is_empty() || mount.container_path.is_empty();
                let mount = self.mounts.iter().find(empty)?;
                Some(format!(
                    "mount of {:?} at {:?} lacks a path",
                    mount.host_path, mount.container_path
                ))
            })
    }

    /// Bounds the lists: each entry is compared with all others when a spec is edited.
    fn size_fault(&self) -> Option<String> {
        let lists = [
            ("env", self.env.len()),
            ("deviceNodes", self.device_nodes.len()),
            ("mounts", self.mounts.len()),
            ("hooks", self.hooks.len()),
            ("additionalGids", self.additional_gids.len()),
        ];
        let (list, many) = lists.into_iter().find(|(_, entries)| *entries > MAX_ENTRIES)?;
        Some(format!("{list} has {many} entries, more than {MAX_ENTRIES}"))
    }
}

impl DeviceNode {
    fn fault(&self) -> Option<String> {
        let path = &self.path;
        if path.is_empty() {
            return Some("a device node has no path".to_owned());
        }
        if let Some(kind) = &self.kind
            && !matches!(kind.as_str(), "" | "b" | "c" | "u" | "p")
        {
            return Some(format!("device node {path} has type {kind:?}, not b, c, u or p"));
        }
        let permissions = self.permissions.as_deref().unwrap_or_default();
        let known = permissions == "none" || permissions.chars().all(|c| "rwm".contains(c));
        (!known).then(|| format!("device node {path} has permissions {permissions:?}, not some of rwm"))
    }
}

impl Hook {
    fn fault(&self) -> Option<String> {
        let Self { hook_name, path, .. } = self;
        if !HOOKS.contains(&hook_name.as_str()) {
            return Some(format!("hook {path:?} has the unknown name {hook_name:?}"));
        }
        if path.is_empty() {
            return Some(format!("a {hook_name} hook has no path"));
        }
        env_fault(&self.env)
    }
}

fn env_fault(env: &[String]) -> Option<String> {
    let is_pair = |pair: &&String| !pair.starts_with('=') && pair.contains('=');
    let bad = env.iter().find(|pair| !is_pair(pair))?;
    Some(format!("{bad:?} in env is not KEY=value"))
}
