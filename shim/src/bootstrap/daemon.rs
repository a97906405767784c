//! Finds out whether the daemon that runs `start` can read a reply of version 3.
//!
//! Daemons before 2.3 give a shim nothing to distinguish them by: same flags, same environment
//! (MAX_SHIM_VERSION is "2" in all of them), same files in the bundle. So the daemon is asked, by the one
//! call that all of them answer: `containerd.services.version.v1.Version/Version` on its gRPC socket.
//! Whatever goes wrong is a "no", which is always safe: every daemon reads the plain reply.

use std::time::{Duration, Instant};

use protobuf::Message;
use protobuf::well_known_types::empty::Empty;

use super::http2;
use crate::options::unknown_string;

/// How long the daemon may take to answer. It answers in a millisecond or two; a shim that gave up too early
/// works as well, with one more `start` per container of a pod.
const LIMIT: Duration = Duration::from_millis(500);
const METHOD: &str = "/containerd.services.version.v1.Version/Version";
/// First daemon that takes a version 3.
const FIRST_MAJOR: u32 = 2;

/// Whether the daemon whose gRPC socket is `address`, a path or `unix://` and a path, reports that it does.
pub(super) fn reads_version_3(address: &str) -> bool {
    let socket = address.strip_prefix("unix://").unwrap_or(address);
    let response = http2::unary_call(socket.as_ref(), METHOD, Instant::now() + LIMIT).ok();
    let version = response.and_then(|response| version_field(&response));
    let major = version.and_then(|version| major(&version));
    major.is_some_and(|major| major >= FIRST_MAJOR)
}

/// Field 1 of `VersionResponse`, a message that is not among the published ones.
pub(super) fn version_field(response: &[u8]) -> Option<String> {
    let response = Empty::parse_from_bytes(response).ok()?;
    Some(unknown_string(&response, 1)).filter(|version| !version.is_empty())
}

/// Major number of `v2.1.4`, `2.1.4~ds1`, `1.7.24+unknown`; none for a build that carries no version.
pub(super) fn major(version: &str) -> Option<u32> {
    let (major, _) = version.strip_prefix('v').unwrap_or(version).split_once('.')?;
    major.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

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
