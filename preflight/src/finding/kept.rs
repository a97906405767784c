//! Processes that have a GPU open which is taken from their container: the rules of the device cgroup count
//! at the open, not afterwards.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::{fs, io};

use firn_gpu::{DeviceNode, NodeType};
use firn_host::proc_maps;
use nix::sys::stat::{major, minor};

use super::Unreadable;
use crate::Refusal;

/// The first process with one of these devices open or mapped, by whatever name.
pub(crate) fn kept(
    proc_root: &Path,
    pids: &[i32],
    devices: &[DeviceNode],
) -> Result<Option<Refusal>, Unreadable> {
    for &pid in pids {
        for what in ["fd", "map_files"] {
            let dir = proc_root.join(pid.to_string()).join(what);
            let found = proc_maps::unless_gone(first(&dir, devices));
            let found = found.map_err(|source| Unreadable { pid, what, source })?;
            if let Some(file) = found.flatten() {
                let comm = proc_maps::comm(proc_root, pid);
                let file = file.to_string_lossy().into_owned();
                return Ok(Some(Refusal::KeptGpu { pid, comm, file }));
            }
        }
    }
    Ok(None)
}

/// The name of the first link in a directory of /proc that leads to one of the devices.
fn first(dir: &Path, devices: &[DeviceNode]) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        // A file that was closed meanwhile is not open.
        let Some(metadata) = proc_maps::unless_gone(fs::metadata(&path))? else {
            continue;
        };
        let kind = match metadata.file_type() {
            kind if kind.is_char_device() => NodeType::Char,
            kind if kind.is_block_device() => NodeType::Block,
            _ => continue,
        };
        let id = (kind, major(metadata.rdev()), minor(metadata.rdev()));
        if devices.iter().any(|device| device.id() == id) {
            return Ok(Some(fs::read_link(&path).unwrap_or(path)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn null() -> DeviceNode {
        DeviceNode {
            path: "/dev/nvidia0".into(),
            kind: NodeType::Char,
            major: 1,
            minor: 3,
        }
    }

    #[test]
    fn an_open_device_is_found_by_its_numbers() {
        let own = i32::try_from(std::process::id()).unwrap();
        let _open = fs::File::open("/dev/null").unwrap();
        let found = kept(Path::new("/proc"), &[own], &[null()]).unwrap();
        let Some(Refusal::KeptGpu { pid, file, .. }) = found else {
            panic!("not found");
        };
        assert_eq!((pid, &*file), (own, "/dev/null"));
        let block = DeviceNode {
            kind: NodeType::Block,
            ..null()
        };
        assert!(kept(Path::new("/proc"), &[own], &[block]).unwrap().is_none());
    }

    #[test]
    fn a_process_that_has_gone_keeps_nothing() {
        assert!(
            kept(Path::new("/nonexistent"), &[7], &[null()])
                .unwrap()
                .is_none()
        );
    }
}
