//! GPUs that processes without CUDA have open or mapped.
//!
//! A child that was forked from a CUDA process and has not called exec keeps its descriptors of the driver's
//! nodes, and mappings of them. It can do nothing with them: CUDA does not work after fork. The driver's
//! checkpoint does not close them; firn's plugin for CRIU dumps them.
//!
//! Descent is required, the same open file alone is not enough: a descriptor that a process was sent, such as
//! that of exported GPU memory, is meant to be used.
//!
//! A file is inherited if a CUDA process, or a parent that has only inherited files, has the same file open.
//! A checkpoint or restore of GPU state makes the driver open its files again in the CUDA process. From then
//! on the comparison fails, and what the checkpoint has found is known.

use std::path::Path;
use std::time::Duration;
use std::{fs, io, thread};

use firn_config::names;
use firn_host::procfs::Descent;
use firn_host::{UnlessAbsent, atomic_file, bounded, open_regular, proc_maps};
use serde::{Deserialize, Serialize};

use super::descriptors::{Gpu, look};
use super::{Certainty, Finding, Processes, Unreadable};
use crate::Refusal;
use crate::sys::Descriptor;

/// How long a process may take from fork to exec, which closes inherited descriptors.
const EXEC: Duration = Duration::from_millis(100);

/// A process without CUDA, and its inherited descriptors of GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inherited {
    pub pid: i32,
    pub open: Vec<i32>,
}

impl Inherited {
    /// Longest file that is read, in bytes.
    const MAX_BYTES: u64 = 16 << 20;

    /// Keeps them in `bundle` for the container's next checkpoint. Writes no file where none is needed.
    pub fn keep(all: &[Self], bundle: &Path) -> io::Result<()> {
        if all.is_empty() {
            fs::remove_file(bundle.join(names::BUNDLE_INHERITED)).unless_absent()
        } else {
            let bytes = serde_json::to_vec(all)?;
            atomic_file::write(bundle, names::BUNDLE_INHERITED, &bytes, 0o600)
        }
    }

    /// What `path` keeps; nothing if it cannot be read: a process whose inheritance is not known is refused.
    pub(crate) fn read(path: &Path) -> Vec<Self> {
        let read = || {
            let bytes = bounded::read_at_most(open_regular(path).ok()?, Self::MAX_BYTES).ok()??;
            serde_json::from_slice(&bytes).ok()
        };
        read().unwrap_or_default()
    }
}

/// How two processes compare.
#[derive(Clone, Copy)]
pub(super) struct Same<'a> {
    /// Whether two descriptors are the same open file.
    pub(super) file: &'a dyn Fn(Descriptor, Descriptor) -> bool,
    /// Whether two processes have the same memory.
    pub(super) memory: &'a dyn Fn(i32, i32) -> bool,
}

/// What processes without CUDA have of GPUs.
#[derive(Debug, Default)]
pub(crate) struct OfGpus {
    /// What keeps CRIU from dumping it.
    pub(crate) findings: Vec<Finding>,
    pub(crate) inherited: Vec<Inherited>,
    /// Processes that may be in cuInit, where that is no finding
    /// ([`Processes::may_start`](super::Processes::may_start)).
    pub(crate) starting: Vec<i32>,
}

/// What each of the processes `holders`, which use no CUDA, has of GPUs.
pub(super) fn inspect(
    proc_root: &Path,
    processes: &Processes<'_>,
    holders: &[i32],
    same: Same<'_>,
) -> Result<OfGpus, Unreadable> {
    if holders.is_empty() {
        return Ok(OfGpus::default());
    }
    let (mut findings, mut starting) = (Vec::new(), Vec::new());
    // Every child has the descriptors between fork and exec.
    thread::sleep(EXEC);
    let comm = |pid| proc_maps::comm(proc_root, pid);
    let mut add = |refusal, certainty| findings.push(Finding { refusal, certainty });
    let mut held = Vec::new();
    for &pid in holders {
        let gpu = gpu_of(proc_root, pid)?;
        let Some(file) = gpu.shown() else { continue };
        if parent(proc_root, pid).is_some_and(|parent| (same.memory)(pid, parent)) {
            add(Refusal::Vfork { pid, comm: comm(pid) }, Certainty::Certain)
        } else {
            held.push((pid, file, gpu))
        }
    }
    let mut known = Known::read(proc_root, processes, same)?;
    while let Some(at) = held.iter().position(|(pid, _, gpu)| known.has_given(*pid, gpu)) {
        let (pid, file, gpu) = held.remove(at);
        if !processes.criu_plugin {
            let comm = comm(pid);
            add(Refusal::InheritedGpu { pid, comm, file }, Certainty::Certain);
        }
        known.inherited.push((pid, gpu));
    }
    for (pid, file, gpu) in held {
        // The driver opens its nodes in cuInit before it knows the process.
        if gpu.has_library && processes.may_start {
            starting.push(pid);
            continue;
        }
        // A plugin of the operator may dump what a process without libcuda has. Where firn's plugin is used,
        // CRIU would dump it as inherited.
        let is_certain = gpu.has_library
            || known.descends(pid)
            || !known.inherited.is_empty()
            || known.shares_with_cuda(pid, &gpu);
        let comm = comm(pid);
        let certainty = if is_certain {
            Certainty::Certain
        } else {
            Certainty::Suspected
        };
        add(Refusal::LeakedGpu { pid, comm, file }, certainty);
    }
    let inherited = known.inherited.into_iter();
    let open = |(pid, gpu): (i32, Gpu)| Inherited {
        pid,
        open: gpu.open.into_iter().map(|(number, _)| number).collect(),
    };
    Ok(OfGpus {
        findings,
        inherited: inherited.map(open).collect(),
        starting,
    })
}

/// Nothing of a process that has ended.
fn gpu_of(proc_root: &Path, pid: i32) -> Result<Gpu, Unreadable> {
    Ok(look(proc_root, pid)?.map(|found| found.gpu).unwrap_or_default())
}

/// Processes whose GPUs others may have inherited.
struct Known<'a> {
    proc_root: &'a Path,
    descent: Descent,
    /// The CUDA processes.
    cuda: Vec<(i32, Gpu)>,
    /// Processes that have only inherited files.
    inherited: Vec<(i32, Gpu)>,
    /// Those of the last checkpoint.
    before: &'a [Inherited],
    same: Same<'a>,
}

impl<'a> Known<'a> {
    fn read(proc_root: &'a Path, processes: &Processes<'a>, same: Same<'a>) -> Result<Self, Unreadable> {
        let mut cuda = Vec::new();
        for &pid in processes.cuda {
            cuda.push((pid, gpu_of(proc_root, pid)?));
        }
        Ok(Self {
            proc_root,
            descent: Descent::of(processes.cuda.iter().copied()),
            cuda,
            inherited: Vec::new(),
            before: processes.inherited_before,
            same,
        })
    }

    fn descends(&mut self, pid: i32) -> bool {
        self.descent.includes(pid, |pid| parent(self.proc_root, pid))
    }

    /// Whether a process has inherited all that it has of GPUs.
    fn has_given(&mut self, pid: i32, gpu: &Gpu) -> bool {
        // An image names a file by its path.
        if !self.descends(pid) || gpu.open.iter().any(|(_, file)| file.ends_with(" (deleted)")) {
            return false;
        }
        let mut before = self.before.iter().filter(|known| known.pid == pid);
        if before.any(|known| gpu.open.iter().all(|(number, _)| known.open.contains(number))) {
            return true;
        }
        let parent = parent(self.proc_root, pid);
        let mut numbers = gpu.open.iter().map(|(number, _)| *number);
        numbers.all(|number| self.is_of(Descriptor { pid, number }, parent))
    }

    /// Whether a process that need not descend from a CUDA process has a file of one.
    fn shares_with_cuda(&self, pid: i32, gpu: &Gpu) -> bool {
        gpu.open
            .iter()
            .any(|&(number, _)| self.is_of(Descriptor { pid, number }, None))
    }

    /// Whether a descriptor is a file of a CUDA process, or of `parent`, if that has only inherited files.
    fn is_of(&self, file: Descriptor, parent: Option<i32>) -> bool {
        let parents = self.inherited.iter().filter(|(pid, _)| Some(*pid) == parent);
        let givers: Vec<_> = self.cuda.iter().chain(parents).collect();
        let is_given = |is_candidate: &dyn Fn(i32) -> bool| {
            givers.iter().any(|(giver, gpu)| {
                let mut candidates = gpu.open.iter().filter(|(other, _)| is_candidate(*other));
                candidates.any(|&(number, _)| (self.same.file)(file, Descriptor { pid: *giver, number }))
            })
        };
        // Mostly it has the same number.
        is_given(&|other| other == file.number) || is_given(&|_| true)
    }
}

fn parent(proc_root: &Path, pid: i32) -> Option<i32> {
    let status = proc_maps::read(proc_root, pid, "status").ok()??;
    let status = String::from_utf8_lossy(&status);
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
pub(super) mod tests;
