//! Converts a container's GPU requests into edits of its spec, and lists the library directories of the
//! node's CDI files.
//!
//! The shim runs this in a process of its own, before the runtime reads the bundle. The spec is replaced as a
//! whole or not at all. The result, or the reason of a failure, is one JSON object on standard output.

use std::path::Path;
use std::process::ExitCode;

use firn_cdi::{Converted, Registry};
use firn_config::{Config, ConfigError};
use firn_host::Problem;
use firn_oci::{Rules, Spec, SpecError};
use serde_json::{Value, json};

/// Why a spec is not converted.
#[derive(Debug, thiserror::Error, Problem)]
enum ConvertError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot use the container's spec")]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Convert(#[from] firn_cdi::ConvertError),
}

/// Converts the spec of a bundle. `wrapper` is NVIDIA's wrapper of runc, if that is the OCI runtime.
pub fn run(bundle: &Path, wrapper: Option<&Path>, restores: bool) -> ExitCode {
    match convert(bundle, wrapper, restores) {
        Ok(Converted { names, left_out, .. }) => {
            let devices: Vec<String> = names.iter().map(ToString::to_string).collect();
            reply(
                &json!({"devices": devices, "left_out": left_out}),
                ExitCode::SUCCESS,
            )
        }
        Err(error) => {
            let mut message = error.to_string();
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                message = format!("{message}: {error}");
                cause = error.source();
            }
            reply(
                &json!({"code": error.code(), "message": message, "hint": error.hint()}),
                ExitCode::FAILURE,
            )
        }
    }
}

/// Prints the result for the shim.
fn reply(result: &Value, code: ExitCode) -> ExitCode {
    match crate::answer(&format!("{result}\n")) {
        Ok(()) => code,
        Err(error) => {
            report!("firn-hook: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the directories from which the node's CDI files mount libraries.
pub fn library_dirs() -> anyhow::Result<()> {
    let config = Config::load()?;
    let dirs = json!(Registry::read(&config.create.cdi_dirs).library_dirs());
    crate::answer(&format!("{dirs}\n"))
}

/// Converts the spec, and saves it if something has changed.
fn convert(bundle: &Path, wrapper: Option<&Path>, restores: bool) -> Result<Converted, ConvertError> {
    let spec = Spec::load(bundle)?;
    let rules = Rules::of(&spec, wrapper)?;
    let converted = firn_cdi::convert(spec, &Config::load()?, &rules, restores)?;
    if !converted.names.is_empty() {
        converted.spec.save(bundle)?;
    }
    Ok(converted)
}
