//! How a spec asks for NVIDIA's GPUs.
//!
//! CDI's edits, `--device` and privileged containers have the GPUs in the spec: nothing is to be done. Older tools leave a
//! hook there that mounts GPUs behind the runtime's back, or only a name; runc knows nothing of what a hook has mounted, and
//! a container that was made so cannot be dumped. [`NamedGpus`] says which devices are meant, so that they can be made edits of
//! the spec instead.
//!
//! A hook or a name may be there beside nodes (Kubernetes' device plugin with PASS_DEVICE_SPECS): the nodes are then not all that the
//! container is to get. CDI's own edits say `void` in the variable, so that nobody gives GPUs twice.

use std::collections::BTreeSet;
use std::path::Path;

use firn_config::{ConfigError, Conversion, Create, Toolkit};
use serde_json::{Value, json};

use crate::device_class;
use crate::device_class::{GpuPath, classify};
use crate::{Spec, SpecError};

/// Kind of devices that are named by index or UUID alone.
pub const KIND: &str = "nvidia.com/gpu";

/// Kind of devices for which NVIDIA's container runtime makes up a CDI file at every start: the same devices.
pub const RUNTIME_KIND: &str = "runtime.nvidia.com/gpu";

/// Programs of NVIDIA's hook.
const HOOK_PROGRAMS: [&str; 2] = ["nvidia-container-runtime-hook", "nvidia-container-toolkit"];

/// Variable that names devices, for NVIDIA's hook.
const VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// Where a mount of /dev/null stands for a device; the variable then has this path as its value.
const VOLUMES: &str = "/var/run/nvidia-container-devices";

/// Beginning of the keys of annotations that name CDI devices.
const ANNOTATION: &str = "cdi.k8s.io/";

/// How a spec asks for GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuRequest {
    /// Not at all, or for none.
    None,
    /// They are in it.
    Nodes,
    /// By what has to be turned into edits.
    Named(NamedGpus),
}

/// Devices that are asked for by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedGpus {
    /// By what.
    pub source: RequestSource,
    /// Indices, UUIDs, `all`, or full names of CDI devices.
    pub devices: Vec<String>,
}

/// By whose settings names in a spec count, beside firn's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Rules {
    /// Nobody's: there is neither a hook of NVIDIA's toolkit nor its wrapper of runc.
    #[default]
    Own,
    /// Those of NVIDIA's toolkit, whose hook is in the spec.
    Hook(Toolkit),
    /// Those of NVIDIA's toolkit, whose wrapper of runc would make the container.
    Wrapper(Toolkit),
}

impl Rules {
    /// Those for this spec; `wrapper` is NVIDIA's wrapper of runc, where that is the OCI runtime.
    pub fn of(spec: &Spec, wrapper: Option<&Path>) -> Result<Self, ConfigError> {
        match (wrapper, toolkit_hook(spec)) {
            (Some(wrapper), _) => Toolkit::load(wrapper).map(Self::Wrapper),
            (None, Some(hook)) => Toolkit::load(hook).map(Self::Hook),
            (None, None) => Ok(Self::Own),
        }
    }
}

/// What asks for devices by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestSource {
    /// A hook that runs nvidia-container-cli, as `ctr run --gpus` of containerd up to 2.2 writes it.
    Cli,
    /// A hook of NVIDIA's container runtime, as docker and hooks.d files write it. It goes by the variable.
    RuntimeHook,
    /// Whatever NVIDIA's container runtime goes by, where that is the OCI runtime: it would edit the spec behind firn.
    Wrapper,
    /// Annotations that name CDI devices, which containerd has passed on and not acted on.
    Annotations,
    /// Mounts that stand for devices, as the Kubernetes device plugin makes them.
    Volumes,
    /// The variable alone: for NVIDIA's container runtime. Images set it too.
    Variable,
}

impl RequestSource {
    /// Whether the container gets its GPUs also if nothing is converted.
    pub fn is_hook(self) -> bool {
        match self {
            Self::Cli | Self::RuntimeHook | Self::Wrapper => true,
            Self::Annotations | Self::Volumes | Self::Variable => false,
        }
    }

    /// Whether what asks is taken for a request of whoever made the container.
    pub fn is_enabled(self, create: &Create) -> bool {
        match self {
            Self::Cli | Self::RuntimeHook | Self::Wrapper => create.hooks == Conversion::Convert,
            Self::Annotations => create.cdi_annotations,
            Self::Volumes => create.volume_mounts,
            Self::Variable => create.visible_devices,
        }
    }
}

impl NamedGpus {
    /// Full names of devices of other kinds than NVIDIA's GPUs. Such a device is never given for its name in a variable, a mount, an
    /// annotation or a hook: those may be an image's, or anybody's who may make a pod.
    pub fn other_kinds(&self) -> impl Iterator<Item = &str> {
        let is_foreign = |name: &&str| {
            let kind = name.split_once('=').map(|(kind, _)| kind);
            kind.is_some_and(|kind| kind != KIND && kind != RUNTIME_KIND)
        };
        self.devices.iter().map(String::as_str).filter(is_foreign)
    }
}

impl GpuRequest {
    /// How this spec asks, by these rules. Looks at nothing else.
    pub fn of(spec: &Spec, rules: &Rules) -> Self {
        let request = by_cli(spec).or_else(|| match rules {
            Rules::Wrapper(toolkit) => by_wrapper(spec, toolkit),
            Rules::Hook(toolkit) => by_runtime_hook(spec, toolkit),
            Rules::Own => {
                let requests = [by_annotations, by_volumes, by_variable];
                requests.into_iter().find_map(|request| request(spec))
            }
        });
        Self::decided(spec, request)
    }

    fn decided(spec: &Spec, request: Option<NamedGpus>) -> Self {
        match request {
            Some(request) if !request.devices.is_empty() => Self::Named(request),
            _ if !spec.gpu_nodes().is_empty() => Self::Nodes,
            _ => Self::None,
        }
    }
}

impl Spec {
    /// Paths of the nodes of single GPUs.
    pub fn gpu_nodes(&self) -> BTreeSet<&str> {
        let devices = self.array("/linux/devices").iter();
        devices
            .filter_map(|device| device["path"].as_str())
            .filter(|path| classify(Path::new(path)) == Some(GpuPath::Gpu))
            .collect()
    }
}

/// Removes from a spec what has asked for GPUs that are now its edits. Returns how many hooks and mounts there were.
pub fn remove_requests(spec: &mut Spec) -> Result<usize, SpecError> {
    let is_volume = |mount: &Value| volume(mount).is_some();
    let hooks = remove(spec, &["hooks"], "prestart", device_class::is_nvidia_hook)?
        + remove(spec, &["hooks"], "createRuntime", device_class::is_nvidia_hook)?;
    let removed = hooks + remove(spec, &[], "mounts", is_volume)? + drop_mounting_hooks(spec)?;
    if variable(spec).is_some_and(|names| list(names).next().is_some()) {
        let env = spec.object_mut(&["process"], "process")?.get_mut("env");
        for pair in env.and_then(Value::as_array_mut).into_iter().flatten() {
            let is_variable = |pair: &str| pair.split('=').next() == Some(VARIABLE);
            if pair.as_str().is_some_and(is_variable) {
                *pair = json!(format!("{VARIABLE}=void"));
            }
        }
    }
    Ok(removed)
}

/// Removes the one hook of NVIDIA's CDI files that leaves mounts: they are not in the spec, and what they hide, a file below
/// /proc by which a program might make device nodes, is no matter of a container's. Returns how many there were.
pub fn drop_mounting_hooks(spec: &mut Spec) -> Result<usize, SpecError> {
    let mounts = |hook: &Value| {
        let mut words = hook["args"].as_array().into_iter().flatten();
        device_class::is_nvidia_hook(hook) && words.any(|word| word == "disable-device-node-modification")
    };
    remove(spec, &["hooks"], "createContainer", mounts)
}

fn remove(
    spec: &mut Spec,
    keys: &[&str],
    list: &'static str,
    which: impl Fn(&Value) -> bool,
) -> Result<usize, SpecError> {
    let pointer: String = keys.iter().chain([&list]).map(|key| format!("/{key}")).collect();
    // Order matters: a spec in which nothing is found is not touched.
    if !spec.array(&pointer).iter().any(&which) {
        return Ok(0);
    }
    let entries = spec.object_mut(keys, list)?.get_mut(list);
    let entries = entries
        .and_then(Value::as_array_mut)
        .ok_or(SpecError::Malformed {
            part: list,
            source: None,
        })?;
    let before = entries.len();
    entries.retain(|entry| !which(entry));
    Ok(before - entries.len())
}

/// Words of the early hooks, each with the path of its hook's program.
fn early_hooks(spec: &Spec) -> impl Iterator<Item = (&str, Vec<&str>)> {
    let kinds = ["/hooks/prestart", "/hooks/createRuntime"];
    kinds.into_iter().flat_map(|kind| spec.array(kind)).map(|hook| {
        let args = hook["args"].as_array().into_iter().flatten();
        let path = hook["path"].as_str().unwrap_or_default();
        (path, args.filter_map(Value::as_str).collect())
    })
}

fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

fn by_cli(spec: &Spec) -> Option<NamedGpus> {
    let (_, words) = early_hooks(spec)
        .find(|(_, words)| words.iter().any(|word| name_of(word) == "nvidia-container-cli"))?;
    let given = words.iter().filter_map(|word| word.strip_prefix("--device="));
    Some(NamedGpus {
        source: RequestSource::Cli,
        devices: given.flat_map(list).collect(),
    })
}

/// The program of NVIDIA's hook, where the spec has it.
fn toolkit_hook(spec: &Spec) -> Option<&Path> {
    let (path, _) = early_hooks(spec).find(|(path, _)| HOOK_PROGRAMS.contains(&name_of(path)))?;
    Some(Path::new(path))
}

/// Whether NVIDIA's hook is in the spec, and something there names devices for it, whatever its settings are.
pub(crate) fn hook_has_names(spec: &Spec) -> bool {
    let has_names = || match named(spec, &[]).as_str() {
        VOLUMES => !volumes(spec).is_empty(),
        names => list(names).next().is_some(),
    };
    by_cli(spec).is_some_and(|request| !request.devices.is_empty())
        || toolkit_hook(spec).is_some() && has_names()
}

/// As NVIDIA's hook goes by its settings: mounts come before the variable, and the variable counts for a container that is not
/// privileged only where the operator has not turned that off.
fn by_runtime_hook(spec: &Spec, toolkit: &Toolkit) -> Option<NamedGpus> {
    let devices = Some(by_mounts(spec, toolkit)).filter(|devices| !devices.is_empty());
    Some(NamedGpus {
        source: RequestSource::RuntimeHook,
        devices: devices.unwrap_or_else(|| by_name(spec, toolkit)),
    })
}

/// What the variable names, where the toolkit's settings let it.
fn by_name(spec: &Spec, toolkit: &Toolkit) -> Vec<String> {
    let bounding = spec.array("/process/capabilities/bounding");
    match toolkit.visible_devices || bounding.contains(&json!("CAP_SYS_ADMIN")) {
        true => list(&named(spec, &toolkit.variables)).collect(),
        false => Vec::new(),
    }
}

/// What mounts stand for, where the toolkit's settings let them.
fn by_mounts(spec: &Spec, toolkit: &Toolkit) -> Vec<String> {
    match toolkit.volume_mounts {
        true => volumes(spec),
        false => Vec::new(),
    }
}

fn by_wrapper(spec: &Spec, toolkit: &Toolkit) -> Option<NamedGpus> {
    let annotated = || {
        let names = annotations(spec, &toolkit.annotations);
        match toolkit.only_full_names && names.iter().any(|name| !name.contains('=')) {
            true => Vec::new(),
            false => names,
        }
    };
    let (mounted, named) = (|| by_mounts(spec, toolkit), || by_name(spec, toolkit));
    let mut asked = [&annotated as &dyn Fn() -> Vec<String>, &mounted, &named].into_iter();
    let devices = asked.find_map(|asked| Some(asked()).filter(|devices| !devices.is_empty()))?;
    Some(NamedGpus {
        source: RequestSource::Wrapper,
        devices,
    })
}

/// Names in the variables that NVIDIA's toolkit goes by: those `preferred`, else its own.
fn named(spec: &Spec, preferred: &[String]) -> String {
    let preferred: Vec<&str> = preferred.iter().filter_map(|name| of_env(spec, name)).collect();
    match preferred.is_empty() {
        false => preferred.join(","),
        true => variable(spec)
            .or_else(|| old_image(spec))
            .unwrap_or_default()
            .to_owned(),
    }
}

/// What the wrapper would give beside GPUs, and firn does not: the variable or place that asks for it.
pub fn requests_beyond_gpus(spec: &Spec) -> Option<&'static str> {
    const SWITCHES: [&str; 4] = ["NVIDIA_GDS", "NVIDIA_MOFED", "NVIDIA_GDRCOPY", "NVIDIA_NVSWITCH"];
    const CHANNELS: &str = "NVIDIA_IMEX_CHANNELS";
    let is_on = |name: &&&str| of_env(spec, name) == Some("enabled");
    let is_channel = |mount: &Value| {
        let below = mount["destination"]
            .as_str()
            .and_then(|at| at.strip_prefix(VOLUMES));
        below.is_some_and(|below| below.starts_with("/imex/"))
    };
    let switch = SWITCHES.iter().find(is_on).copied();
    let channels = of_env(spec, CHANNELS).is_some_and(|names| list(names).next().is_some())
        || spec.array("/mounts").iter().any(is_channel);
    switch.or_else(|| channels.then_some(CHANNELS))
}

fn by_annotations(spec: &Spec) -> Option<NamedGpus> {
    let devices = annotations(spec, &[ANNOTATION.to_owned()]);
    (!devices.is_empty()).then_some(NamedGpus {
        source: RequestSource::Annotations,
        devices,
    })
}

/// CDI devices that annotations name. Where there are nodes, containerd has acted on them.
fn annotations(spec: &Spec, prefixes: &[String]) -> Vec<String> {
    if !spec.gpu_nodes().is_empty() {
        return Vec::new();
    }
    let all = spec.annotations().into_iter().flatten();
    let mut found: Vec<(&String, &str)> = all
        .filter(|(key, _)| prefixes.iter().any(|prefix| key.starts_with(prefix)))
        .filter_map(|(key, value)| Some((key, value.as_str()?)))
        .collect();
    found.sort_unstable();
    found.into_iter().flat_map(|(_, names)| list(names)).collect()
}

fn by_volumes(spec: &Spec) -> Option<NamedGpus> {
    let devices = volumes(spec);
    (!devices.is_empty()).then_some(NamedGpus {
        source: RequestSource::Volumes,
        devices,
    })
}

fn by_variable(spec: &Spec) -> Option<NamedGpus> {
    Some(NamedGpus {
        source: RequestSource::Variable,
        devices: list(variable(spec)?).collect(),
    })
}

fn variable(spec: &Spec) -> Option<&str> {
    of_env(spec, VARIABLE)
}

fn of_env<'s>(spec: &'s Spec, name: &str) -> Option<&'s str> {
    let pairs = spec.array("/process/env").iter().filter_map(Value::as_str);
    // Of a variable that is there twice the last one counts.
    pairs
        .filter_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
        .next_back()
}

/// What NVIDIA's tools take images for that are older than the variable: they say which CUDA they have, and nothing else.
fn old_image(spec: &Spec) -> Option<&'static str> {
    let has = |name: &str| of_env(spec, name).is_some_and(|value| !value.is_empty());
    (has("CUDA_VERSION") && !has("NVIDIA_REQUIRE_CUDA")).then_some("all")
}

/// Names in a list; `none` is none, and `void` voids the list.
fn list(names: &str) -> impl Iterator<Item = String> {
    let names = || names.split(',').map(str::trim);
    let is_void = names().any(|name| name == "void");
    names()
        .filter(move |name| !is_void && !matches!(*name, "" | "none"))
        .map(str::to_owned)
}

fn volumes(spec: &Spec) -> Vec<String> {
    spec.array("/mounts").iter().filter_map(volume).collect()
}

/// The device that a mount stands for: below the directory its name, or `cdi/VENDOR/CLASS/NAME`, or `cdi/VENDOR/CLASS=NAME`.
fn volume(mount: &Value) -> Option<String> {
    let below = mount["destination"]
        .as_str()?
        .strip_prefix(VOLUMES)?
        .strip_prefix('/')?;
    let parts: Vec<&str> = below.split('/').collect();
    match parts[..] {
        _ if mount["source"] != "/dev/null" => None,
        [name] if !name.is_empty() => Some(name.to_owned()),
        ["cdi", vendor, class, name] => Some(format!("{vendor}/{class}={name}")),
        ["cdi", vendor, device] if device.contains('=') => Some(format!("{vendor}/{device}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
