//! A refusal of each kind, for tests of the transaction and of the audit.

use firn_oci::amd::AmdPluginError;
use firn_remap::GrantError;

use crate::{Connection, Object, OtherEnd, Refusal, UnixKind, UnixSocket};

/// One refusal of each kind.
pub fn refusals() -> Vec<Refusal> {
    let (pid, file, path) = (7, || "/dev/x".to_owned(), || "/dev/x".into());
    let comm = || "python".to_owned();
    let mut all = of_the_node();
    all.extend(of_gpus_in_other_processes());
    all.extend(of_the_driver());
    all.extend(of_unix_sockets());
    all.extend(of_objects().into_iter().chain(of_connections()));
    all.extend([
        Refusal::MixedGpus { pid, comm: comm() },
        Refusal::UnknownGpu {
            pid,
            comm: comm(),
            path: path(),
        },
        Refusal::AmdPlugin(AmdPluginError::Missing { looked_at: path() }),
        Refusal::CudaExec { pid, comm: comm() },
        Refusal::Exec { pid, comm: comm() },
        Refusal::ManagedMemory {
            pid,
            comm: comm(),
            ranges: 1,
            bytes: 1,
        },
        Refusal::Mps {
            pid,
            comm: comm(),
            directory: path(),
        },
        Refusal::IoUring { pid, comm: comm() },
        Refusal::ProtectionKey {
            pid,
            comm: comm(),
            at: "7f10a000".to_owned(),
        },
        Refusal::Rdma {
            pid,
            comm: comm(),
            file: file(),
        },
        Refusal::Imex {
            pid,
            comm: comm(),
            file: file(),
        },
        Refusal::Nccl {
            pid,
            comm: comm(),
            missing: vec!["NCCL_P2P_DISABLE=1"],
        },
        Refusal::SharingLibrary {
            pid,
            comm: comm(),
            file: file(),
        },
        Refusal::Ipc {
            processes: vec![(7, comm()), (8, comm())],
        },
    ]);
    all.extend(of_the_environment());
    all
}

fn of_objects() -> [Refusal; 5] {
    [
        of_deleted_names(),
        Refusal::DeletedName {
            pid: 7,
            comm: "python".to_owned(),
            path: "/home/user/library.so".into(),
        },
        Refusal::Object {
            pid: 7,
            comm: "python".to_owned(),
            object: Object::Vsock,
            at: "descriptor 5".to_owned(),
        },
        Refusal::UserNamespace,
        Refusal::SeccompAgent,
    ]
}

fn of_the_driver() -> [Refusal; 2] {
    let (pid, comm) = (7, || "python".to_owned());
    [
        Refusal::RefusedBefore {
            pid,
            comm: comm(),
            answer: "CUDA_ERROR_NOT_SUPPORTED".to_owned(),
        },
        Refusal::PeerAccess {
            pid,
            comm: comm(),
            gpus: vec!["nvidia0".to_owned(), "nvidia1".to_owned()],
        },
    ]
}

fn of_gpus_in_other_processes() -> [Refusal; 3] {
    let (pid, comm, file) = (7, || "python".to_owned(), || "/dev/x".to_owned());
    [
        Refusal::InheritedGpu {
            pid,
            comm: comm(),
            file: file(),
        },
        Refusal::LeakedGpu {
            pid,
            comm: comm(),
            file: file(),
        },
        Refusal::Vfork { pid, comm: comm() },
    ]
}

fn of_deleted_names() -> Refusal {
    Refusal::CriuLink {
        pid: 7,
        comm: "python".to_owned(),
        path: "/dev/shm/link_remap.7".into(),
    }
}

fn of_the_node() -> Vec<Refusal> {
    vec![
        Refusal::NoCheckpointApi {
            version: "550.54".to_owned(),
        },
        Refusal::NoCriu {
            path: "/usr/bin".into(),
        },
        Refusal::ByHook,
        Refusal::Grant(GrantError::UnknownGpu {
            origin: "the map".to_owned(),
            name: "7".to_owned(),
        }),
        Refusal::Mig {
            uuid: "GPU-7".to_owned(),
        },
    ]
}

fn of_the_environment() -> Vec<Refusal> {
    let path = || "/srv".into();
    vec![
        Refusal::CgroupMemory {
            needed: 2,
            dir: path(),
            left: 1,
        },
        Refusal::HostMemory {
            needed: 2,
            image: 1,
            left: 1,
        },
        Refusal::Space {
            dir: path(),
            needed: 2,
            free: 1,
        },
        Refusal::ExternalMount {
            point: path(),
            fs_type: "ext4".to_owned(),
            root: path(),
        },
        Refusal::TooManyMounts { pid: 7 },
        Refusal::Held {
            pid: 7,
            comm: "python".to_owned(),
            what: "the socket of an NCCL communicator".to_owned(),
        },
        Refusal::KeptGpu {
            pid: 7,
            comm: "python".to_owned(),
            file: "/dev/nvidia0".to_owned(),
        },
        Refusal::DeviceHeld {
            pid: 7,
            comm: "python".to_owned(),
            what: "/dev/nvidiactl open".to_owned(),
        },
        Refusal::ExternalStream {
            pid: 7,
            comm: "python".to_owned(),
            fd: 1,
            path: path(),
        },
    ]
}

fn of_connections() -> [Refusal; 2] {
    let connection = Connection {
        pid: 7,
        comm: "python".to_owned(),
        local: ([127, 0, 0, 1], 80).into(),
        remote: ([10, 0, 0, 9], 4000).into(),
        inside: false,
        unread: false,
    };
    let connections = vec![connection];
    [
        Refusal::Connections {
            connections: connections.clone(),
        },
        Refusal::PlainConnections { connections },
    ]
}

/// A stream of process 7 to /run/agent.sock.
pub fn unix_socket() -> UnixSocket {
    UnixSocket {
        pid: 7,
        comm: "python".to_owned(),
        fd: 3,
        inode: 70,
        kind: UnixKind::Stream,
        local: String::new(),
        remote: "/run/agent.sock".to_owned(),
        other_end: OtherEnd::Outside,
    }
}

fn of_unix_sockets() -> [Refusal; 5] {
    let sockets = vec![unix_socket()];
    [
        Refusal::UnixSockets {
            sockets: sockets.clone(),
        },
        Refusal::UnixSocketsKept {
            sockets: sockets.clone(),
        },
        Refusal::UnixSocketsUnseen {
            sockets: sockets.clone(),
        },
        Refusal::UnixSocketsPlugin {
            sockets: sockets.clone(),
        },
        Refusal::PlainUnixSockets { sockets },
    ]
}
