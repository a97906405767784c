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

use std::ffi::OsStr;
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use firn_gpu::{DeviceNode, NodeType};
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
    let (kind, major, minor) = device_id(&lstat(path).ok()?)?;
    Some(DeviceNode {
        path: path.to_owned(),
        kind,
        major,
        minor,
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

fn step<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> DevError {
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
    /// Opens one of [`DIRECTORIES`], on the same mount and without following links; none if it does not
    /// exist. With `make` a missing one is created.
    fn open(&self, name: &str, make: bool) -> Result<Option<Directory>, Errno> {
        let resolve = BENEATH | ResolveFlag::RESOLVE_NO_XDEV;
        let open = || open_below(&self.fd, Path::new(name), DIRECTORY, resolve);
        let fd = match open() {
            Err(Errno::ENOENT) if make => {
                mkdirat(&self.fd, name, Mode::from_bits_truncate(0o755))?;
                open()?
            }
            Err(Errno::ENOENT) => return Ok(None),
            other => other?,
        };
        let path = directory(name);
        Ok(Some(Directory { fd, path }))
    }

    /// Whether it is on this file system, `major:minor`.
    fn is_of(&self, device: &str) -> bool {
        let stat = fstat(&self.fd);
        stat.is_ok_and(|stat| format!("{}:{}", major(stat.st_dev), minor(stat.st_dev)) == device)
    }

    fn has_gpus(&self) -> bool {
        DIRECTORIES.iter().any(|name| {
            let Ok(Some(directory)) = self.open(name, false) else {
                return false;
            };
            let is_device = |path: &PathBuf| matches!(directory.found(path), Ok(Some(Found::Device(_))));
            let paths = directory.gpu_paths();
            paths.is_ok_and(|paths| paths.iter().any(is_device))
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
        let directory = match self.open(name, !wanted.is_empty()) {
            // A file system is mounted there: not firn's to change.
            Err(Errno::EXDEV) if wanted.is_empty() => return Ok(()),
            Ok(None) => return Ok(()),
            Ok(Some(directory)) => directory,
            Err(error) => return Err(step("open", &path)(error)),
        };
        let stat = fstat(&directory.fd).map_err(step("look at", &path))?;
        if stat.st_dev == host {
            return Ok(());
        }
        directory.remove_others(&wanted, done)?;
        for node in wanted {
            directory.provide(node, user_namespace, done)?;
        }
        Ok(())
    }
}

/// The path of one of [`DIRECTORIES`].
fn directory(name: &str) -> PathBuf {
    Path::new(DEV).join(name).components().collect()
}

/// No links, also not those of /proc.
const BENEATH: ResolveFlag = ResolveFlag::RESOLVE_BENEATH.union(ResolveFlag::RESOLVE_NO_SYMLINKS);

const DIRECTORY: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY);

/// Opens the directory at this path beneath a container's root without following links; none if it does not
/// exist. A file system may be mounted on it.
fn open_mounted(root: &OwnedFd, path: &Path) -> Result<Option<OwnedFd>, Errno> {
    // The root itself is its own `.`.
    let relative = Path::new(".").join(path.strip_prefix("/").unwrap_or(path));
    match open_below(root, &relative, DIRECTORY, BENEATH) {
        Err(Errno::ENOENT) => Ok(None),
        other => other.map(Some),
    }
}

/// A directory of the container that holds device nodes. Of the path of an entry, which is that in the
/// container, only the last part is used.
struct Directory {
    fd: OwnedFd,
    path: PathBuf,
}

impl Directory {
    /// Removes GPU nodes that are not among the wanted ones.
    fn remove_others(&self, wanted: &[&SpecDevice], done: &mut DevRepair) -> Result<(), DevError> {
        for path in self.gpu_paths()? {
            let is_wanted = wanted.iter().any(|device| device.node.path == path);
            if !is_wanted && let Some(Found::Device(_)) = self.found(&path)? {
                self.remove(&path)?;
                done.removed.push(path);
            }
        }
        Ok(())
    }

    /// Makes the node, unless it exists and opens the right device.
    fn provide(
        &self,
        wanted: &SpecDevice,
        user_namespace: bool,
        done: &mut DevRepair,
    ) -> Result<(), DevError> {
        let path = &wanted.node.path;
        match self.found(path)? {
            Some(Found::Device(id)) if id == wanted.node.id() => return Ok(()),
            _ if user_namespace => return Err(DevError::UserNamespace { path: path.clone() }),
            Some(_) => self.remove(path)?,
            None => {}
        }
        self.make(wanted)?;
        done.made.push(path.clone());
        Ok(())
    }

    /// Entries that are named as nodes of GPUs are.
    fn gpu_paths(&self) -> Result<Vec<PathBuf>, DevError> {
        let paths = || -> io::Result<Vec<PathBuf>> {
            let entries = std::fs::read_dir(by_descriptor(&self.fd))?;
            let paths = entries.map(|entry| Ok(self.path.join(entry?.file_name())));
            paths
                .filter(|path| path.as_ref().map_or(true, |path| is_gpu(path)))
                .collect()
        };
        paths().map_err(step("list", &self.path))
    }

    /// What has this name; links are not followed.
    fn found(&self, path: &Path) -> Result<Option<Found>, DevError> {
        match fstatat(&self.fd, name_of(path), AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(device_id(&stat).map_or(Found::Other, Found::Device))),
            Err(Errno::ENOENT) => Ok(None),
            Err(e) => Err(step("look at", path)(e)),
        }
    }

    fn remove(&self, path: &Path) -> Result<(), DevError> {
        unlinkat(&self.fd, name_of(path), UnlinkatFlags::NoRemoveDir).map_err(step("remove", path))
    }

    fn make(&self, wanted: &SpecDevice) -> Result<(), DevError> {
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
enum Found {
    Device(DeviceId),
    Other,
}

/// Which device a node opens, as [`DeviceNode::id`] has it.
type DeviceId = (NodeType, u64, u64);

fn device_id(stat: &nix::sys::stat::FileStat) -> Option<DeviceId> {
    let format = SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits());
    let kind = match format {
        SFlag::S_IFCHR => NodeType::Char,
        SFlag::S_IFBLK => NodeType::Block,
        _ => return None,
    };
    Some((kind, major(stat.st_rdev), minor(stat.st_rdev)))
}

#[cfg(test)]
mod tests;
