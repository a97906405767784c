//! What asks for GPUs in a container's spec becomes edits of the spec, by the CDI files of this node.
//!
//! `firn-hook convert` does it to a bundle, for the shim; the command line does it in memory, to tell what the shim would do.

use firn_config::Config;
use firn_oci::{Ask, Request, Spec, SpecError, settle};

use crate::{BadName, CdiError, DeviceName, Registry};

/// Kind of devices that are named by index or UUID alone.
pub const KIND: &str = "nvidia.com/gpu";

/// A container that cannot be given the GPUs that it asks for.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    #[error("cannot use the container's spec")]
    Spec(#[from] SpecError),
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
            Self::Cdi(error) => error.code(),
            Self::Name(_) => "FIRN-CDI-DEVICE",
        }
    }

    /// What to do.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Spec(error) => error.hint(),
            Self::Cdi(error) => error.hint(),
            Self::Name(_) => "`firn cdi list` shows the devices of this node",
        }
    }
}

/// The spec with the GPUs in it that it asks for, and their names; none, and the spec as it is, when it asks for none.
pub fn convert(spec: Spec, config: &Config, restores: bool) -> Result<(Spec, Vec<DeviceName>), ConvertError> {
    let registry = || Registry::read(&config.create.cdi_dirs);
    convert_by(spec, config, restores, registry)
}

/// As [`convert`], by other CDI files than this node's.
pub fn convert_by(
    spec: Spec,
    config: &Config,
    restores: bool,
    registry: impl FnOnce() -> Registry,
) -> Result<(Spec, Vec<DeviceName>), ConvertError> {
    let Ask::Request(request) = Ask::of(&spec) else {
        return Ok((spec, Vec::new()));
    };
    let names = names(&spec, request, config, restores)?;
    let mut value = spec.into_value();
    registry().inject(&mut value, &names)?;
    let mut spec = Spec::from(value);
    settle(&mut spec)?;
    Ok((spec, names))
}

/// What is asked for, as names of CDI devices. The spec of a restored container may be another node's: what it may use here
/// is then said by the configuration, and the restore picks among it.
fn names(
    spec: &Spec,
    request: Request,
    config: &Config,
    restores: bool,
) -> Result<Vec<DeviceName>, ConvertError> {
    let pool = &config.restore.gpus;
    let asked = match restores && !spec.is_cri() && !pool.is_empty() {
        true => pool.clone(),
        false => request.devices,
    };
    let name = |device: &String| match device.contains('=') {
        true => device.parse(),
        false => DeviceName::new(KIND, device),
    };
    Ok(asked.iter().map(name).collect::<Result<_, _>>()?)
}
