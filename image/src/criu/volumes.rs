//! Files of the container's volumes that its processes had open: CRIU opens each again by its name, and only
//! with the size that it had. A volume is no part of a checkpoint, so its files may be others by now.
//!
//! Only what CRIU would refuse is a fault. It has no size of a file that a process appends to.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firn_host::{FileId, is_criu_link, open_below, procfs};
use firn_oci::mounts::RequiredMount;
use firn_oci::{Spec, SpecError, SpecMount};
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag, open};
use nix::sys::stat::Mode;
use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, statx};
use serde::{Deserialize, Serialize};

use super::files::{MAGIC, NAME};
use super::wire::{Message, WireError};
use super::{Image, ImageFault, shown};

/// Files that CRIU opens by another name than that of their entry: deleted ones.
const REMAPS: &str = "remap-fpath.img";
const REMAPS_MAGIC: u32 = 0x5913_3954;

/// Most bytes of paths of running processes. Files beyond are compared by the restore alone.
const MOST_BYTES: usize = 4 << 20;

/// Time between two looks at running processes: what is open for a moment is no matter.
const BETWEEN: Duration = Duration::from_millis(200);

/// A file that was written to so lately may be written to again.
const QUIET: Duration = Duration::from_secs(60);

/// A file that a process has open or mapped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeFile {
    /// In the container.
    path: PathBuf,
    /// In bytes. None for a file whose size may be another by the time of the checkpoint.
    size: Option<u64>,
}

impl VolumeFile {
    /// Those of running processes, on the bind mounts of the spec, which two looks show alike. What a process
    /// may write to has no size, nor has a file that was written to lately.
    ///
    /// # Errors
    /// If the mounts of the spec cannot be read.
    pub fn of_processes(pids: &[i32], spec: &Spec) -> Result<Vec<Self>, SpecError> {
        let volumes = Volumes::of(spec)?;
        let first = volumes.open_files(pids);
        if first.is_empty() {
            return Ok(Vec::new());
        }
        thread::sleep(BETWEEN);
        let mut last = volumes.open_files(pids);
        last.retain(|path, (id, _)| first.get(path).is_some_and(|(before, _)| before == id));
        Ok(last.into_values().map(|(_, file)| file).collect())
    }

    /// The file behind an entry of /proc/PID/fd or map_files; none for what is no regular file, and for a
    /// name that JSON cannot hold. Asks no file server.
    fn behind(entry: &Path, path: PathBuf) -> Option<(FileId, Self)> {
        path.to_str()?;
        // The mode of the link is how the file is open.
        let is_written = fs::symlink_metadata(entry).ok()?.permissions().mode() & 0o200 != 0;
        let file = statx(CWD, entry, AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS).ok()?;
        let is_named = is_regular(&file) && file.stx_nlink > 0;
        let written = u64::try_from(file.stx_mtime.tv_sec).ok().map(Duration::from_secs);
        let is_quiet = written.is_some_and(|written| UNIX_EPOCH + written + QUIET < SystemTime::now());
        let (major, minor) = (file.stx_dev_major.into(), file.stx_dev_minor.into());
        let size = (!is_written && is_quiet).then_some(file.stx_size);
        is_named.then(|| {
            (
                FileId::of_numbers(major, minor, file.stx_ino),
                Self { path, size },
            )
        })
    }
}

fn is_regular(file: &Statx) -> bool {
    FileType::from_raw_mode(file.stx_mode.into()) == FileType::RegularFile
}

/// The bind mounts of a spec, apart from its pod's /dev/shm. A container that may mount can have others in
/// them, and is left to CRIU.
struct Volumes {
    mounts: Vec<SpecMount>,
    pod_shm: Option<PathBuf>,
}

impl Volumes {
    fn of(spec: &Spec) -> Result<Self, SpecError> {
        Ok(Self {
            mounts: if spec.may_mount() {
                Vec::new()
            } else {
                spec.mounts()?
            },
            pod_shm: spec.pod_shm()?,
        })
    }

    /// The files in them that processes have open or mapped now. A process, or a file of it, may be gone
    /// meanwhile.
    fn open_files(&self, pids: &[i32]) -> BTreeMap<PathBuf, (FileId, VolumeFile)> {
        let mut found: BTreeMap<PathBuf, (FileId, VolumeFile)> = BTreeMap::new();
        let mut left = MOST_BYTES;
        for &pid in pids {
            let is_wanted = |path: &Path| !procfs::is_deleted(path) && self.mount_of(path).is_some();
            let named = procfs::named_files(pid, is_wanted);
            for (id, file) in named.filter_map(|(entry, path)| VolumeFile::behind(&entry, path)) {
                let bytes = file.path.as_os_str().len();
                if let Some((_, known)) = found.get_mut(&file.path) {
                    known.size = known.size.and(file.size);
                } else if let Some(rest) = left.checked_sub(bytes) {
                    left = rest;
                    found.insert(file.path.clone(), (id, file));
                }
            }
        }
        found
    }

    /// The one in which a path is: of those with the longest destination the last.
    fn mount_of(&self, path: &Path) -> Option<&SpecMount> {
        let within = self
            .mounts
            .iter()
            .filter(|mount| path.starts_with(&mount.destination));
        let mount = within.max_by_key(|mount| mount.destination.components().count())?;
        (mount.is_bind() && Some(&mount.source) != self.pod_shm.as_ref()).then_some(mount)
    }
}

/// Looks whether files that a running container has are here, as large as they are there. `bundle` is where
/// the sources of mounts may be relative to.
pub fn expect_files(files: &[VolumeFile], spec: &Spec, bundle: &Path) -> Result<(), ImageFault> {
    let volumes = Volumes::of(spec)?;
    files.iter().try_for_each(|file| volumes.expect(file, bundle))
}

/// Looks whether the files are there as they were, on the bind mounts of the spec. `bundle` is where the
/// sources of mounts may be relative to.
/// `kept`: destinations of the mounts that the copy will have, if not all of the spec.
pub fn expect_volumes(
    spec: &Spec,
    image: &Path,
    bundle: &Path,
    kept: Option<&[RequiredMount]>,
) -> Result<(), ImageFault> {
    let image = Image::open(image)?;
    let Some(files) = image.read(NAME, MAGIC, read)? else {
        return Ok(());
    };
    let remaps = image.read(REMAPS, REMAPS_MAGIC, |remap| {
        Ok([remap.required(1)?, remap.required(2)?])
    })?;
    let remapped: HashSet<u32> = remaps.into_iter().flatten().flatten().collect();
    let mut volumes = Volumes::of(spec)?;
    if let Some(kept) = kept {
        let is_kept = |mount: &SpecMount| kept.iter().any(|kept| kept.destination == mount.destination);
        volumes.mounts.retain(|mount| !mount.is_bind() || is_kept(mount));
    }
    let files = files.into_iter().flatten();
    let mut files = files.filter(|(id, _)| !remapped.contains(id));
    files.try_for_each(|(_, file)| volumes.expect(&file, bundle))
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

/// Its number, and the file, if CRIU compares its size.
fn read(file: &Message<'_>) -> Result<Option<(u32, VolumeFile)>, WireError> {
    let Some(regular) = file.message(3)? else {
        return Ok(None);
    };
    let is_external = regular.number(9)?.unwrap_or(0) != 0;
    let (Some(name), size @ Some(_), false) = (regular.bytes(6)?, regular.long(8)?, is_external) else {
        return Ok(None);
    };
    let path = PathBuf::from(OsStr::from_bytes(name));
    Ok(Some((regular.required(1)?, VolumeFile { path, size })))
}

impl Volumes {
    /// A file that cannot be looked at is left to CRIU, and a mount whose source is not here to runc.
    fn expect(&self, file: &VolumeFile, bundle: &Path) -> Result<(), ImageFault> {
        let Some(mount) = self.mount_of(&file.path) else {
            return Ok(());
        };
        let below = file.path.strip_prefix(&mount.destination);
        let (source, below) = (bundle.join(&mount.source), below.unwrap_or(Path::new("")));
        let (path, shown_file) = (shown(file.path.display()), shown(source.join(below).display()));
        let found = match opened(&source, below) {
            // Another node may have written to it: what this one knows of it may be old.
            Ok(found) => {
                let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
                let size = StatxFlags::TYPE | StatxFlags::SIZE;
                file.size.and_then(|_| statx(found, "", flags, size).ok())
            }
            Err(Errno::ENOENT) if source.exists() => {
                let file = shown_file;
                return Err(ImageFault::Gone { path, file });
            }
            Err(_) => None,
        };
        match (found.filter(is_regular), file.size) {
            (Some(found), Some(then)) if found.stx_size != then => Err(ImageFault::Size {
                path,
                file: shown_file,
                then,
                now: found.stx_size,
            }),
            _ => Ok(()),
        }
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
