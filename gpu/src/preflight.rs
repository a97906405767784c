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
//! - Launch jobs: the variable `CUDA_CHECKPOINT_JOB_FILE` in the environment that the process was started with.
//! - Libraries that exist to share GPU memory between processes: UCX's for CUDA, and the plugins that NVSHMEM loads when it is
//!   initialised. NVSHMEM itself says nothing: every PyTorch process has it.
//! - Open files: io_uring, RDMA devices, IMEX channels, and GPUs in processes that use no CUDA (`descriptors`).
//! - More than one CUDA process: they may share GPU memory in ways that leave no sign at all. Processes that only use NVML
//!   (nvidia-smi, monitors) are known to the driver, too, and cannot have any: no node of the driver's is mapped in them, as some
//!   are in every process that has called cuInit. libcuda is mapped in both, and /dev/nvidia-uvm only where there is a context,
//!   which cuMemCreate does not need.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::maps::{self, Mapping};

mod descriptors;
mod judge;
#[cfg(test)]
mod tests;

pub use judge::{Owner, Refusal, judge};

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
        cumem_disabled: bool,
    },
    /// It was started as one of the launch job that has this file.
    LaunchJob { file: PathBuf },
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
    let read = |name| {
        maps::read(proc_root, pid, name).map_err(|source| Unreadable {
            pid,
            what: name,
            source,
        })
    };
    let (Some(maps), Some(environment)) = (read("maps")?, read("environ")?) else {
        return Ok(None);
    };
    let mut findings = managed_memory(&maps);
    findings.extend(nccl(&maps, &environment));
    findings.extend(sharing_library(&maps));
    findings.extend(launch_job(&environment));
    findings.extend(mps(proc_root, pid, &environment)?);
    let of_process = |(sign, certainty)| Finding {
        pid: Some(pid),
        sign,
        certainty,
    };
    let has_cuda = maps::mappings(&maps).any(|mapping| is_node(mapping.file_name()));
    Ok(Some((findings.into_iter().map(of_process).collect(), has_cuda)))
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

fn managed_memory(maps: &[u8]) -> Vec<(Sign, Certainty)> {
    let (mut certain, mut suspected) = ((0, 0), (0, 0));
    for mapping in maps::mappings(maps).filter(is_managed) {
        let sum = if DRIVER_RANGE.contains(&mapping.start) {
            &mut suspected
        } else {
            &mut certain
        };
        sum.0 += 1;
        sum.1 += mapping.len();
    }
    [(certain, Certainty::Certain), (suspected, Certainty::Suspected)]
        .into_iter()
        .filter(|((ranges, _), _)| *ranges > 0)
        .map(|((ranges, bytes), certainty)| (Sign::ManagedMemory { ranges, bytes }, certainty))
        .collect()
}

fn is_managed(mapping: &Mapping<'_>) -> bool {
    mapping.path == b"/dev/nvidia-uvm"
        && mapping.perms == b"rw-s"
        && mapping.offset == mapping.start
        && !(DRIVER_RANGE.contains(&mapping.start) && mapping.len() == UVM_BASELINE)
}

/// What [`Sign::Nccl`] says of a process, whether NCCL shows in its mappings or, linked statically, does not. A process that
/// has ended shows nothing.
fn nccl_settings(proc_root: &Path, pid: i32) -> Result<Option<Finding>, Unreadable> {
    const ENVIRON: &str = "environ";
    let environment = maps::read(proc_root, pid, ENVIRON).map_err(|source| Unreadable {
        pid,
        what: ENVIRON,
        source,
    })?;
    Ok(environment.map(|environment| Finding {
        pid: Some(pid),
        sign: settings(&environment),
        certainty: Certainty::Certain,
    }))
}

fn nccl(maps: &[u8], environment: &[u8]) -> Option<(Sign, Certainty)> {
    maps::mappings(maps).find(|mapping| mapping.file_name().starts_with(b"libnccl"))?;
    Some((settings(environment), Certainty::Certain))
}

fn settings(environment: &[u8]) -> Sign {
    let number =
        |name| variable(environment, name).and_then(|v| std::str::from_utf8(v).ok()?.trim().parse().ok());
    let is_set = |name| number(name).is_some_and(|n: i64| n != 0);
    Sign::Nccl {
        p2p_disabled: is_set("NCCL_P2P_DISABLE"),
        shm_disabled: is_set("NCCL_SHM_DISABLE"),
        nvls_disabled: number("NCCL_NVLS_ENABLE") == Some(0),
        cumem_disabled: number("NCCL_CUMEM_ENABLE") == Some(0),
    }
}

fn sharing_library(maps: &[u8]) -> Option<(Sign, Certainty)> {
    let is_one = |name: &&[u8]| {
        SHARING_LIBRARIES
            .iter()
            .any(|library| name.starts_with(library.as_bytes()))
    };
    let file = maps::mappings(maps)
        .map(|mapping| mapping.file_name())
        .find(is_one)?;
    let file = String::from_utf8_lossy(file).into_owned();
    Some((Sign::SharingLibrary { file }, Certainty::Suspected))
}

fn launch_job(environment: &[u8]) -> Option<(Sign, Certainty)> {
    let file = variable(environment, "CUDA_CHECKPOINT_JOB_FILE").filter(|value| !value.is_empty())?;
    let file = PathBuf::from(OsStr::from_bytes(file));
    Some((Sign::LaunchJob { file }, Certainty::Certain))
}

fn mps(proc_root: &Path, pid: i32, environment: &[u8]) -> Result<Option<(Sign, Certainty)>, Unreadable> {
    let named = variable(environment, "CUDA_MPS_PIPE_DIRECTORY").filter(|value| !value.is_empty());
    let directory = named.map_or(Path::new(MPS_DIRECTORY), |value| {
        Path::new(OsStr::from_bytes(value))
    });
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
    let control = directory.strip_prefix("/").unwrap_or(directory).join("control");
    let present = fs::symlink_metadata(process.join("root").join(control)).is_ok();
    Ok(if named.is_some() || present {
        found(Certainty::Suspected)
    } else {
        None
    })
}

fn has_open_file_in(descriptors: &Path, directory: &Path) -> io::Result<bool> {
    let entries = match fs::read_dir(descriptors) {
        Ok(entries) => entries,
        Err(error) if maps::is_gone(&error) => return Ok(false),
        Err(error) => return Err(error),
    };
    // A descriptor that is closed meanwhile shows nothing.
    Ok(entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|to| to.starts_with(directory)))
}

/// Value of `name` in the NUL-separated environment.
fn variable<'a>(environment: &'a [u8], name: &str) -> Option<&'a [u8]> {
    environment
        .split(|b| *b == 0)
        .find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}
