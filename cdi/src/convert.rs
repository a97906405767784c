//! What asks for GPUs in a container's spec becomes edits of the spec, by the CDI files of this node.
//!
//! `firn-hook convert` does it to a bundle, for the shim; the command line does it in memory, to tell what the shim would do.

use firn_config::{Config, Toolkit};
use firn_oci::edit::{self, EditError};
use firn_oci::{Ask, Request, Spec, SpecError, settle};

use crate::{BadName, CdiError, DeviceName, Registry};

/// Kind of devices that are named by index or UUID alone.
pub const KIND: &str = "nvidia.com/gpu";

/// Kind of devices for which NVIDIA's container runtime makes up a CDI file at every start: the same devices.
const MADE_UP: &str = "runtime.nvidia.com/gpu";

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
}

impl ConvertError {
    /// Its code in docs/errors.md.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Spec(error) => error.code(),
            Self::Edit(error) => error.code(),
            Self::Cdi(error) => error.code(),
            Self::Name(_) => "FIRN-CDI-DEVICE",
        }
    }

    /// What to do.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Spec(error) => error.hint(),
            Self::Edit(error) => error.hint(),
            Self::Cdi(error) => error.hint(),
            Self::Name(_) => "`firn cdi list` shows the devices of this node",
        }
    }
}

/// The spec with the GPUs in it that it asks for, and their names; none, and the spec as it is, when it asks for none.
///
/// `wrapper` is the configuration of NVIDIA's container runtime where that is what makes the container.
pub fn convert(
    spec: Spec,
    config: &Config,
    wrapper: Option<&Toolkit>,
    restores: bool,
) -> Result<(Spec, Vec<DeviceName>), ConvertError> {
    let registry = || Registry::read(&config.create.cdi_dirs);
    convert_by(spec, config, wrapper, restores, registry)
}

/// As [`convert`], by other CDI files than this node's.
pub fn convert_by(
    spec: Spec,
    config: &Config,
    wrapper: Option<&Toolkit>,
    restores: bool,
    registry: impl FnOnce() -> Registry,
) -> Result<(Spec, Vec<DeviceName>), ConvertError> {
    let ask = match wrapper {
        None => Ask::of(&spec),
        Some(toolkit) => Ask::of_wrapped(&spec, toolkit),
    };
    let Ask::Request(request) = ask else {
        return Ok((spec, Vec::new()));
    };
    let (is_hook, granted) = (request.form.is_hook(), spec.gpu_nodes());
    // The nodes of a restored container's spec may be another node's, and so may the names beside them.
    if !is_hook && !granted.is_empty() && restores && !spec.is_cri() {
        return Ok((spec, Vec::new()));
    }
    let registry = registry();
    let names = names(&spec, request, &registry, config, restores)?;
    let mut value = spec.clone();
    if restores && !spec.is_cri() {
        edit::drop_nodes(&mut value)?;
    }
    let mut value = value.into_value();
    registry.inject(&mut value, &names)?;
    let mut edited = Spec::from(value);
    settle(&mut edited)?;
    // Nodes are a grant, and a name beside them, which may be an image's, adds libraries to it and no GPU.
    if !is_hook && !granted.is_empty() && !edited.gpu_nodes().is_subset(&granted) {
        return Ok((spec, Vec::new()));
    }
    Ok((edited, names))
}

/// What is asked for, as names of CDI devices. The spec of a restored container may be another node's: what it may use here
/// is then said by the configuration, and the restore picks among it.
fn names(
    spec: &Spec,
    request: Request,
    registry: &Registry,
    config: &Config,
    restores: bool,
) -> Result<Vec<DeviceName>, ConvertError> {
    let pool = &config.restore.gpus;
    let asked = match restores && !spec.is_cri() && !pool.is_empty() {
        true => pool.clone(),
        false => request.devices,
    };
    let name = |device: &String| {
        let name = match device.contains('=') {
            true => device.parse(),
            false => DeviceName::new(KIND, device),
        }?;
        match name.kind() == MADE_UP && !registry.has_kind(MADE_UP) {
            true => DeviceName::new(KIND, name.device()),
            false => Ok(name),
        }
    };
    Ok(asked.iter().map(name).collect::<Result<_, BadName>>()?)
}

#[cfg(test)]
mod tests;
