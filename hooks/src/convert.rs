//! Converts a container's GPU requests into edits of its spec, and lists the library directories of the
//! node's CDI files.
//!
//! The shim runs this in a process of its own, before the runtime reads the bundle. The result, or the reason
//! of a failure, is one JSON object on standard output.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use firn_cdi::{Converted, Registry, convert_bundle};
use firn_config::{Config, Keys};
use firn_host::Problem;
use serde_json::json;

/// Converts the spec of a bundle. `wrapper` is NVIDIA's wrapper of runc, if that is the OCI runtime.
pub fn run(bundle: &Path, wrapper: Option<&Path>, restores: bool) -> Result<ExitCode> {
    let (result, code) = match convert_bundle(bundle, wrapper, restores) {
        Ok(Converted { names, left_out, .. }) => {
            let devices: Vec<String> = names.iter().map(ToString::to_string).collect();
            let result = json!({"devices": devices, "left_out": left_out});
            (result, ExitCode::SUCCESS)
        }
        Err(error) => (json!(error.report()), ExitCode::FAILURE),
    };
    crate::answer(result)?;
    Ok(code)
}

/// Prints the directories from which the node's CDI files mount libraries.
pub fn library_dirs() -> Result<()> {
    let config = Config::load(Keys::CDI)?;
    crate::answer(json!(Registry::read(&config.create.cdi_dirs).library_dirs()))
}
