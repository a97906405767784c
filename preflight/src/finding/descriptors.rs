//! Findings in the open files and mappings of all processes that CRIU dumps.
//!
//! CRIU cannot dump an io_uring, an RDMA device or a GPU. The driver's checkpoint closes the GPUs of a CUDA
//! process. A child that was forked from a CUDA process and has not called exec keeps its inherited
//! descriptors of GPUs.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::thread;
use std::time::Duration;

use super::{Certainty, Finding, Processes, Unreadable, each_mapping, open_files};
use crate::Refusal;
use firn_host::proc_maps;
use firn_host::procfs::Descent;

/// How long a process may take from fork to exec, which closes inherited descriptors.
const EXEC: Duration = Duration::from_millis(100);

/// What one process has open or mapped.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    io_uring: bool,
    rdma: Option<String>,
    imex: Option<String>,
    gpu: Option<String>,
}

pub(super) fn inspect(proc_root: &Path, processes: &Processes<'_>) -> Result<Vec<Finding>, Unreadable> {
    let mut findings = Vec::new();
    let mut holders = Vec::new();
    let cuda: BTreeSet<i32> = processes.cuda.iter().copied().collect();
    for &pid in processes.dumped {
        let Some(found) = look(proc_root, pid)? else {
            continue;
        };
        let comm = || proc_maps::comm(proc_root, pid);
        let mut add = |refusal, certainty| findings.push(Finding { refusal, certainty });
        if found.io_uring {
            add(Refusal::IoUring { pid, comm: comm() }, Certainty::Certain);
        }
        if let Some(file) = found.rdma {
            let comm = comm();
            add(Refusal::Rdma { pid, comm, file }, Certainty::Certain);
        }
        if let Some(file) = found.imex {
            let comm = comm();
            add(Refusal::Imex { pid, comm, file }, Certainty::Suspected);
        }
        if found.gpu.is_some() && !cuda.contains(&pid) {
            holders.push(pid);
        }
    }
    findings.extend(leaked(proc_root, cuda, &holders)?);
    Ok(findings)
}

/// Descriptors of GPUs in processes without CUDA. A child of a CUDA process has inherited them; any other
/// process may be about to initialise CUDA.
fn leaked(proc_root: &Path, cuda: BTreeSet<i32>, holders: &[i32]) -> Result<Vec<Finding>, Unreadable> {
    if holders.is_empty() {
        return Ok(Vec::new());
    }
    // Every child has the descriptors between fork and exec.
    thread::sleep(EXEC);
    let mut findings = Vec::new();
    let mut descent = Descent::of(cuda);
    for &pid in holders {
        if let Some(file) = look(proc_root, pid)?.and_then(|found| found.gpu) {
            let comm = proc_maps::comm(proc_root, pid);
            findings.push(Finding {
                refusal: Refusal::LeakedGpu { pid, comm, file },
                certainty: match descent.includes(pid, |pid| parent(proc_root, pid)) {
                    true => Certainty::Certain,
                    false => Certainty::Suspected,
                },
            });
        }
    }
    Ok(findings)
}

fn parent(proc_root: &Path, pid: i32) -> Option<i32> {
    let status = proc_maps::read(proc_root, pid, "status").ok()??;
    let status = String::from_utf8_lossy(&status);
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok()
}

/// What a process has open or mapped; `None` if it has ended.
fn look(proc_root: &Path, pid: i32) -> Result<Option<Found>, Unreadable> {
    let mut found = Found::default();
    let read = each_mapping(proc_root, pid, |mapping| {
        // A ring can be mapped without an open descriptor.
        found.io_uring = mapping.path.starts_with(b"anon_inode:[io_uring]");
        match found.io_uring {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    if read?.is_none() {
        return Ok(None);
    }
    let Some(files) = open_files(proc_root, pid)? else {
        return Ok(None);
    };
    for to in files {
        let to = to.to_string_lossy();
        if to.starts_with("anon_inode:[io_uring]") {
            found.io_uring = true;
        } else if to.starts_with("/dev/infiniband/") {
            found.rdma.get_or_insert(to.into_owned());
        } else if to.starts_with("/dev/nvidia-caps-imex-channels/") {
            found.imex.get_or_insert(to.into_owned());
        } else if to.starts_with("/dev/nvidia") {
            found.gpu.get_or_insert(to.into_owned());
        }
    }
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    /// Processes by pid, parent, mapped file and open files.
    fn processes(all: &[(i32, i32, &str, &[&str])]) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        for (pid, parent, mapped, open) in all {
            let process = root.path().join(pid.to_string());
            fs::create_dir_all(process.join("fd")).unwrap();
            fs::write(process.join("status"), format!("Name:\tx\nPPid:\t{parent}\n")).unwrap();
            let maps = format!("7f10-7f20 rw-s 00000000 00:0e 77    {mapped}\n");
            fs::write(process.join("maps"), maps).unwrap();
            for (fd, to) in open.iter().enumerate() {
                symlink(to, process.join("fd").join(fd.to_string())).unwrap();
            }
        }
        root
    }

    /// Pid, kind, file and certainty of each finding.
    fn found(root: &TempDir, dumped: &[i32], cuda: &[i32]) -> Vec<(i32, &'static str, String, Certainty)> {
        let processes = Processes {
            dumped,
            cuda,
            ranks: false,
        };
        let findings = inspect(root.path(), &processes).unwrap();
        findings
            .into_iter()
            .map(|Finding { refusal, certainty }| match refusal {
                Refusal::IoUring { pid, .. } => (pid, "ring", String::new(), certainty),
                Refusal::Rdma { pid, file, .. } => (pid, "rdma", file, certainty),
                Refusal::Imex { pid, file, .. } => (pid, "imex", file, certainty),
                Refusal::LeakedGpu { pid, file, .. } => (pid, "gpu", file, certainty),
                other => panic!("{other}"),
            })
            .collect()
    }

    #[test]
    fn rings_and_devices_are_found_in_every_process() {
        let root = processes(&[
            (
                1,
                0,
                "/bin/sh",
                &["/dev/null", "pipe:[1]", "anon_inode:[eventpoll]"],
            ),
            (2, 1, "/lib/x", &["anon_inode:[io_uring]"]),
            (3, 1, "anon_inode:[io_uring]", &[]),
            (
                4,
                1,
                "/lib/x",
                &["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"],
            ),
            (
                5,
                1,
                "/lib/x",
                &["/dev/nvidia-caps-imex-channels/channel0", "/dev/nvidiactl"],
            ),
        ]);
        assert_eq!(
            found(&root, &[1, 2, 3, 4, 5, 6], &[5]),
            [
                (2, "ring", String::new(), Certainty::Certain),
                (3, "ring", String::new(), Certainty::Certain),
                (4, "rdma", found_rdma(&root), Certainty::Certain),
                (
                    5,
                    "imex",
                    "/dev/nvidia-caps-imex-channels/channel0".into(),
                    Certainty::Suspected
                ),
            ]
        );
    }

    /// The first of the two in the order of the directory.
    fn found_rdma(root: &TempDir) -> String {
        look(root.path(), 4).unwrap().unwrap().rdma.unwrap()
    }

    #[test]
    fn in_a_chain_of_32000_processes_every_parent_is_read_once() {
        const LENGTH: i32 = 32_000;
        let reads = std::cell::Cell::new(0);
        let parent = |pid| {
            reads.set(reads.get() + 1);
            (pid > 1).then(|| pid - 1)
        };
        for (cuda, forked) in [(1, true), (LENGTH + 1, false)] {
            reads.set(0);
            let mut descent = Descent::of([cuda]);
            assert!((2..=LENGTH).all(|pid| descent.includes(pid, parent) == forked));
            assert!(descent.includes(LENGTH, parent) == forked);
            assert!(reads.get() <= LENGTH, "{}", reads.get());
        }
        let mut descent = Descent::of([1]);
        assert!(
            !descent.includes(7, |pid| Some(if pid == 7 { 8 } else { 7 })),
            "a cycle"
        );
    }

    #[test]
    fn gpus_leak_into_children_of_cuda_processes() {
        let root = processes(&[
            (1, 0, "/bin/sh", &[]),
            (7, 1, "/lib/libcuda.so.1", &["/dev/nvidiactl", "/dev/nvidia-uvm"]),
            (8, 7, "/lib/libcuda.so.1", &["/dev/null", "/dev/nvidia0"]),
            (9, 8, "/lib/libcuda.so.1", &["/dev/nvidia0 (deleted)"]),
            (10, 7, "/bin/sleep", &["/dev/null"]),
            (11, 1, "/lib/libnvidia-ml.so.1", &["/dev/nvidiactl"]),
        ]);
        assert_eq!(
            found(&root, &[1, 7, 8, 9, 10, 11], &[7]),
            [
                (8, "gpu", "/dev/nvidia0".into(), Certainty::Certain),
                (9, "gpu", "/dev/nvidia0 (deleted)".into(), Certainty::Certain),
                (11, "gpu", "/dev/nvidiactl".into(), Certainty::Suspected),
            ]
        );
        assert_eq!(found(&root, &[1, 7, 10, 4711], &[7]), []);
    }
}
