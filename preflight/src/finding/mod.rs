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
//! - Peer access: a process whose GPUs access each other's memory is checkpointed and, with large
//!   allocations, never restored. Nothing shows the access. A context on a GPU shows: a shared mapping of
//!   2 MiB or more of that GPU's node (a process that only sees a GPU has mappings of 64 KiB of its node). A
//!   process with contexts on several GPUs is therefore refused unless its owner asserts that there is no
//!   such access.
//! - MPS: a process with an open file in the pipe directory of an MPS daemon is a client. A pipe directory
//!   that only exists, or that only a variable names, may be unused.
//! - Libraries that share GPU memory between processes: UCX's for CUDA, and the plugins that NVSHMEM loads
//!   when a program initialises it. NVSHMEM itself is no finding, because every PyTorch process has loaded
//!   it.
//! - Open files: io_uring, RDMA devices, IMEX channels, and GPUs in processes that use no CUDA
//!   (`descriptors`).
//! - Memory with a protection key (`protection_keys`).
//! - Several CUDA processes: they may share GPU memory in ways that /proc does not show. Processes that only
//!   use NVML (nvidia-smi, monitors) are known to the driver and share nothing. They do not count: they map
//!   no device node of the driver, as every process does after cuInit. (Both map libcuda. /dev/nvidia-uvm is
//!   mapped only with a context, which cuMemCreate does not need.) A process without a context is counted: it
//!   may have imported memory, which the driver does not restore, and it looks like one that has only called
//!   cuInit. A compile worker of PyTorch is known by its program, and does not count.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, ResolveFlag, open};
use nix::sys::stat::Mode;

use firn_host::ordered::set_of;
use firn_host::proc_maps::{self, Mapping};
use firn_host::{bounded, open_below, procfs};

mod connections;
mod deleted_names;
mod descriptors;
mod devices;
mod evaluate;
mod held;
mod inherited;
mod kept;
mod objects;
mod protection_keys;
mod refused_before;
#[cfg(test)]
mod tests;
mod unix_sockets;
mod watches;

pub(crate) use descriptors::of_criu;
pub(crate) use watches::{Lookup, inspect as watches};

pub use connections::Connection;
pub(crate) use connections::Line as SocketLine;
pub(crate) use evaluate::{evaluate, without_peer_access, without_peer_access_of};
pub use inherited::Inherited;
pub(crate) use inherited::OfGpus;
pub(crate) use kept::kept;
pub use objects::Object;
pub use refused_before::RefusedBefore;
pub use unix_sockets::{Kind as UnixKind, OtherEnd, UnixSocket};

pub(crate) use connections::socket as socket_inode;

use crate::sys::is_same_memory;
use crate::{Assertions, Refusal};

/// Size of the driver's own mapping of /dev/nvidia-uvm for each context. The first is at 0x204a00000.
const UVM_BASELINE: u64 = 2 << 20;

/// Size of the smallest mapping of a GPU's node that shows a context on it.
const CONTEXT: u64 = 2 << 20;

/// Addresses that the driver reserves for itself.
const DRIVER_RANGE: std::ops::Range<u64> = 0x2_0000_0000..0x4_0000_0000;

/// Pipe directory of an MPS daemon without `CUDA_MPS_PIPE_DIRECTORY`.
const MPS_DIRECTORY: &str = "/tmp/nvidia-mps";

/// The program of a compile worker of inductor (`torch.compile`). It calls cuInit and is given source text
/// alone.
const COMPILE_WORKER: &str = "torch/_inductor/compile_worker/__main__.py";

/// How the file names of libraries begin that share GPU memory between processes.
const SHARING_LIBRARIES: [&str; 3] = ["nvshmem_bootstrap", "nvshmem_transport", "libuct_cuda"];

/// How sure a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Certainty {
    Certain,
    Suspected,
}

/// What was found.
#[derive(Debug)]
pub struct Finding {
    /// What a checkpoint is refused with, if the finding refuses it.
    pub refusal: Refusal,
    pub certainty: Certainty,
}

impl Finding {
    /// Whether it is one of descriptors and mappings of GPUs in a process that uses no CUDA.
    pub(crate) fn is_of_a_gpu(&self) -> bool {
        let refusal = &self.refusal;
        matches!(
            refusal,
            Refusal::LeakedGpu { .. } | Refusal::InheritedGpu { .. } | Refusal::Imex { .. }
        )
    }
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
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Processes<'a> {
    /// All that CRIU dumps.
    pub dumped: &'a [i32],
    /// Those that the driver knows.
    pub cuda: &'a [i32],
    /// The owner asserts that the CUDA processes are ranks of NCCL. The library may be linked into the
    /// program, so that no mapping shows it.
    pub ranks: bool,
    /// CRIU is given firn's plugin for inherited GPUs.
    pub criu_plugin: bool,
    /// Inherited descriptors that the last checkpoint has found.
    pub inherited_before: &'a [Inherited],
    /// A process may be in cuInit: whoever asks waits for it, and asks again.
    pub may_start: bool,
}

/// The TCP connections of processes below `proc_root`.
pub(crate) fn connections(proc_root: &Path, dumped: &[i32]) -> Result<Vec<Connection>, Unreadable> {
    connections::inspect(proc_root, dumped)
}

/// Inodes of the TCP connections in the network namespace of a process, but of those whose other end has
/// ended them after bytes that nobody has read. Of a process that has ended there are none.
///
/// # Errors
/// The kernel's table cannot be read, or is very long.
pub fn read_connections(pid: i32) -> Result<BTreeSet<u64>, Unreadable> {
    connections::all_read(Path::new("/proc"), pid)
}

/// Whether CRIU has to make links of files of the processes, or why it must not.
pub(crate) fn link_remap(
    init: i32,
    dumped: &[i32],
    tmpfs: &[PathBuf],
    users_links: bool,
) -> Result<bool, Refusal> {
    deleted_names::inspect(init, dumped, tmpfs, users_links)
}

/// The Unix sockets of processes below `proc_root` that lead outside, and why they refuse a checkpoint.
pub(crate) fn unix_sockets(
    proc_root: &Path,
    dumped: &[i32],
    assertions: &Assertions,
    criu_plugin: bool,
) -> Result<(Vec<UnixSocket>, Option<Refusal>), Unreadable> {
    let mut found = unix_sockets::inspect(proc_root, dumped)?;
    let refusal = unix_sockets::evaluate(&mut found, assertions, criu_plugin);
    Ok((found, refusal))
}

/// As [`unix_sockets`] where CRIU dumps the container without firn's plugin: it dumps none of them, but
/// datagram sockets that it connects again if its user wants that.
pub(crate) fn unix_sockets_by_criu(
    proc_root: &Path,
    dumped: &[i32],
    external_unix: bool,
) -> Result<(Vec<UnixSocket>, Option<Refusal>), Unreadable> {
    let mut found = unix_sockets::inspect(proc_root, dumped)?;
    found.retain(|socket| !(external_unix && socket.is_connected_again()));
    let sockets = found.clone();
    let refusal = (!sockets.is_empty()).then_some(Refusal::PlainUnixSockets { sockets });
    Ok((found, refusal))
}

/// Objects of processes below `proc_root` that no copy would have, and a user namespace of the container.
pub(crate) fn objects(
    proc_root: &Path,
    init: i32,
    dumped: &[i32],
    no_inet: bool,
) -> Result<Vec<Refusal>, Unreadable> {
    let objects = objects::inspect(proc_root, init, dumped, no_inet)?;
    let waiting = unix_sockets::waiting(proc_root, dumped)?;
    Ok(user_namespace(proc_root, init)
        .into_iter()
        .chain(objects)
        .chain(waiting)
        .collect())
}

/// Why a container with this first process is not dumped, whoever dumps it: nothing could restore it.
pub fn user_namespace(proc_root: &Path, init: i32) -> Option<Refusal> {
    objects::has_user_namespace(proc_root, init).then_some(Refusal::UserNamespace)
}

/// Why processes share GPU memory after the hook `prepare`, as far as /proc shows it. One refusal at most.
pub(crate) fn held(proc_root: &Path, dumped: &[i32]) -> Result<Option<Refusal>, Unreadable> {
    held::inspect(proc_root, dumped)
}

/// Which process holds an accelerator after the hook `prepare`. One refusal at most.
pub(crate) fn held_devices(
    proc_root: &Path,
    pids: &[i32],
    cuda: &[i32],
) -> Result<Option<Refusal>, Unreadable> {
    devices::inspect(proc_root, pids, cuda)
}

/// Whether none of these processes is between vfork and exec: its parent waits for that in the kernel, where
/// CRIU cannot stop it.
pub fn is_outside_vfork(pids: &[i32]) -> bool {
    let all = set_of(pids.iter().copied());
    let parent = |pid| procfs::stat_field(pid, 1)?.parse().ok();
    let mut pairs = pids.iter().filter_map(|pid| Some((*pid, parent(*pid)?)));
    !pairs.any(|(pid, parent)| all.contains(&parent) && is_same_memory(pid, parent))
}

/// Reads the files of processes below `proc_root`. A process that has ended has no findings. Returns also
/// what those without CUDA have of GPUs, whose findings are among the others.
pub(crate) fn inspect(
    proc_root: &Path,
    processes: &Processes<'_>,
) -> Result<(Vec<Finding>, OfGpus), Unreadable> {
    let (mut findings, mut with_cuda) = (Vec::new(), Vec::new());
    for &pid in processes.cuda {
        if inspect_one(proc_root, pid, processes.ranks, &mut findings)? {
            with_cuda.push((pid, proc_maps::comm(proc_root, pid)));
        }
    }
    let (others, of_gpus) = descriptors::inspect(proc_root, processes)?;
    findings.extend(others);
    if with_cuda.len() > 1 {
        findings.push(Finding {
            refusal: Refusal::Ipc { processes: with_cuda },
            certainty: Certainty::Certain,
        });
    }
    Ok((findings, of_gpus))
}

/// Adds the findings of a process. Returns whether it uses more of CUDA than NVML, and may share memory.
fn inspect_one(
    proc_root: &Path,
    pid: i32,
    is_rank: bool,
    findings: &mut Vec<Finding>,
) -> Result<bool, Unreadable> {
    let Some(mapped) = Mapped::read(proc_root, pid)? else {
        return Ok(false);
    };
    let Some(environment) = Environment::read(proc_root, pid)? else {
        return Ok(false);
    };
    let comm = || proc_maps::comm(proc_root, pid);
    let mut add = |refusal, certainty| findings.push(Finding { refusal, certainty });
    let managed = mapped.managed.into_iter();
    for ((ranges, bytes), certainty) in managed.zip([Certainty::Certain, Certainty::Suspected]) {
        if ranges > 0 {
            let comm = comm();
            add(
                Refusal::ManagedMemory {
                    pid,
                    comm,
                    ranges,
                    bytes,
                },
                certainty,
            );
        }
    }
    let compiles = mapped.contexts.is_empty() && is_compile_worker(proc_root, pid)?;
    if !compiles && (mapped.nccl || (is_rank && mapped.has_node)) {
        let (comm, missing) = (comm(), environment.missing_for_sockets());
        add(Refusal::Nccl { pid, comm, missing }, Certainty::Certain);
    }
    if mapped.contexts.len() > 1 {
        let (comm, gpus) = (comm(), mapped.contexts.into_iter().collect());
        add(Refusal::PeerAccess { pid, comm, gpus }, Certainty::Certain);
    }
    if let Some(file) = mapped.sharing {
        let comm = comm();
        add(Refusal::SharingLibrary { pid, comm, file }, Certainty::Suspected);
    }
    if let Some((directory, certainty)) = mps(proc_root, pid, &environment)? {
        let comm = comm();
        add(Refusal::Mps { pid, comm, directory }, certainty);
    }
    Ok(mapped.has_node && !compiles)
}

/// Whether a process runs [`COMPILE_WORKER`]: its first argument that is a program of Python.
fn is_compile_worker(proc_root: &Path, pid: i32) -> Result<bool, Unreadable> {
    let what = "cmdline";
    let path = proc_root.join(pid.to_string()).join(what);
    let mut found = false;
    let read = bounded::each(&path, 0, bounded::WHOLE, |argument| {
        if !argument.ends_with(b".py") {
            return ControlFlow::Continue(());
        }
        found = Path::new(OsStr::from_bytes(argument)).ends_with(COMPILE_WORKER);
        ControlFlow::Break(())
    });
    let read = proc_maps::unless_gone(read).map_err(|source| Unreadable { pid, what, source })?;
    Ok(read.is_some() && found)
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

/// The name of the GPU's node that a file is, which may be deleted.
fn gpu_of(name: &[u8]) -> Option<String> {
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    let number = name.strip_prefix(b"nvidia")?;
    let is_gpu = !number.is_empty() && number.iter().all(u8::is_ascii_digit);
    is_gpu.then(|| String::from_utf8_lossy(name).into_owned())
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
    /// Names of the nodes of the GPUs that it has contexts on.
    contexts: BTreeSet<String>,
}

impl Mapped {
    fn read(proc_root: &Path, pid: i32) -> Result<Option<Self>, Unreadable> {
        let mut mapped = Self::default();
        let read = each_mapping(proc_root, pid, |mapping| {
            mapped.add(&mapping);
            ControlFlow::Continue(())
        });
        Ok(read?.map(|()| mapped))
    }

    fn add(&mut self, mapping: &Mapping<'_>) {
        if is_managed(mapping) {
            let [certain, suspected] = &mut self.managed;
            let sum = if DRIVER_RANGE.contains(&mapping.start) {
                suspected
            } else {
                certain
            };
            sum.0 += 1;
            sum.1 = sum.1.saturating_add(mapping.bytes());
        }
        let name = mapping.file_name();
        self.has_node |= is_node(name);
        if let Some(gpu) = gpu_of(name).filter(|_| mapping.bytes() >= CONTEXT) {
            self.contexts.insert(gpu);
        }
        self.nccl |= name.starts_with(b"libnccl");
        let shares = |library: &&str| name.starts_with(library.as_bytes());
        if self.sharing.is_none() && SHARING_LIBRARIES.iter().any(shares) {
            self.sharing = Some(String::from_utf8_lossy(name).into_owned());
        }
    }
}

fn is_managed(mapping: &Mapping<'_>) -> bool {
    mapping.path == b"/dev/nvidia-uvm"
        && mapping.perms == b"rw-s"
        && mapping.offset == mapping.start
        && !(DRIVER_RANGE.contains(&mapping.start) && mapping.bytes() == UVM_BASELINE)
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

    /// The settings that keep NCCL to sockets and that the process was started without.
    fn missing_for_sockets(&self) -> Vec<&'static str> {
        let number = |name| {
            self.get(name)
                .and_then(|v| std::str::from_utf8(v).ok()?.trim().parse().ok())
        };
        let is_set = |name| number(name).is_some_and(|n: i64| n != 0);
        let settings = [
            ("NCCL_P2P_DISABLE=1", is_set("NCCL_P2P_DISABLE")),
            ("NCCL_SHM_DISABLE=1", is_set("NCCL_SHM_DISABLE")),
            ("NCCL_NVLS_ENABLE=0", number("NCCL_NVLS_ENABLE") == Some(0)),
        ];
        let missing = settings.into_iter().filter(|(_, is_there)| !is_there);
        missing.map(|(setting, _)| setting).collect()
    }
}

/// The pipe directory of the MPS daemon that the process is, or may be, a client of.
fn mps(
    proc_root: &Path,
    pid: i32,
    environment: &Environment,
) -> Result<Option<(PathBuf, Certainty)>, Unreadable> {
    let named = environment.get(MPS_PIPES).filter(|value| !value.is_empty());
    let directory = named.map_or(Path::new(MPS_DIRECTORY), |value| {
        Path::new(OsStr::from_bytes(value))
    });
    let has_open_file =
        open_files(proc_root, pid)?.is_some_and(|mut files| files.any(|(_, to)| to.starts_with(directory)));
    let root = proc_root.join(pid.to_string()).join("root");
    let certainty = if has_open_file {
        Certainty::Certain
    } else if named.is_some() || exists_in(&root, &directory.join("control")) {
        Certainty::Suspected
    } else {
        return Ok(None);
    };
    Ok(Some((directory.to_owned(), certainty)))
}

/// The descriptors of a process and what they stand for; `None` if it has ended.
pub(crate) fn open_files(
    proc_root: &Path,
    pid: i32,
) -> Result<Option<impl Iterator<Item = (i32, PathBuf)> + use<>>, Unreadable> {
    let what = "fd";
    let entries = proc_maps::unless_gone(fs::read_dir(proc_root.join(pid.to_string()).join(what)));
    let entries = entries.map_err(|source| Unreadable { pid, what, source })?;
    // A descriptor may be closed between the two reads.
    let link = |entry: fs::DirEntry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Some((number, fs::read_link(entry.path()).ok()?))
    };
    Ok(entries.map(|entries| entries.flatten().filter_map(link)))
}

/// Visits the mappings of a process until `visit` breaks; `None` if it has ended.
fn each_mapping(
    proc_root: &Path,
    pid: i32,
    visit: impl FnMut(Mapping<'_>) -> ControlFlow<()>,
) -> Result<Option<()>, Unreadable> {
    let what = "maps";
    proc_maps::each(proc_root, pid, visit).map_err(|source| Unreadable { pid, what, source })
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
