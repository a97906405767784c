//! What asks for GPUs in a container's spec becomes edits of the spec, by the CDI files of this node.
//!
//! `firn-hook convert` does it to a bundle, for the shim; the command line does it in memory, to tell what
//! the shim would do.
//!
//! Names in a spec may be an image's, or a pod's author's. They give devices only where the operator lets
//! them count, only GPUs of NVIDIA's kind, and nothing beyond the device nodes that the spec has already.

use std::collections::BTreeSet;

use firn_config::Config;
use firn_host::{Problem, Remedy, remedy};
use firn_oci::edit::{self, EditError};
use firn_oci::{GpuRequest, KIND, NamedGpus, RUNTIME_KIND, Rules, Spec, SpecError, remove_requests};

use crate::{BadName, CdiError, DeviceName, Registry};

/// A container that cannot be given the GPUs that it asks for.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    #[error("cannot use the container's spec")]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Edit(#[from] EditError),
    #[error(transparent)]
    Cdi(#[from] CdiError),
    #[error(transparent)]
    Name(#[from] BadName),
    /// A device of another kind, which only the operator can give.
    #[error("CDI device {name} is no GPU of the kind {KIND}")]
    Kind { name: DeviceName },
}

impl Problem for ConvertError {
    fn remedy(&self) -> Remedy<'_> {
        match self {
            Self::Spec(error) => error.remedy(),
            Self::Edit(error) => error.remedy(),
            Self::Cdi(error) => error.remedy(),
            Self::Name(_) => remedy(
                "FIRN-CDI-DEVICE",
                "`firn cdi list` shows the devices of this node",
            ),
            Self::Kind { .. } => remedy(
                "FIRN-CDI-KIND",
                "variables, mounts, annotations and hooks name GPUs alone; let containerd give other CDI devices: \
                 `ctr run --device`, or a device plugin",
            ),
        }
    }
}

/// A spec after its conversion.
#[derive(Debug)]
pub struct Converted {
    /// With the GPUs in it that it asks for; as it was, when there are no names.
    pub spec: Spec,
    /// Names of the devices that it has been given.
    pub names: Vec<DeviceName>,
    /// What the devices have, and the container's device nodes do not grant.
    pub left_out: BTreeSet<String>,
}

impl Converted {
    fn unchanged(spec: Spec) -> Self {
        Self {
            spec,
            names: Vec::new(),
            left_out: BTreeSet::new(),
        }
    }
}

/// The spec with the GPUs in it that it asks for by these rules.
pub fn convert(
    spec: Spec,
    config: &Config,
    rules: &Rules,
    restores: bool,
) -> Result<Converted, ConvertError> {
    let registry = || Registry::read(&config.create.cdi_dirs);
    convert_by(spec, config, rules, restores, registry)
}

/// As [`convert`], by other CDI files than this node's.
pub fn convert_by(
    spec: Spec,
    config: &Config,
    rules: &Rules,
    restores: bool,
    registry: impl FnOnce() -> Registry,
) -> Result<Converted, ConvertError> {
    let GpuRequest::Named(request) = GpuRequest::of(&spec, rules) else {
        return Ok(Converted::unchanged(spec));
    };
    if !request.source.is_enabled(&config.create) {
        return Ok(Converted::unchanged(spec));
    }
    let granted = !spec.gpu_nodes().is_empty() && !spec.opens_all_devices();
    // The nodes of a restored container's spec may be another node's, and so may the names beside them.
    let from_elsewhere = restores && !spec.is_cri();
    if !request.source.is_hook() && !spec.gpu_nodes().is_empty() && from_elsewhere {
        return Ok(Converted::unchanged(spec));
    }
    let registry = registry();
    let names = match from_elsewhere && !config.restore.gpus.is_empty() {
        // What it may use here is said by the configuration, and the restore picks among it.
        true => parsed(&config.restore.gpus, &registry)?,
        false => asked(&spec, &request, &registry)?,
    };
    if names.is_empty() {
        return Ok(Converted::unchanged(spec));
    }
    let mut edited = spec;
    if from_elsewhere {
        edit::drop_nodes(&mut edited)?;
    }
    let mut value = edited.into_value();
    let left_out = match granted && !from_elsewhere {
        true => registry.inject_without_nodes(&mut value, &names)?,
        false => registry.inject(&mut value, &names).map(|()| BTreeSet::new())?,
    };
    let mut spec = Spec::from(value);
    remove_requests(&mut spec)?;
    Ok(Converted {
        spec,
        names,
        left_out,
    })
}

/// What is asked for, as names of CDI devices. One of another kind is refused, unless the spec has all of its
/// edits: containerd has acted on the annotation that names it.
fn asked(spec: &Spec, request: &NamedGpus, registry: &Registry) -> Result<Vec<DeviceName>, ConvertError> {
    let foreign: BTreeSet<&str> = request.other_kinds().collect();
    for name in &foreign {
        let name: DeviceName = name.parse()?;
        if !is_given(spec, &name, registry) {
            return Err(ConvertError::Kind { name });
        }
    }
    let devices = request.devices.iter();
    let gpus: Vec<String> = devices
        .filter(|device| !foreign.contains(device.as_str()))
        .cloned()
        .collect();
    Ok(parsed(&gpus, registry)?)
}

fn is_given(spec: &Spec, name: &DeviceName, registry: &Registry) -> bool {
    let mut before = spec.clone().into_value();
    let mut after = before.clone();
    let injected = registry.inject(&mut after, std::slice::from_ref(name));
    // Hooks are appended, whatever is there.
    for spec in [&mut before, &mut after] {
        spec.as_object_mut().and_then(|spec| spec.remove("hooks"));
    }
    injected.is_ok() && after == before
}

fn parsed(devices: &[String], registry: &Registry) -> Result<Vec<DeviceName>, BadName> {
    let name = |device: &String| {
        let name = match device.contains('=') {
            true => device.parse(),
            false => DeviceName::new(KIND, device),
        }?;
        match name.kind() == RUNTIME_KIND && !registry.has_kind(RUNTIME_KIND) {
            true => DeviceName::new(KIND, name.device()),
            false => Ok(name),
        }
    };
    devices.iter().map(name).collect()
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
