//! GPU nodes in the /dev of a restored container.
//!
//! CRIU restores /dev as it was at the dump, with the source's nodes and numbers; it does not know the spec
//! of the restored container. [`repair`] replaces the GPU nodes by those of the spec. It runs when CRIU has
//! mounted the container's file systems and has opened no file ([`crate::criu_script`]). For NVIDIA GPUs it
//! runs once more between `runc restore`, which leaves the tasks stopped, and the driver's restore, which
//! opens the nodes.
//!
//! The content of a container is hostile. Directories are opened beneath the container's root, and no link or
//! mount below /dev is followed. Entries are removed and made relative to these directories, and a new node
//! is checked before its owner and mode are set. The host's own /dev is never changed, and nodes that are not
//! GPU nodes are ignored.

use std::ffi::{CString, OsStr};
use std::fs::Permissions;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use firn_gpu::{DeviceNode, NodeType};
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, ResolveFlag, open, openat};
use nix::sys::stat::{Mode, SFlag, fstat, fstatat, lstat, major, makedev, minor, mkdirat, mknodat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, unlinkat};

use crate::device_class::{DIRECTORIES, GRAPHICS};
use crate::vendor::is_gpu;
use crate::{Spec, SpecDevice, SpecError, other_gpu};
use firn_host::mountinfo::{self, MountEntry};
use firn_host::{Chain, Problem, open_below};

/// Where a container's device nodes are.
const DEV: &str = "/dev";

/// A /dev that cannot be repaired.
#[derive(Debug, thiserror::Error, Problem)]
pub enum DevError {
    /// A step failed.
    #[error("cannot {action} {} of the restored container", path.display())]
    #[problem(
        "FIRN-DEV-REPAIR",
        "the container's /dev must be a directory that holds the nodes themselves, no mounts"
    )]
    Step {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// A node would have to be made in a user namespace, where no device can be opened through it.
    #[error("cannot make {}: the container has a user namespace", path.display())]
    #[problem(
        "FIRN-DEV-USERNS",
        "restore onto the same GPUs, or run the container without user namespace"
    )]
    UserNamespace { path: PathBuf },
    /// The spec's devices cannot be read.
    #[error("cannot read the devices of the spec")]
    Spec(#[from] SpecError),
}

/// What [`repair`] has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DevRepair {
    /// Nodes made, or replaced because they opened another device.
    pub made: Vec<PathBuf>,
    /// Nodes of GPUs that the spec does not have.
    pub removed: Vec<PathBuf>,
    /// Why graphics nodes are unchanged. They are not used for compute, and the device cgroup allows only the
    /// spec's.
    pub left: Option<String>,
}

/// Replaces the GPU nodes in the /dev of this process's root by those of the spec. Safe to repeat.
pub fn repair(pid: i32, spec: &Spec) -> Result<DevRepair, DevError> {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    repair_below(&root, Path::new(DEV), spec)
}

/// Does the same while CRIU restores the container and has none of its files open.
///
/// The container's first process is then in a mount namespace of CRIU's. The container's file systems are
/// mounted there separately, under names that CRIU chooses; the container's own mount namespace cannot be
/// reached yet. /dev is recognised by its content: a tmpfs that is not mounted on the host and has GPU nodes.
pub fn repair_unassembled(init: i32, spec: &Spec) -> Result<DevRepair, DevError> {
    let root = PathBuf::from(format!("/proc/{init}/root"));
    let root_fd = open_root(&root)?;
    let mounts = mountinfo::of_process(init).map_err(step("list the mounts of", &root))?;
    let hosts = mountinfo::mounted().map_err(step("list the mounts around", &root))?;
    let is_hosts = |mount: &MountEntry| hosts.iter().any(|host| host.device == mount.device);
    let is_own =
        |mount: &&MountEntry| mount.fs_type == "tmpfs" && mount.root == Path::new("/") && !is_hosts(mount);
    let mut done = DevRepair::default();
    for mount in mounts.iter().filter(is_own) {
        // A mount that another one covers cannot be opened, and is not /dev.
        let Ok(Some(fd)) = open_mounted(&root_fd, &mount.mount_point) else {
            continue;
        };
        let dev = Dev { fd };
        if dev.is_of(&mount.device) && dev.has_gpus() {
            dev.repair(host_device(Path::new(DEV))?, spec, &mut done)?;
        }
    }
    Ok(done)
}

/// This host's nodes of AMD's GPUs, and its graphics nodes of any GPU.
pub fn other_gpus_of_host() -> Vec<DeviceNode> {
    let graphics = std::fs::read_dir("/dev/dri").into_iter().flatten().flatten();
    let paths = graphics.map(|entry| entry.path()).chain(["/dev/kfd".into()]);
    paths
        .filter(|path| other_gpu(path).is_some())
        .filter_map(|path| of_host(&path))
        .collect()
}

/// The device node at this path of the host; none when there is none, or something else.
fn of_host(path: &Path) -> Option<DeviceNode> {
    let id = DeviceId::of_stat(&lstat(path).ok()?)?;
    Some(DeviceNode {
        path: path.to_owned(),
        kind: id.kind,
        major: id.major,
        minor: id.minor,
    })
}

fn repair_below(root: &Path, host_dev: &Path, spec: &Spec) -> Result<DevRepair, DevError> {
    let mut done = DevRepair::default();
    let fd = open_mounted(&open_root(root)?, Path::new(DEV)).map_err(step("open", Path::new(DEV)))?;
    if let Some(fd) = fd {
        Dev { fd }.repair(host_device(host_dev)?, spec, &mut done)?;
    }
    Ok(done)
}

fn step<E: Into<std::io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> DevError {
    let path = path.to_owned();
    move |source| DevError::Step {
        action,
        path,
        source: source.into(),
    }
}

/// The file system of the host's /dev.
fn host_device(host_dev: &Path) -> Result<u64, DevError> {
    let metadata = host_dev.metadata().map_err(step("look at", host_dev))?;
    Ok(metadata.dev())
}

fn open_root(root: &Path) -> Result<OwnedFd, DevError> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    open(root, flags, Mode::empty()).map_err(step("open", root))
}

/// A container's /dev.
struct Dev {
    fd: OwnedFd,
}

impl Dev {
    /// A directory of it, by its path in the container.
    fn open(&self, path: &Path, make: bool) -> Result<Option<OwnedFd>, Errno> {
        open_directory(&self.fd, path.strip_prefix(DEV).unwrap_or(path), make)
    }

    /// Whether it is on this file system, `major:minor`.
    fn is_of(&self, device: &str) -> bool {
        let stat = fstat(&self.fd);
        stat.is_ok_and(|stat| format!("{}:{}", major(stat.st_dev), minor(stat.st_dev)) == device)
    }

    fn has_gpus(&self) -> bool {
        DIRECTORIES.iter().any(|name| {
            let path = directory(name);
            let Ok(Some(fd)) = self.open(&path, false) else {
                return false;
            };
            let directory = Directory {
                fd,
                path,
                user_namespace: false,
            };
            let is_device = |name: &CString| {
                let entry = directory.entry(name, &directory.path);
                matches!(entry, Ok(Some(Entry::Device(_))))
            };
            directory
                .gpu_names()
                .is_ok_and(|names| names.iter().any(is_device))
        })
    }

    fn repair(&self, host: u64, spec: &Spec, done: &mut DevRepair) -> Result<(), DevError> {
        let devices = spec.devices()?;
        let is_wanted = |device: &&SpecDevice| is_gpu(&device.node.path);
        let wanted: Vec<&SpecDevice> = devices.iter().filter(is_wanted).collect();
        let user_namespace = spec.has_namespace("user");
        for name in DIRECTORIES {
            match self.repair_directory(name, host, &wanted, user_namespace, done) {
                Err(error) if name == GRAPHICS => done.left = Some(Chain(&error).to_string()),
                repaired => repaired?,
            }
        }
        Ok(())
    }

    fn repair_directory(
        &self,
        name: &str,
        host: u64,
        wanted: &[&SpecDevice],
        user_namespace: bool,
        done: &mut DevRepair,
    ) -> Result<(), DevError> {
        let path = directory(name);
        let is_here = |device: &&SpecDevice| device.node.path.parent() == Some(&path);
        let wanted: Vec<&SpecDevice> = wanted.iter().copied().filter(is_here).collect();
        let fd = match self.open(&path, !wanted.is_empty() && !name.is_empty()) {
            // A file system is mounted there: not firn's to change.
            Err(Errno::EXDEV) if wanted.is_empty() => return Ok(()),
            Ok(None) => return Ok(()),
            Ok(Some(fd)) => fd,
            Err(error) => return Err(step("open", &path)(error)),
        };
        if fstat(&fd).map_err(step("look at", &path))?.st_dev == host {
            return Ok(());
        }
        let mut directory = Directory {
            fd,
            path,
            user_namespace,
        };
        directory.remove_others(&wanted, done)?;
        for node in wanted {
            directory.provide(node, done)?;
        }
        Ok(())
    }
}

/// The path of one of [`DIRECTORIES`].
fn directory(name: &str) -> PathBuf {
    match name {
        "" => PathBuf::from(DEV),
        name => Path::new(DEV).join(name),
    }
}

/// No links, also not those of /proc.
const BENEATH: ResolveFlag = ResolveFlag::RESOLVE_BENEATH.union(ResolveFlag::RESOLVE_NO_SYMLINKS);

const DIRECTORY: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY);

/// Opens the directory at this path beneath a container's root without following links; none if it does not
/// exist. A file system may be mounted on it.
fn open_mounted(root: &OwnedFd, path: &Path) -> Result<Option<OwnedFd>, Errno> {
    let relative = or_itself(path.strip_prefix("/").unwrap_or(path));
    match open_below(root, &relative, DIRECTORY, BENEATH) {
        Err(Errno::ENOENT) => Ok(None),
        other => other.map(Some),
    }
}

fn or_itself(path: &Path) -> PathBuf {
    match path.as_os_str().is_empty() {
        true => PathBuf::from("."),
        false => path.to_owned(),
    }
}

/// Opens a directory beneath another, on the same mount and without following links. With `make` a missing
/// one is created.
fn open_directory(dir: &OwnedFd, path: &Path, make: bool) -> Result<Option<OwnedFd>, Errno> {
    let open = |path: &Path| open_below(dir, path, DIRECTORY, BENEATH | ResolveFlag::RESOLVE_NO_XDEV);
    let relative = or_itself(path);
    match open(&relative) {
        Err(Errno::ENOENT) if make => {
            let (parent, name) = (relative.parent(), relative.file_name());
            let (Some(parent), Some(name)) = (parent, name) else {
                return Err(Errno::ENOENT);
            };
            let parent = open(&or_itself(parent))?;
            mkdirat(&parent, name, Mode::from_bits_truncate(0o755))?;
            open(&relative).map(Some)
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

    /// Makes the node, unless it exists and opens the right device.
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
                if is_gpu(&self.path.join(OsStr::from_bytes(name.as_bytes()))) {
                    names.push(name);
                }
            }
            Ok(names)
        };
        names().map_err(|e| self.failed("list", &self.path, e))
    }

    /// What has this name; links are not followed.
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
        // From here on by descriptor, so that the owner and mode are set on the node that was just made.
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
