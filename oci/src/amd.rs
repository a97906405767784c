//! AMD's GPUs: CRIU's plugin saves their state in CRIU's image. firn finds the plugin and hands it to CRIU;
//! it has not been tried on such a GPU.
//!
//! Which nodes are theirs is in [`crate::vendor`], what refuses a checkpoint in firn-preflight.

use std::io;
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::Problem;

use crate::criu_config::{MAKE_WRITABLE, make_link};

/// Where CRIU's packages put plugins.
pub const PLUGIN_DIRS: [&str; 6] = [
    "/usr/lib/criu",
    "/usr/local/lib/criu",
    "/usr/lib/x86_64-linux-gnu/criu",
    "/usr/lib64/criu",
    "/usr/local/lib64/criu",
    "/usr/libexec/criu",
];

const PLUGIN: &str = "amdgpu_plugin.so";

/// CRIU has no plugin for AMD's GPUs, or the directory for it cannot be made.
#[derive(Debug, thiserror::Error, Problem)]
pub enum AmdPluginError {
    /// The plugin does not exist.
    #[error("CRIU's plugin for AMD's GPUs does not exist: {}", looked_at.display())]
    #[problem(
        "FIRN-AMD-PLUGIN",
        "install CRIU's amdgpu plugin, or name it by [criu] amdgpu-plugin in the configuration"
    )]
    Missing { looked_at: PathBuf },
    /// The directory for this plugin alone cannot be made.
    #[error("cannot make {}", path.display())]
    #[problem("FIRN-AMD-PLUGIN", MAKE_WRITABLE)]
    Directory { path: PathBuf, source: io::Error },
}

/// The path of CRIU's plugin for AMD's GPUs: the configured one, else the first in `dirs`.
pub fn plugin(configured: Option<&Path>, dirs: &[&str]) -> Result<PathBuf, AmdPluginError> {
    let found = match configured {
        Some(plugin) => Some(plugin.to_owned()).filter(|plugin| plugin.is_file()),
        None => dirs
            .iter()
            .map(|dir| Path::new(dir).join(PLUGIN))
            .find(|plugin| plugin.is_file()),
    };
    found.ok_or_else(|| AmdPluginError::Missing {
        looked_at: configured.map_or_else(|| dirs.join(", ").into(), Path::to_owned),
    })
}

/// Makes a plugin directory in the bundle with the plugin for AMD's GPUs and no other. Safe to repeat.
pub fn plugin_directory(
    bundle: &Path,
    configured: Option<&Path>,
    dirs: &[&str],
) -> Result<PathBuf, AmdPluginError> {
    let plugin = plugin(configured, dirs)?;
    let dir = bundle.join(names::BUNDLE_AMD_LIBS);
    match std::fs::create_dir_all(&dir).and_then(|()| make_link(&plugin, &dir.join(PLUGIN))) {
        Ok(()) => Ok(dir),
        Err(source) => Err(AmdPluginError::Directory { path: dir, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_for_amd_is_given_alone() {
        let node = tempfile::tempdir().unwrap();
        let at = |name: &str| node.path().join(name);
        for name in [
            "criu/amdgpu_plugin.so",
            "criu/cuda_plugin.so",
            "own/amdgpu_plugin.so",
        ] {
            std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            std::fs::write(at(name), "").unwrap();
        }
        let dirs = [at("none"), at("criu"), at("own")];
        let dirs: Vec<&str> = dirs.iter().map(|dir| dir.to_str().unwrap()).collect();
        let own = at("own/amdgpu_plugin.so");
        for (configured, expected) in [
            (None, at("criu/amdgpu_plugin.so")),
            (Some(own.as_path()), own.clone()),
        ] {
            let dir = plugin_directory(node.path(), configured, &dirs).unwrap();
            let entries: Vec<_> = std::fs::read_dir(&dir)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .collect();
            assert_eq!(entries, [dir.join("amdgpu_plugin.so")]);
            assert_eq!(std::fs::read_link(&entries[0]).unwrap(), expected);
        }
        for configured in [None, Some(at("none/amdgpu_plugin.so"))] {
            let error = plugin_directory(node.path(), configured.as_deref(), &dirs[..1]).unwrap_err();
            assert_eq!(error.code(), "FIRN-AMD-PLUGIN");
            assert!(error.to_string().contains("none"), "{error}");
        }
    }
}
