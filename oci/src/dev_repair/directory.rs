//! A directory of device nodes in a container, whose content is hostile.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use firn_gpu::{DeviceId, NodeType};
use firn_host::open_below;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, ResolveFlag, openat};
use nix::sys::stat::{Mode, SFlag, fstat, fstatat, major, makedev, minor, mknodat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, unlinkat};

use super::{BENEATH, DevError, step};
use crate::SpecDevice;

/// A directory of the container that holds device nodes. Of the path of an entry, which is that in the
/// container, only the last part is used.
pub(super) struct Directory {
    pub(super) fd: OwnedFd,
    pub(super) path: PathBuf,
    /// Whether this is a name of a node that is repaired.
    pub(super) is_ours: fn(&Path) -> bool,
}

impl Directory {
    /// GPU nodes that are not among the wanted ones.
    pub(super) fn others(&self, wanted: &[&SpecDevice]) -> Result<Vec<PathBuf>, DevError> {
        let mut others = Vec::new();
        for path in self.gpu_paths()? {
            let is_wanted = wanted.iter().any(|device| device.node.path == path);
            if !is_wanted && let Some(EntryKind::Device(_)) = self.found(&path)? {
                others.push(path);
            }
        }
        Ok(others)
    }

    /// Entries that are named as nodes of GPUs are.
    pub(super) fn gpu_paths(&self) -> Result<Vec<PathBuf>, DevError> {
        let paths = || -> io::Result<Vec<PathBuf>> {
            let entries = std::fs::read_dir(by_descriptor(&self.fd))?;
            let paths = entries.map(|entry| Ok(self.path.join(entry?.file_name())));
            paths
                .filter(|path| path.as_ref().map_or(true, |path| (self.is_ours)(path)))
                .collect()
        };
        paths().map_err(step("list", &self.path))
    }

    /// What has this name; links are not followed.
    pub(super) fn found(&self, path: &Path) -> Result<Option<EntryKind>, DevError> {
        match fstatat(&self.fd, name_of(path), AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(EntryKind::of(&stat))),
            Err(Errno::ENOENT) => Ok(None),
            Err(e) => Err(step("look at", path)(e)),
        }
    }

    /// Whether something is mounted on the entry.
    pub(super) fn is_mount(&self, path: &Path) -> Result<bool, DevError> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let resolve = BENEATH | ResolveFlag::RESOLVE_NO_XDEV;
        match open_below(&self.fd, Path::new(name_of(path)), flags, resolve) {
            Err(Errno::EXDEV) => Ok(true),
            opened => opened.map(|_| false).map_err(step("open", path)),
        }
    }

    pub(super) fn remove(&self, path: &Path) -> Result<(), DevError> {
        unlinkat(&self.fd, name_of(path), UnlinkatFlags::NoRemoveDir).map_err(step("remove", path))
    }

    pub(super) fn make(&self, wanted: &SpecDevice) -> Result<(), DevError> {
        let path = &wanted.node.path;
        let kind = match wanted.node.kind {
            NodeType::Char => SFlag::S_IFCHR,
            NodeType::Block => SFlag::S_IFBLK,
        };
        let number = makedev(wanted.node.major, wanted.node.minor);
        mknodat(&self.fd, name_of(path), kind, Mode::empty(), number).map_err(step("make", path))?;
        // From here on by descriptor, so that the owner and mode are set on the node that was just made.
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let node = openat(&self.fd, name_of(path), flags, Mode::empty()).map_err(step("open", path))?;
        let stat = fstat(&node).map_err(step("look at", path))?;
        if device_id(&stat) != Some(wanted.node.id()) {
            return Err(step("make", path)(Errno::EEXIST));
        }
        let (uid, gid) = (Uid::from_raw(wanted.uid), Gid::from_raw(wanted.gid));
        fchownat(node.as_fd(), "", Some(uid), Some(gid), AtFlags::AT_EMPTY_PATH)
            .map_err(step("set the owner of", path))?;
        std::fs::set_permissions(by_descriptor(&node), Permissions::from_mode(wanted.mode))
            .map_err(step("set the mode of", path))
    }
}

fn name_of(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

fn by_descriptor(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// What a directory entry is.
pub(super) enum EntryKind {
    Device(DeviceId),
    Directory,
    Other,
}

impl EntryKind {
    fn of(stat: &nix::sys::stat::FileStat) -> Self {
        match device_id(stat) {
            Some(id) => Self::Device(id),
            None if stat.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFDIR.bits() => Self::Directory,
            None => Self::Other,
        }
    }
}

/// Which device the node of this status opens.
pub(super) fn device_id(stat: &nix::sys::stat::FileStat) -> Option<DeviceId> {
    let format = SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits());
    let kind = match format {
        SFlag::S_IFCHR => NodeType::Char,
        SFlag::S_IFBLK => NodeType::Block,
        _ => return None,
    };
    Some(DeviceId {
        kind,
        major: major(stat.st_rdev),
        minor: minor(stat.st_rdev),
    })
}
