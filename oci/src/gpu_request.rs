//! How a spec requests NVIDIA GPUs.
//!
//! CDI's edits, `--device` and privileged containers have the GPUs in the spec, and nothing is left to do.
//! Older tools only write a name into the spec, or a hook that mounts the GPUs without the runtime's
//! knowledge. runc does not know what a hook has mounted, so that such a container cannot be dumped.
//! [`NamedGpus`] holds the devices that are meant, for a conversion into edits of the spec.
//!
//! A spec may have a hook or a name and device nodes too (Kubernetes' device plugin with PASS_DEVICE_SPECS).
//! The nodes are then only a part of what the container should get. CDI's own edits set the variable to
//! `void`, so that nobody adds the GPUs twice.

use std::collections::BTreeSet;
use std::path::Path;

use firn_config::{ConfigError, Conversion, Create, Toolkit};
use serde_json::{Value, json};

use crate::device_class::{self, GpuPath, arguments, classify};
use crate::edit::strip_gpu_hooks;
use crate::{Spec, SpecError};

/// Kind of devices that are named by index or UUID alone.
pub const KIND: &str = "nvidia.com/gpu";

/// The same devices under the kind for which NVIDIA's container runtime generates a CDI file at every start.
pub const RUNTIME_KIND: &str = "runtime.nvidia.com/gpu";

/// Programs of NVIDIA's hook.
const HOOK_PROGRAMS: [&str; 2] = ["nvidia-container-runtime-hook", "nvidia-container-toolkit"];

/// Variable that names devices, for NVIDIA's hook.
const VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// Directory in which a mount of /dev/null stands for a device. The variable then has this path as its value.
const VOLUMES: &str = "/var/run/nvidia-container-devices";

/// Prefix of the keys of annotations that name CDI devices.
const ANNOTATION: &str = "cdi.k8s.io/";

/// How a spec requests GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuRequest {
    /// It requests none.
    None,
    /// Their device nodes are in the spec.
    Nodes,
    /// By names, which have to be converted into edits.
    Named(NamedGpus),
}

/// Devices that are requested by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedGpus {
    /// Where the names are.
    pub source: RequestSource,
    /// Indices, UUIDs, `all`, or full names of CDI devices.
    pub devices: Vec<String>,
}

/// Whose settings decide which names in a spec count, together with firn's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Rules {
    /// Only firn's: there is neither a hook of NVIDIA's toolkit nor its wrapper of runc.
    #[default]
    Own,
    /// Those of NVIDIA's toolkit, whose hook is in the spec.
    Hook(Toolkit),
    /// Those of NVIDIA's toolkit, whose wrapper of runc would make the container.
    Wrapper(Toolkit),
}

impl Rules {
    /// The rules for this spec; `wrapper` is NVIDIA's wrapper of runc, where that is the OCI runtime.
    pub fn of(spec: &Spec, wrapper: Option<&Path>) -> Result<Self, ConfigError> {
        match (wrapper, toolkit_hook(spec)) {
            (Some(wrapper), _) => Toolkit::load(wrapper).map(Self::Wrapper),
            (None, Some(hook)) => Toolkit::load(hook).map(Self::Hook),
            (None, None) => Ok(Self::Own),
        }
    }
}

/// What names the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestSource {
    /// A hook that runs nvidia-container-cli, as `ctr run --gpus` of containerd up to 2.2 writes it.
    Cli,
    /// A hook of NVIDIA's container runtime, as docker and hooks.d files write it. It goes by the variable.
    RuntimeHook,
    /// What NVIDIA's container runtime reads, where that is the OCI runtime: it would edit the spec after
    /// firn.
    Wrapper,
    /// Annotations that name CDI devices and that containerd has passed on without acting on them.
    Annotations,
    /// Mounts that stand for devices, as Kubernetes' device plugin adds them.
    Volumes,
    /// The variable alone, meant for NVIDIA's container runtime. Images set it too.
    Variable,
}

impl RequestSource {
    /// Whether the container gets its GPUs even if nothing is converted.
    pub fn is_hook(self) -> bool {
        match self {
            Self::Cli | Self::RuntimeHook | Self::Wrapper => true,
            Self::Annotations | Self::Volumes | Self::Variable => false,
        }
    }

    /// Whether the configuration lets this source request GPUs.
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
    /// Full names of devices that are not NVIDIA GPUs. firn never adds such a device because a variable, a
    /// mount, an annotation or a hook names it: these may come from an image or from any author of a pod.
    pub fn other_kinds(&self) -> impl Iterator<Item = &str> {
        let is_other = |name: &&str| {
            let kind = name.split_once('=').map(|(kind, _)| kind);
            kind.is_some_and(|kind| kind != KIND && kind != RUNTIME_KIND)
        };
        self.devices.iter().map(String::as_str).filter(is_other)
    }
}

impl GpuRequest {
    /// The request of this spec under these rules. Reads nothing but the spec.
    pub fn of(spec: &Spec, rules: &Rules) -> Self {
        let (source, devices) = match (by_cli(spec), rules) {
            (Some(devices), _) => (RequestSource::Cli, devices),
            (None, Rules::Wrapper(toolkit)) => (RequestSource::Wrapper, by_wrapper(spec, toolkit)),
            (None, Rules::Hook(toolkit)) => (RequestSource::RuntimeHook, by_runtime_hook(spec, toolkit)),
            (None, Rules::Own) => {
                let by_variable = variable(spec).into_iter().flat_map(list).collect();
                let sources = [
                    (
                        RequestSource::Annotations,
                        annotations(spec, &[ANNOTATION.to_owned()]),
                    ),
                    (RequestSource::Volumes, volumes(spec)),
                    (RequestSource::Variable, by_variable),
                ];
                let first = sources.into_iter().find(|(_, devices)| !devices.is_empty());
                first.unwrap_or((RequestSource::Variable, Vec::new()))
            }
        };
        match devices.is_empty() {
            false => Self::Named(NamedGpus { source, devices }),
            true if !spec.gpu_nodes().is_empty() => Self::Nodes,
            true => Self::None,
        }
    }
}

impl Spec {
    /// Whether the spec has a device node of NVIDIA's, or a hook that gives the container GPUs. If not, firn
    /// leaves the container to runc.
    pub fn requests_gpu(&self) -> bool {
        self.has_nvidia_node() || has_gpu_hook(self)
    }

    /// Whether a hook of NVIDIA's gives the container its GPUs or libraries, and not the spec itself. Such a
    /// container cannot be restored: `runc restore` does not know what the hook has mounted.
    pub fn gpu_by_hook(&self) -> bool {
        !self.has_nvidia_node() && has_gpu_hook(self) || hook_has_names(self)
    }

    fn has_nvidia_node(&self) -> bool {
        self.device_paths().any(device_class::is_nvidia)
    }

    /// Paths of the nodes of single GPUs.
    pub fn gpu_nodes(&self) -> BTreeSet<&str> {
        let gpus = self
            .device_paths()
            .filter(|path| classify(path) == Some(GpuPath::Gpu));
        firn_host::ordered::set_of(gpus.filter_map(Path::to_str))
    }
}

/// Removes from a spec the requests that have been converted into edits. Returns the number of hooks and
/// mounts removed.
pub fn remove_requests(spec: &mut Spec) -> Result<usize, SpecError> {
    let is_volume = |mount: &Value| volume(mount).is_some();
    let hooks = strip_gpu_hooks(spec)?;
    let removed = hooks + spec.remove("mounts", is_volume)? + drop_mounting_hooks(spec)?;
    if variable(spec).is_some_and(|names| list(names).next().is_some()) {
        for pair in spec.list_mut("process.env")? {
            let is_variable = |pair: &str| pair.split('=').next() == Some(VARIABLE);
            if pair.as_str().is_some_and(is_variable) {
                *pair = json!(format!("{VARIABLE}=void"));
            }
        }
    }
    Ok(removed)
}

/// Removes the one hook of NVIDIA's CDI files that leaves a mount behind, which the spec does not have. The
/// mount hides a file below /proc that no container needs hidden. Returns the number of hooks removed.
pub fn drop_mounting_hooks(spec: &mut Spec) -> Result<usize, SpecError> {
    let mounts = |hook: &Value| {
        let word = "disable-device-node-modification";
        device_class::is_nvidia_hook(hook) && arguments(hook).any(|argument| argument == word)
    };
    spec.remove("hooks.createContainer", mounts)
}

/// The hooks that runc runs before the container's own program.
fn early_hooks(spec: &Spec) -> impl Iterator<Item = &Value> {
    let stages = ["/hooks/prestart", "/hooks/createRuntime"];
    stages.into_iter().flat_map(|stage| spec.array(stage))
}

fn has_gpu_hook(spec: &Spec) -> bool {
    early_hooks(spec).any(device_class::gives_gpus)
}

fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// Devices that a hook with nvidia-container-cli names, if there is such a hook.
fn by_cli(spec: &Spec) -> Option<Vec<String>> {
    let is_cli = |hook: &&Value| arguments(hook).any(|word| name_of(word) == "nvidia-container-cli");
    let words = arguments(early_hooks(spec).find(is_cli)?);
    let given = words.filter_map(|word| word.strip_prefix("--device="));
    Some(given.flat_map(list).collect())
}

/// The program of NVIDIA's hook, if the spec has it.
fn toolkit_hook(spec: &Spec) -> Option<&Path> {
    let mut programs = early_hooks(spec).filter_map(|hook| hook["path"].as_str());
    let program = programs.find(|path| HOOK_PROGRAMS.contains(&name_of(path)))?;
    Some(Path::new(program))
}

/// Whether the spec has NVIDIA's hook and names devices for it, whatever the hook's settings are.
fn hook_has_names(spec: &Spec) -> bool {
    let has_names = || match named(spec, &[]).as_str() {
        VOLUMES => !volumes(spec).is_empty(),
        names => list(names).next().is_some(),
    };
    by_cli(spec).is_some_and(|devices| !devices.is_empty()) || toolkit_hook(spec).is_some() && has_names()
}

/// What NVIDIA's hook would add: mounts come before the variable, as far as the toolkit's settings accept
/// them. For a container without privileges the variable counts unless the operator has disabled it.
fn by_runtime_hook(spec: &Spec, toolkit: &Toolkit) -> Vec<String> {
    let mounted = volumes(spec);
    if toolkit.volume_mounts && !mounted.is_empty() {
        return mounted;
    }
    if toolkit.visible_devices || spec.has_sys_admin() {
        list(&named(spec, &toolkit.variables)).collect()
    } else {
        Vec::new()
    }
}

/// What NVIDIA's wrapper would add: annotations come before what its hook goes by.
fn by_wrapper(spec: &Spec, toolkit: &Toolkit) -> Vec<String> {
    let annotated = annotations(spec, &toolkit.annotations);
    let counts = !toolkit.only_full_names || annotated.iter().all(|name| name.contains('='));
    if counts && !annotated.is_empty() {
        annotated
    } else {
        by_runtime_hook(spec, toolkit)
    }
}

/// The value of the `preferred` variables, else of the toolkit's own variable.
fn named(spec: &Spec, preferred: &[String]) -> String {
    let preferred: Vec<&str> = preferred.iter().filter_map(|name| of_env(spec, name)).collect();
    if preferred.is_empty() {
        variable(spec)
            .or_else(|| old_image(spec))
            .unwrap_or_default()
            .to_owned()
    } else {
        preferred.join(",")
    }
}

/// The variable by which the spec requests something that NVIDIA's wrapper would add and firn does not.
pub fn requests_beyond_gpus(spec: &Spec) -> Option<&'static str> {
    const SWITCHES: [&str; 4] = ["NVIDIA_GDS", "NVIDIA_MOFED", "NVIDIA_GDRCOPY", "NVIDIA_NVSWITCH"];
    const CHANNELS: &str = "NVIDIA_IMEX_CHANNELS";
    const OF_MIG: [&str; 2] = ["NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES"];
    let is_set = |name: &&&str| of_env(spec, name).is_some_and(|value| !value.is_empty());
    let is_on = |name: &&&str| of_env(spec, name) == Some("enabled");
    let is_channel = |mount: &Value| {
        let below = mount["destination"]
            .as_str()
            .and_then(|at| at.strip_prefix(VOLUMES));
        below.is_some_and(|below| below.starts_with("/imex/"))
    };
    let switch = SWITCHES
        .iter()
        .find(is_on)
        .or_else(|| OF_MIG.iter().find(is_set))
        .copied();
    let channels = of_env(spec, CHANNELS).is_some_and(|names| list(names).next().is_some())
        || spec.array("/mounts").iter().any(is_channel);
    switch.or_else(|| channels.then_some(CHANNELS))
}

/// CDI devices that annotations name. If the spec has nodes, containerd has already acted on the annotations.
fn annotations(spec: &Spec, prefixes: &[String]) -> Vec<String> {
    if !spec.gpu_nodes().is_empty() {
        return Vec::new();
    }
    let all = spec.annotations().into_iter().flatten();
    let found = all
        .filter(|(key, _)| prefixes.iter().any(|prefix| key.starts_with(prefix)))
        .filter_map(|(key, value)| Some((key, value.as_str()?)));
    let by_name = firn_host::ordered::map_of(found);
    by_name.into_values().flat_map(list).collect()
}

fn variable(spec: &Spec) -> Option<&str> {
    of_env(spec, VARIABLE)
}

/// The last entry of a variable counts.
fn of_env<'s>(spec: &'s Spec, name: &'s str) -> Option<&'s str> {
    spec.variables(name).next_back()
}

/// What NVIDIA's tools assume for an image that is older than the variable: all GPUs, if it only states its
/// version of CUDA.
fn old_image(spec: &Spec) -> Option<&'static str> {
    let has = |name: &str| of_env(spec, name).is_some_and(|value| !value.is_empty());
    (has("CUDA_VERSION") && !has("NVIDIA_REQUIRE_CUDA")).then_some("all")
}

/// The names in a list without `none`; a list with `void` is empty.
fn list(names: &str) -> impl Iterator<Item = String> {
    let names = || names.split(',').map(str::trim);
    let is_void = names().any(|name| name == "void");
    names()
        .filter(move |name| !is_void && !matches!(*name, "" | "none"))
        .map(str::to_owned)
}

/// The devices that mounts stand for; none if one of them is `void`. NVIDIA's CDI files mount that, so that
/// nobody adds the GPUs twice.
fn volumes(spec: &Spec) -> Vec<String> {
    let devices: Vec<String> = spec.array("/mounts").iter().filter_map(volume).collect();
    if devices.iter().any(|device| device == "void") {
        Vec::new()
    } else {
        devices
    }
}

/// The device that a mount stands for. Below [`VOLUMES`] the path is its name, `cdi/VENDOR/CLASS/NAME` or
/// `cdi/VENDOR/CLASS=NAME`.
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
