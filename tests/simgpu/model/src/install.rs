//! Puts the built libraries where a driver's installer would.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use simgpu_model::branch_of;
use simgpu_model::paths::LIBRARY_DIR;

/// First driver branch with the process checkpoint calls.
const CHECKPOINT_BRANCH: u32 = 570;

/// Names of these calls at their beginning, and a name of the same length that nobody asks for.
const CALLS: &[u8; 19] = b"cuCheckpointProcess";
const NO_CALLS: &[u8; 19] = b"cuNoCheckpointCalls";

/// A library as a driver of this version has it.
fn as_of(mut library: Vec<u8>, driver_version: &str) -> Vec<u8> {
    if branch_of(driver_version) < CHECKPOINT_BRANCH {
        for at in 0..library.len().saturating_sub(CALLS.len()) {
            if library[at..].starts_with(CALLS) {
                library[at..at + CALLS.len()].copy_from_slice(NO_CALLS);
            }
        }
    }
    library
}

/// Copies the libraries from the build directory `from` below `root` and makes their links.
pub fn install(from: &Path, root: &Path, driver_version: &str) -> Result<()> {
    let dir = root.join(LIBRARY_DIR.trim_start_matches('/'));
    fs::create_dir_all(&dir)?;
    for (built, library) in [
        ("libcuda.so", "libcuda.so"),
        ("libnvidia_ml.so", "libnvidia-ml.so"),
    ] {
        let target = format!("{library}.{driver_version}");
        let source = from.join(built);
        // By a new file: one that running processes have mapped must not change under them.
        let fresh = dir.join(format!(".{target}.new"));
        let built = fs::read(&source)
            .with_context(|| format!("cannot copy {}; hint: cargo build", source.display()))?;
        fs::write(&fresh, as_of(built, driver_version))?;
        fs::rename(&fresh, dir.join(&target))?;
        let link = dir.join(format!("{library}.1"));
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot replace {}", link.display()));
            }
            _ => symlink(&target, &link)?,
        }
    }
    Ok(())
}
