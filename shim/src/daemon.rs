//! Calls of containerd's gRPC socket: its version, and what it has of a container.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_config::names;
use firn_oci::{GpuPath, Spec, classify, edit};
use firn_process::blocking::blocking;
use firn_transaction::checkpoint::park::Moved;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use protobuf::well_known_types::empty::Empty;
use protobuf::well_known_types::wrappers::StringValue;
use protobuf::{Message, UnknownValueRef};

use crate::options::unknown_string;
use http2::Call;

pub(crate) mod http2;
pub(crate) mod images;

/// How long the daemon may take to answer. It answers in a millisecond or two; a shim that gave up too early
/// works as well, with one more `start` per container of a pod.
const VERSION_LIMIT: Duration = Duration::from_millis(500);
const VERSION: &str = "/containerd.services.version.v1.Version/Version";
/// How long it may take to send the metadata of a container, or to take them. Without them the container
/// starts and continues, too.
const METADATA_LIMIT: Duration = Duration::from_secs(2);
const CONTAINER: &str = "/containerd.services.containers.v1.Containers/Get";
const UPDATE: &str = "/containerd.services.containers.v1.Containers/Update";
/// Field 1 of `GetContainerResponse`: the container. Field 2 of that: its labels, as pairs of fields 1 and 2.
/// Field 3: the name of its image. Field 5: its spec, JSON in a `google.protobuf.Any`.
const CONTAINER_FIELD: u32 = 1;
const LABELS_FIELD: u32 = 2;
const IMAGE_FIELD: u32 = 3;
const SPEC_FIELD: u32 = 5;
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
        method: VERSION,
        namespace: None,
        message: &[],
    };
    let response = http2::unary_call(path(address), &call, Instant::now() + VERSION_LIMIT).ok();
    let version = response.and_then(|response| version_field(&response));
    let major = version.and_then(|version| major(&version));
    major.is_some_and(|major| major >= FIRST_MAJOR)
}

/// Field 1 of `VersionResponse`, a message that is not among the published ones.
pub(crate) fn version_field(response: &[u8]) -> Option<String> {
    let response = Empty::parse_from_bytes(response).ok()?;
    Some(unknown_string(&response, 1)).filter(|version| !version.is_empty())
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
    let labels = blocking(move || call_for_labels(&address, &namespace, &of)).await;
    labels.unwrap_or_else(|error| {
        log::warn!("cannot read the labels of {id}: hooks that its image names are not called: {error}");
        BTreeMap::new()
    })
}

/// The name of a container's image; empty if containerd does not answer.
pub(crate) fn image(address: &str, namespace: &str, id: &str) -> impl Future<Output = String> + Send + use<> {
    let (address, namespace, id) = (address.to_owned(), namespace.to_owned(), id.to_owned());
    let image = blocking(move || {
        let found = get(&address, &namespace, &id);
        let found = found.inspect_err(|error| log::debug!("cannot read the image of {id}: {error}"));
        found.map(|container| unknown_string(&container, IMAGE_FIELD))
    });
    async { image.await.unwrap_or_default() }
}

fn call_for_labels(address: &str, namespace: &str, id: &str) -> io::Result<BTreeMap<String, String>> {
    Ok(labels_of(&get(address, namespace, id)?)?)
}

/// What containerd has of a container.
fn get(address: &str, namespace: &str, id: &str) -> io::Result<Empty> {
    // The request has the one field of a StringValue.
    let request = StringValue {
        value: id.to_owned(),
        ..StringValue::default()
    };
    let call = Call {
        method: CONTAINER,
        namespace: Some(namespace),
        message: &request.write_to_bytes()?,
    };
    let response = http2::unary_call(path(address), &call, Instant::now() + METADATA_LIMIT)?;
    Ok(container_in(&response)?)
}

/// The container in a `GetContainerResponse`, a message that is not among the published ones.
fn container_in(response: &[u8]) -> protobuf::Result<Empty> {
    let found = messages(&Empty::parse_from_bytes(response)?, CONTAINER_FIELD)?;
    Ok(found.into_iter().next_back().unwrap_or_default())
}

fn labels_of(container: &Empty) -> protobuf::Result<BTreeMap<String, String>> {
    let labels = messages(container, LABELS_FIELD)?.into_iter();
    let pairs = labels.map(|label| (unknown_string(&label, 1), unknown_string(&label, 2)));
    Ok(firn_host::ordered::map_of(pairs))
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
        method: UPDATE,
        namespace: Some(namespace),
        message: &request,
    };
    http2::unary_call(path(address), &call, Instant::now() + METADATA_LIMIT).map(drop)
}

/// An `UpdateContainerRequest`; none if nothing changes.
fn update_of(container: &Empty, id: &str, change: &Change) -> io::Result<Option<Vec<u8>>> {
    let mut updated = Empty::new();
    let mut mask = Empty::new();
    push(&mut updated, 1, id.as_bytes());
    if labels_of(container)?.get(names::LABEL_PARKED) != change.label.as_ref() {
        if let Some(text) = &change.label {
            let mut pair = Empty::new();
            push(&mut pair, 1, names::LABEL_PARKED.as_bytes());
            push(&mut pair, 2, text.as_bytes());
            push(&mut updated, LABELS_FIELD, &pair.write_to_bytes()?);
        }
        // Clients may change other labels meanwhile. containerd removes one that the mask alone names.
        push(&mut mask, 1, format!("labels.{}", names::LABEL_PARKED).as_bytes());
    }
    if let Some(moved) = &change.moved
        && let Some(any) = messages(container, SPEC_FIELD)?.first()
        && let Some(spec) = moved_spec(&bytes(any, 2), moved)?
    {
        let mut edited = Empty::new();
        push(&mut edited, 1, &bytes(any, 1));
        push(&mut edited, 2, &spec);
        push(&mut updated, SPEC_FIELD, &edited.write_to_bytes()?);
        push(&mut mask, 1, b"spec");
    }
    if bytes(&mask, 1).is_empty() {
        return Ok(None);
    }
    let mut request = Empty::new();
    push(&mut request, 1, &updated.write_to_bytes()?);
    push(&mut request, 2, &mask.write_to_bytes()?);
    Ok(Some(request.write_to_bytes()?))
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

fn push(message: &mut Empty, field: u32, bytes: &[u8]) {
    let fields = message.special_fields.mut_unknown_fields();
    fields.add_length_delimited(field, bytes.to_vec());
}

/// The last value of a field; empty if there is none.
fn bytes(message: &Empty, field: u32) -> Vec<u8> {
    match message.special_fields.unknown_fields().get(field) {
        Some(UnknownValueRef::LengthDelimited(bytes)) => bytes.to_vec(),
        _ => Vec::new(),
    }
}

/// The messages in a field.
fn messages(message: &Empty, field: u32) -> protobuf::Result<Vec<Empty>> {
    let fields = message.special_fields.unknown_fields().iter();
    let bytes = fields.filter_map(|(number, value)| match value {
        UnknownValueRef::LengthDelimited(bytes) if number == field => Some(bytes),
        _ => None,
    });
    bytes.map(Empty::parse_from_bytes).collect()
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
    fn labels_are_found_among_the_metadata() {
        let label = |key: &str, value: &str| {
            let pair = [field(1, key.as_bytes()), field(2, value.as_bytes())].concat();
            field(2, &pair)
        };
        let container = [
            field(1, b"job"),
            label("a", "1"),
            field(3, b"image"),
            label("firn.dev/hook-prepare", "exec: /hook"),
        ]
        .concat();
        let labels_in = |response: &[u8]| labels_of(&container_in(response)?);
        let labels = labels_in(&field(1, &container)).unwrap();
        let expected = [("a", "1"), ("firn.dev/hook-prepare", "exec: /hook")];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(labels, BTreeMap::from(expected));
        assert!(labels_in(b"").unwrap().is_empty());
        labels_in(b"\x0a\x7fjob").unwrap_err();
        labels_in(&field(1, b"\x12\x7f")).unwrap_err();
    }

    /// The container of an `UpdateContainerRequest`, and the paths of its mask.
    fn parsed(request: &[u8]) -> (Empty, Vec<String>) {
        let request = Empty::parse_from_bytes(request).unwrap();
        let container = messages(&request, 1).unwrap().remove(0);
        let mask = messages(&request, 2).unwrap().remove(0);
        let fields = mask.special_fields.unknown_fields().iter();
        let paths = fields.map(|(_, value)| match value {
            UnknownValueRef::LengthDelimited(path) => String::from_utf8(path.to_vec()).unwrap(),
            _ => panic!("no path"),
        });
        let paths = paths.collect();
        (container, paths)
    }

    #[test]
    fn a_parked_container_gets_a_label_and_loses_it() {
        let change = |label: Option<&str>| Change {
            label: label.map(str::to_owned),
            moved: None,
        };
        let update = |container: &Empty, label| update_of(container, "job", &change(label)).unwrap();
        let other = [field(1, b"a"), field(2, b"1")].concat();
        let mut container = Empty::new();
        push(&mut container, LABELS_FIELD, &other);
        assert!(update(&container, None).is_none());
        // The label of nobody else is written.
        let (parked, mask) = parsed(&update(&container, Some("5 MiB")).unwrap());
        assert_eq!(mask, ["labels.firn.dev/parked"]);
        let label = ("firn.dev/parked".to_owned(), "5 MiB".to_owned());
        assert_eq!(labels_of(&parked).unwrap(), BTreeMap::from([label]));
        assert!(update(&parked, Some("5 MiB")).is_none());
        let (freed, mask) = parsed(&update(&parked, None).unwrap());
        assert_eq!(mask, ["labels.firn.dev/parked"]);
        assert!(labels_of(&freed).unwrap().is_empty());
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
        let of = |json: &serde_json::Value| {
            let mut container = Empty::new();
            let mut any = Empty::new();
            push(&mut any, 1, b"types/Spec");
            push(&mut any, 2, &serde_json::to_vec(json).unwrap());
            push(&mut container, SPEC_FIELD, &any.write_to_bytes().unwrap());
            container
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
        let (container, mask) = parsed(&request);
        assert_eq!(mask, ["spec"]);
        let any = messages(&container, SPEC_FIELD).unwrap().remove(0);
        let now: serde_json::Value = serde_json::from_slice(&bytes(&any, 2)).unwrap();
        assert_eq!(now["linux"]["devices"], spec(1)["linux"]["devices"]);
        assert_eq!(
            (bytes(&any, 1), &now["hostname"]),
            (b"types/Spec".to_vec(), &"h".into())
        );
        // Its GPUs come from a hook or a name, which firn has turned into nodes in the bundle alone.
        let unnamed = of(&serde_json::json!({"linux": {}}));
        assert!(update_of(&unnamed, "job", &moved()).unwrap().is_none());
    }

    /// A length-delimited field of fewer than 128 bytes.
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let length = u8::try_from(bytes.len()).unwrap();
        [&[number << 3 | 2, length][..], bytes].concat()
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
            version_field(b"\x12\x03rev\x0a\x06v2.1.4").as_deref(),
            Some("v2.1.4")
        );
        assert_eq!(version_field(b"\x12\x03rev"), None);
        assert_eq!(version_field(b"\x0a\x7fv2"), None);
    }

    #[test]
    fn nobody_there_is_a_no() {
        assert!(!reads_version_3(""));
        assert!(!reads_version_3("unix:///nonexistent/containerd.sock"));
    }
}
