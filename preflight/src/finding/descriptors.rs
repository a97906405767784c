//! Findings in the open files and mappings of all processes that CRIU dumps.
//!
//! CRIU cannot dump an io_uring, an RDMA device or a GPU. The driver's checkpoint closes the GPUs of a CUDA
//! process. A child that was forked from a CUDA process and has not called exec keeps its inherited
//! descriptors of GPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::thread;
use std::time::Duration;

use super::{Certainty, Finding, FindingKind, Processes, Unreadable};
use firn_host::proc_maps;

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
        let mut add = |kind, certainty| {
            findings.push(Finding {
                pid: Some(pid),
                kind,
                certainty,
            })
        };
        if found.io_uring {
            add(FindingKind::IoUring, Certainty::Certain);
        }
        if let Some(file) = found.rdma {
            add(FindingKind::Rdma { file }, Certainty::Certain);
        }
        if let Some(file) = found.imex {
            add(FindingKind::Imex { file }, Certainty::Suspected);
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
    let mut descent = Descent {
        cuda,
        known: BTreeMap::new(),
    };
    for &pid in holders {
        if let Some(file) = look(proc_root, pid)?.and_then(|found| found.gpu) {
            let forked = descent.is_forked(pid, |pid| parent(proc_root, pid));
            findings.push(Finding {
                pid: Some(pid),
                kind: FindingKind::LeakedGpu { file },
                certainty: if forked {
                    Certainty::Certain
                } else {
                    Certainty::Suspected
                },
            });
        }
    }
    Ok(findings)
}

/// Which processes descend from CUDA processes. The parent of each process is read once.
struct Descent {
    cuda: BTreeSet<i32>,
    known: BTreeMap<i32, bool>,
}

impl Descent {
    fn is_forked(&mut self, mut pid: i32, parent: impl Fn(i32) -> Option<i32>) -> bool {
        let mut chain = Vec::new();
        let forked = loop {
            // A chain that ends in itself, because pids were reused meanwhile, has no CUDA process.
            if let Some(known) = self.known.insert(pid, false) {
                self.known.insert(pid, known);
                break known;
            }
            chain.push(pid);
            match parent(pid) {
                Some(parent) if self.cuda.contains(&parent) => break true,
                Some(parent) => pid = parent,
                None => break false,
            }
        };
        self.known.extend(chain.into_iter().map(|pid| (pid, forked)));
        forked
    }
}

fn parent(proc_root: &Path, pid: i32) -> Option<i32> {
    let status = proc_maps::read(proc_root, pid, "status").ok()??;
    let status = String::from_utf8_lossy(&status);
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok()
}

/// What a process has open or mapped; `None` if it has ended.
fn look(proc_root: &Path, pid: i32) -> Result<Option<Found>, Unreadable> {
    let unreadable = |what| move |source| Unreadable { pid, what, source };
    let mut found = Found::default();
    let read = proc_maps::each(proc_root, pid, |mapping| {
        // A ring can be mapped without an open descriptor.
        found.io_uring = mapping.path.starts_with(b"anon_inode:[io_uring]");
        match found.io_uring {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    if read.map_err(unreadable("maps"))?.is_none() {
        return Ok(None);
    }
    let entries = match fs::read_dir(proc_root.join(pid.to_string()).join("fd")) {
        Ok(entries) => entries,
        Err(error) if proc_maps::is_gone(&error) => return Ok(None),
        Err(error) => return Err(unreadable("fd")(error)),
    };
    // A descriptor may be closed between the two reads.
    for to in entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
    {
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

    fn found(root: &TempDir, dumped: &[i32], cuda: &[i32]) -> Vec<(i32, FindingKind, Certainty)> {
        let processes = Processes {
            dumped,
            cuda,
            ranks: false,
        };
        let findings = inspect(root.path(), &processes).unwrap();
        findings
            .into_iter()
            .map(|finding| (finding.pid.unwrap(), finding.kind, finding.certainty))
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
                (2, FindingKind::IoUring, Certainty::Certain),
                (3, FindingKind::IoUring, Certainty::Certain),
                (
                    4,
                    FindingKind::Rdma {
                        file: found_rdma(&root)
                    },
                    Certainty::Certain
                ),
                (
                    5,
                    FindingKind::Imex {
                        file: "/dev/nvidia-caps-imex-channels/channel0".into()
                    },
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
            let mut descent = Descent {
                cuda: BTreeSet::from([cuda]),
                known: BTreeMap::new(),
            };
            assert!((2..=LENGTH).all(|pid| descent.is_forked(pid, parent) == forked));
            assert!(descent.is_forked(LENGTH, parent) == forked);
            assert!(reads.get() <= LENGTH, "{}", reads.get());
        }
        let mut descent = Descent {
            cuda: BTreeSet::from([1]),
            known: BTreeMap::new(),
        };
        assert!(
            !descent.is_forked(7, |pid| Some(if pid == 7 { 8 } else { 7 })),
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
        let leaked = |file: &str| FindingKind::LeakedGpu { file: file.into() };
        assert_eq!(
            found(&root, &[1, 7, 8, 9, 10, 11], &[7]),
            [
                (8, leaked("/dev/nvidia0"), Certainty::Certain),
                (9, leaked("/dev/nvidia0 (deleted)"), Certainty::Certain),
                (11, leaked("/dev/nvidiactl"), Certainty::Suspected),
            ]
        );
        assert_eq!(found(&root, &[1, 7, 10, 4711], &[7]), []);
    }
}
