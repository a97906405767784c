//! The calls that mount. On a thread of their own: see `mounts`.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use containerd_shim_protos::types::mount::Mount;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::mount::{MsFlags, mount};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{SysconfVar, chdir, sysconf};

use super::flags::Options;
use super::loopdev::LoopDevice;
use super::unmount::{self, Busy};
use super::{MountError, overlay};

/// Room for the rest of an overlay's options when layers are counted against the page.
const PAGE_RESERVE: usize = 512;

/// Types that helper programs mount.
const HELPER_TYPES: [&str; 2] = ["fuse.", "fuse3."];

pub(super) fn all(mounts: &[Mount], rootfs: &Path) -> Result<(), MountError> {
    for mount in mounts {
        if let Err(error) = one(mount, rootfs) {
            if let Err(left) = unmount::tree(rootfs, Busy::Fail) {
                log::warn!("after a failed mount: {left}");
            }
            return Err(error);
        }
    }
    Ok(())
}

fn one(mount: &Mount, rootfs: &Path) -> Result<(), MountError> {
    let mut options = Options::parse(mount.options.iter().map(String::as_str))?;
    let unsupported = |what: &str| MountError::Unsupported {
        source_name: mount.source.clone(),
        what: what.to_owned(),
    };
    if options.id_mapped {
        return Err(unsupported("a user mapping of its own"));
    }
    if HELPER_TYPES.iter().any(|prefix| mount.type_.starts_with(prefix)) {
        return Err(unsupported(&format!("type {}", mount.type_)));
    }
    let target = inside(rootfs, Path::new(&mount.target))?;
    let data = file_system_options(mount, &mut options)?;
    let call = Call {
        mount,
        target: &target,
    };

    // A remount that changes no option of the file system is only one of propagation or of the bind.
    if !options.flags.contains(MsFlags::MS_REMOUNT) || !data.is_empty() {
        // The device goes away with its mount, or here when there is none.
        let device = options
            .looped
            .then(|| LoopDevice::of(mount, &options))
            .transpose()?;
        let source = device.as_ref().map_or(Path::new(&mount.source), LoopDevice::path);
        call.mount("mount", Some(source), options.flags, &data)?;
    }
    if !options.propagation.is_empty() {
        call.mount("set the propagation of", None, options.propagation, "")?;
    }
    if options.restricts_bind() {
        let locked = if in_user_namespace() {
            locked_flags(&target)
        } else {
            MsFlags::empty()
        };
        call.mount("restrict", None, options.flags | locked | MsFlags::MS_REMOUNT, "")?;
    }
    Ok(())
}

/// The options for the file system, short enough for the kernel. May change the working directory.
fn file_system_options(mount: &Mount, options: &mut Options) -> Result<String, MountError> {
    let page = sysconf(SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .and_then(|size| usize::try_from(size).ok());
    let page = page.unwrap_or(4096);
    let too_long = options.data.iter().map(|option| option.len() + 1).sum::<usize>() >= page - PAGE_RESERVE;
    if mount.type_ == "overlay"
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

struct Call<'a> {
    mount: &'a Mount,
    target: &'a Path,
}

impl Call<'_> {
    fn mount(
        &self,
        step: &'static str,
        source: Option<&Path>,
        flags: MsFlags,
        data: &str,
    ) -> Result<(), MountError> {
        let fs_type = source.map(|_| self.mount.type_.as_str());
        let data = (!data.is_empty()).then_some(data);
        mount(source, self.target, fs_type, flags, data).map_err(|errno| MountError::Mount {
            step,
            source_name: self.mount.source.clone(),
            fs_type: self.mount.type_.clone(),
            target: self.target.to_owned(),
            source: errno.into(),
        })
    }
}

/// The path of `target` as a process in `rootfs` would find it: links do not lead out.
fn inside(rootfs: &Path, target: &Path) -> Result<PathBuf, MountError> {
    if target.as_os_str().is_empty() {
        return Ok(rootfs.to_owned());
    }
    let find = || {
        let root = File::open(rootfs)?;
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT);
        let found = openat2(&root, target, how)?;
        // By name, because a descriptor goes on naming what the mount will hide.
        fs::read_link(format!("/proc/thread-self/fd/{}", found.as_raw_fd()))
    };
    find().map_err(|source: io::Error| MountError::Target {
        rootfs: rootfs.to_owned(),
        target: target.to_owned(),
        source,
    })
}

fn in_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    !map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

/// `ST_RELATIME` of statvfs, which the C library of the static build does not name.
const ST_RELATIME: FsFlags = FsFlags::from_bits_retain(4096);

/// Flags that the owner of a user namespace may not clear; a remount has to repeat them.
fn locked_flags(target: &Path) -> MsFlags {
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
