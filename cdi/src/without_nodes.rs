//! The edits of CDI devices for a spec that already has the device nodes.
//!
//! Kubernetes' device plugin can add nodes to a spec, and a name for the libraries. The nodes come from the
//! operator. The name may come from the image or the pod, so of its device's edits only those are made that
//! grant nothing: variables, read-only bind mounts, and hooks that make links and the loader's cache. Edits
//! that NVIDIA's files have for every GPU and that a container does not need are left out: other nodes of the
//! driver, graphics nodes, sockets of its daemons, groups. Every other edit would exceed the grant and is
//! refused.

use std::collections::BTreeSet;
use std::path::Path;

use firn_oci::mounts::is_daemon_socket;
use firn_oci::{GpuPath, classify};
use serde_json::{Value, json};

use crate::file::{Edits, Hook, Mount};
use crate::{CdiError, DeviceName, Registry};

/// Directory of the MPS daemon's pipes.
const MPS: &str = "/tmp/nvidia-mps";

/// Where NVIDIA's files mount /dev/null, which stands for no device.
const VOID: &str = "/var/run/nvidia-container-devices/void";

/// Hooks of NVIDIA's and firn's that are permitted: they only change files of the container.
const HOOKS: [(&str, &[&str]); 3] = [
    ("nvidia-cdi-hook", &OF_NVIDIA),
    ("nvidia-ctk", &OF_NVIDIA),
    ("firn-hook", &["create-symlinks", "update-ldcache"]),
];
/// One that is permitted at createRuntime: it lowers what the container may use of a GPU.
const LIMITS: &str = "apply-cuda-memory-limits";
const OF_NVIDIA: [&str; 5] = [
    "create-symlinks",
    "update-ldcache",
    "enable-cuda-compat",
    "update-application-profile",
    "disable-device-node-modification",
];

impl Registry {
    /// Adds the edits of these devices without their nodes. Returns descriptions of the edits that were left
    /// out.
    pub fn inject_without_nodes(
        &self,
        spec: &mut Value,
        names: &[DeviceName],
    ) -> Result<BTreeSet<String>, CdiError> {
        let mut left_out = BTreeSet::new();
        self.inject_edits(spec, names, |file, name, edits, spec| {
            let (edits, left) = harmless(edits, spec).map_err(|edit| CdiError::Beyond {
                name: name.to_string(),
                file: file.to_owned(),
                edit,
            })?;
            left_out.extend(left);
            Ok(edits)
        })?;
        Ok(left_out)
    }
}

/// The edits that grant the container nothing, and those that are left out. The error is an edit that would
/// grant more than the container's nodes.
fn harmless(edits: &Edits, spec: &Value) -> Result<(Edits, Vec<String>), String> {
    let mut left = Vec::new();
    let list = |pointer| {
        spec.pointer(pointer)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
    };
    for node in &edits.device_nodes {
        let path = Path::new(&node.path);
        if list("/linux/devices").any(|device| device["path"] == json!(node.path)) {
            continue;
        }
        match classify(path) {
            Some(GpuPath::Control | GpuPath::Graphics) => left.push(node.path.clone()),
            Some(GpuPath::Gpu) | None => return Err(format!("device node {}", node.path)),
        }
    }
    let mut mounts = Vec::new();
    for mount in edits.mounts.iter().filter(|mount| mount.container_path != VOID) {
        match mount.is_harmless() {
            true => mounts.push(mount.clone()),
            false if mount.is_dispensable() => left.push(mount.container_path.clone()),
            false => {
                return Err(format!(
                    "mount of {} at {}, which is no read-only bind mount of files",
                    mount.host_path, mount.container_path
                ));
            }
        }
    }
    if let Some(hook) = edits.hooks.iter().find(|hook| !hook.is_harmless()) {
        return Err(format!("{} hook {}", hook.hook_name, hook.path));
    }
    let gids = edits.additional_gids.iter();
    let has_not = |gid: &&u32| !list("/process/user/additionalGids").any(|other| other == &json!(gid));
    left.extend(gids.filter(has_not).map(|gid| format!("group {gid}")));
    let made = Edits {
        env: edits.env.clone(),
        mounts,
        hooks: edits.hooks.clone(),
        ..Edits::default()
    };
    Ok((made, left))
}

impl Mount {
    /// Whether the mount permits neither writing nor opening a device.
    fn is_harmless(&self) -> bool {
        let has = |names: &[&str]| self.options.iter().any(|option| names.contains(&option.as_str()));
        let is_bind = match self.kind.as_deref() {
            None | Some("" | "none") => has(&["bind", "rbind"]),
            Some(kind) => kind == "bind",
        };
        let in_dev = [&self.host_path, &self.container_path]
            .into_iter()
            .any(|path| below_dev(path));
        is_bind && has(&["ro", "rro"]) && !has(&["rw", "rrw"]) && !in_dev
    }

    fn is_dispensable(&self) -> bool {
        let at = Path::new(&self.container_path);
        is_daemon_socket(at) || at == Path::new(MPS)
    }
}

/// Whether a path may lead to /dev or below. One with `..` may.
fn below_dev(path: &str) -> bool {
    let path = Path::new(path);
    let leads_up = path
        .components()
        .any(|part| part == std::path::Component::ParentDir);
    leads_up || path.starts_with("/dev") || !path.has_root()
}

impl Hook {
    fn is_harmless(&self) -> bool {
        let program = Path::new(&self.path).file_name().and_then(|name| name.to_str());
        let known = HOOKS.iter().find(|(name, _)| Some(*name) == program);
        let verb = match self.args.get(1).map(String::as_str) {
            Some("hook") => self.args.get(2).map(String::as_str),
            verb => verb,
        };
        let is_permitted = |(of, verbs): (&str, &[&str]), verb| match self.hook_name.as_str() {
            "createContainer" => verbs.contains(&verb),
            "createRuntime" => of != "firn-hook" && verb == LIMITS,
            _ => false,
        };
        known
            .copied()
            .zip(verb)
            .is_some_and(|(known, verb)| is_permitted(known, verb))
    }
}
