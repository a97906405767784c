//! The files in a pod's /dev/shm, which CRIU leaves out of the image: they are archived next to it, and made
//! again in the /dev/shm of a copy.
//!
//! The pod's containers share the directory, and those that are not checkpointed run on. So what only others
//! have open stays theirs, and a copy takes nothing from them: only what nobody has open gives way to a file
//! that the copy has open.
//!
//! The archive is hostile, and so is every process of the pod. All names are opened below the directory,
//! without following a link. A file has its whole content before it has a name.

mod fill;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod held;
mod keep;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path};

use anyhow::{Context, Result};
use firn_host::open_below;
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag, open};
use nix::sys::stat::Mode;
use serde::de::DeserializeOwned;

#[cfg_attr(fuzzing, expect(unused_imports, reason = "no target calls them"))]
pub use fill::{empty, fill};
#[cfg_attr(fuzzing, expect(unused_imports, reason = "no target calls it"))]
pub use keep::keep;

/// Longest request that is read.
const REQUEST: u64 = 16 << 20;
/// Files and directories at most.
const MOST: usize = 1 << 20;

fn read<T: DeserializeOwned>(request: impl Read) -> Result<T> {
    let mut bytes = Vec::new();
    request.take(REQUEST).read_to_end(&mut bytes)?;
    serde_json::from_slice(&bytes).context("the request is not understood")
}

fn open_dir(path: &Path) -> Result<File> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let dir = open(path, flags, Mode::empty());
    Ok(File::from(
        dir.with_context(|| format!("cannot open {}", path.display()))?,
    ))
}

/// A handle of what is at this path, which opens no device and waits for nobody; none if it has gone.
fn handle(dir: &File, path: &Path) -> io::Result<Option<File>> {
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
    match open_below(dir, path, OFlag::O_PATH | OFlag::O_NOFOLLOW, resolve) {
        Ok(opened) => Ok(Some(File::from(opened))),
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether a path has names alone, and one at least.
fn is_below(path: &Path) -> bool {
    let is_name = |part: Component<'_>| matches!(part, Component::Normal(_));
    path.components().next().is_some() && path.components().all(is_name)
}

#[cfg(test)]
mod tests;
