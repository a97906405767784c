//! `firn cdi list`: which devices this node's CDI files describe.

use anyhow::Result;
use firn_cdi::Registry;
use firn_config::{Config, Keys};
use serde_json::{Value, json};

use crate::args::CdiListArgs;
use crate::output::{self, line};
use firn_host::ProblemReport;

/// True: every file can be used and no device is described twice.
pub fn run(args: &CdiListArgs) -> Result<bool> {
    let config = Config::load(Keys::CDI).map_err(ProblemReport::from)?;
    let registry = Registry::read(&config.create.cdi_dirs);
    let conflicts = registry.devices().any(|(_, files)| files.len() > 1);
    if args.json {
        output::json(&as_json(&registry))?;
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

fn as_json(registry: &Registry) -> Value {
    let devices = registry
        .devices()
        .map(|(name, files)| json!({"name": name.to_string(), "files": files}));
    let broken = registry
        .broken()
        .iter()
        .map(|(path, error)| json!({"file": path, "error": error.to_string()}));
    json!({"devices": devices.collect::<Vec<_>>(), "broken": broken.collect::<Vec<_>>()})
}
