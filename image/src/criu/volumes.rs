//! Files of the container's volumes that its processes had open: CRIU opens each again by its name, and only
//! with the size that it had. A volume is no part of a checkpoint, so its files may be others by now.
//!
//! Only what CRIU would refuse is a fault. It has no size of a file that a process appends to.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_host::{is_criu_link, open_below};
use firn_oci::{Spec, SpecMount};
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag, open};
use nix::sys::stat::Mode;

use super::files::{MAGIC, NAME};
use super::wire::{Message, WireError};
use super::{Image, ImageFault, shown};

/// Files that CRIU opens by another name than that of their entry: deleted ones.
const REMAPS: &str = "remap-fpath.img";
const REMAPS_MAGIC: u32 = 0x5913_3954;

/// A file of the image.
struct OpenFile {
    id: u32,
    name: PathBuf,
    size: u64,
}

/// Looks whether the files are there as they were, on the bind mounts of the spec. `bundle` is where the
/// sources of mounts may be relative to.
pub fn expect_volumes(spec: &Spec, image: &Path, bundle: &Path) -> Result<(), ImageFault> {
    let image = Image::open(image)?;
    let Some(files) = image.read(NAME, MAGIC, read)? else {
        return Ok(());
    };
    let remaps = image.read(REMAPS, REMAPS_MAGIC, |remap| {
        Ok([remap.required(1)?, remap.required(2)?])
    })?;
    let remapped: HashSet<u32> = remaps.into_iter().flatten().flatten().collect();
    let mounts = spec.mounts()?;
    let pod_shm = spec.pod_shm()?;
    let files = files.into_iter().flatten();
    for file in files.filter(|file| !remapped.contains(&file.id)) {
        if let Some(mount) = mount_of(&mounts, &file.name)
            && mount.is_bind()
            && Some(&mount.source) != pod_shm.as_ref()
        {
            check(&file, mount, bundle)?;
        }
    }
    Ok(())
}

/// Names in /dev/shm of links that CRIU has made of files with a deleted name, by which the image refers to
/// them: in bytes, below that directory.
pub fn names_of_links(image: &Path) -> Result<HashSet<Vec<u8>>, ImageFault> {
    let name = |file: &Message<'_>| -> Result<Option<PathBuf>, WireError> {
        let regular = file.message(3)?;
        let name = regular.map(|regular| regular.bytes(6)).transpose()?.flatten();
        Ok(name.map(|name| PathBuf::from(OsStr::from_bytes(name))))
    };
    let names = Image::open(image)?.read(NAME, MAGIC, name)?.unwrap_or_default();
    let names = names
        .iter()
        .flatten()
        .filter_map(|name| name.strip_prefix("/dev/shm").ok());
    let links = names.filter(|name| name.file_name().is_some_and(is_criu_link));
    Ok(links.map(|name| name.as_os_str().as_bytes().to_vec()).collect())
}

fn read(file: &Message<'_>) -> Result<Option<OpenFile>, WireError> {
    let Some(regular) = file.message(3)? else {
        return Ok(None);
    };
    let is_external = regular.number(9)?.unwrap_or(0) != 0;
    let (Some(name), Some(size), false) = (regular.bytes(6)?, regular.long(8)?, is_external) else {
        return Ok(None);
    };
    Ok(Some(OpenFile {
        id: regular.required(1)?,
        name: PathBuf::from(OsStr::from_bytes(name)),
        size,
    }))
}

/// The mount in which a path is: of those with the longest place the last.
fn mount_of<'m>(mounts: &'m [SpecMount], path: &Path) -> Option<&'m SpecMount> {
    let within = mounts.iter().filter(|mount| path.starts_with(&mount.destination));
    within.max_by_key(|mount| mount.destination.components().count())
}

/// A file that cannot be looked at is left to CRIU.
fn check(file: &OpenFile, mount: &SpecMount, bundle: &Path) -> Result<(), ImageFault> {
    let source = bundle.join(&mount.source);
    let below = file
        .name
        .strip_prefix(&mount.destination)
        .unwrap_or(Path::new(""));
    let found = match opened(&source, below) {
        Ok(found) => File::from(found).metadata().ok(),
        Err(Errno::ENOENT) => {
            return Err(ImageFault::Gone {
                path: shown(file.name.display()),
                file: shown(source.join(below).display()),
            });
        }
        Err(_) => None,
    };
    match found.filter(|found| found.is_file() && found.len() != file.size) {
        None => Ok(()),
        Some(found) => Err(ImageFault::Size {
            path: shown(file.name.display()),
            file: shown(source.join(below).display()),
            then: file.size,
            now: found.len(),
        }),
    }
}

/// A handle, which reads nothing and waits for nobody but the file system.
fn opened(source: &Path, below: &Path) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let source = open(source, flags, Mode::empty())?;
    if below == Path::new("") {
        return Ok(source);
    }
    // Names of the image lead through no links: those of the kernel do not.
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
    open_below(source, below, flags | OFlag::O_NOFOLLOW, resolve)
}

#[cfg(test)]
mod tests;
