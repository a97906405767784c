//! Why a container is not checkpointed.

use std::path::PathBuf;

use firn_host::Problem;
use firn_oci::amd::AmdPluginError;
use firn_remap::GrantError;

use crate::{Connection, Object, UnixSocket};

/// Why a container is not checkpointed. Nothing has been touched.
#[derive(Debug, thiserror::Error, Problem)]
pub enum Refusal {
    #[error("driver {version} has no process checkpoint")]
    #[problem("FIRN-DRIVER-TOO-OLD", DRIVER)]
    NoCheckpointApi { version: String },
    #[error("there is no CRIU in PATH ({})", path.display())]
    #[problem("FIRN-CRIU-MISSING", INSTALL_CRIU)]
    NoCriu { path: PathBuf },
    #[error("the container got its GPUs from a hook, whose mounts CRIU does not know")]
    #[problem("FIRN-GPU-HOOK", CDI)]
    ByHook,
    #[error("cannot determine which GPUs the container has")]
    Grant(#[source] GrantError),
    #[error("GPU {uuid} is in MIG mode, whose memory the driver cannot checkpoint")]
    #[problem("FIRN-GPU-MIG", WHOLE_GPUS)]
    Mig { uuid: String },
    #[error("process {pid} ({comm}) has /dev/kfd open, and the container has GPUs of both NVIDIA and AMD")]
    #[problem("FIRN-GPU-MIXED", ONE_VENDOR)]
    MixedGpus { pid: i32, comm: String },
    #[error(
        "process {pid} ({comm}) has {} open, a GPU or accelerator whose state cannot be checkpointed",
        path.display()
    )]
    #[problem("FIRN-GPU-VENDOR", CLOSE_DEVICE)]
    UnknownGpu { pid: i32, comm: String, path: PathBuf },
    #[error(transparent)]
    AmdPlugin(AmdPluginError),
    #[error(
        "CUDA process {pid} ({comm}) was started by exec and is no child of init, so CRIU would leave it out"
    )]
    #[problem("FIRN-EXEC", CHILD_OF_INIT)]
    CudaExec { pid: i32, comm: String },
    #[error("process {pid} ({comm}) was started by exec and is no child of init, so CRIU would leave it out")]
    #[problem("FIRN-EXEC", OMIT_EXEC)]
    Exec { pid: i32, comm: String },
    #[error(
        "process {pid} ({comm}) uses {bytes} bytes of managed (UVM) memory, which the driver cannot \
         checkpoint"
    )]
    #[problem("FIRN-UVM", DEVICE_MEMORY)]
    ManagedMemory {
        pid: i32,
        comm: String,
        /// Mappings that it has.
        ranges: usize,
        bytes: u64,
    },
    #[error(
        "the driver has refused to checkpoint process {pid} ({comm}) before ({answer}), and refuses it for \
         ever since then"
    )]
    #[problem("FIRN-GPU-REFUSED", START_AGAIN)]
    RefusedBefore { pid: i32, comm: String, answer: String },
    #[error("process {pid} ({comm}) is a client of the MPS daemon at {}", directory.display())]
    #[problem("FIRN-MPS", "start the container without MPS")]
    Mps {
        pid: i32,
        comm: String,
        directory: PathBuf,
    },
    #[error("process {pid} ({comm}) has {object} ({at}), which {}", object.fate())]
    #[problem("FIRN-OBJECT", object.remedy())]
    Object {
        pid: i32,
        comm: String,
        object: Object,
        /// Its descriptor, its address, or the number of a namespace.
        at: String,
    },
    #[error(
        "the container has a user namespace of its own: CRIU would dump it, and nothing could restore it"
    )]
    #[problem("FIRN-USER-NAMESPACE", HOST_USERS)]
    UserNamespace,
    #[error(
        "the container's seccomp profile asks an agent (SCMP_ACT_NOTIFY), and nobody would answer a copy"
    )]
    #[problem("FIRN-OBJECT", NO_AGENT)]
    SeccompAgent,
    #[error("process {pid} ({comm}) has an io_uring, which CRIU cannot dump")]
    #[problem("FIRN-IO-URING", NO_IO_URING)]
    IoUring { pid: i32, comm: String },
    #[error(
        "process {pid} ({comm}) protects the memory at 0x{at} by a key (pkey_mprotect), which CRIU would not \
         restore"
    )]
    #[problem(
        "FIRN-PROTECTION-KEY",
        "turn the use of protection keys off in the program, if it has a setting for that"
    )]
    ProtectionKey { pid: i32, comm: String, at: String },
    #[error("process {pid} ({comm}) has the RDMA device {file} open, which CRIU cannot dump")]
    #[problem("FIRN-RDMA", NO_RDMA)]
    Rdma { pid: i32, comm: String, file: String },
    #[error(
        "process {pid} ({comm}) was forked from a CUDA process and has inherited {file}, which CRIU dumps \
         only with firn's plugin"
    )]
    #[problem("FIRN-CRIU-PLUGIN", firn_config::INSTALL_CRIU_PLUGIN)]
    InheritedGpu { pid: i32, comm: String, file: String },
    #[error(
        "process {pid} ({comm}) has {file} open or mapped, uses no CUDA, and has not inherited all of it \
         from a CUDA process among its ancestors: CRIU cannot dump it"
    )]
    #[problem("FIRN-GPU-FD", CLOSE_GPU)]
    LeakedGpu { pid: i32, comm: String, file: String },
    #[error(
        "process {pid} ({comm}) has the memory of its parent, as between vfork and exec: CRIU cannot dump it"
    )]
    #[problem("FIRN-VFORK", "try again once it has executed its program, or end it")]
    Vfork { pid: i32, comm: String },
    #[error("process {pid} ({comm}) has {file} open, through which GPU memory is shared with other machines")]
    #[problem("FIRN-IPC", SHARES_NONE)]
    Imex { pid: i32, comm: String, file: String },
    #[error(
        "process {pid} ({comm}) is a rank of NCCL that may share GPU memory with others: it was started \
         without {}",
        missing.join(", ")
    )]
    #[problem("FIRN-NCCL", NCCL_SOCKETS)]
    Nccl {
        pid: i32,
        comm: String,
        missing: Vec<&'static str>,
    },
    #[error(
        "process {pid} ({comm}) still shares GPU memory with others after the hook prepare: it has {what}"
    )]
    #[problem("FIRN-IPC-HELD", RELEASE)]
    Held { pid: i32, comm: String, what: String },
    #[error("process {pid} ({comm}) has {file} open or mapped, a GPU that would be taken from the container")]
    #[problem("FIRN-GPU-KEPT", CLOSE_KEPT)]
    KeptGpu { pid: i32, comm: String, file: String },
    #[error("process {pid} ({comm}) has not let go of its device after the hook prepare: it has {what}")]
    #[problem("FIRN-GPU-HELD", LET_GO)]
    DeviceHeld { pid: i32, comm: String, what: String },
    #[error(
        "process {pid} ({comm}) computes on several GPUs ({}): if one accesses the memory of another, the \
         driver checkpoints and cannot restore it",
        gpus.join(", ")
    )]
    #[problem("FIRN-PEER", NO_PEER_ACCESS)]
    PeerAccess {
        pid: i32,
        comm: String,
        /// Device nodes of the GPUs that it has a context on.
        gpus: Vec<String>,
    },
    #[error("process {pid} ({comm}) has loaded {file}, which shares GPU memory with other processes")]
    #[problem("FIRN-IPC", SHARE_NONE)]
    SharingLibrary { pid: i32, comm: String, file: String },
    #[error(
        "CUDA processes {} may share GPU memory, which the driver checkpoints and cannot restore",
        listed(&named(processes))
    )]
    #[problem("FIRN-IPC", SHARE_NONE)]
    Ipc { processes: Vec<(i32, String)> },
    #[error(
        "{} has a name that CRIU would give to a file of process {pid} ({comm})", path.display()
    )]
    #[problem("FIRN-LINK-REMAP", REMOVE_LINK)]
    CriuLink { pid: i32, comm: String, path: PathBuf },
    #[error(
        "process {pid} ({comm}) has {} open or mapped, whose name was deleted while the file has another one",
        path.display()
    )]
    #[problem("FIRN-DELETED-NAME", REMOVE_OTHER_NAME)]
    DeletedName { pid: i32, comm: String, path: PathBuf },
    #[error("TCP connections are established: {}", listed(connections))]
    #[problem("FIRN-TCP", CLOSE_TCP)]
    Connections { connections: Vec<Connection> },
    #[error("TCP connections are established: {}", listed(connections))]
    #[problem("FIRN-TCP", KEEP_TCP)]
    PlainConnections { connections: Vec<Connection> },
    #[error(
        "Unix sockets are connected to processes outside of the container: {}",
        listed(sockets)
    )]
    #[problem("FIRN-UNIX", CLOSE_UNIX)]
    UnixSockets { sockets: Vec<UnixSocket> },
    #[error(
        "no copy continues Unix sockets that are connected to processes outside of the container: {}",
        listed(sockets)
    )]
    #[problem("FIRN-UNIX", NOT_KEPT)]
    UnixSocketsKept { sockets: Vec<UnixSocket> },
    #[error(
        "Unix sockets lead outside of the container in a way that CRIU cannot dump: {}",
        listed(sockets)
    )]
    #[problem("FIRN-UNIX", CLOSE_BEFORE)]
    UnixSocketsUnseen { sockets: Vec<UnixSocket> },
    #[error(
        "Unix sockets lead outside of the container, and CRIU cannot dump them: {}",
        listed(sockets)
    )]
    #[problem("FIRN-UNIX", CLOSE_PLAIN)]
    PlainUnixSockets { sockets: Vec<UnixSocket> },
    #[error(
        "CRIU closes Unix sockets in a copy only with firn's plugin: {}",
        listed(sockets)
    )]
    #[problem("FIRN-CRIU-PLUGIN", firn_config::INSTALL_CRIU_PLUGIN)]
    UnixSocketsPlugin { sockets: Vec<UnixSocket> },
    #[error(
        "the driver copies {} of GPU memory into host memory, and the limit of cgroup {} leaves {}",
        mib(*needed),
        dir.display(),
        mib(*left)
    )]
    #[problem("FIRN-HOST-MEMORY", RAISE_LIMIT)]
    CgroupMemory { needed: u64, dir: PathBuf, left: u64 },
    #[error(
        "the driver copies {} of GPU memory into host memory{}, and the host has {} left",
        mib(*needed),
        with_image(*image),
        mib(*left)
    )]
    #[problem("FIRN-HOST-MEMORY", FREE_MEMORY)]
    HostMemory { needed: u64, image: u64, left: u64 },
    #[error(
        "the checkpoint writes {} or more, and the file system of {} has {} free",
        mib(*needed),
        dir.display(),
        mib(*free)
    )]
    #[problem("FIRN-IMAGE-SPACE", FREE_SPACE)]
    Space { dir: PathBuf, needed: u64, free: u64 },
    #[error(
        "{} is a mount of {} of a {fs_type} file system that is not in the spec, which CRIU cannot dump",
        point.display(),
        root.display()
    )]
    #[problem("FIRN-FOREIGN-MOUNT", UNMOUNT)]
    ExternalMount {
        point: PathBuf,
        fs_type: String,
        root: PathBuf,
    },
    #[error("process {pid} has made more mounts than firn reads")]
    #[problem("FIRN-PROC", "unmount what the container does not need")]
    TooManyMounts { pid: i32 },
    #[error(
        "descriptor {fd} of process {pid} ({comm}) is {} on a mount that the container does not have",
        path.display()
    )]
    #[problem("FIRN-STDIO", PIPES)]
    ExternalStream {
        pid: i32,
        comm: String,
        fd: i32,
        path: PathBuf,
    },
}

impl Refusal {
    /// Whether CRIU is the reason, and the driver would not mind.
    pub(crate) fn is_crius(&self) -> bool {
        match self {
            Self::NoCriu { .. }
            | Self::AmdPlugin(_)
            | Self::CudaExec { .. }
            | Self::Exec { .. }
            | Self::Object { .. }
            | Self::UserNamespace
            | Self::SeccompAgent
            | Self::IoUring { .. }
            | Self::ProtectionKey { .. }
            | Self::Rdma { .. }
            | Self::InheritedGpu { .. }
            | Self::LeakedGpu { .. }
            | Self::Vfork { .. }
            | Self::CriuLink { .. }
            | Self::DeletedName { .. }
            | Self::Connections { .. }
            | Self::PlainConnections { .. }
            | Self::UnixSockets { .. }
            | Self::UnixSocketsKept { .. }
            | Self::UnixSocketsUnseen { .. }
            | Self::UnixSocketsPlugin { .. }
            | Self::PlainUnixSockets { .. }
            | Self::ExternalMount { .. }
            | Self::TooManyMounts { .. }
            | Self::ExternalStream { .. } => true,
            Self::NoCheckpointApi { .. }
            | Self::ByHook
            | Self::Grant(_)
            | Self::Mig { .. }
            | Self::MixedGpus { .. }
            | Self::UnknownGpu { .. }
            | Self::ManagedMemory { .. }
            | Self::RefusedBefore { .. }
            | Self::Mps { .. }
            | Self::Imex { .. }
            | Self::Nccl { .. }
            | Self::Held { .. }
            | Self::KeptGpu { .. }
            | Self::DeviceHeld { .. }
            | Self::PeerAccess { .. }
            | Self::SharingLibrary { .. }
            | Self::Ipc { .. }
            | Self::CgroupMemory { .. }
            | Self::HostMemory { .. }
            | Self::Space { .. } => false,
        }
    }
}

const DRIVER: &str = "install driver 570 or later (580 to restore onto other GPUs)";
const INSTALL_CRIU: &str =
    "`apt install criu` (Debian, Ubuntu) or `dnf install criu`, into the PATH of containerd";
const CDI: &str = "start the container with CDI devices (`ctr run --device nvidia.com/gpu=0`)";
const WHOLE_GPUS: &str = "use whole GPUs for containers that are to be checkpointed";
const ONE_VENDOR: &str = "use GPUs of one vendor in a container that is to be checkpointed";
const CLOSE_DEVICE: &str = "close the device before the checkpoint; NVIDIA's GPUs for computing and, with \
                            CRIU's plugin, AMD's can be checkpointed";
const CHILD_OF_INIT: &str = "end the exec'd process, or start it from the container's own init";
const OMIT_EXEC: &str = "wait for its end or end it, or let CRIU leave it out: `firn checkpoint --exec omit` \
                         (`firn move`, too), the annotation firn.dev/exec=omit, or exec = \"omit\" under \
                         [checkpoint] in the configuration";
const DEVICE_MEMORY: &str = "start the program with plain device memory (cudaMalloc)";
const START_AGAIN: &str = "end the process and start it again, without what the driver could not checkpoint \
                          (managed memory, or memory shared with others)";
const NO_IO_URING: &str = "block io_uring with a seccomp profile, as containerd's default does, or turn it \
                           off in the program: UV_USE_IO_URING=0 for libuv, USE_LIBUV=0 for PyTorch's store";
const NO_AGENT: &str = "create the container with a seccomp profile without SCMP_ACT_NOTIFY";
const HOST_USERS: &str = "create the container without a user namespace (ctr run without --uidmap and \
                          --gidmap; in a pod without hostUsers: false)";
const NO_RDMA: &str = "start the program without RDMA; for NCCL set NCCL_IB_DISABLE=1";
const CLOSE_GPU: &str = "close the GPU in that process, or end it; a child that was forked from a CUDA \
                         process must keep its parent and open no GPU itself";
const CLOSE_KEPT: &str = "close it in that process, or end it: children that were forked from a CUDA process \
                          keep its GPUs open; or move the container by checkpoint and restore";
const SHARES_NONE: &str = "if it shares none: `firn checkpoint --ipc none` (`firn move`, too), or the \
                           annotation firn.dev/ipc=none at the container's creation";
const SHARE_NONE: &str = "if they share none: `firn checkpoint --ipc none` (`firn move`, too), or the \
                          annotation firn.dev/ipc=none at the container's creation; ranks of NCCL: \
                          firn.dev/nccl=sockets, or firn.dev/ipc=released-by-hook with a prepare \
                          hook that ends their communicators";
const NO_PEER_ACCESS: &str = "run a process for each GPU, or copy between GPUs through the host; if none of \
                              its GPUs accesses another one's memory (PyTorch lets them when it copies \
                              between GPUs): `firn checkpoint --peer-access none` (`firn move`, too), or the \
                              annotation firn.dev/peer-access=none at the container's creation";
const RELEASE: &str = "end every NCCL communicator in the hook prepare (PyTorch: \
                       torch.distributed.destroy_process_group), and answer only then; a suspended one still \
                       has its socket";
const LET_GO: &str = "end every process that uses a device in the hook prepare, and answer only then: CUDA \
                      lets go of its device when the process ends; or leave out the annotation \
                      firn.dev/gpu=released-by-hook";
const NCCL_SOCKETS: &str = "create the container with the annotation firn.dev/nccl=sockets, or start the \
                            job with NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 and NCCL_NVLS_ENABLE=0 in its \
                            environment; or let a prepare hook end its communicators: \
                            firn.dev/ipc=released-by-hook; if its processes share nothing: \
                            `firn checkpoint --ipc none`, or the annotation firn.dev/ipc=none";
const REMOVE_LINK: &str = "remove it in the container, unless its program uses this name: a checkpoint in \
                           which CRIU was killed may have left it";
const REMOVE_OTHER_NAME: &str = "remove the file's other names, or end the process that has it; of a \
                                 container with GPUs one in /dev/shm or another tmpfs of its own moves, and \
                                 without any the option link-remap in /etc/criu/runc.conf leaves it to CRIU";
const CLOSE_TCP: &str = "`firn checkpoint --tcp auto` (`firn move`, too): the copy continues connections \
                         inside of the container, and finds others closed; for every checkpoint: the \
                         annotation firn.dev/tcp=auto, or tcp = \"auto\" under [checkpoint] in the \
                         configuration";
const KEEP_TCP: &str = "`firn checkpoint --tcp keep`, or tcp-established in /etc/criu/runc.conf: the copy \
                        continues them; or close them before. CRIU alone cannot close some and keep others";
const CLOSE_UNIX: &str = "`firn checkpoint --tcp auto` (`firn move`, too): the copy finds them closed; for \
                          every checkpoint: the annotation firn.dev/tcp=auto, or tcp = \"auto\" under \
                          [checkpoint] in the configuration";
const NOT_KEPT: &str = "use --tcp auto, or the annotation firn.dev/tcp=auto, with which the copy finds \
                        them closed, instead of keep";
const CLOSE_BEFORE: &str = "try again if it is a connection that is about to be accepted; otherwise close \
                            them before the checkpoint, as in a hook prepare, or let both ends have the \
                            same network namespace";
const CLOSE_PLAIN: &str = "close them before the checkpoint, or end the process that has them; with the \
                           option ext-unix-sk in /etc/criu/runc.conf CRIU connects datagram sockets again";
const RAISE_LIMIT: &str = "raise the memory limit of that cgroup by as much as the container has GPU memory";
const FREE_MEMORY: &str = "free memory of the host, or write the image to a file system on disk";
const FREE_SPACE: &str = "free space there, or write the checkpoint to another file system";
const UNMOUNT: &str = "unmount it, or add it to the mounts of the container's spec";
const PIPES: &str = "start the process with pipes, or with files of the container";

/// Mebibytes, rounded up.
fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

fn with_image(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!(" and the image takes {} of it, being on a tmpfs", mib(bytes)),
    }
}

fn named(processes: &[(i32, String)]) -> Vec<String> {
    let name = |(pid, comm): &(i32, String)| format!("{pid} ({comm})");
    processes.iter().map(name).collect()
}

/// The first few, and how many more there are.
fn listed(all: &[impl ToString]) -> String {
    const SHOWN: usize = 8;
    let mut shown: Vec<String> = all.iter().take(SHOWN).map(ToString::to_string).collect();
    if all.len() > SHOWN {
        shown.push(format!("{} more", all.len() - SHOWN));
    }
    shown.join(", ")
}
