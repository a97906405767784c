//! What is known of a container before its checkpoint.

use std::path::PathBuf;
use std::time::Duration;

use firn_config::{Config, Exec, Tcp, names};
use firn_gpu::DeviceNode;
use firn_oci::{Spec, job_hook, nccl};
use serde::{Deserialize, Serialize};

/// How long a process may be in cuInit before it counts as one that only has a GPU open.
pub const STARTS: Duration = Duration::from_secs(5);

/// How often it is looked at meanwhile.
pub const STARTS_LOOK: Duration = Duration::from_millis(100);

/// Value of the annotation `firn.dev/exec` with which CRIU may leave processes out.
const OMIT: &str = "omit";

/// A container whose processes are checked.
///
/// A part that is `None` is not checked: the transaction checks the parts at different moments, the audit
/// checks all that it knows at once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// The first process of the container.
    pub init: i32,
    /// All processes of the container.
    pub pids: Vec<i32>,
    /// Those that use CUDA.
    pub cuda: Vec<i32>,
    /// Check which GPUs and accelerators the processes have open that are not NVIDIA's.
    pub other_vendors: Option<OtherVendors>,
    /// Check which processes CRIU would leave out, and what the others have open and mapped.
    pub processes: Option<Assertions>,
    /// Instead of `processes`, for a container that is dumped as by the stock shim: check what CRIU refuses
    /// or loses by itself. Of the assertions only those count that its user's configuration sets.
    #[serde(default)]
    pub by_criu: Option<Assertions>,
    /// Where an earlier check has found files that processes watch. Of a container that CRIU's user
    /// configures: where CRIU looks for them.
    #[serde(default)]
    pub scanned: Vec<PathBuf>,
    /// The container's seccomp profile lets an agent outside decide about system calls.
    #[serde(default)]
    pub seccomp_agent: bool,
    /// The node's CRIU cannot dump sockets of the internet on its kernel
    /// ([`CriuLimits`](crate::CriuLimits)).
    #[serde(default)]
    pub no_inet: bool,
    /// Nothing is dumped: check only what the driver does not park, or cannot restore. Then the image of
    /// `capacity` does not matter.
    pub pause: bool,
    /// A process without CUDA that has libcuda and a GPU may be in cuInit: it is no finding, but in
    /// [`Outcome::starting`](crate::Outcome::starting). Whoever asks waits ([`STARTS`](crate::STARTS)) and
    /// asks again without.
    #[serde(default)]
    pub may_start: bool,
    /// GPUs that are taken from the container: no process may have one open.
    pub leaves: Vec<DeviceNode>,
    /// CRIU is given firn's plugin for GPUs that processes have inherited.
    pub criu_plugin: bool,
    /// The file in the bundle that keeps what processes had inherited at the container's last checkpoint.
    pub inherited: Option<PathBuf>,
    /// Processes whose GPU memory leaves them before the driver is called: their GPUs' access to the memory
    /// of each other refuses nothing.
    #[serde(default)]
    pub taken_out: Vec<i32>,
    /// The file in the bundle that keeps which processes the driver has refused to checkpoint.
    #[serde(default)]
    pub refused_before: Option<PathBuf>,
    /// Mount points of the tmpfs whose files are in a checkpoint: the container's own, and its pod's
    /// /dev/shm.
    pub tmpfs: Vec<PathBuf>,
    /// Check that there is enough memory and disk space.
    pub capacity: Option<Capacity>,
    /// Compare the mounts of the container and the standard streams of its processes with the spec in this
    /// bundle.
    pub bundle: Option<PathBuf>,
}

/// What the rules about GPUs of other vendors need to know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherVendors {
    /// Whether the container has NVIDIA GPUs.
    pub nvidia: bool,
    /// `[criu] amdgpu-plugin` of the configuration.
    pub amdgpu_plugin: Option<PathBuf>,
}

/// How much a checkpoint will need, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Bytes of GPU memory that all processes have.
    pub gpu_memory: u64,
    /// Large memory goes into a store, which need not hold all of it again.
    pub stored: bool,
    /// Image directory.
    pub image: PathBuf,
    /// CRIU's work directory.
    pub work: PathBuf,
}

/// What the owner of a container asserts by annotations. Where an annotation is missing, the configuration of
/// the node decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assertions {
    /// The processes share no GPU memory.
    pub shares_nothing: bool,
    /// No GPU of a process accesses the memory of another one.
    pub no_peer_access: bool,
    /// The hook `prepare` has released all GPU memory that the processes shared.
    pub released: bool,
    /// The hook `prepare` has let go of every accelerator: nothing of any is in the checkpoint.
    pub device_free: bool,
    /// The CUDA processes are ranks of NCCL that communicate over sockets.
    pub nccl_sockets: bool,
    /// What happens to processes that CRIU leaves out.
    pub exec: Exec,
    /// What becomes of TCP connections, and of Unix sockets that lead outside.
    pub tcp: Tcp,
    /// CRIU is to connect datagram sockets again that lead outside: the client or the user's CRIU
    /// configuration wants it.
    pub external_unix: bool,
    /// CRIU makes links of files with a deleted name, wherever they are: the user's CRIU configuration wants
    /// it.
    pub link_remap: bool,
}

impl Assertions {
    /// Those of a container that is dumped as by the stock shim.
    pub fn by_criu(users_tcp: Option<Tcp>) -> Self {
        Self {
            tcp: users_tcp.unwrap_or(Tcp::Refuse),
            ..Self::default()
        }
    }

    /// `spec` is `None` for processes outside of a container. `users_tcp` is what the user's CRIU
    /// configuration sets.
    pub fn of(spec: Option<&Spec>, config: &Config, users_tcp: Option<Tcp>) -> Self {
        let annotation = |name| spec.and_then(|spec| spec.annotation(name));
        let nccl_sockets = spec.is_some_and(nccl::is_requested);
        let released = spec.is_some_and(job_hook::releases_shared_memory);
        Self {
            shares_nothing: released || annotation(names::ANNOTATION_IPC) == Some("none"),
            no_peer_access: annotation(names::ANNOTATION_PEER_ACCESS) == Some("none"),
            released,
            device_free: spec.is_some_and(job_hook::releases_devices),
            nccl_sockets,
            external_unix: false,
            link_remap: false,
            tcp: match annotation(names::ANNOTATION_TCP) {
                None => match users_tcp {
                    Some(tcp) => tcp,
                    // Ranks are connected to each other.
                    None if (nccl_sockets || released) && config.checkpoint.tcp != Tcp::Keep => Tcp::Auto,
                    None => config.checkpoint.tcp,
                },
                Some(word) => Tcp::of_word(word).unwrap_or(Tcp::Refuse),
            },
            exec: match annotation(names::ANNOTATION_EXEC) {
                None => config.checkpoint.exec,
                Some(OMIT) => Exec::Omit,
                Some(_) => Exec::Refuse,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_annotation_for_execs_overrides_the_configuration() {
        let node = |exec| Config {
            checkpoint: firn_config::Checkpoint {
                exec,
                ..firn_config::Checkpoint::default()
            },
            ..Config::default()
        };
        for (annotation, of_node, expected) in [
            (None, Exec::Refuse, Exec::Refuse),
            (None, Exec::Omit, Exec::Omit),
            (Some("omit"), Exec::Refuse, Exec::Omit),
            (Some("refuse"), Exec::Omit, Exec::Refuse),
            (Some("Omit"), Exec::Omit, Exec::Refuse),
        ] {
            let spec: Spec = match annotation {
                Some(value) => json!({"annotations": {"firn.dev/exec": value}}).into(),
                None => json!({}).into(),
            };
            assert_eq!(
                Assertions::of(Some(&spec), &node(of_node), None).exec,
                expected,
                "{annotation:?}"
            );
        }
        assert_eq!(Assertions::of(None, &node(Exec::Omit), None).exec, Exec::Omit);
    }

    #[test]
    fn connections_are_decided_by_the_annotation_then_the_users_file_then_the_job() {
        for (annotations, users, of_node, expected) in [
            (json!({}), None, Tcp::Refuse, Tcp::Refuse),
            (json!({}), None, Tcp::Close, Tcp::Close),
            (json!({}), Some(Tcp::Keep), Tcp::Close, Tcp::Keep),
            (
                json!({"firn.dev/tcp": "auto"}),
                Some(Tcp::Keep),
                Tcp::Close,
                Tcp::Auto,
            ),
            (
                json!({"firn.dev/tcp": "Auto"}),
                Some(Tcp::Keep),
                Tcp::Close,
                Tcp::Refuse,
            ),
            (json!({"firn.dev/nccl": "sockets"}), None, Tcp::Refuse, Tcp::Auto),
            (json!({"firn.dev/nccl": "sockets"}), None, Tcp::Keep, Tcp::Keep),
            (
                json!({"firn.dev/ipc": "released-by-hook", "firn.dev/hook-prepare": "exec: /x"}),
                None,
                Tcp::Refuse,
                Tcp::Auto,
            ),
            (
                json!({"firn.dev/ipc": "released-by-hook"}),
                None,
                Tcp::Refuse,
                Tcp::Refuse,
            ),
            (
                json!({"firn.dev/nccl": "sockets", "firn.dev/tcp": "keep"}),
                None,
                Tcp::Refuse,
                Tcp::Keep,
            ),
        ] {
            let spec = Spec::from(json!({"annotations": annotations}));
            let mut config = Config::default();
            config.checkpoint.tcp = of_node;
            let found = Assertions::of(Some(&spec), &config, users).tcp;
            assert_eq!(found, expected, "{annotations} {users:?} {of_node:?}");
        }
    }

    #[test]
    fn assertions_are_read_from_the_annotations() {
        let spec: Spec = json!({"annotations": {"firn.dev/ipc": "none", "firn.dev/nccl": "sockets"}}).into();
        let found = Assertions::of(Some(&spec), &Config::default(), None);
        assert!(found.shares_nothing && found.nccl_sockets);
        let ipc = |hook: &str| -> Spec {
            json!({"annotations": {"firn.dev/ipc": "released-by-hook", hook: "exec: /x"}}).into()
        };
        let of = |hook| Assertions::of(Some(&ipc(hook)), &Config::default(), None);
        let (released, without) = (of("firn.dev/hook-prepare"), of("firn.dev/hook-restored"));
        assert!(released.shares_nothing && released.released);
        assert!(!without.shares_nothing && !without.released);
        let gpu = |hook: &str| -> Spec {
            json!({"annotations": {"firn.dev/gpu": "released-by-hook", hook: "exec: /x"}}).into()
        };
        let of = |hook| Assertions::of(Some(&gpu(hook)), &Config::default(), None).device_free;
        assert!(of("firn.dev/hook-prepare") && !of("firn.dev/hook-restored"));
        let none: Spec = json!({"annotations": {"firn.dev/ipc": "some"}}).into();
        assert_eq!(
            Assertions::of(Some(&none), &Config::default(), None),
            Assertions::default()
        );
    }
}
