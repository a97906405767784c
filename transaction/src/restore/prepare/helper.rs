//! Calls of firn-hook that a restore can do without.

use std::path::Path;
use std::process::Command;

use firn_process::reaper::Reaper;

use super::{HELPER, printed};

/// Repeats what the create hooks did to the container's files, which may be missing after a restore. The
/// restored processes do not need it, so a failure refuses nothing.
pub(super) async fn replay_hooks(hook: &Path, bundle: &Path, reaper: &Reaper) {
    let mut command = Command::new(hook);
    command.arg("replay").arg(bundle);
    if let Err(error) = printed(&mut command, HELPER, reaper).await {
        log::warn!(
            "cannot make the driver's links and the loader's cache in {}, so programs that are started in \
             the container may not find its libraries: {error}",
            bundle.display()
        );
    }
}

/// The directories of libraries in the node's CDI files, by firn-hook: the shim reads no YAML.
pub(super) async fn library_dirs(hook: &Path, reaper: &Reaper) -> Vec<String> {
    let directories = printed(Command::new(hook).arg("library-dirs"), HELPER, reaper).await;
    let directories = directories.inspect_err(|error| log::warn!("firn-hook: {error}"));
    serde_json::from_slice(&directories.unwrap_or_default()).unwrap_or_default()
}
