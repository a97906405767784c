//! Calls of containerd's gRPC socket: its version, and what it has of a container.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_config::names;
use firn_containerd::containers::{self, Container};
use firn_containerd::node::{self, VersionResponse};
use firn_containerd::{Any, FieldMask, Message};
use firn_oci::{GpuPath, Spec, classify, edit};
use firn_process::blocking::blocking;
use firn_transaction::checkpoint::park::Moved;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use http2::Call;

pub(crate) mod http2;
pub(crate) mod images;

/// How long the daemon may take to answer. It answers in a millisecond or two; a shim that gave up too early
/// works as well, with one more `start` per container of a pod.
const VERSION_LIMIT: Duration = Duration::from_millis(500);
/// How long it may take to send the metadata of a container, or to take them. Without them the container
/// starts and continues, too.
const METADATA_LIMIT: Duration = Duration::from_secs(2);
/// First daemon that takes a version 3.
const FIRST_MAJOR: u32 = 2;

/// Whether the daemon that runs `start` can read a reply of version 3. Its gRPC socket is `address`, a path
/// or `unix://` and a path.
///
/// Daemons before 2.3 give a shim nothing to distinguish them by: same flags, same environment
/// (MAX_SHIM_VERSION is "2" in all of them), same files in the bundle. So the daemon is asked for its
/// version, which all of them answer. Whatever goes wrong is a "no", which is always safe: every daemon reads
/// the plain reply.
pub(crate) fn reads_version_3(address: &str) -> bool {
    let call = Call {
        method: node::VERSION,
        namespace: None,
        message: &[],
    };
    let response = http2::unary_call(path(address), &call, Instant::now() + VERSION_LIMIT).ok();
    let version = response.and_then(|response| version_in(&response));
    let major = version.and_then(|version| major(&version));
    major.is_some_and(|major| major >= FIRST_MAJOR)
}

/// The version in a [`VersionResponse`].
pub(crate) fn version_in(response: &[u8]) -> Option<String> {
    let response = VersionResponse::decode(response).ok()?;
    Some(response.version).filter(|version| !version.is_empty())
}

/// Major number of `v2.1.4`, `2.1.4~ds1`, `1.7.24+unknown`; none for a build that carries no version.
pub(crate) fn major(version: &str) -> Option<u32> {
    let (major, _) = version.strip_prefix('v').unwrap_or(version).split_once('.')?;
    major.parse().ok()
}

/// The labels that containerd has of a container; clients give it those of its image. None after an error,
/// which is logged.
pub(crate) async fn labels(address: &str, namespace: &str, id: &str) -> BTreeMap<String, String> {
    let (address, namespace, of) = (address.to_owned(), namespace.to_owned(), id.to_owned());
    let container = blocking(move || get(&address, &namespace, &of)).await;
    let container = container.unwrap_or_else(|error| {
        log::warn!("cannot read the labels of {id}: hooks that its image names are not called: {error}");
        Container::default()
    });
    firn_host::ordered::map_of(container.labels)
}

/// The name of a container's image; empty if containerd does not answer.
pub(crate) fn image(address: &str, namespace: &str, id: &str) -> impl Future<Output = String> + Send + use<> {
    let (address, namespace, id) = (address.to_owned(), namespace.to_owned(), id.to_owned());
    let image = blocking(move || {
        let found = get(&address, &namespace, &id);
        let found = found.inspect_err(|error| log::debug!("cannot read the image of {id}: {error}"));
        found.map(|container| container.image)
    });
    async { image.await.unwrap_or_default() }
}

/// What containerd has of a container.
fn get(address: &str, namespace: &str, id: &str) -> io::Result<Container> {
    let call = Call {
        method: containers::GET,
        namespace: Some(namespace),
        message: &id.to_owned().encode_to_vec(),
    };
    let response = http2::unary_call(path(address), &call, Instant::now() + METADATA_LIMIT)?;
    let response = containers::GetResponse::decode(&*response)?;
    Ok(response.container.unwrap_or_default())
}

/// What is new of a container.
pub(crate) struct Change {
    /// The label of a parked container; none if it is not parked.
    pub label: Option<String>,
    /// The GPUs that it has now.
    pub moved: Option<Moved>,
}

/// Writes into containerd's metadata what its clients show. After an error, which is logged, they show what
/// was before; the container continues all the same.
pub(crate) async fn describe(address: &str, namespace: &str, id: &str, change: Change) {
    let (address, namespace, of) = (address.to_owned(), namespace.to_owned(), id.to_owned());
    let done = blocking(move || call_to_describe(&address, &namespace, &of, &change)).await;
    if let Err(error) = done {
        log::warn!("containerd's metadata of {id} are not as they should be: {error}");
    }
}

fn call_to_describe(address: &str, namespace: &str, id: &str, change: &Change) -> io::Result<()> {
    let container = get(address, namespace, id)?;
    let Some(request) = update_of(&container, id, change)? else {
        return Ok(());
    };
    let call = Call {
        method: containers::UPDATE,
        namespace: Some(namespace),
        message: &request.encode_to_vec(),
    };
    http2::unary_call(path(address), &call, Instant::now() + METADATA_LIMIT).map(drop)
}

/// The request that makes the change; none if nothing changes.
fn update_of(
    container: &Container,
    id: &str,
    change: &Change,
) -> io::Result<Option<containers::UpdateRequest>> {
    let mut updated = Container {
        id: id.to_owned(),
        ..Container::default()
    };
    let mut mask = FieldMask::default();
    if container.labels.get(names::LABEL_PARKED) != change.label.as_ref() {
        if let Some(text) = &change.label {
            updated
                .labels
                .insert(names::LABEL_PARKED.to_owned(), text.clone());
        }
        // Clients may change other labels meanwhile. containerd removes one that the mask alone names.
        mask.paths.push(format!("labels.{}", names::LABEL_PARKED));
    }
    if let Some(moved) = &change.moved
        && let Some(any) = &container.spec
        && let Some(value) = moved_spec(&any.value, moved)?
    {
        updated.spec = Some(Any {
            type_url: any.type_url.clone(),
            value,
        });
        mask.paths.push("spec".to_owned());
    }
    Ok((!mask.paths.is_empty()).then_some(containers::UpdateRequest {
        container: Some(updated),
        update_mask: Some(mask),
    }))
}

/// The spec with other GPUs; none if it names no GPU nodes, but asks for GPUs in another way.
fn moved_spec(json: &[u8], moved: &Moved) -> io::Result<Option<Vec<u8>>> {
    let mut spec = Spec::from(serde_json::from_slice::<serde_json::Value>(json)?);
    let devices = spec.devices().map_err(io::Error::other)?;
    if !devices
        .iter()
        .any(|device| classify(&device.node.path) == Some(GpuPath::Gpu))
    {
        return Ok(None);
    }
    edit::replace_gpus(&mut spec, &moved.gpus, &moved.common).map_err(io::Error::other)?;
    Ok(Some(serde_json::to_vec(spec.value())?))
}

/// Connects without waiting for a place in the listener's backlog.
pub(crate) fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match connect(fd.as_raw_fd(), &UnixAddr::new(path)?) {
        Ok(()) => {}
        Err(Errno::EAGAIN) => return Err(io::ErrorKind::WouldBlock.into()),
        Err(errno) => return Err(errno.into()),
    }
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn path(address: &str) -> &Path {
    Path::new(address.strip_prefix("unix://").unwrap_or(address))
}

#[cfg(test)]
mod tests {
    use firn_gpu::{DeviceNode, Gpu, NodeType};

    use super::*;

    #[test]
    fn a_parked_container_gets_a_label_and_loses_it() {
        let label = |text: &str| (names::LABEL_PARKED.to_owned(), text.to_owned());
        let update = |container: &Container, text: Option<&str>| {
            let change = Change {
                label: text.map(str::to_owned),
                moved: None,
            };
            let request = update_of(container, "job", &change).unwrap()?;
            Some((request.container.unwrap(), request.update_mask.unwrap().paths))
        };
        let mut container = Container::default();
        container.labels.insert("a".to_owned(), "1".to_owned());
        assert!(update(&container, None).is_none());
        // The label of nobody else is written.
        let (parked, mask) = update(&container, Some("5 MiB")).unwrap();
        assert_eq!(mask, ["labels.firn.dev/parked"]);
        assert_eq!(
            (&*parked.id, parked.labels.clone()),
            ("job", [label("5 MiB")].into())
        );
        assert!(update(&parked, Some("5 MiB")).is_none());
        let (freed, mask) = update(&parked, None).unwrap();
        assert_eq!(mask, ["labels.firn.dev/parked"]);
        assert!(freed.labels.is_empty());
    }

    #[test]
    fn a_container_that_has_moved_gets_its_new_nodes() {
        let node = |minor: u64| DeviceNode {
            path: format!("/dev/nvidia{minor}").into(),
            kind: NodeType::Char,
            major: 195,
            minor,
        };
        let spec = |minor: u64| {
            let node = serde_json::json!({
                "path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor
            });
            serde_json::json!({"linux": {"devices": [node]}, "hostname": "h"})
        };
        let of = |json: &serde_json::Value| Container {
            spec: Some(Any {
                type_url: "types/Spec".to_owned(),
                value: serde_json::to_vec(json).unwrap(),
            }),
            ..Container::default()
        };
        let moved = || Change {
            label: None,
            moved: Some(Moved {
                gpus: vec![Gpu {
                    uuid: "GPU-5f1e0000-0000-4000-8000-000000000001".parse().unwrap(),
                    name: "NVIDIA H200".to_owned(),
                    pci_device_id: 1,
                    pci_address: "00000000:17:00.0".to_owned(),
                    memory_total: 1,
                    memory_free: 1,
                    minor: 1,
                    mig: false,
                    persistence: true,
                    node: Some(node(1)),
                }],
                common: Vec::new(),
            }),
        };
        let request = update_of(&of(&spec(0)), "job", &moved()).unwrap().unwrap();
        assert_eq!(request.update_mask.unwrap().paths, ["spec"]);
        let any = request.container.unwrap().spec.unwrap();
        let now: serde_json::Value = serde_json::from_slice(&any.value).unwrap();
        assert_eq!(now["linux"]["devices"], spec(1)["linux"]["devices"]);
        assert_eq!((&*any.type_url, &now["hostname"]), ("types/Spec", &"h".into()));
        // Its GPUs come from a hook or a name, which firn has turned into nodes in the bundle alone.
        let unnamed = of(&serde_json::json!({"linux": {}}));
        assert!(update_of(&unnamed, "job", &moved()).unwrap().is_none());
    }

    #[test]
    fn versions_as_distributions_write_them() {
        for (version, expected) in [
            ("v2.1.4", Some(2)),
            ("2.1.4~ds1", Some(2)),
            ("1.7.24~ds1-6+deb13u1", Some(1)),
            ("v1.7.24-k3s1", Some(1)),
            ("10.0.0", Some(10)),
            ("unknown", None),
            ("", None),
            ("2", None),
        ] {
            assert_eq!(major(version), expected, "{version}");
        }
    }

    #[test]
    fn the_version_is_found_among_other_fields() {
        assert_eq!(
            version_in(b"\x12\x03rev\x0a\x06v2.1.4").as_deref(),
            Some("v2.1.4")
        );
        assert_eq!(version_in(b"\x12\x03rev"), None);
        assert_eq!(version_in(b"\x0a\x7fv2"), None);
    }

    #[test]
    fn nobody_there_is_a_no() {
        assert!(!reads_version_3(""));
        assert!(!reads_version_3("unix:///nonexistent/containerd.sock"));
    }
}
