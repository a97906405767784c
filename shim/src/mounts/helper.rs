//! Types of file systems that a program of the host mounts.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use containerd_shim_protos::types::mount::Mount;
use firn_process::reaper::Reaper;

use super::flags::Options;
use super::mount::{Call, inside};
use super::{MountError, on_thread};

/// How long a helper may take. It returns when the mount is there; what serves it continues behind it.
const LIMIT: Duration = Duration::from_secs(60);

/// The programs, and what begins the names of their types. No others are run: a client names the type.
const HELPERS: [(&str, &str); 2] = [("mount.fuse", "fuse."), ("mount.fuse3", "fuse3.")];

/// A program that mounts a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Helper<'m> {
    program: &'static str,
    /// The type as the program knows it.
    fs_type: &'m str,
}

impl<'m> Helper<'m> {
    /// The helper for a mount; none when the kernel mounts it.
    pub(super) fn of(mount: &'m Mount) -> Option<Self> {
        HELPERS.into_iter().find_map(|(program, prefix)| {
            let fs_type = mount.type_.strip_prefix(prefix)?;
            Some(Self { program, fs_type })
        })
    }

    pub(super) async fn mount(self, mount: &Mount, rootfs: &Path, reaper: &Reaper) -> Result<(), MountError> {
        // The helper gets them as they are, but for those that are meant for nobody here.
        Options::parse(mount.options.iter().map(String::as_str))?;
        let (target, rootfs) = (PathBuf::from(&mount.target), rootfs.to_owned());
        let target = on_thread(move || inside(&rootfs, &target)).await?;
        let mut command = Command::new(self.program);
        command.arg(&mount.source).arg(&target);
        for option in &mount.options {
            command.arg("-o").arg(option);
        }
        command.arg("-t").arg(self.fs_type);
        let call = Call {
            mount,
            target: &target,
        };
        let output = reaper
            .output(&mut command, LIMIT)
            .await
            .map_err(|source| call.error("mount", source))?;
        if output.success() {
            return Ok(());
        }
        let output = [output.stdout, output.stderr].concat();
        let output = String::from_utf8_lossy(&output);
        Err(call.error("mount", format!("{} reports: {}", self.program, output.trim())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_types_of_fuse_have_helpers() {
        let mount = |fs_type: &str| Mount {
            type_: fs_type.to_owned(),
            ..Mount::default()
        };
        let program = |fs_type: &str| {
            let mount = mount(fs_type);
            Helper::of(&mount).map(|helper| (helper.program, helper.fs_type.to_owned()))
        };
        assert_eq!(program("fuse.sshfs"), Some(("mount.fuse", "sshfs".to_owned())));
        assert_eq!(
            program("fuse3.overlayfs"),
            Some(("mount.fuse3", "overlayfs".to_owned()))
        );
        for plain in ["fuse", "overlay", "bind", "fusectl", "nfs", ""] {
            assert_eq!(program(plain), None, "{plain:?}");
        }
    }
}
