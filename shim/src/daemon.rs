//! Calls of containerd's gRPC socket: its version, and the labels of a container.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_transaction::blocking::blocking;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use protobuf::well_known_types::empty::Empty;
use protobuf::well_known_types::wrappers::StringValue;
use protobuf::{Message, UnknownValueRef};

use crate::options::unknown_string;
use http2::Call;

pub(crate) mod http2;

/// How long the daemon may take to answer. It answers in a millisecond or two; a shim that gave up too early
/// works as well, with one more `start` per container of a pod.
const VERSION_LIMIT: Duration = Duration::from_millis(500);
const VERSION: &str = "/containerd.services.version.v1.Version/Version";
/// How long it may take to send the metadata of a container. Without them the container starts, too.
const LABELS_LIMIT: Duration = Duration::from_secs(2);
const CONTAINER: &str = "/containerd.services.containers.v1.Containers/Get";
/// Field 1 of `GetContainerResponse`: the container. Field 2 of that: its labels, as pairs of fields 1 and 2.
const CONTAINER_FIELD: u32 = 1;
const LABELS_FIELD: u32 = 2;
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

fn call_for_labels(address: &str, namespace: &str, id: &str) -> io::Result<BTreeMap<String, String>> {
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
    let response = http2::unary_call(path(address), &call, Instant::now() + LABELS_LIMIT)?;
    Ok(labels_in(&response)?)
}

/// The labels in a `GetContainerResponse`, a message that is not among the published ones.
pub(crate) fn labels_in(response: &[u8]) -> protobuf::Result<BTreeMap<String, String>> {
    let mut labels = BTreeMap::new();
    for container in messages(&Empty::parse_from_bytes(response)?, CONTAINER_FIELD)? {
        for label in messages(&container, LABELS_FIELD)? {
            labels.insert(unknown_string(&label, 1), unknown_string(&label, 2));
        }
    }
    Ok(labels)
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
        let labels = labels_in(&field(1, &container)).unwrap();
        let expected = [("a", "1"), ("firn.dev/hook-prepare", "exec: /hook")];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(labels, BTreeMap::from(expected));
        assert!(labels_in(b"").unwrap().is_empty());
        labels_in(b"\x0a\x7fjob").unwrap_err();
        labels_in(&field(1, b"\x12\x7f")).unwrap_err();
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
