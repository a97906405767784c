//! The calls that mount. On a thread of their own: see `mounts`.

use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use containerd_shim_protos::types::mount::Mount;
use firn_host::open_below;
use nix::fcntl::{OFlag, ResolveFlag};
use nix::mount::{MsFlags, mount};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::chdir;
use rustix::param::page_size;

use super::flags::Options;
use super::idmap::{self, Mapping};
use super::loopdev::LoopDevice;
use super::{MountError, overlay};

const OVERLAY: &str = "overlay";

/// Room for the rest of an overlay's options when layers are counted against the page.
const PAGE_RESERVE: usize = 512;

/// Mounts one thing that the kernel mounts by itself.
pub(super) fn one(mount: &Mount, rootfs: &Path) -> Result<(), MountError> {
    let mut options = Options::parse(mount.options.iter().map(String::as_str))?;
    let target = inside(rootfs, Path::new(&mount.target))?;
    let data = file_system_options(mount, &mut options)?;
    let call = Call {
        mount,
        target: &target,
    };
    let mapping = Mapping::of(&options).map_err(|source| call.error("map owners of", source))?;

    // A remount that changes no option of the file system is only one of propagation or of the bind.
    if !options.flags.contains(MsFlags::MS_REMOUNT) || !data.is_empty() {
        // The device goes away with its mount, or here when there is none.
        let device = options
            .looped
            .then(|| LoopDevice::of(mount, &options))
            .transpose()?;
        let source = device.as_ref().map_or(Path::new(&mount.source), LoopDevice::path);
        match mapping.as_ref().filter(|_| mount.type_ == OVERLAY) {
            // The kernel maps the layers of an overlay, not the overlay.
            Some(mapping) => mapping
                .overlay(&overlay::layers(&options.data), &target, || {
                    call.mount(Some(source), options.flags, &data)
                })
                .and_then(|tree| idmap::attach(&tree, &target))
                .map_err(|source| call.error("mount, with mapped owners,", source))?,
            None => call.step("mount", Some(source), options.flags, &data)?,
        }
    }
    if !options.propagation.is_empty() {
        call.step("set the propagation of", None, options.propagation, "")?;
    }
    if options.restricts_bind() {
        let flags = options.flags | locked_flags(&target) | MsFlags::MS_REMOUNT;
        call.step("restrict", None, flags, "")?;
    }
    // Last, because it takes a clone of what the steps before have made.
    match mapping.filter(|_| mount.type_ != OVERLAY) {
        Some(mapping) => mapping
            .remount(&target)
            .map_err(|source| call.error("map owners of", source)),
        None => Ok(()),
    }
}

/// The options for the file system, short enough for the kernel. May change the working directory.
fn file_system_options(mount: &Mount, options: &mut Options) -> Result<String, MountError> {
    let page = page_size();
    let too_long = options.data.iter().map(|option| option.len() + 1).sum::<usize>() >= page - PAGE_RESERVE;
    if mount.type_ == OVERLAY
        && too_long
        && let Some(dir) = overlay::compact(&mut options.data)
    {
        chdir(&dir).map_err(|errno| MountError::Layers {
            path: dir,
            source: errno.into(),
        })?;
    }
    let data = options.data.join(",");
    // The kernel keeps the last byte for itself.
    if data.len() >= page {
        let source_name = mount.source.clone();
        return Err(MountError::TooLong {
            source_name,
            length: data.len(),
            limit: page - 1,
        });
    }
    Ok(data)
}

/// A mount, and where it is made.
pub(super) struct Call<'a> {
    pub(super) mount: &'a Mount,
    pub(super) target: &'a Path,
}

impl Call<'_> {
    fn step(
        &self,
        step: &'static str,
        source: Option<&Path>,
        flags: MsFlags,
        data: &str,
    ) -> Result<(), MountError> {
        self.mount(source, flags, data)
            .map_err(|source| self.error(step, source))
    }

    fn mount(&self, source: Option<&Path>, flags: MsFlags, data: &str) -> io::Result<()> {
        let fs_type = source.map(|_| self.mount.type_.as_str());
        let data = (!data.is_empty()).then_some(data);
        Ok(mount(source, self.target, fs_type, flags, data)?)
    }

    pub(super) fn error(
        &self,
        step: &'static str,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> MountError {
        MountError::Mount {
            step,
            source_name: self.mount.source.clone(),
            fs_type: self.mount.type_.clone(),
            target: self.target.to_owned(),
            source: source.into(),
        }
    }
}

/// The path of `target` as a process in `rootfs` would find it: links do not lead out.
pub(super) fn inside(rootfs: &Path, target: &Path) -> Result<PathBuf, MountError> {
    if target.as_os_str().is_empty() {
        return Ok(rootfs.to_owned());
    }
    let find = || {
        let root = File::open(rootfs)?;
        let found = open_below(&root, target, OFlag::O_PATH, ResolveFlag::RESOLVE_IN_ROOT)?;
        // By name, because a descriptor continues naming what the mount will hide.
        fs::read_link(format!("/proc/thread-self/fd/{}", found.as_raw_fd()))
    };
    find().map_err(|source: io::Error| MountError::Target {
        rootfs: rootfs.to_owned(),
        target: target.to_owned(),
        source,
    })
}

/// `ST_RELATIME` of statvfs, which the C library of the static build does not name.
const ST_RELATIME: FsFlags = FsFlags::from_bits_retain(4096);

/// Flags that the owner of a user namespace may not clear; a remount has to repeat them. None outside of one.
fn locked_flags(target: &Path) -> MsFlags {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    if map.split_ascii_whitespace().eq(["0", "0", "4294967295"]) {
        return MsFlags::empty();
    }
    let held = statvfs(target)
        .map(|stat| stat.flags())
        .unwrap_or(FsFlags::empty());
    [
        (FsFlags::ST_RDONLY, MsFlags::MS_RDONLY),
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (ST_RELATIME, MsFlags::MS_RELATIME),
    ]
    .into_iter()
    .filter(|(flag, _)| held.contains(*flag))
    .map(|(_, flag)| flag)
    .collect()
}
