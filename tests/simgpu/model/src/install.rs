//! Puts the built libraries where a driver's installer would.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use simgpu_model::paths::LIBRARY_DIR;

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
        fs::copy(&source, &fresh)
            .with_context(|| format!("cannot copy {}; hint: cargo build", source.display()))?;
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
