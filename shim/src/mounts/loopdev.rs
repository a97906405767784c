//! A block device made of a file, for mounts with the option `loop`.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use containerd_shim_protos::types::mount::Mount;
use firn_process::sys;
use nix::errno::Errno;
use nix::mount::MsFlags;

use super::MountError;
use super::flags::Options;

/// Hands out free devices.
const CONTROL: &str = "/dev/loop-control";

/// How often another process may be faster than we with a free device.
const ATTEMPTS: usize = 100;

/// A loop device. It ends when neither this nor a mount holds it.
#[derive(Debug)]
pub(super) struct LoopDevice {
    path: PathBuf,
    _open: File,
}

impl LoopDevice {
    pub(super) fn of(mount: &Mount, options: &Options) -> Result<Self, MountError> {
        let read_only = options.flags.contains(MsFlags::MS_RDONLY);
        let backing = Path::new(&mount.source);
        Self::make(backing, read_only, options.direct_io).map_err(|source| MountError::Loop {
            path: backing.to_owned(),
            source,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn make(backing: &Path, read_only: bool, direct_io: bool) -> io::Result<Self> {
        let direct = if direct_io { libc::O_DIRECT } else { 0 };
        let file = fs::OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(direct)
            .open(backing)?;
        let control = fs::OpenOptions::new().read(true).write(true).open(CONTROL)?;
        for _ in 0..ATTEMPTS {
            let path = PathBuf::from(format!("/dev/loop{}", sys::loop_get_free(&control)?));
            let device = fs::OpenOptions::new().read(true).write(!read_only).open(&path)?;
            match sys::loop_configure(&device, &file, sys::LoopFlags { read_only, direct_io }) {
                Ok(()) => return Ok(Self { path, _open: device }),
                Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }
}
