//! Findings in the open files and mappings of all processes that CRIU dumps.
//!
//! CRIU cannot dump an io_uring or an RDMA device, and loses protection keys of memory. The driver's
//! checkpoint closes the GPUs of a CUDA process, and of no other.

use std::ops::ControlFlow;
use std::path::Path;

use firn_host::ordered::set_of;
use firn_host::proc_maps;

use super::inherited::{self, OfGpus, Same};
use super::{Certainty, Finding, Processes, Unreadable, each_mapping, open_files, protection_keys};
use crate::Refusal;
use crate::sys::{is_same_file, is_same_memory};

/// What one process has open or mapped.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ProcessFiles {
    io_uring: bool,
    rdma: Option<String>,
    imex: Option<String>,
    /// Where the first memory with a protection key begins.
    key: Option<String>,
    pub(super) gpu: Gpu,
}

/// What one process has of the nodes of NVIDIA's driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Gpu {
    /// Open files by descriptor.
    pub(super) open: Vec<(i32, String)>,
    /// The file of a mapping.
    mapped: Option<String>,
    /// Whether libcuda is mapped.
    pub(super) has_library: bool,
}

impl Gpu {
    /// One of the files, for a message; none if it has none.
    pub(super) fn shown(&self) -> Option<String> {
        let open = self.open.first().map(|(_, file)| file);
        open.or(self.mapped.as_ref()).cloned()
    }
}

impl ProcessFiles {
    /// What CRIU cannot dump, or loses, of a process.
    fn of_criu(&self, pid: i32, comm: impl Fn() -> String) -> Vec<Refusal> {
        let ring = self.io_uring.then(|| Refusal::IoUring { pid, comm: comm() });
        let key = self.key.clone().map(|at| Refusal::ProtectionKey {
            pid,
            comm: comm(),
            at,
        });
        let rdma = self.rdma.clone().map(|file| Refusal::Rdma {
            pid,
            comm: comm(),
            file,
        });
        ring.into_iter().chain(key).chain(rdma).collect()
    }
}

/// What CRIU cannot dump, or loses, of all processes that it dumps.
pub(crate) fn of_criu(proc_root: &Path, dumped: &[i32]) -> Result<Vec<Refusal>, Unreadable> {
    let mut refusals = Vec::new();
    for &pid in dumped {
        if let Some(found) = look(proc_root, pid)? {
            refusals.extend(found.of_criu(pid, || proc_maps::comm(proc_root, pid)));
        }
    }
    Ok(refusals)
}

pub(super) fn inspect(
    proc_root: &Path,
    processes: &Processes<'_>,
) -> Result<(Vec<Finding>, OfGpus), Unreadable> {
    let mut findings = Vec::new();
    let mut holders = Vec::new();
    let cuda = set_of(processes.cuda.iter().copied());
    for &pid in processes.dumped {
        let Some(found) = look(proc_root, pid)? else {
            continue;
        };
        let comm = || proc_maps::comm(proc_root, pid);
        let of_criu = found.of_criu(pid, comm).into_iter().map(|refusal| Finding {
            refusal,
            certainty: Certainty::Certain,
        });
        findings.extend(of_criu);
        if let Some(file) = found.imex {
            let comm = comm();
            findings.push(Finding {
                refusal: Refusal::Imex { pid, comm, file },
                certainty: Certainty::Suspected,
            });
        }
        if found.gpu.shown().is_some() && !cuda.contains(&pid) {
            holders.push(pid);
        }
    }
    let same = Same {
        file: &is_same_file,
        memory: &is_same_memory,
    };
    let mut of_gpus = inherited::inspect(proc_root, processes, &holders, same)?;
    findings.append(&mut of_gpus.findings);
    Ok((findings, of_gpus))
}

/// What a process has open or mapped; `None` if it has ended.
pub(super) fn look(proc_root: &Path, pid: i32) -> Result<Option<ProcessFiles>, Unreadable> {
    let mut found = ProcessFiles::default();
    let read = each_mapping(proc_root, pid, |mapping| {
        // A ring can be mapped without an open descriptor.
        found.io_uring = mapping.path.starts_with(b"anon_inode:[io_uring]");
        found.gpu.has_library |= mapping.file_name().starts_with(b"libcuda.so");
        if mapping.path.starts_with(b"/dev/nvidia") {
            let file = || String::from_utf8_lossy(mapping.path).into_owned();
            found.gpu.mapped.get_or_insert_with(file);
        }
        if found.io_uring {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    if read?.is_none() {
        return Ok(None);
    }
    found.key = protection_keys::first(proc_root, pid)?;
    let Some(files) = open_files(proc_root, pid)? else {
        return Ok(None);
    };
    for (fd, to) in files {
        let to = to.to_string_lossy();
        if to.starts_with("anon_inode:[io_uring]") {
            found.io_uring = true;
        } else if to.starts_with("/dev/infiniband/") {
            found.rdma.get_or_insert(to.into_owned());
        } else if to.starts_with("/dev/nvidia-caps-imex-channels/") {
            found.imex.get_or_insert(to.into_owned());
        } else if to.starts_with("/dev/nvidia") {
            found.gpu.open.push((fd, to.into_owned()));
        }
    }
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::super::inherited::tests::processes;
    use super::*;

    /// Pid, kind, file and certainty of each finding.
    fn found(root: &TempDir, dumped: &[i32], cuda: &[i32]) -> Vec<(i32, &'static str, String, Certainty)> {
        let processes = Processes {
            dumped,
            cuda,
            ..Processes::default()
        };
        let (findings, _) = inspect(root.path(), &processes).unwrap();
        findings
            .into_iter()
            .map(|Finding { refusal, certainty }| match refusal {
                Refusal::IoUring { pid, .. } => (pid, "ring", String::new(), certainty),
                Refusal::ProtectionKey { pid, at, .. } => (pid, "key", at, certainty),
                Refusal::Rdma { pid, file, .. } => (pid, "rdma", file, certainty),
                Refusal::Imex { pid, file, .. } => (pid, "imex", file, certainty),
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
                &[(0, "/dev/null"), (1, "pipe:[1]"), (2, "anon_inode:[eventpoll]")],
            ),
            (2, 1, "/lib/x", &[(0, "anon_inode:[io_uring]")]),
            (3, 1, "anon_inode:[io_uring]", &[]),
            (
                4,
                1,
                "/lib/x",
                &[(0, "/dev/infiniband/uverbs0"), (1, "/dev/infiniband/rdma_cm")],
            ),
            (
                5,
                1,
                "/lib/x",
                &[
                    (0, "/dev/nvidia-caps-imex-channels/channel0"),
                    (1, "/dev/nvidiactl"),
                ],
            ),
        ]);
        let smaps = "1000-2000 rw-p 00000000 00:00 0 \nProtectionKey:         3\nVmFlags: rd\n";
        std::fs::write(root.path().join("1/smaps"), smaps).unwrap();
        assert_eq!(
            found(&root, &[1, 2, 3, 4, 5, 6], &[5]),
            [
                (1, "key", "1000".into(), Certainty::Certain),
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
}
