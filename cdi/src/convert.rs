//! Converts GPU requests in a container's spec into edits of the spec, by the CDI files of this node.
//!
//! `firn-hook convert` converts the spec of a bundle, for the shim. The command line converts in memory, to
//! show what the shim would do.
//!
//! Names in a spec may come from an image or from the author of a pod. They add devices only if the operator
//! permits it, only NVIDIA GPUs, and nothing beyond the device nodes that the spec already has.

use std::collections::BTreeSet;
use std::path::Path;

use firn_config::{Config, ConfigError, Keys};
use firn_host::Problem;
use firn_oci::edit::{self, EditError};
use firn_oci::{GpuRequest, KIND, NamedGpus, RUNTIME_KIND, Rules, Spec, SpecError, remove_requests};

use crate::{BadName, CdiError, DeviceName, Registry};

/// Why a spec's GPU request cannot be converted.
#[derive(Debug, thiserror::Error, Problem)]
pub enum ConvertError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot use the container's spec")]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Edit(#[from] EditError),
    #[error(transparent)]
    Cdi(#[from] CdiError),
    #[error(transparent)]
    #[problem("FIRN-CDI-DEVICE", "`firn cdi list` shows the devices of this node")]
    Name(#[from] BadName),
    /// A device of another kind, which only the operator can give.
    #[error("CDI device {name} is no GPU of the kind {KIND}")]
    #[problem(
        "FIRN-CDI-KIND",
        "variables, mounts, annotations and hooks name GPUs alone; let containerd give other CDI devices: \
         `ctr run --device`, or a device plugin"
    )]
    Kind { name: DeviceName },
}

/// A spec after its conversion.
#[derive(Debug)]
pub struct Converted {
    /// The spec with the requested GPUs; unchanged if there are no names.
    pub spec: Spec,
    /// Names of the devices that were added.
    pub names: Vec<DeviceName>,
    /// Edits of the devices that were left out, because the container's device nodes do not grant them.
    pub left_out: BTreeSet<String>,
}

/// Converts the spec of a bundle, which is replaced as a whole or not at all. `wrapper` is NVIDIA's wrapper
/// of runc, if that is the OCI runtime.
pub fn convert_bundle(
    bundle: &Path,
    wrapper: Option<&Path>,
    restores: bool,
) -> Result<Converted, ConvertError> {
    let spec = Spec::load(bundle)?;
    let rules = Rules::of(&spec, wrapper)?;
    let keys = if restores {
        Keys::RESTORED_GPU_REQUEST
    } else {
        Keys::GPU_REQUEST
    };
    let converted = convert(spec, &Config::load(keys)?, &rules, restores)?;
    if !converted.names.is_empty() {
        converted.spec.save(bundle)?;
    }
    Ok(converted)
}

/// Adds the GPUs to a spec that it requests by these rules. `restores` is true for the spec of a restore.
pub fn convert(
    spec: Spec,
    config: &Config,
    rules: &Rules,
    restores: bool,
) -> Result<Converted, ConvertError> {
    let registry = || Registry::read(&config.create.cdi_dirs);
    convert_by(spec, config, rules, restores, registry)
}

/// Does the same by other CDI files than this node's.
pub fn convert_by(
    spec: Spec,
    config: &Config,
    rules: &Rules,
    restores: bool,
    registry: impl FnOnce() -> Registry,
) -> Result<Converted, ConvertError> {
    let unchanged = |spec| {
        Ok(Converted {
            spec,
            names: Vec::new(),
            left_out: BTreeSet::new(),
        })
    };
    let GpuRequest::Named(request) = GpuRequest::of(&spec, rules) else {
        return unchanged(spec);
    };
    if !request.source.is_enabled(&config.create) {
        return unchanged(spec);
    }
    let granted = !spec.gpu_nodes().is_empty() && !spec.opens_all_devices();
    // Device nodes and names in the spec of a restore may be those of the source's node.
    let from_elsewhere = restores && spec.author().owns_node();
    if !request.source.is_hook() && !spec.gpu_nodes().is_empty() && from_elsewhere {
        return unchanged(spec);
    }
    let registry = registry();
    let names = if from_elsewhere && !config.restore.gpus.is_empty() {
        // The configuration names the GPUs that it may use here; the restore picks among them.
        parsed(&config.restore.gpus, &registry)?
    } else {
        requested(&spec, &request, &registry)?
    };
    if names.is_empty() {
        return unchanged(spec);
    }
    let mut edited = spec;
    if from_elsewhere {
        edit::drop_nodes(&mut edited)?;
    }
    let mut value = edited.into_value();
    let left_out = if granted && !from_elsewhere {
        registry.inject_without_nodes(&mut value, &names)?
    } else {
        registry.inject(&mut value, &names).map(|()| BTreeSet::new())?
    };
    let mut spec = Spec::from(value);
    remove_requests(&mut spec)?;
    Ok(Converted {
        spec,
        names,
        left_out,
    })
}

/// The requested devices as names of CDI devices. A device of another kind is refused unless the spec has all
/// of its edits: containerd has then acted on the annotation that names it.
fn requested(spec: &Spec, request: &NamedGpus, registry: &Registry) -> Result<Vec<DeviceName>, ConvertError> {
    let others: BTreeSet<&str> = request.other_kinds().collect();
    for name in &others {
        let name: DeviceName = name.parse()?;
        if !has_edits_of(spec, &name, registry) {
            return Err(ConvertError::Kind { name });
        }
    }
    let devices = request.devices.iter();
    let gpus: Vec<String> = devices
        .filter(|device| !others.contains(device.as_str()))
        .cloned()
        .collect();
    Ok(parsed(&gpus, registry)?)
}

/// Whether the spec already has all edits of this device.
fn has_edits_of(spec: &Spec, name: &DeviceName, registry: &Registry) -> bool {
    let mut before = spec.clone().into_value();
    let mut after = before.clone();
    let injected = registry.inject(&mut after, std::slice::from_ref(name));
    // Injecting always appends hooks.
    for spec in [&mut before, &mut after] {
        spec.as_object_mut().and_then(|spec| spec.remove("hooks"));
    }
    injected.is_ok() && after == before
}

fn parsed(devices: &[String], registry: &Registry) -> Result<Vec<DeviceName>, BadName> {
    let name = |device: &String| {
        let name = if device.contains('=') {
            device.parse()
        } else {
            DeviceName::new(KIND, device)
        }?;
        if name.kind() == RUNTIME_KIND && !registry.has_kind(RUNTIME_KIND) {
            DeviceName::new(KIND, name.device())
        } else {
            Ok(name)
        }
    };
    devices.iter().map(name).collect()
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
