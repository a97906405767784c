//! ELF files: what they need, and programs that bring their own loader. Reading and writing is patchelf's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::{check, output};

/// The program interpreter of x86-64.
pub(super) const LOADER: &str = "ld-linux-x86-64.so.2";

/// Makes `program` start with the loader in `lib` and look for libraries there before anywhere else.
///
/// `DT_RPATH`, not `DT_RUNPATH`: it also holds for the libraries of the libraries, and comes before
/// LD_LIBRARY_PATH, which GPU machines like to set to the driver's directory.
pub(super) fn rebind(program: &Path, lib: &Path) -> anyhow::Result<()> {
    check(
        Command::new("patchelf")
            .arg("--set-interpreter")
            .arg(lib.join(LOADER))
            .arg("--force-rpath")
            .arg("--set-rpath")
            .arg(lib)
            .arg(program),
    )
}

/// Copies the loader and every library that `file` needs, directly or not, from `dirs` into `to`.
pub(super) fn copy_needed(file: &Path, dirs: &[PathBuf], to: &Path) -> anyhow::Result<()> {
    copy_library(LOADER, dirs, to)?;
    for name in output(Command::new("patchelf").arg("--print-needed").arg(file))?.lines() {
        copy_library(name, dirs, to)?;
    }
    Ok(())
}

/// Copies the library `name` with what it needs.
pub(super) fn copy_library(name: &str, dirs: &[PathBuf], to: &Path) -> anyhow::Result<()> {
    let copy = to.join(name);
    if copy.exists() {
        return Ok(());
    }
    let found = dirs.iter().map(|dir| dir.join(name)).find(|path| path.exists());
    let from = found.with_context(|| format!("no library {name} in {dirs:?}"))?;
    fs::copy(&from, &copy).with_context(|| format!("cannot copy {}", from.display()))?;
    for needed in output(Command::new("patchelf").arg("--print-needed").arg(&copy))?.lines() {
        copy_library(needed, dirs, to)?;
    }
    Ok(())
}
