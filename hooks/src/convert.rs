//! Turns what asks for GPUs in a container's spec into edits of the spec.
//!
//! Run by the shim, in a process of its own, before the runtime sees the bundle. The spec is replaced as a whole or not at
//! all. What was done, or why nothing could be, is one JSON object on standard output.

use std::path::Path;
use std::process::ExitCode;

use firn_cdi::{BadName, CdiError, DeviceName, Registry};
use firn_config::{Config, ConfigError};
use firn_oci::{Ask, Request, Spec, SpecError, settle};
use serde_json::json;

/// Kind of devices that are named by index or UUID alone.
const KIND: &str = "nvidia.com/gpu";

/// A container that cannot be given the GPUs that it asks for.
#[derive(Debug, thiserror::Error)]
enum ConvertError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot use the container's spec")]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Cdi(#[from] CdiError),
    #[error(transparent)]
    Name(#[from] BadName),
}

impl ConvertError {
    fn code(&self) -> &'static str {
        match self {
            Self::Config(error) => error.code(),
            Self::Spec(error) => error.code(),
            Self::Cdi(error) => error.code(),
            Self::Name(_) => "FIRN-CDI-DEVICE",
        }
    }

    fn hint(&self) -> &'static str {
        match self {
            Self::Config(error) => error.hint(),
            Self::Spec(error) => error.hint(),
            Self::Cdi(error) => error.hint(),
            Self::Name(_) => "`firn cdi list` shows the devices of this node",
        }
    }
}

/// Converts the spec of a bundle.
pub fn run(bundle: &Path, restores: bool) -> ExitCode {
    match convert(bundle, restores) {
        Ok(devices) => {
            println!("{}", json!({"devices": devices}));
            ExitCode::SUCCESS
        }
        Err(error) => {
            let mut message = error.to_string();
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                message = format!("{message}: {error}");
                cause = error.source();
            }
            println!(
                "{}",
                json!({"code": error.code(), "message": message, "hint": error.hint()})
            );
            ExitCode::FAILURE
        }
    }
}

/// Names of the devices that the container has been given.
fn convert(bundle: &Path, restores: bool) -> Result<Vec<String>, ConvertError> {
    let spec = Spec::load(bundle)?;
    let Ask::Request(request) = Ask::of(&spec) else {
        return Ok(Vec::new());
    };
    let config = Config::load()?;
    let names = names(&spec, request, &config, restores)?;
    let mut value = spec.into_value();
    Registry::read(&config.create.cdi_dirs).inject(&mut value, &names)?;
    let mut spec = Spec::from(value);
    settle(&mut spec)?;
    spec.save(bundle)?;
    Ok(names.iter().map(ToString::to_string).collect())
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
