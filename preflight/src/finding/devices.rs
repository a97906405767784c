//! Accelerators that processes hold, for jobs that let go of all of them in their hook `prepare`.
//!
//! A program holds a device as long as it has its node open or mapped. CUDA has /dev/nvidiactl open from
//! cuInit to the end of the process. NVIDIA's driver also knows processes that have no node open: those whose
//! GPU state another tool has put into their memory.

use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use firn_host::proc_maps;
use firn_oci::is_any_accelerator;

use super::{Unreadable, each_mapping, open_files};
use crate::Refusal;

/// The first of these processes that holds an accelerator. `cuda` are those that NVIDIA's driver knows.
pub(super) fn inspect(proc_root: &Path, pids: &[i32], cuda: &[i32]) -> Result<Option<Refusal>, Unreadable> {
    let refusal = |pid, what| {
        let comm = proc_maps::comm(proc_root, pid);
        Refusal::DeviceHeld { pid, comm, what }
    };
    for &pid in pids {
        if let Some(what) = of_process(proc_root, pid)? {
            return Ok(Some(refusal(pid, what)));
        }
    }
    let known = cuda
        .first()
        .map(|&pid| refusal(pid, "GPU state of CUDA".to_owned()));
    Ok(known)
}

fn of_process(proc_root: &Path, pid: i32) -> Result<Option<String>, Unreadable> {
    let Some(mut files) = open_files(proc_root, pid)? else {
        return Ok(None);
    };
    if let Some((_, path)) = files.find(|(_, path)| is_device(path)) {
        return Ok(Some(format!("{} open", path.display())));
    }
    let mut mapped = None;
    each_mapping(proc_root, pid, |mapping| {
        let path = Path::new(std::ffi::OsStr::from_bytes(mapping.path));
        if is_device(path) {
            mapped = Some(format!("{} mapped", path.display()));
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    Ok(mapped)
}

/// The name of a node may have been deleted.
fn is_device(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    let name = bytes.strip_suffix(b" (deleted)").unwrap_or(bytes);
    is_any_accelerator(Path::new(std::ffi::OsStr::from_bytes(name)))
}

#[cfg(test)]
mod tests {
    use super::super::inherited::tests::processes;
    use super::*;

    fn found(file: &str, mapped: &str, cuda: &[i32]) -> Option<(i32, String)> {
        let root = processes(&[
            (1, 0, "/bin/sh", &[(0, "/dev/null")]),
            (7, 1, mapped, &[(3, file)]),
        ]);
        match inspect(root.path(), &[1, 7, 8], cuda).unwrap()? {
            Refusal::DeviceHeld { pid, what, .. } => Some((pid, what)),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn nodes_of_every_vendor_are_held_open_or_mapped() {
        for file in [
            "/dev/nvidiactl",
            "/dev/nvidia-uvm",
            "/dev/nvidia3",
            "/dev/nvidia-caps/nvidia-cap1",
            "/dev/kfd",
            "/dev/kfd (deleted)",
            "/dev/dri/renderD128",
            "/dev/accel/accel0",
            "/dev/hl0",
        ] {
            assert_eq!(found(file, "/lib/x", &[]), Some((7, format!("{file} open"))));
            assert_eq!(found("pipe:[1]", file, &[]), Some((7, format!("{file} mapped"))));
        }
        for file in [
            "/dev/null",
            "/dev/shm/nvidia0",
            "/tmp/dev/kfd",
            "/dev/infiniband/uverbs0",
        ] {
            assert_eq!(found(file, "/usr/lib/libcuda.so.1", &[]), None, "{file}");
        }
    }

    #[test]
    fn a_process_that_the_driver_knows_is_named_after_all_nodes() {
        let state = || Some((1, "GPU state of CUDA".to_owned()));
        assert_eq!(found("/dev/null", "/lib/x", &[1]), state());
        let open = Some((7, "/dev/nvidiactl open".to_owned()));
        assert_eq!(found("/dev/nvidiactl", "/lib/x", &[1]), open);
    }
}
