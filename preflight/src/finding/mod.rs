//! What /proc shows of processes that the driver or CRIU cannot checkpoint or restore.
//!
//! No process is stopped and the driver is not called. A [`Finding`] is [`Certain`](Certainty::Certain) if it
//! has no other explanation. [`evaluate`] decides which findings refuse a checkpoint.
//!
//! - Managed memory: each managed allocation is a shared writable mapping of /dev/nvidia-uvm whose file
//!   offset equals its address. The driver has such mappings of its own: one of 2 MiB for each context, in an
//!   address range that it reserves. Larger mappings in that range may be the driver's (semaphore pools look
//!   the same) and are suspected; those elsewhere are managed memory. A suspicion refuses nothing, because
//!   the driver itself refuses managed memory without harm.
//! - NCCL: its transports over peer-to-peer access and over shared memory share GPU memory between processes,
//!   which can be checkpointed and not restored. They count as off only if the process was started with them
//!   off: /proc shows the environment of the start, and not what the program sets later.
//! - MPS: a process with an open file in the pipe directory of an MPS daemon is a client. A pipe directory
//!   that only exists, or that only a variable names, may be unused.
//! - Libraries that share GPU memory between processes: UCX's for CUDA, and the plugins that NVSHMEM loads
//!   when a program initialises it. NVSHMEM itself is no finding, because every PyTorch process has loaded
//!   it.
//! - Open files: io_uring, RDMA devices, IMEX channels, and GPUs in processes that use no CUDA
//!   (`descriptors`).
//! - Several CUDA processes: they may share GPU memory in ways that /proc does not show. Processes that only
//!   use NVML (nvidia-smi, monitors) are known to the driver and share nothing. They do not count: they map
//!   no device node of the driver, as every process does after cuInit. (Both map libcuda. /dev/nvidia-uvm is
//!   mapped only with a context, which cuMemCreate does not need.)

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, ResolveFlag, open};
use nix::sys::stat::Mode;

use firn_host::proc_maps::{self, Mapping};
use firn_host::{bounded, open_below};

mod descriptors;
mod evaluate;
#[cfg(test)]
mod tests;

pub(crate) use evaluate::evaluate;

/// Size of the driver's own mapping of /dev/nvidia-uvm for each context. The first is at 0x204a00000.
const UVM_BASELINE: u64 = 2 << 20;

/// Addresses that the driver reserves for itself.
const DRIVER_RANGE: std::ops::Range<u64> = 0x2_0000_0000..0x4_0000_0000;

/// Pipe directory of an MPS daemon without `CUDA_MPS_PIPE_DIRECTORY`.
const MPS_DIRECTORY: &str = "/tmp/nvidia-mps";

/// How the file names of libraries begin that share GPU memory between processes.
const SHARING_LIBRARIES: [&str; 3] = ["nvshmem_bootstrap", "nvshmem_transport", "libuct_cuda"];

/// How sure a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Certainty {
    Certain,
    Suspected,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// Managed (UVM) memory: `ranges` mappings with a total of `bytes`.
    ManagedMemory { ranges: usize, bytes: u64 },
    /// The process is a rank of NCCL. Each field: the transport was off when the process was started.
    Nccl {
        p2p_disabled: bool,
        shm_disabled: bool,
        nvls_disabled: bool,
    },
    /// A library that shares GPU memory between processes is loaded.
    SharingLibrary { file: String },
    /// The process is, or may be, a client of the MPS daemon whose pipes are in `directory`.
    Mps { directory: PathBuf },
    /// The process has an io_uring.
    IoUring,
    /// The process has an RDMA device open.
    Rdma { file: String },
    /// The process has an IMEX channel open, through which GPUs of several machines share memory.
    Imex { file: String },
    /// The process has a GPU open and uses no CUDA.
    LeakedGpu { file: String },
    /// The container has more than one CUDA process, not counting those that only use NVML.
    MultipleCudaProcesses { pids: Vec<i32> },
}

/// What was found, and in which process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// `None` if the finding concerns several processes.
    pub pid: Option<i32>,
    pub kind: FindingKind,
    pub certainty: Certainty,
}

/// A file of a process in /proc could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {what} of process {pid}")]
pub struct Unreadable {
    pub pid: i32,
    pub what: &'static str,
    #[source]
    pub source: io::Error,
}

/// The processes to inspect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Processes<'a> {
    /// All that CRIU dumps.
    pub dumped: &'a [i32],
    /// Those that the driver knows.
    pub cuda: &'a [i32],
    /// The owner asserts that the CUDA processes are ranks of NCCL. The library may be linked into the
    /// program, so that no mapping shows it.
    pub ranks: bool,
}

/// Reads the files of processes below `proc_root`. A process that has ended has no findings.
pub(crate) fn inspect(proc_root: &Path, processes: &Processes<'_>) -> Result<Vec<Finding>, Unreadable> {
    let (mut findings, mut with_cuda) = (Vec::new(), Vec::new());
    for &pid in processes.cuda {
        let Some((found, has_cuda)) = inspect_one(proc_root, pid)? else {
            continue;
        };
        if has_cuda {
            let shows_nccl = found
                .iter()
                .any(|finding| matches!(finding.kind, FindingKind::Nccl { .. }));
            if processes.ranks && !shows_nccl {
                findings.extend(nccl_settings(proc_root, pid)?);
            }
            with_cuda.push(pid);
        }
        findings.extend(found);
    }
    findings.extend(descriptors::inspect(proc_root, processes)?);
    if with_cuda.len() > 1 {
        findings.push(Finding {
            pid: None,
            kind: FindingKind::MultipleCudaProcesses { pids: with_cuda },
            certainty: Certainty::Certain,
        });
    }
    Ok(findings)
}

/// The findings of a process, and whether it uses more of CUDA than NVML.
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
    let of_process = |(kind, certainty)| Finding {
        pid: Some(pid),
        kind,
        certainty,
    };
    Ok(Some((
        findings.into_iter().map(of_process).collect(),
        mapped.has_node,
    )))
}

/// Whether a file is a device node of the driver. Only the name counts: it may have another path, or be
/// deleted.
fn is_node(name: &[u8]) -> bool {
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    match name.strip_prefix(b"nvidia") {
        Some(b"ctl") => true,
        Some(rest) => rest.starts_with(b"-uvm") || (!rest.is_empty() && rest.iter().all(u8::is_ascii_digit)),
        None => false,
    }
}

/// What the mappings of a process contain.
#[derive(Default)]
struct Mapped {
    /// Ranges and bytes of managed memory outside of the driver's address range, and of suspected memory
    /// inside.
    managed: [(usize, u64); 2],
    nccl: bool,
    sharing: Option<String>,
    /// Whether a device node of the driver is mapped.
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

    fn managed_memory(&self) -> Vec<(FindingKind, Certainty)> {
        let sums = self
            .managed
            .into_iter()
            .zip([Certainty::Certain, Certainty::Suspected]);
        sums.filter(|((ranges, _), _)| *ranges > 0)
            .map(|((ranges, bytes), certainty)| (FindingKind::ManagedMemory { ranges, bytes }, certainty))
            .collect()
    }

    fn sharing_library(&self) -> Option<(FindingKind, Certainty)> {
        let file = self.sharing.clone()?;
        Some((FindingKind::SharingLibrary { file }, Certainty::Suspected))
    }
}

fn is_managed(mapping: &Mapping<'_>) -> bool {
    mapping.path == b"/dev/nvidia-uvm"
        && mapping.perms == b"rw-s"
        && mapping.offset == mapping.start
        && !(DRIVER_RANGE.contains(&mapping.start) && mapping.bytes() == UVM_BASELINE)
}

/// The settings of NCCL that a process was started with, whether or not its mappings show the library.
fn nccl_settings(proc_root: &Path, pid: i32) -> Result<Option<Finding>, Unreadable> {
    let environment = Environment::read(proc_root, pid)?;
    Ok(environment.map(|environment| Finding {
        pid: Some(pid),
        kind: environment.nccl_settings(),
        certainty: Certainty::Certain,
    }))
}

/// The variables that matter.
const VARIABLES: [&str; 4] = [
    MPS_PIPES,
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NVLS_ENABLE",
];
const MPS_PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// Those of [`VARIABLES`] that a process was started with. If a variable is set twice, the first value
/// counts.
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

    /// The value as a path; `None` if it is empty.
    fn path(&self, name: &str) -> Option<&Path> {
        let value = self.get(name).filter(|value| !value.is_empty())?;
        Some(Path::new(OsStr::from_bytes(value)))
    }

    fn nccl_settings(&self) -> FindingKind {
        let number = |name| {
            self.get(name)
                .and_then(|v| std::str::from_utf8(v).ok()?.trim().parse().ok())
        };
        let is_set = |name| number(name).is_some_and(|n: i64| n != 0);
        FindingKind::Nccl {
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
) -> Result<Option<(FindingKind, Certainty)>, Unreadable> {
    let named = environment.path(MPS_PIPES);
    let directory = named.unwrap_or(Path::new(MPS_DIRECTORY));
    let process = proc_root.join(pid.to_string());
    let found = |certainty| {
        Some((
            FindingKind::Mps {
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
    // A descriptor may be closed between the two reads.
    Ok(entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|to| to.starts_with(directory)))
}

/// Whether `path` exists for a process. The process chooses the path, so links are not followed out of its
/// root.
fn exists_in(root: &Path, path: &Path) -> bool {
    let directory = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let resolve = ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    open(root, directory, Mode::empty())
        .and_then(|root| open_below(root, path, OFlag::O_PATH | OFlag::O_NOFOLLOW, resolve))
        .is_ok()
}
