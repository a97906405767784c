//! `firn cdi list`: which devices this node's CDI files describe.

use std::path::Path;

use anyhow::Result;
use firn_cdi::Registry;
use firn_config::{Config, Keys};
use serde::Serialize;

use crate::args::CdiListArgs;
use crate::output::{self, line, printed};
use firn_host::ProblemReport;

/// What the node's CDI files describe.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct DeviceList<'a> {
    /// The devices, in the order of their names.
    devices: Vec<Device<'a>>,
    /// Files that cannot be used.
    broken: Vec<Broken<'a>>,
}

/// A device.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Device<'a> {
    /// Its name, as `nvidia.com/gpu=0`.
    name: String,
    /// The files that describe it. Several: they are in conflict, and the device cannot be requested.
    files: Vec<&'a Path>,
}

/// A file that cannot be used.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Broken<'a> {
    /// The file.
    file: &'a Path,
    /// What is wrong with it.
    error: String,
}

printed! { DeviceList<'_>: "cdi list" }

/// True: every file can be used and no device is described twice.
pub fn run(args: &CdiListArgs) -> Result<bool> {
    let config = Config::load(Keys::CDI).map_err(ProblemReport::from)?;
    let registry = Registry::read(&config.create.cdi_dirs);
    let conflicts = registry.devices().any(|(_, files)| files.len() > 1);
    if args.json {
        output::json(&DeviceList::of(&registry))?;
    } else {
        print(&registry);
    }
    Ok(!conflicts && registry.broken().is_empty())
}

fn print(registry: &Registry) {
    for (name, files) in registry.devices() {
        let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
        match files.len() {
            1 => line!("{name}  {}", files[0]),
            _ => line!("{name}  in conflict: {}", files.join(", ")),
        }
    }
    for (path, error) in registry.broken() {
        line!("not used: {}: {error}", path.display());
    }
    if registry.files().is_empty() {
        line!("no CDI devices");
    }
}

impl<'a> DeviceList<'a> {
    fn of(registry: &'a Registry) -> Self {
        let devices = registry.devices().map(|(name, files)| Device {
            name: name.to_string(),
            files,
        });
        let broken = registry.broken().iter().map(|(file, error)| Broken {
            file,
            error: error.to_string(),
        });
        Self {
            devices: devices.collect(),
            broken: broken.collect(),
        }
    }
}
