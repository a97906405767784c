//! Edits of a spec before runc sees it.
//!
//! All edits are idempotent and keep the order of the remaining entries. They grant nothing more: no wildcard
//! is added, and a device rule is added only for a node that is in the spec's device list.

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;

use firn_config::names;
use firn_gpu::{DeviceNode, Gpu, GpuUuid, NodeType};
use firn_host::Problem;
use serde_json::{Map, Value, json};

use crate::device_class;
use crate::device_class::{GpuPath, classify};
use crate::spec::parse_device;
use crate::vendor::{OtherGpu, other_gpu};
use crate::{DeviceRule, Spec, SpecError};

/// An edit that cannot be made.
#[derive(Debug, thiserror::Error, Problem)]
pub enum EditError {
    /// The host has no device node for a GPU that the container should get.
    #[error("GPU {uuid} has no device node on this host")]
    #[problem("FIRN-GPU-NO-NODE", "`nvidia-modprobe -c 0` or `nvidia-smi` makes the nodes")]
    NoNode { uuid: GpuUuid },
    /// The spec is malformed where the edit changes it.
    #[error("cannot edit the spec")]
    Spec(#[from] SpecError),
}

/// The changes of [`replace_gpus`], for the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceEdit {
    /// Nodes that the spec did not have, or had with other numbers.
    pub added: Vec<DeviceNode>,
    /// Nodes that the spec no longer has.
    pub dropped: Vec<DeviceNode>,
}

impl DeviceEdit {
    /// Whether nothing was changed.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.dropped.is_empty()
    }
}

impl fmt::Display for DeviceEdit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |nodes: &[DeviceNode], what: &'static str| -> Vec<String> {
            let one =
                |node: &DeviceNode| format!("{} ({}:{}) {what}", node.path.display(), node.major, node.minor);
            nodes.iter().map(one).collect()
        };
        let mut all = list(&self.dropped, "is gone");
        all.extend(list(&self.added, "is new"));
        f.write_str(&all.join(", "))
    }
}

/// Gives the container exactly the GPUs `targets`, and the driver's common nodes with this host's numbers.
///
/// Entries of `linux.devices` and their rules in `linux.resources.devices` change together: a rule with the
/// old numbers of a replaced entry gets the new numbers, and the rule of a dropped entry is removed. Common
/// nodes that the spec lacks are not added. If the GPUs change, nodes under /dev/dri and common nodes that
/// this host does not have are dropped: firn does not know which device they would open here.
pub fn replace_gpus(
    spec: &mut Spec,
    targets: &[Gpu],
    common: &[DeviceNode],
) -> Result<DeviceEdit, EditError> {
    let targets: Vec<DeviceNode> = targets.iter().map(node_of).collect::<Result<_, _>>()?;
    let moves = replace_devices(spec, &targets, common)?;
    replace_rules(spec, &moves)?;
    Ok(report(&moves))
}

/// Replaces nodes of AMD's GPUs and graphics nodes of any GPU by this host's nodes, `host`.
///
/// The kernel chooses the number of `/dev/kfd`, so the node gets this host's number. Graphics nodes have the
/// same numbers on every host and may have other names in a container, so the number identifies the granted
/// device. Nodes that this host does not have are dropped: firn does not know which device they would open
/// here.
pub fn replace_other_gpus(spec: &mut Spec, host: &[DeviceNode]) -> Result<DeviceEdit, EditError> {
    let (mut moves, mut new) = (Vec::new(), Vec::new());
    let old = spec.array("/linux/devices").to_vec();
    for entry in &old {
        let from = parse_device(entry)?.map(|device| device.node);
        let class = from.as_ref().and_then(|node| other_gpu(&node.path));
        let (Some(from), Some(class @ (OtherGpu::Amd | OtherGpu::Graphics))) = (from, class) else {
            new.push(entry.clone());
            continue;
        };
        let mut here = host.iter().filter(|node| other_gpu(&node.path) == Some(class));
        let to = match class {
            OtherGpu::Amd => here.next().cloned(),
            _ => here
                .any(|node| number(node) == number(&from))
                .then(|| from.clone()),
        };
        new.extend(to.as_ref().map(|to| match *to == from {
            true => entry.clone(),
            false => with_node(entry, to),
        }));
        moves.push(Move { from: Some(from), to });
    }
    let done = report(&moves);
    if new != old {
        let rules = spec.device_rules()?;
        // A node that the device cgroup did not allow stays so.
        moves.retain(|m| m.from.as_ref().is_some_and(|from| DeviceRule::open(&rules, from)));
        replace_rules(spec, &moves)?;
        spec.object_mut(&["linux"], "linux")?
            .insert("devices".to_owned(), Value::Array(new));
    }
    Ok(done)
}

fn number(node: &DeviceNode) -> (NodeType, u64, u64) {
    (node.kind, node.major, node.minor)
}

/// Removes the nodes of NVIDIA's driver from a spec, with the rules that allow only them. On this host the
/// numbers of another host may belong to other devices.
pub fn drop_nodes(spec: &mut Spec) -> Result<(), EditError> {
    let devices = spec.devices()?.into_iter().map(|device| device.node);
    let moves: Vec<Move> = devices
        .filter(|node| device_class::is_nvidia(&node.path))
        .map(|node| Move {
            from: Some(node),
            to: None,
        })
        .collect();
    if moves.is_empty() {
        return Ok(());
    }
    replace_rules(spec, &moves)?;
    let linux = spec.object_mut(&["linux"], "linux")?;
    if let Some(devices) = linux.get_mut("devices").and_then(Value::as_array_mut) {
        devices.retain(|entry| {
            let path = entry["path"].as_str().unwrap_or_default();
            !device_class::is_nvidia(Path::new(path))
        });
    }
    Ok(())
}

/// Removes NVIDIA's prestart and createRuntime hooks and returns their number. runc would run them at a
/// restore, on an incomplete container whose devices and mounts are already in the spec.
pub fn strip_gpu_hooks(spec: &mut Spec) -> Result<usize, EditError> {
    if spec.array("/hooks/prestart").is_empty() && spec.array("/hooks/createRuntime").is_empty() {
        return Ok(0);
    }
    let hooks = spec.object_mut(&["hooks"], "hooks")?;
    let mut stripped = 0;
    for kind in ["prestart", "createRuntime"] {
        if let Some(list) = hooks.get_mut(kind).and_then(Value::as_array_mut) {
            let before = list.len();
            list.retain(|hook| !device_class::is_nvidia_hook(hook));
            stripped += before - list.len();
        }
    }
    Ok(stripped)
}

/// Makes runc pass this configuration file to CRIU.
pub fn set_criu_config(spec: &mut Spec, file: &Path) -> Result<(), EditError> {
    let annotations = spec.object_mut(&["annotations"], "annotations")?;
    annotations.insert(names::ANNOTATION_CRIU_CONFIG.to_owned(), json!(file));
    Ok(())
}

/// Moves the container to another cgroup: the last part of `linux.cgroupsPath` becomes `name`.
pub fn rename_cgroup(spec: &mut Spec, name: &str) -> Result<(), EditError> {
    let Some(path) = spec.cgroups_path() else {
        return Ok(());
    };
    // `slice:prefix:name` for the systemd driver, else a path.
    let end = path.rfind(['/', ':']).map_or(0, |at| at + 1);
    let path = format!("{}{name}", &path[..end]);
    spec.object_mut(&["linux"], "linux")?
        .insert("cgroupsPath".to_owned(), json!(path));
    Ok(())
}

/// Adds firn's createRuntime hook after all others. At a restore runc runs it before CRIU restores sockets.
/// The hook brings up the loopback interface of the container's network namespace, which runc does only at
/// create.
pub fn add_restore_hook(spec: &mut Spec, program: &Path) -> Result<(), EditError> {
    const PART: &str = "hooks.createRuntime";
    let hooks = spec.object_mut(&["hooks"], "hooks")?;
    let list = hooks.entry("createRuntime").or_insert(Value::Null);
    if list.is_null() {
        *list = json!([]);
    }
    let list = list.as_array_mut().ok_or(SpecError::Malformed {
        part: PART,
        source: None,
    })?;
    if !list.iter().any(|hook| hook["path"] == json!(program)) {
        list.push(json!({"path": program, "args": [names::HOOK_PROGRAM, "createRuntime"], "timeout": 10}));
    }
    Ok(())
}

/// The change of one GPU entry of `linux.devices`: its node before and after.
struct Move {
    from: Option<DeviceNode>,
    to: Option<DeviceNode>,
}

fn node_of(gpu: &Gpu) -> Result<DeviceNode, EditError> {
    gpu.node.clone().ok_or_else(|| EditError::NoNode {
        uuid: gpu.uuid.clone(),
    })
}

fn report(moves: &[Move]) -> DeviceEdit {
    let changed = |m: &&Move| m.from != m.to;
    DeviceEdit {
        added: moves
            .iter()
            .filter(changed)
            .filter_map(|m| m.to.clone())
            .collect(),
        dropped: moves
            .iter()
            .filter(changed)
            .filter_map(|m| m.from.clone())
            .collect(),
    }
}

/// The nodes of these entries of `linux.devices`; none for a fifo.
fn nodes_of(entries: &[Value]) -> Result<Vec<Option<DeviceNode>>, SpecError> {
    let entries = entries.iter();
    entries
        .map(|entry| Ok(parse_device(entry)?.map(|device| device.node)))
        .collect()
}

fn replace_devices(
    spec: &mut Spec,
    targets: &[DeviceNode],
    common: &[DeviceNode],
) -> Result<Vec<Move>, EditError> {
    let old = spec.array("/linux/devices").to_vec();
    let parsed = nodes_of(&old)?;
    let class = |node: &Option<DeviceNode>| node.as_ref().and_then(|node| classify(&node.path));
    let gpus: Vec<&DeviceNode> = parsed
        .iter()
        .filter(|n| class(n) == Some(GpuPath::Gpu))
        .flatten()
        .collect();
    let gpus_change = gpus.len() != targets.len() || targets.iter().any(|target| !gpus.contains(&target));
    let mut missing: VecDeque<&DeviceNode> = targets
        .iter()
        .filter(|target| !gpus.iter().any(|gpu| gpu.path == target.path))
        .collect();

    let mut moves = Vec::new();
    let mut new: Vec<Value> = Vec::new();
    let (mut after_gpus, mut template) = (None, None);
    for (entry, from) in old.iter().zip(parsed.iter()) {
        let Some((from, class)) = from.as_ref().zip(class(from)) else {
            new.push(entry.clone());
            continue;
        };
        let here = |nodes: &[DeviceNode]| nodes.iter().find(|node| node.path == from.path).cloned();
        let to = match class {
            GpuPath::Gpu => here(targets).or_else(|| missing.pop_front().cloned()),
            GpuPath::Control => here(common).or_else(|| (!gpus_change).then(|| from.clone())),
            GpuPath::Graphics => (!gpus_change).then(|| from.clone()),
        };
        // A path that the spec has twice stays once.
        let to = to.filter(|to| {
            !moves
                .iter()
                .any(|m: &Move| m.to.as_ref().is_some_and(|t| t.path == to.path))
        });
        new.extend(to.as_ref().map(|to| with_node(entry, to)));
        if class == GpuPath::Gpu {
            after_gpus = Some(new.len());
            template = template.or(Some(entry));
        }
        moves.push(Move {
            from: Some(from.clone()),
            to,
        });
    }
    let template = template.cloned().unwrap_or_else(|| json!({"fileMode": 0o666}));
    let at = after_gpus.unwrap_or(new.len());
    for (i, target) in missing.into_iter().enumerate() {
        new.insert(at + i, with_node(&template, target));
        moves.push(Move {
            from: None,
            to: Some(target.clone()),
        });
    }
    if new != old {
        spec.object_mut(&["linux"], "linux")?
            .insert("devices".to_owned(), Value::Array(new));
    }
    Ok(moves)
}

/// The entry with another node. Owner, mode and unknown fields stay.
fn with_node(entry: &Value, node: &DeviceNode) -> Value {
    let mut fields = entry.as_object().cloned().unwrap_or_default();
    fields.insert("path".to_owned(), json!(node.path));
    set_numbers(&mut fields, node);
    Value::Object(fields)
}

fn set_numbers(fields: &mut Map<String, Value>, node: &DeviceNode) {
    let same_kind = fields.get("type").and_then(Value::as_str) == Some("u") && node.kind == NodeType::Char;
    if !same_kind {
        fields.insert("type".to_owned(), json!(node.kind));
    }
    fields.insert("major".to_owned(), json!(node.major));
    fields.insert("minor".to_owned(), json!(node.minor));
}

fn replace_rules(spec: &mut Spec, moves: &[Move]) -> Result<(), EditError> {
    let rules = spec.device_rules()?;
    let old = spec.array("/linux/resources/devices").to_vec();
    let mut new: Vec<Value> = Vec::new();
    for (entry, rule) in old.iter().zip(&rules) {
        let names_old = |m: &&Move| m.from.as_ref().is_some_and(|from| rule.is_exactly(from));
        let moved: Vec<&Move> = moves.iter().filter(names_old).collect();
        let stays = |m: &&Move| m.to.as_ref().is_some_and(|to| rule.is_exactly(to));
        if !rule.is_allow() || moved.iter().all(stays) {
            new.push(entry.clone());
            continue;
        }
        for to in moved.iter().filter_map(|m| m.to.as_ref()) {
            let mut fields = entry.as_object().cloned().unwrap_or_default();
            set_numbers(&mut fields, to);
            let entry = Value::Object(fields);
            if !new.contains(&entry) {
                new.push(entry);
            }
        }
    }
    // Nodes whose old numbers had no rule, and GPUs in addition to the spec's.
    let decided: Vec<DeviceRule> =
        Spec::from(json!({"linux": {"resources": {"devices": &new}}})).device_rules()?;
    for to in moves
        .iter()
        .filter_map(|m| m.to.as_ref())
        .filter(|to| !DeviceRule::open(&decided, to))
    {
        new.push(
            json!({"allow": true, "type": to.kind, "major": to.major, "minor": to.minor, "access": "rwm"}),
        );
    }
    if new != old {
        let resources = spec.object_mut(&["linux", "resources"], "linux.resources")?;
        resources.insert("devices".to_owned(), Value::Array(new));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
