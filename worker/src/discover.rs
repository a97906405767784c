//! Which processes may be CUDA processes, seen from /proc alone.
//!
//! The driver is asked only about processes that map a file `libcuda.so*` or a node `/dev/nvidia*`: asking
//! costs tens of microseconds per process, and a container may have thousands of them. A checkpointed process
//! maps libcuda and no node. A process escapes this when its libcuda has another file name or none (a copy
//! renamed by the image, a memfd) and maps no node: it is not running CUDA then, or was checkpointed by
//! somebody else, and CRIU refuses what it cannot dump, so nothing is lost silently.
//!
//! Of these, CUDA processes are those that have a restore thread: the state alone also answers for others.
//! That one has none is taken from the two answers that a driver was seen to give for such processes, and
//! from no other error.

use std::ops::ControlFlow;
use std::path::Path;

use firn_host::proc_maps;

/// What the mappings of a process show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sign {
    /// No CUDA here.
    None,
    /// libcuda is loaded; whether it is used only the driver knows.
    Library,
    /// A node of the NVIDIA driver is mapped, or the mappings cannot be read.
    Device,
}

/// Looks at the mappings of `pid`. A process that has ended shows none.
pub(super) fn sign(proc_root: &Path, pid: i32) -> Sign {
    let mut sign = Sign::None;
    let read = proc_maps::each(proc_root, pid, |mapping| {
        if mapping.path.starts_with(b"/dev/nvidia") {
            sign = Sign::Device;
            return ControlFlow::Break(());
        }
        if mapping.file_name().starts_with(b"libcuda.so") {
            sign = Sign::Library;
        }
        ControlFlow::Continue(())
    });
    match read {
        Ok(Some(())) => sign,
        Ok(None) => Sign::None,
        Err(_) => Sign::Device,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libcuda_and_nodes_are_seen_and_lookalikes_are_not() {
        let line = |path: &str| format!("7f10-7f20 r--p 00000000 00:00 0    {path}\n");
        let sign_in = |text: &[u8]| {
            let proc_root = tempfile::tempdir().unwrap();
            std::fs::create_dir(proc_root.path().join("7")).unwrap();
            std::fs::write(proc_root.path().join("7/maps"), text).unwrap();
            sign(proc_root.path(), 7)
        };
        assert_eq!(sign_in(b""), Sign::None);
        assert_eq!(sign_in(line("/usr/lib/libcudart.so.12").as_bytes()), Sign::None);
        assert_eq!(sign_in(line("/opt/libcuda.so.d/data").as_bytes()), Sign::None);
        assert_eq!(
            sign_in(line("/usr/lib/libcuda.so.580.1").as_bytes()),
            Sign::Library
        );
        assert_eq!(
            sign_in(line("/usr/lib/libcuda.so.1 (deleted)").as_bytes()),
            Sign::Library
        );
        let both = line("/usr/lib/libcuda.so.1") + &line("/dev/nvidiactl");
        assert_eq!(sign_in(both.as_bytes()), Sign::Device);
    }

    #[test]
    fn a_process_that_has_ended_shows_nothing() {
        let proc_root = tempfile::tempdir().unwrap();
        assert_eq!(sign(proc_root.path(), 4711), Sign::None);
    }
}
