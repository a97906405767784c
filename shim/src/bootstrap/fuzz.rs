//! What must hold for the input of `start`, whatever its bytes are.

use std::ffi::OsString;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use firn_oci::Spec;
use protobuf::Message;
use protobuf::well_known_types::any::Any;

use super::params::Request;
use super::{socket, start};
use crate::args::{Action, Args};
use crate::daemon::{self, http2};
use crate::options::fuzz::{is_kept, names_a_file};
use crate::options::runc_options;

const ADDRESS: &str = "unix:///run/containerd/s/0";

fn args() -> Args {
    // No daemon is there to be asked.
    let line = "-namespace k8s.io -address /nonexistent/containerd.sock -id c1 start";
    Args::parse(line.split(' ').map(OsString::from)).expect("the line is right")
}

/// Stdin of `start` and of `-info`.
pub fn start_input(stdin: &[u8]) {
    let args = args();
    let params = BootstrapParams::parse_from_bytes(stdin).ok();
    let params = params.filter(|params| params.instance_id == args.id && params.namespace == args.namespace);
    let extensions = params.iter().flat_map(|params| &params.extensions);
    let any = Any::parse_from_bytes(stdin).ok();
    if extensions
        .filter_map(|sent| sent.value.as_ref())
        .chain(&any)
        .any(names_a_file)
    {
        return;
    }
    if let Some(options) = any.and_then(|any| runc_options(Some(&any)).ok()) {
        is_kept(&options);
    }
    let Ok(request) = Request::read(&args, stdin) else {
        return;
    };
    is_kept(&request.options);
    let path = socket::path(
        &request.socket_dir,
        &request.grpc_address,
        &args.namespace,
        "group",
    );
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    assert!(name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit()));
    assert_eq!(path.parent(), Some(request.socket_dir.as_path()));

    let reply = request.reply(ADDRESS);
    match params {
        Some(params) => {
            let reply = BootstrapResult::parse_from_bytes(&reply).expect("the daemon can read it");
            assert_eq!(
                (reply.version, reply.address.as_str(), reply.protocol.as_str()),
                (3, ADDRESS, "ttrpc")
            );
            let dir = params.socket_dir.filter(|dir| !dir.is_empty());
            assert_eq!(request.socket_dir_given, dir.is_some());
            assert!(dir.is_none_or(|dir| request.socket_dir == Path::new(&dir)));
        }
        None => {
            assert_eq!(reply, ADDRESS.as_bytes(), "the reply that all daemons can read");
            assert_eq!(
                request.grpc_address, args.address,
                "only the command line names the daemon"
            );
            assert!(!request.socket_dir_given && !request.debug);
        }
    }
}

/// The command line, words apart by NUL.
pub fn command_line(words: &[u8]) {
    let words = words
        .split(|byte| *byte == 0)
        .map(|word| OsString::from_vec(word.to_vec()));
    let Ok(args) = Args::parse(words) else { return };
    if matches!(args.action, Action::Start | Action::Delete | Action::Serve) {
        for segment in [&args.id, &args.namespace] {
            let below = Path::new("/run").join(segment);
            assert_eq!(
                below.parent(),
                Some(Path::new("/run")),
                "{segment:?} is one segment of a path"
            );
            assert_eq!(
                below.file_name().and_then(|name| name.to_str()),
                Some(segment.as_str())
            );
        }
    }
}

/// `config.json` as `start` and `delete` look at it.
pub fn config_json(json: &[u8]) {
    let group = start::group_in(json);
    let Ok(spec) = serde_json::from_slice::<serde_json::Value>(json) else {
        // `start` does not decode what it does not need, and so may not notice.
        return;
    };
    let spec = Spec::from(spec);
    if let Ok(group) = group {
        let first = start::GROUP_ANNOTATIONS
            .iter()
            .find_map(|name| spec.annotation(name));
        assert_eq!(group.as_deref(), first, "the whole spec has the same group");
    }
}

/// What a daemon sends when it is asked for its version.
pub fn daemon_answer(bytes: &[u8]) {
    // What fits into a socket that nobody reads yet.
    let bytes = &bytes[..bytes.len().min(64 << 10)];
    let (mut ours, mut theirs) = UnixStream::pair().expect("a socket can be had");
    theirs.write_all(bytes).expect("it has room");
    theirs.shutdown(Shutdown::Write).expect("it is open");
    let deadline = Instant::now() + Duration::from_secs(60);
    if let Ok(message) = http2::answer(&mut ours, deadline) {
        assert!(message.len() <= bytes.len());
        if let Some(version) = daemon::version_in(&message) {
            // A byte that is not UTF-8 becomes a character of three bytes.
            assert!(version.chars().count() < message.len());
            if let Some(major) = daemon::major(&version) {
                assert!(
                    version
                        .trim_start_matches(['v', '+', '0'])
                        .starts_with(&major.to_string())
                        || major == 0
                );
            }
        }
    }
}
