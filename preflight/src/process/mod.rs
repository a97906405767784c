//! Signs, read from /proc alone, that the driver's checkpoint of a process would be refused or could not be restored.
//!
//! Nothing is stopped and nothing is asked of the driver. What decides between `Certain` and `Suspected` is whether the sign
//! has another explanation; what is refused for a sign, [`judge`] says.
//!
//! - Managed memory: each managed allocation is a shared writable mapping of /dev/nvidia-uvm whose file offset equals
//!   its address. The driver has such mappings of its own, one of 2 MiB for each context, in the low range that it keeps for
//!   itself. What is larger there may be its own as well (semaphore pools look the same), those elsewhere are managed memory.
//!   A suspicion needs no refusal: the driver refuses managed memory itself, before anything is lost.
//! - NCCL: the transports over peer-to-peer access and over shared memory share GPU memory between processes, which
//!   checkpoints well and cannot be restored. They are off only when the process was started with them off: the
//!   environment in /proc is that of its start, what the program sets later is not seen.
//! - MPS: an open file in the pipe directory of an MPS daemon shows a client; a pipe directory that is only named or
//!   only present may be unused.
//! - Libraries that exist to share GPU memory between processes: UCX's for CUDA, and the plugins that NVSHMEM loads when it is
//!   initialised. NVSHMEM itself says nothing: every PyTorch process has it.
//! - Open files: io_uring, RDMA devices, IMEX channels, and GPUs in processes that use no CUDA (`descriptors`).
//! - More than one CUDA process: they may share GPU memory in ways that leave no sign at all. Processes that only use NVML
//!   (nvidia-smi, monitors) are known to the driver, too, and cannot have any: no node of the driver's is mapped in them, as some
//!   are in every process that has called cuInit. libcuda is mapped in both, and /dev/nvidia-uvm only where there is a context,
//!   which cuMemCreate does not need.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;
use serde::{Deserialize, Serialize};

use firn_host::bounded;
use firn_host::proc_maps::{self, Mapping};

mod descriptors;

#[cfg(test)]
mod tests;
mod verdict;

pub use verdict::{Owner, Refusal, judge, shares_nothing};

/// Size of the driver's own mapping of /dev/nvidia-uvm for each context. The first lies at 0x204a00000.
const UVM_BASELINE: u64 = 2 << 20;

/// Addresses that the driver keeps for itself; programs get none of them.
const DRIVER_RANGE: std::ops::Range<u64> = 0x2_0000_0000..0x4_0000_0000;

/// Where an MPS daemon has its pipes when `CUDA_MPS_PIPE_DIRECTORY` does not say otherwise.
const MPS_DIRECTORY: &str = "/tmp/nvidia-mps";

/// File names, at their beginning, of libraries that share GPU memory between processes.
const SHARING_LIBRARIES: [&str; 3] = ["nvshmem_bootstrap", "nvshmem_transport", "libuct_cuda"];

/// How sure a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Certainty {
    Certain,
    Suspected,
}

/// What was seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "sign", rename_all = "snake_case")]
pub enum Sign {
    /// Managed (UVM) memory: `ranges` mappings of `bytes` in all.
    ManagedMemory { ranges: usize, bytes: u64 },
    /// NCCL is loaded; which transports were off when the process was started.
    Nccl {
        p2p_disabled: bool,
        shm_disabled: bool,
        nvls_disabled: bool,
    },
    /// A library that shares GPU memory between processes is loaded.
    SharingLibrary { file: String },
    /// The process is, or may be, a client of the MPS daemon whose pipes are in `directory`.
    Mps { directory: PathBuf },
    /// It has an io_uring.
    IoUring,
    /// It has an RDMA device open.
    Rdma { file: String },
    /// It has an IMEX channel open, through which GPUs of several machines share memory.
    Imex { file: String },
    /// It has a GPU open and uses no CUDA.
    LeakedGpu { file: String },
    /// The container has more than one CUDA process, those with NVML alone not counted.
    MultipleCudaProcesses { pids: Vec<i32> },
}

/// A sign and where it was seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The process; absent for what concerns several.
    pub pid: Option<i32>,
    #[serde(flatten)]
    pub sign: Sign,
    pub certainty: Certainty,
}

/// A process that could not be looked at.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {what} of process {pid}")]
pub struct Unreadable {
    pub pid: i32,
    pub what: &'static str,
    #[source]
    pub source: io::Error,
}

/// The processes of a workload.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// All that CRIU dumps.
    pub dumped: &'a [i32],
    /// Those that the driver knows.
    pub cuda: &'a [i32],
    /// The owner has announced these as ranks of NCCL: it need not show, as it may be linked into the program.
    pub ranks: bool,
}

/// Looks at processes through the proc filesystem at `proc_root`. One that has ended shows nothing.
pub fn inspect(proc_root: &Path, subject: &Subject<'_>) -> Result<Vec<Finding>, Unreadable> {
    let (mut findings, mut with_cuda) = (Vec::new(), Vec::new());
    for &pid in subject.cuda {
        let Some((found, has_cuda)) = inspect_one(proc_root, pid)? else {
            continue;
        };
        if has_cuda {
            let shows_nccl = found
                .iter()
                .any(|finding| matches!(finding.sign, Sign::Nccl { .. }));
            if subject.ranks && !shows_nccl {
                findings.extend(nccl_settings(proc_root, pid)?);
            }
            with_cuda.push(pid);
        }
        findings.extend(found);
    }
    findings.extend(descriptors::inspect(proc_root, subject)?);
    if with_cuda.len() > 1 {
        findings.push(Finding {
            pid: None,
            sign: Sign::MultipleCudaProcesses { pids: with_cuda },
            certainty: Certainty::Certain,
        });
    }
    Ok(findings)
}

/// What a process shows, and whether it uses CUDA and not NVML alone.
fn inspect_one(proc_root: &Path, pid: i32) -> Result<Option<(Vec<Finding>, bool)>, Unreadable> {
    let Some(mapped) = Mapped::read(proc_root, pid)? else {
        return Ok(None);
    };
    let Some(environment) = Environment::read(proc_root, pid)? else {
        return Ok(None);
    };
    let mut findings = mapped.managed_memory();
    if mapped.nccl {
        findings.push((environment.nccl_settings(), Certainty::Certain));
    }
    findings.extend(mapped.sharing_library());
    findings.extend(mps(proc_root, pid, &environment)?);
    let of_process = |(sign, certainty)| Finding {
        pid: Some(pid),
        sign,
        certainty,
    };
    Ok(Some((
        findings.into_iter().map(of_process).collect(),
        mapped.has_node,
    )))
}

/// Whether a file is a node of the driver's, by its name: it may have another path, or none any more.
fn is_node(name: &[u8]) -> bool {
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    match name.strip_prefix(b"nvidia") {
        Some(b"ctl") => true,
        Some(rest) => rest.starts_with(b"-uvm") || (!rest.is_empty() && rest.iter().all(u8::is_ascii_digit)),
        None => false,
    }
}

/// What the mappings of a process show.
#[derive(Default)]
struct Mapped {
    /// Ranges and bytes of managed memory outside the driver's range, and of what may be in it.
    managed: [(usize, u64); 2],
    nccl: bool,
    sharing: Option<String>,
    /// Whether a node of the driver's is mapped.
    has_node: bool,
}

impl Mapped {
    fn read(proc_root: &Path, pid: i32) -> Result<Option<Self>, Unreadable> {
        let mut mapped = Self::default();
        let read = proc_maps::each(proc_root, pid, |mapping| {
            mapped.add(&mapping);
            ControlFlow::Continue(())
        });
        let read = read.map_err(|source| Unreadable {
            pid,
            what: "maps",
            source,
        })?;
        Ok(read.map(|()| mapped))
    }

    fn add(&mut self, mapping: &Mapping<'_>) {
        if is_managed(mapping) {
            let [certain, suspected] = &mut self.managed;
            let sum = match DRIVER_RANGE.contains(&mapping.start) {
                true => suspected,
                false => certain,
            };
            sum.0 += 1;
            sum.1 = sum.1.saturating_add(mapping.bytes());
        }
        let name = mapping.file_name();
        self.has_node |= is_node(name);
        self.nccl |= name.starts_with(b"libnccl");
        let shares = |library: &&str| name.starts_with(library.as_bytes());
        if self.sharing.is_none() && SHARING_LIBRARIES.iter().any(shares) {
            self.sharing = Some(String::from_utf8_lossy(name).into_owned());
        }
    }

    fn managed_memory(&self) -> Vec<(Sign, Certainty)> {
        let sums = self
            .managed
            .into_iter()
            .zip([Certainty::Certain, Certainty::Suspected]);
        sums.filter(|((ranges, _), _)| *ranges > 0)
            .map(|((ranges, bytes), certainty)| (Sign::ManagedMemory { ranges, bytes }, certainty))
            .collect()
    }

    fn sharing_library(&self) -> Option<(Sign, Certainty)> {
        let file = self.sharing.clone()?;
        Some((Sign::SharingLibrary { file }, Certainty::Suspected))
    }
}

fn is_managed(mapping: &Mapping<'_>) -> bool {
    mapping.path == b"/dev/nvidia-uvm"
        && mapping.perms == b"rw-s"
        && mapping.offset == mapping.start
        && !(DRIVER_RANGE.contains(&mapping.start) && mapping.bytes() == UVM_BASELINE)
}

/// What [`Sign::Nccl`] says of a process, whether NCCL shows in its mappings or, linked statically, does not. A process that
/// has ended shows nothing.
fn nccl_settings(proc_root: &Path, pid: i32) -> Result<Option<Finding>, Unreadable> {
    let environment = Environment::read(proc_root, pid)?;
    Ok(environment.map(|environment| Finding {
        pid: Some(pid),
        sign: environment.nccl_settings(),
        certainty: Certainty::Certain,
    }))
}

/// The variables that are looked at.
const VARIABLES: [&str; 4] = [
    MPS_PIPES,
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NVLS_ENABLE",
];
const MPS_PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// Those of [`VARIABLES`] that a process was started with. Of one that is there several times the first counts.
#[derive(Default)]
struct Environment(BTreeMap<&'static str, Vec<u8>>);

impl Environment {
    fn read(proc_root: &Path, pid: i32) -> Result<Option<Self>, Unreadable> {
        let what = "environ";
        let mut found = Self::default();
        let path = proc_root.join(pid.to_string()).join(what);
        let read = bounded::each(&path, 0, bounded::WHOLE, |entry| {
            let value = |name: &str| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=");
            for name in VARIABLES {
                if let Some(value) = value(name) {
                    found.0.entry(name).or_insert_with(|| value.to_vec());
                }
            }
            ControlFlow::Continue(())
        });
        let read = proc_maps::unless_gone(read).map_err(|source| Unreadable { pid, what, source })?;
        Ok(read.map(|()| found))
    }

    fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.get(name).map(Vec::as_slice)
    }

    /// A path; an empty one is none.
    fn path(&self, name: &str) -> Option<&Path> {
        let value = self.get(name).filter(|value| !value.is_empty())?;
        Some(Path::new(OsStr::from_bytes(value)))
    }

    fn nccl_settings(&self) -> Sign {
        let number = |name| {
            self.get(name)
                .and_then(|v| std::str::from_utf8(v).ok()?.trim().parse().ok())
        };
        let is_set = |name| number(name).is_some_and(|n: i64| n != 0);
        Sign::Nccl {
            p2p_disabled: is_set("NCCL_P2P_DISABLE"),
            shm_disabled: is_set("NCCL_SHM_DISABLE"),
            nvls_disabled: number("NCCL_NVLS_ENABLE") == Some(0),
        }
    }
}

fn mps(
    proc_root: &Path,
    pid: i32,
    environment: &Environment,
) -> Result<Option<(Sign, Certainty)>, Unreadable> {
    let named = environment.path(MPS_PIPES);
    let directory = named.unwrap_or(Path::new(MPS_DIRECTORY));
    let process = proc_root.join(pid.to_string());
    let found = |certainty| {
        Some((
            Sign::Mps {
                directory: directory.to_owned(),
            },
            certainty,
        ))
    };

    let open = has_open_file_in(&process.join("fd"), directory);
    if open.map_err(|source| Unreadable {
        pid,
        what: "fd",
        source,
    })? {
        return Ok(found(Certainty::Certain));
    }
    let present = || exists_in(&process.join("root"), &directory.join("control"));
    Ok(if named.is_some() || present() {
        found(Certainty::Suspected)
    } else {
        None
    })
}

fn has_open_file_in(descriptors: &Path, directory: &Path) -> io::Result<bool> {
    let entries = match fs::read_dir(descriptors) {
        Ok(entries) => entries,
        Err(error) if proc_maps::is_gone(&error) => return Ok(false),
        Err(error) => return Err(error),
    };
    // A descriptor that is closed meanwhile shows nothing.
    Ok(entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|to| to.starts_with(directory)))
}

/// Whether a process finds something at `path`, which is the process's to choose: no link of it leads out of its root.
fn exists_in(root: &Path, path: &Path) -> bool {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let how = OpenHow::new()
        .flags(flags | OFlag::O_NOFOLLOW)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    open(root, flags | OFlag::O_DIRECTORY, Mode::empty())
        .and_then(|root| openat2(root, path, how))
        .is_ok()
}
