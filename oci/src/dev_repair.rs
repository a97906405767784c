//! GPU nodes in the /dev of a restored container.
//!
//! CRIU restores /dev as it was at the dump, with the source's nodes and numbers; it does not know the spec
//! of the restored container. [`repair`] replaces the GPU nodes by those of the spec. It runs when CRIU has
//! mounted the container's file systems and has opened no file ([`crate::criu_script`]). For NVIDIA GPUs it
//! runs once more between `runc restore`, which leaves the tasks stopped, and the driver's restore, which
//! opens the nodes. A container whose GPU state moves to other GPUs while it runs needs the same.
//!
//! The content of a container is hostile. Directories are opened beneath the container's root, and no link or
//! mount below /dev is followed. Entries are removed and made relative to these directories, and a new node
//! is checked before its owner and mode are set. The host's own /dev is never changed, and nodes that are not
//! GPU nodes are ignored. Accelerators are GPU nodes here only in a container whose checkpoints hold nothing
//! of any device: no process has one open, and the spec alone decides which nodes there are.

mod directory;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use firn_gpu::DeviceNode;
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag, open};
use nix::sys::stat::{Mode, fstat, lstat, major, minor, mkdirat};

use crate::device_class::{DIRECTORIES, GRAPHICS};
use crate::vendor::{ACCELERATORS, is_any_accelerator, is_gpu};
use crate::{Spec, SpecDevice, SpecError, job_hook, other_gpu};
use firn_host::mountinfo::{self, MountEntry};
use firn_host::{Chain, Problem, open_below};

use directory::{Directory, EntryKind, device_id};

/// Where a container's device nodes are.
const DEV: &str = "/dev";

/// A /dev that cannot be repaired.
#[derive(Debug, thiserror::Error, Problem)]
pub enum DevError {
    /// A step failed.
    #[error("cannot {action} {} of the container", path.display())]
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
    repair_unless(&AtomicBool::new(false), pid, spec)
}

/// As [`repair`], but makes no further change once `stop` is set: nobody waits for it any more, and what has
/// become of /dev since then stays.
pub fn repair_unless(stop: &AtomicBool, pid: i32, spec: &Spec) -> Result<DevRepair, DevError> {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    repair_below(&root, Path::new(DEV), spec, stop)
}

/// Whether [`repair`] can do it; changes nothing. Unlike there, a node that would have to go must not be a
/// mount: whoever has mounted it may do so again.
pub fn can_repair(pid: i32, spec: &Spec) -> Result<(), DevError> {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let fd = open_mounted(&open_root(&root)?, Path::new(DEV)).map_err(step("open", Path::new(DEV)))?;
    let Some(dev) = fd.map(|fd| Dev::of(fd, spec)) else {
        return Ok(());
    };
    let devices = spec.devices()?;
    let host = host_device(Path::new(DEV))?;
    for work in dev.plan(host, spec, &devices, &mut DevRepair::default())? {
        if let Some(path) = work.mounted()? {
            return Err(step("replace", &path)(Errno::EBUSY));
        }
    }
    Ok(())
}

/// Does the same as [`repair`] while CRIU restores the container and has none of its files open.
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
        let dev = Dev::of(fd, spec);
        if dev.is_of(&mount.device) && dev.has_gpus() {
            let stop = AtomicBool::new(false);
            dev.repair(host_device(Path::new(DEV))?, spec, &mut done, &stop)?;
        }
    }
    Ok(done)
}

/// This host's nodes of AMD's GPUs, its graphics nodes of any GPU, and its accelerators.
pub fn other_gpus_of_host() -> Vec<DeviceNode> {
    let directories = [".", GRAPHICS].into_iter().chain(ACCELERATORS).map(directory);
    let entries = directories.flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten().flatten());
    let paths = entries.map(|entry| entry.path());
    paths
        .filter(|path| other_gpu(path).is_some())
        .filter_map(|path| of_host(&path))
        .collect()
}

/// The device node at this path of the host; none when there is none, or something else.
fn of_host(path: &Path) -> Option<DeviceNode> {
    let id = device_id(&lstat(path).ok()?)?;
    Some(DeviceNode {
        path: path.to_owned(),
        kind: id.kind,
        major: id.major,
        minor: id.minor,
    })
}

fn repair_below(root: &Path, host_dev: &Path, spec: &Spec, stop: &AtomicBool) -> Result<DevRepair, DevError> {
    let mut done = DevRepair::default();
    let fd = open_mounted(&open_root(root)?, Path::new(DEV)).map_err(step("open", Path::new(DEV)))?;
    if let Some(fd) = fd {
        Dev::of(fd, spec).repair(host_device(host_dev)?, spec, &mut done, stop)?;
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
    /// Whether accelerators are repaired, too.
    accelerators: bool,
}

impl Dev {
    fn of(fd: OwnedFd, spec: &Spec) -> Self {
        let accelerators = job_hook::releases_devices(spec);
        Self { fd, accelerators }
    }

    /// Whether this is a name of a node that is repaired.
    fn is_ours(&self) -> fn(&Path) -> bool {
        if self.accelerators {
            is_any_accelerator
        } else {
            is_gpu
        }
    }

    fn directories(&self) -> impl Iterator<Item = &'static str> {
        let more = if self.accelerators { &ACCELERATORS[..] } else { &[] };
        DIRECTORIES.iter().chain(more).copied()
    }

    /// Opens one of its directories, on the same mount and without following links; none if it does not
    /// exist.
    fn open(&self, name: &str) -> Result<Option<Directory>, Errno> {
        let resolve = BENEATH | ResolveFlag::RESOLVE_NO_XDEV;
        let (path, is_ours) = (directory(name), self.is_ours());
        match open_below(&self.fd, Path::new(name), DIRECTORY, resolve) {
            Err(Errno::ENOENT) => Ok(None),
            opened => Ok(Some(Directory {
                fd: opened?,
                path,
                is_ours,
            })),
        }
    }

    /// Makes one that does not exist.
    fn make(&self, name: &str) -> Result<Directory, Errno> {
        mkdirat(&self.fd, name, Mode::from_bits_truncate(0o755))?;
        self.open(name)?.ok_or(Errno::ENOENT)
    }

    /// Whether it is on this file system, `major:minor`.
    fn is_of(&self, device: &str) -> bool {
        let stat = fstat(&self.fd);
        stat.is_ok_and(|stat| format!("{}:{}", major(stat.st_dev), minor(stat.st_dev)) == device)
    }

    fn has_gpus(&self) -> bool {
        self.directories().any(|name| {
            let Ok(Some(directory)) = self.open(name) else {
                return false;
            };
            let is_device = |path: &PathBuf| matches!(directory.found(path), Ok(Some(EntryKind::Device(_))));
            let paths = directory.gpu_paths();
            paths.is_ok_and(|paths| paths.iter().any(is_device))
        })
    }

    fn repair(
        &self,
        host: u64,
        spec: &Spec,
        done: &mut DevRepair,
        stop: &AtomicBool,
    ) -> Result<(), DevError> {
        let devices = spec.devices()?;
        // Order matters: nothing is changed before it is known that everything may be.
        for work in self.plan(host, spec, &devices, done)? {
            match self.perform(&work, done, stop) {
                Err(error) if work.name == GRAPHICS => done.left = Some(Chain(&error).to_string()),
                performed => performed?,
            }
        }
        Ok(())
    }

    /// What is to be done; nothing in the host's own /dev.
    fn plan<'s>(
        &self,
        host: u64,
        spec: &Spec,
        devices: &'s [SpecDevice],
        done: &mut DevRepair,
    ) -> Result<Vec<Work<'s>>, DevError> {
        let stat = fstat(&self.fd).map_err(step("look at", Path::new(DEV)))?;
        if stat.st_dev == host {
            return Ok(Vec::new());
        }
        let mut all = Vec::new();
        for name in self.directories() {
            let path = directory(name);
            let is_wanted =
                |node: &DeviceNode| self.is_ours()(&node.path) && node.path.parent() == Some(&path);
            let wanted = devices.iter().filter(|device| is_wanted(&device.node)).collect();
            match self.plan_directory(name, wanted, spec.has_namespace("user")) {
                Err(error) if name == GRAPHICS => done.left = Some(Chain(&error).to_string()),
                planned => all.extend(planned?),
            }
        }
        Ok(all)
    }

    fn plan_directory<'s>(
        &self,
        name: &'static str,
        wanted: Vec<&'s SpecDevice>,
        user_namespace: bool,
    ) -> Result<Option<Work<'s>>, DevError> {
        let directory = match self.open(name) {
            // None, or a file system is mounted there: not firn's to change.
            Ok(None) | Err(Errno::EXDEV) if wanted.is_empty() => return Ok(None),
            opened => opened.map_err(step("open", &directory(name)))?,
        };
        let remove = directory.as_ref().map(|directory| directory.others(&wanted));
        let mut work = Work {
            name,
            remove: remove.transpose()?.unwrap_or_default(),
            make: Vec::new(),
            directory,
        };
        for device in wanted {
            let path = &device.node.path;
            let found = work.directory.as_ref().map(|directory| directory.found(path));
            match found.transpose()?.flatten() {
                Some(EntryKind::Device(id)) if id == device.node.id() => {}
                _ if user_namespace => return Err(DevError::UserNamespace { path: path.clone() }),
                Some(EntryKind::Directory) => return Err(step("remove", path)(Errno::EISDIR)),
                found => work.make.push((device, found.is_some())),
            }
        }
        Ok(Some(work))
    }

    fn perform(&self, work: &Work<'_>, done: &mut DevRepair, stop: &AtomicBool) -> Result<(), DevError> {
        let is_stopped = || stop.load(Ordering::Relaxed);
        if is_stopped() {
            return Ok(());
        }
        let made;
        let directory = match &work.directory {
            Some(directory) => directory,
            None => {
                made = self
                    .make(work.name)
                    .map_err(step("make", &directory(work.name)))?;
                &made
            }
        };
        for path in work.remove.iter().take_while(|_| !is_stopped()) {
            directory.remove(path)?;
            done.removed.push(path.clone());
        }
        for (device, exists) in work.make.iter().take_while(|_| !is_stopped()) {
            if *exists {
                directory.remove(&device.node.path)?;
            }
            directory.make(device)?;
            done.made.push(device.node.path.clone());
        }
        Ok(())
    }
}

/// What is to be done in a directory of nodes.
struct Work<'s> {
    name: &'static str,
    /// None if it does not exist; it is then made.
    directory: Option<Directory>,
    /// GPU nodes that are not wanted.
    remove: Vec<PathBuf>,
    /// Nodes to be made, and whether something is in their place.
    make: Vec<(&'s SpecDevice, bool)>,
}

impl Work<'_> {
    /// An entry that would have to go and is a mount.
    fn mounted(&self) -> Result<Option<PathBuf>, DevError> {
        let Some(directory) = &self.directory else {
            return Ok(None);
        };
        let replaced = self.make.iter().filter(|(_, exists)| *exists);
        let replaced = replaced.map(|(device, _)| &device.node.path);
        for path in self.remove.iter().chain(replaced) {
            if directory.is_mount(path)? {
                return Ok(Some(path.clone()));
            }
        }
        Ok(None)
    }
}

/// The path of a directory of device nodes.
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

#[cfg(test)]
mod tests;
