//! Processes that have a GPU open which is taken from their container: the rules of the device cgroup count
//! at the open, not afterwards.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::{fs, io};

use firn_gpu::{DeviceId, DeviceNode, NodeType};
use firn_host::proc_maps;
use nix::sys::stat::{major, minor};

use super::Unreadable;
use crate::Refusal;
use crate::sys::is_same_table;

/// The first process with one of these devices open or mapped, by whatever name.
///
/// Each descriptor table of a process is read: a thread may have one of its own, and that of a first thread
/// which has ended is empty while the others continue.
pub(crate) fn kept(
    proc_root: &Path,
    pids: &[i32],
    devices: &[DeviceNode],
) -> Result<Option<Refusal>, Unreadable> {
    for &pid in pids {
        let what = "task";
        let task = proc_root.join(pid.to_string()).join(what);
        let threads = proc_maps::unless_gone(threads(&task));
        let threads = threads.map_err(|source| Unreadable { pid, what, source })?;
        let mut read: Vec<i32> = Vec::new();
        for tid in threads.unwrap_or_default() {
            if read.iter().any(|other| is_same_table(*other, tid)) {
                continue;
            }
            read.push(tid);
            if let Some(file) = of_thread(proc_root, pid, tid, devices)? {
                let comm = proc_maps::comm(proc_root, pid);
                let file = file.to_string_lossy().into_owned();
                return Ok(Some(Refusal::KeptGpu { pid, comm, file }));
            }
        }
    }
    Ok(None)
}

fn threads(task: &Path) -> io::Result<Vec<i32>> {
    let mut tids = Vec::new();
    for entry in fs::read_dir(task)? {
        tids.extend(
            entry?
                .file_name()
                .to_str()
                .and_then(|tid| tid.parse::<i32>().ok()),
        );
    }
    Ok(tids)
}

/// The name of a device in the descriptors of a thread, or in its mappings. /proc has these of every thread,
/// but lists them for the first one alone.
fn of_thread(
    proc_root: &Path,
    pid: i32,
    tid: i32,
    devices: &[DeviceNode],
) -> Result<Option<PathBuf>, Unreadable> {
    for what in ["fd", "map_files"] {
        let dir = proc_root.join(tid.to_string()).join(what);
        let found = proc_maps::unless_gone(first(&dir, devices));
        let found = found.map_err(|source| Unreadable { pid, what, source })?;
        if let Some(file) = found.flatten() {
            return Ok(Some(file));
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
        let id = DeviceId {
            kind,
            major: major(metadata.rdev()),
            minor: minor(metadata.rdev()),
        };
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

    /// /dev/full, which nothing else of these tests opens.
    #[test]
    fn a_descriptor_of_one_thread_alone_is_found() {
        let full = DeviceNode { minor: 7, ..null() };
        let own = i32::try_from(std::process::id()).unwrap();
        let look = || kept(Path::new("/proc"), &[own], std::slice::from_ref(&full)).unwrap();
        assert!(look().is_none());
        let found = std::thread::scope(|scope| {
            let apart = scope.spawn(|| {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES).unwrap();
                let _open = fs::File::open("/dev/full").unwrap();
                look()
            });
            apart.join().unwrap()
        });
        let Some(Refusal::KeptGpu { pid, file, .. }) = found else {
            panic!("not found");
        };
        assert_eq!((pid, &*file), (own, "/dev/full"));
    }

    /// As of a process whose first thread has ended. No thread has such a number.
    #[test]
    fn the_threads_that_a_first_one_has_left_are_looked_at() {
        let (leader, thread) = (i32::MAX - 1, i32::MAX);
        for (what, file) in [("fd", "3"), ("map_files", "1000-2000")] {
            let root = tempfile::tempdir().unwrap();
            for tid in [leader, thread] {
                let task = format!("{leader}/task/{tid}");
                fs::create_dir_all(root.path().join(task)).unwrap();
                fs::create_dir_all(root.path().join(tid.to_string()).join(what)).unwrap();
            }
            let open = root.path().join(thread.to_string()).join(what).join(file);
            std::os::unix::fs::symlink("/dev/null", open).unwrap();
            let found = kept(root.path(), &[leader], &[null()]).unwrap();
            assert!(
                matches!(&found, Some(Refusal::KeptGpu { pid, .. }) if *pid == leader),
                "{what}: {found:?}"
            );
        }
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
