//! GPU nodes in the /dev of a restored container.
//!
//! CRIU brings /dev back as it was at the dump: with the source's nodes and numbers, whatever the spec of the restored
//! container says. [`repair`] makes the GPU nodes those of the spec. It runs between `runc restore`, which leaves the
//! tasks stopped, and the driver's restore, which opens the nodes.
//!
//! The content of a container is hostile: directories are opened beneath the container's root without following any
//! link, entries are removed and made relative to them, and a new node is checked before its owner and mode are set. A
//! /dev that is the host's own is left alone. Nodes that are not about GPUs are not looked at.

use std::ffi::{CString, OsStr};
use std::fs::Permissions;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use firn_gpu::{DeviceNode, NodeType};
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{Mode, SFlag, fstat, fstatat, major, makedev, minor, mkdirat, mknodat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, unlinkat};

use crate::gpu_path::{DIRECTORIES, classify};
use crate::{Spec, SpecDevice, SpecError};

/// A /dev that cannot be repaired.
#[derive(Debug, thiserror::Error)]
pub enum DevError {
    /// A step failed.
    #[error("cannot {action} {} of the restored container", path.display())]
    Step {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// A node would have to be made in a user namespace, where no device can be opened through it.
    #[error("cannot make {}: the container has a user namespace", path.display())]
    UserNamespace { path: PathBuf },
    /// The spec's devices cannot be read.
    #[error("cannot read the devices of the spec")]
    Spec(#[from] SpecError),
}

impl DevError {
    /// The code shown to users.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Step { .. } => "FIRN-DEV-REPAIR",
            Self::UserNamespace { .. } => "FIRN-DEV-USERNS",
            Self::Spec(error) => error.code(),
        }
    }

    /// What the operator can do.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Step { .. } => {
                "the container's /dev must be a directory that holds the nodes themselves, no mounts"
            }
            Self::UserNamespace { .. } => {
                "restore onto the same GPUs, or run the container without user namespace"
            }
            Self::Spec(error) => error.hint(),
        }
    }
}

/// What [`repair`] has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DevRepair {
    /// Nodes made, or replaced because they opened another device.
    pub made: Vec<PathBuf>,
    /// Nodes of GPUs that the spec does not give.
    pub removed: Vec<PathBuf>,
}

/// Makes the GPU nodes in the /dev of this process's root those of the spec. Safe to repeat.
pub fn repair(pid: i32, spec: &Spec) -> Result<DevRepair, DevError> {
    repair_below(
        &PathBuf::from(format!("/proc/{pid}/root")),
        Path::new("/dev"),
        spec,
    )
}

fn repair_below(root: &Path, host_dev: &Path, spec: &Spec) -> Result<DevRepair, DevError> {
    let devices = spec.devices()?;
    let wanted: Vec<&SpecDevice> = devices
        .iter()
        .filter(|d| classify(&d.node.path).is_some())
        .collect();
    let step = |action, path: &Path| {
        let path = path.to_owned();
        move |source: std::io::Error| DevError::Step { action, path, source }
    };
    let host = host_dev.metadata().map_err(step("look at", host_dev))?.dev();
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root_fd = open(root, flags, Mode::empty()).map_err(|e| step("open", root)(e.into()))?;

    let mut done = DevRepair::default();
    for name in DIRECTORIES {
        let path = if name.is_empty() {
            PathBuf::from("/dev")
        } else {
            Path::new("/dev").join(name)
        };
        let in_here: Vec<&SpecDevice> = wanted
            .iter()
            .copied()
            .filter(|d| d.node.path.parent() == Some(&path))
            .collect();
        let opened = open_directory(&root_fd, &path, !in_here.is_empty() && !name.is_empty());
        let Some(fd) = opened.map_err(|e| step("open", &path)(e.into()))? else {
            continue;
        };
        let device = fstat(&fd).map_err(|e| step("look at", &path)(e.into()))?.st_dev;
        if device == host {
            continue;
        }
        let mut directory = Directory {
            fd,
            path,
            user_namespace: spec.has_namespace("user"),
        };
        directory.remove_others(&in_here, &mut done)?;
        for node in in_here {
            directory.provide(node, &mut done)?;
        }
    }
    Ok(done)
}

/// Opens a directory beneath the container's root, without following links; none if it is not there and not to be made.
fn open_directory(root: &OwnedFd, path: &Path, make: bool) -> Result<Option<OwnedFd>, Errno> {
    let relative = path.strip_prefix("/").unwrap_or(path);
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_MAGICLINKS,
        );
    match openat2(root, relative, how) {
        Err(Errno::ENOENT) if make => {
            let (parent, name) = (relative.parent(), relative.file_name());
            let (Some(parent), Some(name)) = (parent, name) else {
                return Err(Errno::ENOENT);
            };
            let parent = openat2(root, parent, how)?;
            mkdirat(&parent, name, Mode::from_bits_truncate(0o755))?;
            openat2(root, relative, how).map(Some)
        }
        Err(Errno::ENOENT) => Ok(None),
        other => other.map(Some),
    }
}

/// A directory of the container that holds device nodes.
struct Directory {
    fd: OwnedFd,
    path: PathBuf,
    user_namespace: bool,
}

impl Directory {
    /// Removes GPU nodes that are not among the wanted ones.
    fn remove_others(&mut self, wanted: &[&SpecDevice], done: &mut DevRepair) -> Result<(), DevError> {
        for name in self.gpu_names()? {
            let path = self.path.join(OsStr::from_bytes(name.as_bytes()));
            if wanted.iter().any(|device| device.node.path == path) {
                continue;
            }
            if let Some(Entry::Device(_)) = self.entry(name.as_c_str(), &path)? {
                self.remove(&name, &path)?;
                done.removed.push(path);
            }
        }
        Ok(())
    }

    /// Makes the node, unless it is there and opens the right device.
    fn provide(&mut self, wanted: &SpecDevice, done: &mut DevRepair) -> Result<(), DevError> {
        let path = &wanted.node.path;
        let name = self.name(path)?;
        let found = self.entry(&name, path)?;
        if matches!(&found, Some(Entry::Device(id)) if *id == DeviceId::of(&wanted.node)) {
            return Ok(());
        }
        if self.user_namespace {
            return Err(DevError::UserNamespace { path: path.clone() });
        }
        if found.is_some() {
            self.remove(&name, path)?;
        }
        self.make(&name, wanted)?;
        done.made.push(path.clone());
        Ok(())
    }

    fn gpu_names(&self) -> Result<Vec<CString>, DevError> {
        let names = || -> Result<Vec<CString>, Errno> {
            let again = openat(
                &self.fd,
                ".",
                OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
                Mode::empty(),
            )?;
            let mut names = Vec::new();
            for entry in Dir::from_fd(again)?.iter() {
                let name = entry?.file_name().to_owned();
                if classify(&self.path.join(OsStr::from_bytes(name.as_bytes()))).is_some() {
                    names.push(name);
                }
            }
            Ok(names)
        };
        names().map_err(|e| self.failed("list", &self.path, e))
    }

    /// What lies under this name; links are not followed.
    fn entry(&self, name: &std::ffi::CStr, path: &Path) -> Result<Option<Entry>, DevError> {
        match fstatat(&self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(DeviceId::of_stat(&stat).map_or(Entry::Other, Entry::Device))),
            Err(Errno::ENOENT) => Ok(None),
            Err(e) => Err(self.failed("look at", path, e)),
        }
    }

    fn remove(&self, name: &std::ffi::CStr, path: &Path) -> Result<(), DevError> {
        unlinkat(&self.fd, name, UnlinkatFlags::NoRemoveDir).map_err(|e| self.failed("remove", path, e))
    }

    fn make(&self, name: &std::ffi::CStr, wanted: &SpecDevice) -> Result<(), DevError> {
        let path = &wanted.node.path;
        let kind = match wanted.node.kind {
            NodeType::Char => SFlag::S_IFCHR,
            NodeType::Block => SFlag::S_IFBLK,
        };
        let number = makedev(wanted.node.major, wanted.node.minor);
        mknodat(&self.fd, name, kind, Mode::empty(), number).map_err(|e| self.failed("make", path, e))?;
        // From here on by descriptor: what is given an owner and a mode is the node just made.
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let node = openat(&self.fd, name, flags, Mode::empty()).map_err(|e| self.failed("open", path, e))?;
        let stat = fstat(&node).map_err(|e| self.failed("look at", path, e))?;
        if DeviceId::of_stat(&stat) != Some(DeviceId::of(&wanted.node)) {
            return Err(self.failed("make", path, Errno::EEXIST));
        }
        let (uid, gid) = (Uid::from_raw(wanted.uid), Gid::from_raw(wanted.gid));
        fchownat(node.as_fd(), "", Some(uid), Some(gid), AtFlags::AT_EMPTY_PATH)
            .map_err(|e| self.failed("set the owner of", path, e))?;
        let by_descriptor = format!("/proc/self/fd/{}", node.as_raw_fd());
        std::fs::set_permissions(by_descriptor, Permissions::from_mode(wanted.mode)).map_err(|source| {
            DevError::Step {
                action: "set the mode of",
                path: path.clone(),
                source,
            }
        })
    }

    fn name(&self, path: &Path) -> Result<CString, DevError> {
        let name = path.file_name().map(OsStr::as_bytes).unwrap_or_default();
        CString::new(name).map_err(|_| self.failed("make", path, Errno::EINVAL))
    }

    fn failed(&self, action: &'static str, path: &Path, errno: Errno) -> DevError {
        DevError::Step {
            action,
            path: path.to_owned(),
            source: errno.into(),
        }
    }
}

/// What a directory entry is.
enum Entry {
    Device(DeviceId),
    Other,
}

/// Which device a node opens.
#[derive(PartialEq, Eq)]
struct DeviceId {
    kind: NodeType,
    major: u64,
    minor: u64,
}

impl DeviceId {
    fn of(node: &DeviceNode) -> Self {
        Self {
            kind: node.kind,
            major: node.major,
            minor: node.minor,
        }
    }

    fn of_stat(stat: &nix::sys::stat::FileStat) -> Option<Self> {
        let format = SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits());
        let kind = match format {
            SFlag::S_IFCHR => NodeType::Char,
            SFlag::S_IFBLK => NodeType::Block,
            _ => return None,
        };
        Some(Self {
            kind,
            major: major(stat.st_rdev),
            minor: minor(stat.st_rdev),
        })
    }
}

#[cfg(test)]
mod tests;
