//! Edits of a spec before runc sees it.
//!
//! All edits are idempotent and keep the order of the remaining entries. They grant nothing more: no wildcard
//! is added, and a device rule is added only for a node that is in the spec's device list.

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
use crate::{DeviceRule, Spec, SpecError, annotations};

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
/// this host does not have are dropped: firn does not know which device they would open here. A hook that
/// limits GPU memory limits that of the targets.
pub fn replace_gpus(
    spec: &mut Spec,
    targets: &[Gpu],
    common: &[DeviceNode],
) -> Result<DeviceEdit, EditError> {
    let nodes: Vec<DeviceNode> = targets.iter().map(node_of).collect::<Result<_, _>>()?;
    let moves = replace_devices(spec, &nodes, common)?;
    replace_rules(spec, &moves)?;
    limit_memory_of(spec, targets)?;
    Ok(report(&moves))
}

/// Replaces nodes of AMD's GPUs and graphics nodes of any GPU by this host's nodes, `host`.
///
/// The kernel chooses the number of `/dev/kfd`, so the node gets this host's number. Graphics nodes have the
/// same numbers on every host and may have other names in a container, so the number identifies the granted
/// device. Nodes that this host does not have are dropped: firn does not know which device they would open
/// here.
pub fn replace_other_gpus(spec: &mut Spec, host: &[DeviceNode]) -> Result<DeviceEdit, EditError> {
    replace_others(spec, |from| match other_gpu(&from.path)? {
        OtherGpu::Accelerator => None,
        class => Some(of_host(from, class, host)),
    })
}

/// As [`replace_other_gpus`], with accelerators, for a container that holds nothing of any device: those that
/// this host has at the same path, with this host's numbers.
pub fn replace_released(spec: &mut Spec, host: &[DeviceNode]) -> Result<DeviceEdit, EditError> {
    replace_others(spec, |from| {
        let class = other_gpu(&from.path)?;
        Some(of_host(from, class, host))
    })
}

/// What this host has for a node of this class; none if it has nothing.
fn of_host(from: &DeviceNode, class: OtherGpu, host: &[DeviceNode]) -> Option<DeviceNode> {
    let mut here = host.iter().filter(|node| other_gpu(&node.path) == Some(class));
    match class {
        OtherGpu::Amd => here.next().cloned(),
        OtherGpu::Graphics => here.any(|node| node.id() == from.id()).then(|| from.clone()),
        OtherGpu::Accelerator => here.find(|node| node.path == from.path).cloned(),
    }
}

fn replace_others(
    spec: &mut Spec,
    here: impl FnMut(&DeviceNode) -> Option<Option<DeviceNode>>,
) -> Result<DeviceEdit, EditError> {
    let (new, mut moves) = replace_nodes(spec, here)?;
    let done = report(&moves);
    if !done.is_empty() {
        let rules = spec.device_rules()?;
        // A node that the device cgroup did not allow stays so.
        moves.retain(|m| m.from.as_ref().is_some_and(|from| DeviceRule::open(&rules, from)));
        replace_rules(spec, &moves)?;
        *spec.list_mut("linux.devices")? = new;
    }
    Ok(done)
}

/// Removes the nodes of NVIDIA's driver from a spec, with the rules that allow only them. On this host the
/// numbers of another host may belong to other devices.
pub fn drop_nodes(spec: &mut Spec) -> Result<(), EditError> {
    let (new, moves) = replace_nodes(spec, |node| device_class::is_nvidia(&node.path).then_some(None))?;
    if !moves.is_empty() {
        replace_rules(spec, &moves)?;
        *spec.list_mut("linux.devices")? = new;
    }
    Ok(limit_memory_of(spec, &[])?)
}

/// Removes the prestart and createRuntime hooks that give a container NVIDIA GPUs, and returns their number.
/// runc would run them at a restore, on an incomplete container whose devices and mounts are already in the
/// spec.
pub fn strip_gpu_hooks(spec: &mut Spec) -> Result<usize, SpecError> {
    let gives = device_class::gives_gpus;
    Ok(spec.remove("hooks.prestart", gives)? + spec.remove("hooks.createRuntime", gives)?)
}

/// Makes the hook that limits a container's GPU memory limit it on these GPUs, which may be others than those
/// that the hook names. Without variables that limit anything the hook is removed: it would do nothing, and
/// its program may be missing on this node.
fn limit_memory_of(spec: &mut Spec, gpus: &[Gpu]) -> Result<(), SpecError> {
    const STAGE: &str = "hooks.createRuntime";
    let hooks = spec.array("/hooks/createRuntime");
    let Some(mut hook) = hooks
        .iter()
        .find(|hook| device_class::limits_memory(hook))
        .cloned()
    else {
        return Ok(());
    };
    let is_limited = ["NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST"]
        .iter()
        .any(|name| spec.variables(name).next().is_some());
    spec.remove(STAGE, device_class::limits_memory)?;
    if is_limited && !gpus.is_empty() {
        let before = device_class::arguments(&hook).take_while(|word| !word.starts_with("--gpu-id"));
        let named = gpus.iter().map(|gpu| format!("--gpu-id={}", gpu.uuid));
        hook["args"] = before.map(str::to_owned).chain(named).collect();
        spec.list_mut(STAGE)?.push(hook);
    }
    Ok(())
}

/// Makes runc pass this configuration file to CRIU.
pub fn set_criu_config(spec: &mut Spec, file: &Path) -> Result<(), EditError> {
    let annotations = spec.object_mut("annotations")?;
    annotations.insert(names::ANNOTATION_CRIU_CONFIG.to_owned(), json!(file));
    Ok(())
}

/// Removes annotations with firn's prefix that no given spec may have: names that firn itself writes
/// elsewhere, and unknown ones. Returns them.
pub fn drop_internal_annotations(spec: &mut Spec) -> Result<Vec<String>, SpecError> {
    let internal = annotations::named(spec).filter(|name| !annotations::is_known(name));
    let internal: Vec<String> = internal.map(str::to_owned).collect();
    if !internal.is_empty() {
        let annotations = spec.object_mut("annotations")?;
        annotations.retain(|key, _| !internal.contains(key));
    }
    Ok(internal)
}

/// Moves the container to another cgroup: the last part of `linux.cgroupsPath` becomes `name`.
pub fn rename_cgroup(spec: &mut Spec, name: &str) -> Result<(), EditError> {
    let Some(path) = spec.cgroups_path() else {
        return Ok(());
    };
    // `slice:prefix:name` for the systemd driver, else a path.
    let end = path.rfind(['/', ':']).map_or(0, |at| at + 1);
    let path = format!("{}{name}", &path[..end]);
    spec.object_mut("linux")?
        .insert("cgroupsPath".to_owned(), json!(path));
    Ok(())
}

/// Adds firn's createRuntime hook after all others. At a restore runc runs it before CRIU restores sockets.
/// The hook brings up the loopback interface of the container's network namespace, which runc does only at
/// create.
pub fn add_restore_hook(spec: &mut Spec, program: &Path) -> Result<(), EditError> {
    let list = spec.list_mut("hooks.createRuntime")?;
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
    let changed = moves.iter().filter(|m| m.from != m.to);
    DeviceEdit {
        added: changed.clone().filter_map(|m| m.to.clone()).collect(),
        dropped: changed.filter_map(|m| m.from.clone()).collect(),
    }
}

/// The entries of `linux.devices` after `to` has decided what becomes of each node, and what has changed.
/// `to` returns none for a node that it leaves alone.
fn replace_nodes(
    spec: &Spec,
    mut to: impl FnMut(&DeviceNode) -> Option<Option<DeviceNode>>,
) -> Result<(Vec<Value>, Vec<Move>), EditError> {
    let (mut new, mut moves) = (Vec::new(), Vec::<Move>::new());
    for entry in spec.array("/linux/devices") {
        let from = parse_device(entry)?.map(|device| device.node);
        let Some((from, to)) = from.and_then(|from| to(&from).map(|to| (from, to))) else {
            new.push(entry.clone());
            continue;
        };
        // A path that the spec has twice stays once.
        let is_there = |path: &Path| {
            moves
                .iter()
                .any(|m| m.to.as_ref().is_some_and(|to| to.path == path))
        };
        let to = to.filter(|to| !is_there(&to.path));
        new.extend(to.as_ref().map(|to| with_node(entry, to)));
        moves.push(Move { from: Some(from), to });
    }
    Ok((new, moves))
}

fn replace_devices(
    spec: &mut Spec,
    targets: &[DeviceNode],
    common: &[DeviceNode],
) -> Result<Vec<Move>, EditError> {
    let is_gpu = |path: &Path| classify(path) == Some(GpuPath::Gpu);
    let nodes = spec.devices()?.into_iter().map(|device| device.node);
    let gpus: Vec<DeviceNode> = nodes.filter(|node| is_gpu(&node.path)).collect();
    let gpus_change = gpus.len() != targets.len() || targets.iter().any(|target| !gpus.contains(target));
    let is_missing = |target: &&DeviceNode| !gpus.iter().any(|gpu| gpu.path == target.path);
    let mut missing = targets.iter().filter(is_missing);
    let (mut new, mut moves) = replace_nodes(spec, |from| {
        let here = |nodes: &[DeviceNode]| nodes.iter().find(|node| node.path == from.path).cloned();
        Some(match classify(&from.path)? {
            GpuPath::Gpu => here(targets).or_else(|| missing.next().cloned()),
            GpuPath::Control => here(common).or_else(|| (!gpus_change).then(|| from.clone())),
            GpuPath::Graphics => (!gpus_change).then(|| from.clone()),
        })
    })?;
    // The rest goes behind the spec's GPUs and gets what else the first of them has.
    let is_gpu = |entry: &Value| entry["path"].as_str().is_some_and(|path| is_gpu(Path::new(path)));
    let old = spec.array("/linux/devices");
    let template = old.iter().find(|entry| is_gpu(entry)).cloned();
    let template = template.unwrap_or_else(|| json!({"fileMode": 0o666}));
    let at = new.iter().rposition(is_gpu).map_or(new.len(), |last| last + 1);
    for (i, target) in missing.enumerate() {
        new.insert(at + i, with_node(&template, target));
        moves.push(Move {
            from: None,
            to: Some(target.clone()),
        });
    }
    if new != old {
        *spec.list_mut("linux.devices")? = new;
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
        *spec.list_mut("linux.resources.devices")? = new;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
