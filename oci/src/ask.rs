//! How a spec asks for NVIDIA's GPUs.
//!
//! CDI's edits, `--device` and privileged containers have the GPUs in the spec: nothing is to be done. Older tools leave a
//! hook there that mounts GPUs behind the runtime's back, or only a name; runc knows nothing of what a hook has mounted, and
//! a container that was made so cannot be dumped. [`Request`] says which devices are meant, so that they can be made edits of
//! the spec instead.

use std::path::Path;

use firn_config::{Conversion, Create};
use serde_json::Value;

use crate::gpu_path::{self, GpuPath, classify};
use crate::{Spec, SpecError};

/// Variable that names devices, for NVIDIA's hook.
const VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// Where a mount of /dev/null stands for a device; the variable then has this path as its value.
const VOLUMES: &str = "/var/run/nvidia-container-devices";

/// How a spec asks for GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Not at all, or for none.
    Nothing,
    /// They are in it.
    Nodes,
    /// By what has to be turned into edits.
    Request(Request),
}

/// Devices that are asked for by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// By what.
    pub form: Form,
    /// Indices, UUIDs, `all`, or full names of CDI devices.
    pub devices: Vec<String>,
}

/// What asks for devices by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A hook that runs nvidia-container-cli, as `ctr run --gpus` of containerd up to 2.2 writes it.
    Cli,
    /// A hook of NVIDIA's container runtime, as docker and hooks.d files write it. It goes by the variable.
    RuntimeHook,
    /// Mounts that stand for devices, as the Kubernetes device plugin makes them.
    Volumes,
    /// The variable alone: for NVIDIA's container runtime, which wraps runc. Images set it too.
    Variable,
}

impl Form {
    /// Whether the container gets its GPUs also if nothing is converted.
    pub fn is_hook(self) -> bool {
        match self {
            Self::Cli | Self::RuntimeHook => true,
            Self::Volumes | Self::Variable => false,
        }
    }

    /// Whether what asks is taken for a request of whoever made the container.
    pub fn counts(self, create: &Create) -> bool {
        match self {
            Self::Cli | Self::RuntimeHook => create.hooks == Conversion::Convert,
            Self::Volumes => create.volume_mounts,
            Self::Variable => create.visible_devices,
        }
    }
}

impl Ask {
    /// How this spec asks. Looks at nothing else.
    pub fn of(spec: &Spec) -> Self {
        let devices = spec.array("/linux/devices").iter();
        let mut paths = devices.filter_map(|device| device["path"].as_str());
        if paths.any(|path| classify(Path::new(path)) == Some(GpuPath::Gpu)) {
            return Self::Nodes;
        }
        let requests = [by_cli, by_runtime_hook, by_volumes, by_variable];
        let request = requests.into_iter().find_map(|request| request(spec));
        match request {
            Some(request) if !request.devices.is_empty() => Self::Request(request),
            _ => Self::Nothing,
        }
    }
}

/// Removes from a spec what has asked for GPUs that are now its edits. Returns how many entries there were.
pub fn settle(spec: &mut Spec) -> Result<usize, SpecError> {
    let is_volume = |mount: &Value| volume(mount).is_some();
    let hooks = remove(spec, &["hooks"], "prestart", gpu_path::is_nvidia_hook)?
        + remove(spec, &["hooks"], "createRuntime", gpu_path::is_nvidia_hook)?;
    Ok(hooks + remove(spec, &[], "mounts", is_volume)? + drop_mounting_hooks(spec)?)
}

/// Removes the one hook of NVIDIA's CDI files that leaves mounts: they are not in the spec, and what they hide, a file below
/// /proc by which a program might make device nodes, is no matter of a container's. Returns how many there were.
pub fn drop_mounting_hooks(spec: &mut Spec) -> Result<usize, SpecError> {
    let mounts = |hook: &Value| {
        let mut words = hook["args"].as_array().into_iter().flatten();
        gpu_path::is_nvidia_hook(hook) && words.any(|word| word == "disable-device-node-modification")
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

/// Words of the early hooks, each with its hook's program.
fn early_hooks(spec: &Spec) -> impl Iterator<Item = (&str, Vec<&str>)> {
    let kinds = ["/hooks/prestart", "/hooks/createRuntime"];
    kinds.into_iter().flat_map(|kind| spec.array(kind)).map(|hook| {
        let args = hook["args"].as_array().into_iter().flatten();
        let path = hook["path"].as_str().unwrap_or_default();
        (name_of(path), args.filter_map(Value::as_str).collect())
    })
}

fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

fn by_cli(spec: &Spec) -> Option<Request> {
    let (_, words) = early_hooks(spec)
        .find(|(_, words)| words.iter().any(|word| name_of(word) == "nvidia-container-cli"))?;
    let given = words.iter().filter_map(|word| word.strip_prefix("--device="));
    Some(Request {
        form: Form::Cli,
        devices: given.flat_map(list).collect(),
    })
}

fn by_runtime_hook(spec: &Spec) -> Option<Request> {
    let programs = ["nvidia-container-runtime-hook", "nvidia-container-toolkit"];
    early_hooks(spec).find(|(program, _)| programs.contains(program))?;
    let devices = match variable(spec)? {
        VOLUMES => volumes(spec),
        names => list(names).collect(),
    };
    Some(Request {
        form: Form::RuntimeHook,
        devices,
    })
}

fn by_volumes(spec: &Spec) -> Option<Request> {
    let devices = volumes(spec);
    (!devices.is_empty()).then_some(Request {
        form: Form::Volumes,
        devices,
    })
}

fn by_variable(spec: &Spec) -> Option<Request> {
    Some(Request {
        form: Form::Variable,
        devices: list(variable(spec)?).collect(),
    })
}

fn variable(spec: &Spec) -> Option<&str> {
    let pairs = spec.array("/process/env").iter().filter_map(Value::as_str);
    // Of a variable that is there twice the last one counts.
    pairs
        .filter_map(|pair| pair.strip_prefix(VARIABLE)?.strip_prefix('='))
        .next_back()
}

/// Names in a list; those that mean no device are none.
fn list(names: &str) -> impl Iterator<Item = String> {
    names
        .split(',')
        .map(str::trim)
        .filter(|name| !matches!(*name, "" | "void" | "none"))
        .map(str::to_owned)
}

fn volumes(spec: &Spec) -> Vec<String> {
    spec.array("/mounts").iter().filter_map(volume).collect()
}

/// The device that a mount stands for: below the directory its name, or `cdi/VENDOR/CLASS/NAME`.
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
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ask(spec: Value) -> Ask {
        Ask::of(&Spec::from(spec))
    }

    fn request(form: Form, devices: &[&str]) -> Ask {
        Ask::Request(Request {
            form,
            devices: devices.iter().map(ToString::to_string).collect(),
        })
    }

    fn env(value: &str) -> Value {
        json!({"env": ["PATH=/bin", format!("NVIDIA_VISIBLE_DEVICES={value}")]})
    }

    /// As contrib/nvidia of containerd 2.1 writes it.
    fn oci_hook(words: &[&str]) -> Value {
        let begin = [
            "containerd",
            "oci-hook",
            "--",
            "/usr/bin/nvidia-container-cli",
            "--load-kmods",
            "configure",
        ];
        let args = [
            &begin,
            words,
            &["--utility", "--compute", "--pid={{pid}}", "{{rootfs}}"],
        ]
        .concat();
        json!({"createRuntime": [{"path": "/usr/bin/containerd", "args": args, "env": ["PATH=/usr/bin"]}]})
    }

    /// As docker writes it.
    fn prestart() -> Value {
        let path = "/usr/bin/nvidia-container-runtime-hook";
        json!({"prestart": [{"path": path, "args": ["nvidia-container-runtime-hook", "prestart"]}]})
    }

    #[test]
    fn every_way_of_asking_is_told_from_the_others() {
        let device = |path: &str| json!({"devices": [{"path": path, "type": "c", "major": 195, "minor": 0}]});
        let stands_for = |at: &str| json!({"source": "/dev/null", "destination": format!("{VOLUMES}/{at}")});
        for (spec, expected) in [
            (json!({}), Ask::Nothing),
            (json!({"linux": device("/dev/fuse")}), Ask::Nothing),
            (json!({"linux": device("/dev/kfd")}), Ask::Nothing),
            (json!({"linux": device("/dev/nvidiactl")}), Ask::Nothing),
            (json!({"linux": device("/dev/nvidia0")}), Ask::Nodes),
            (
                json!({"linux": device("/dev/nvidia0"), "hooks": prestart(), "process": env("all")}),
                Ask::Nodes,
            ),
            (
                json!({"hooks": oci_hook(&["--device=0,1"])}),
                request(Form::Cli, &["0", "1"]),
            ),
            (
                json!({"hooks": oci_hook(&["--device=0", "--device=GPU-1"])}),
                request(Form::Cli, &["0", "GPU-1"]),
            ),
            (json!({"hooks": oci_hook(&[])}), Ask::Nothing),
            (json!({"hooks": prestart()}), Ask::Nothing),
            (json!({"hooks": prestart(), "process": env("void")}), Ask::Nothing),
            (
                json!({"hooks": prestart(), "process": env("all")}),
                request(Form::RuntimeHook, &["all"]),
            ),
            (
                json!({"hooks": prestart(), "process": env(VOLUMES), "mounts": [stands_for("GPU-1")]}),
                request(Form::RuntimeHook, &["GPU-1"]),
            ),
            (json!({"process": env("all")}), request(Form::Variable, &["all"])),
            (
                json!({"process": env(" 0, GPU-2 ,,void")}),
                request(Form::Variable, &["0", "GPU-2"]),
            ),
            (
                json!({"process": env("nvidia.com/gpu=0")}),
                request(Form::Variable, &["nvidia.com/gpu=0"]),
            ),
            (json!({"process": env("void")}), Ask::Nothing),
            (json!({"process": env("none")}), Ask::Nothing),
            (json!({"process": env("")}), Ask::Nothing),
            (
                json!({"process": env(VOLUMES), "mounts": [stands_for("GPU-1"), stands_for("cdi/nvidia.com/gpu/2")]}),
                request(Form::Volumes, &["GPU-1", "nvidia.com/gpu=2"]),
            ),
            (
                json!({"mounts": [{"source": "/srv", "destination": format!("{VOLUMES}/GPU-1")}, stands_for("a/b"), stands_for("")]}),
                Ask::Nothing,
            ),
            (
                json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void"]}}),
                Ask::Nothing,
            ),
        ] {
            assert_eq!(ask(spec.clone()), expected, "{spec}");
        }
    }

    #[test]
    fn names_count_only_where_the_operator_lets_them() {
        let mut create = Create::default();
        for form in [Form::Cli, Form::RuntimeHook] {
            assert!(form.counts(&create), "{form:?}");
        }
        for form in [Form::Variable, Form::Volumes] {
            assert!(!form.counts(&create), "{form:?}");
        }
        create.hooks = Conversion::Keep;
        create.visible_devices = true;
        assert!(!Form::RuntimeHook.counts(&create) && Form::Variable.counts(&create));
        assert!(!Form::Volumes.counts(&create));
        create.volume_mounts = true;
        assert!(Form::Volumes.counts(&create));
    }

    #[test]
    fn what_has_asked_is_removed_and_nothing_else() {
        let others = json!({"path": "/usr/bin/cni", "args": ["cni"]});
        let links =
            json!({"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "create-symlinks"]});
        let params = json!({"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "disable-device-node-modification"]});
        let mut spec = Spec::from(json!({
            "hooks": {
                "prestart": [others, prestart()["prestart"][0]],
                "createRuntime": [oci_hook(&["--device=0"])["createRuntime"][0]],
                "createContainer": [links, params],
            },
            "mounts": [
                {"source": "/dev/null", "destination": format!("{VOLUMES}/GPU-1")},
                {"source": "/dev/null", "destination": "/etc/null"},
            ],
        }));
        assert_eq!(settle(&mut spec).unwrap(), 4);
        let expected = json!({
            "hooks": {"prestart": [others], "createRuntime": [], "createContainer": [links]},
            "mounts": [{"source": "/dev/null", "destination": "/etc/null"}],
        });
        assert_eq!(spec, Spec::from(expected.clone()));
        assert_eq!(settle(&mut spec).unwrap(), 0);
        assert_eq!(spec, Spec::from(expected));
    }

    #[test]
    fn specs_of_another_shape_ask_for_nothing() {
        for spec in [
            json!([]),
            json!({"hooks": [], "mounts": {}, "process": 3, "linux": "x"}),
            json!({"hooks": {"prestart": [3, {"path": 3, "args": 3}, {"path": "nvidia-container-runtime-hook"}]}}),
            json!({"process": {"env": [3, "NVIDIA_VISIBLE_DEVICES"]}, "mounts": [3, {"destination": 3}]}),
        ] {
            assert_eq!(ask(spec), Ask::Nothing);
        }
    }
}
