//! What `start` reads and what it prints, for every daemon that there is.
//!
//! containerd 2.3 and later send `BootstrapParams`, earlier ones the options as an `Any`, or nothing. An
//! `Any` with options can also be read as `BootstrapParams` (both begin with two length-delimited fields),
//! hence the check that the message names the same task as the command line.

use std::path::PathBuf;

use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult, LogLevel};
use protobuf::well_known_types::any::Any;
use protobuf::{Enum, Message};

use super::env;
use crate::args::Args;
use crate::daemon;
use crate::options::{DecodeError, is_sent_as, runc_options};
use firn_transaction::options::RuncOptions;

/// Version of the task API that the reply promises; both are served.
const TASK_API_VERSION: i32 = 3;
const PROTOCOL: &str = "ttrpc";
/// Socket directory of daemons that name none.
const DEFAULT_SOCKET_DIR: &str = "/run/containerd/s";

/// A request to start a shim.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) debug: bool,
    /// containerd's gRPC socket; part of the shim socket's name.
    pub(super) grpc_address: String,
    /// containerd's socket for events.
    pub(super) ttrpc_address: String,
    /// Where the socket goes.
    pub(super) socket_dir: PathBuf,
    /// Whether the daemon chose the directory; it is then kept in the bundle.
    pub(super) socket_dir_given: bool,
    pub(super) options: RuncOptions,
    form: Form,
}

/// What the caller can read.
#[derive(Debug, PartialEq, Eq)]
enum Form {
    Bootstrap,
    Legacy,
}

impl Request {
    /// Understands stdin of `start`.
    pub(super) fn read(args: &Args, stdin: &[u8]) -> Result<Self, DecodeError> {
        let sent = BootstrapParams::parse_from_bytes(stdin).ok();
        match sent.filter(|sent| sent.instance_id == args.id && sent.namespace == args.namespace) {
            Some(params) => Self::bootstrap(args, params),
            None => Ok(Self::legacy(args, stdin)),
        }
    }

    fn bootstrap(args: &Args, params: BootstrapParams) -> Result<Self, DecodeError> {
        let mut options = RuncOptions::default();
        for extension in params
            .extensions
            .iter()
            .filter_map(|extension| extension.value.as_ref())
        {
            if is_sent_as(extension) {
                options = runc_options(Some(extension))?;
            }
        }
        let or = |sent: String, otherwise: String| if sent.is_empty() { otherwise } else { sent };
        let socket_dir = params.socket_dir.filter(|dir| !dir.is_empty());
        Ok(Self {
            // The levels are an open enumeration: anything as wordy as debug is debug.
            debug: args.debug || params.log_level.value() <= LogLevel::LOG_LEVEL_DEBUG.value(),
            grpc_address: or(params.containerd_grpc_address, args.address.clone()),
            ttrpc_address: or(params.containerd_ttrpc_address, env::ttrpc_address()),
            socket_dir_given: socket_dir.is_some(),
            socket_dir: socket_dir.unwrap_or_else(|| DEFAULT_SOCKET_DIR.to_owned()).into(),
            options,
            form: Form::Bootstrap,
        })
    }

    fn legacy(args: &Args, stdin: &[u8]) -> Self {
        // Only the shim's own cgroup matters here. What cannot be understood is Create's to refuse.
        let sent = Any::parse_from_bytes(stdin).ok().filter(is_sent_as);
        let options = sent.and_then(|any| runc_options(Some(&any)).ok());
        Self {
            debug: args.debug,
            grpc_address: args.address.clone(),
            ttrpc_address: env::ttrpc_address(),
            socket_dir: DEFAULT_SOCKET_DIR.into(),
            socket_dir_given: false,
            options: options.unwrap_or_default(),
            form: Form::Legacy,
        }
    }

    /// The reply for `address`, `unix://...`, in the form that the caller can read.
    pub(super) fn reply(&self, address: &str) -> Vec<u8> {
        match self.form {
            Form::Bootstrap => BootstrapResult {
                version: TASK_API_VERSION,
                address: address.to_owned(),
                protocol: PROTOCOL.to_owned(),
                ..BootstrapResult::default()
            }
            .write_to_bytes()
            .expect("a message in memory can be encoded"),
            Form::Legacy if daemon::reads_version_3(&self.grpc_address) => {
                let reply = serde_json::json!({
                    "version": TASK_API_VERSION, "address": address, "protocol": PROTOCOL,
                });
                reply.to_string().into_bytes()
            }
            Form::Legacy => address.as_bytes().to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use containerd_shim_protos::bootstrap_api::Extension;
    use containerd_shim_protos::shim::oci;
    use protobuf::{EnumOrUnknown, MessageField};

    use super::*;

    fn args() -> Args {
        let line = "-namespace k8s.io -address /nonexistent/containerd.sock -id c1 start";
        Args::parse(line.split(' ').map(OsString::from)).unwrap()
    }

    fn options() -> Any {
        let options = oci::Options {
            shim_cgroup: "/shims".into(),
            ..oci::Options::default()
        };
        Any {
            type_url: "containerd.runc.v1.Options".into(),
            value: options.write_to_bytes().unwrap(),
            ..Any::default()
        }
    }

    fn params() -> BootstrapParams {
        let other = Any {
            type_url: "some.Thing".into(),
            value: vec![0xff],
            ..Any::default()
        };
        BootstrapParams {
            instance_id: "c1".into(),
            namespace: "k8s.io".into(),
            log_level: EnumOrUnknown::from_i32(-5),
            containerd_ttrpc_address: "/run/c.ttrpc".into(),
            containerd_grpc_address: "/run/c.sock".into(),
            extensions: [other, options()]
                .map(|any| Extension {
                    value: MessageField::some(any),
                    ..Extension::default()
                })
                .to_vec(),
            ..BootstrapParams::default()
        }
    }

    #[test]
    fn a_daemon_that_speaks_the_bootstrap_protocol_gets_its_result() {
        let request = Request::read(&args(), &params().write_to_bytes().unwrap()).unwrap();
        assert!(request.debug);
        assert_eq!(
            (request.grpc_address.as_str(), request.ttrpc_address.as_str()),
            ("/run/c.sock", "/run/c.ttrpc")
        );
        assert_eq!(request.options.shim_cgroup, "/shims");
        assert_eq!(
            (request.socket_dir, request.socket_dir_given),
            ("/run/containerd/s".into(), false)
        );

        let mut with_dir = params();
        with_dir.socket_dir = Some("/run/user/1/s".into());
        let request = Request::read(&args(), &with_dir.write_to_bytes().unwrap()).unwrap();
        assert_eq!(
            (&request.socket_dir, request.socket_dir_given),
            (&"/run/user/1/s".into(), true)
        );

        let reply = BootstrapResult::parse_from_bytes(&request.reply("unix:///s/x")).unwrap();
        assert_eq!(
            (reply.version, reply.address.as_str(), reply.protocol.as_str()),
            (3, "unix:///s/x", "ttrpc")
        );
    }

    #[test]
    fn params_of_another_task_are_no_params() {
        let mut stranger = params();
        stranger.instance_id = "c2".into();
        // Field 3 is no length-delimited one, so this is no `Any` with options either: it is read as an empty
        // one.
        let request = Request::read(&args(), &stranger.write_to_bytes().unwrap()).unwrap();
        assert_eq!(request.form, Form::Legacy);
    }

    #[test]
    fn older_daemons_send_options_or_nothing() {
        for (stdin, cgroup) in [(vec![], ""), (options().write_to_bytes().unwrap(), "/shims")] {
            let request = Request::read(&args(), &stdin).unwrap();
            assert_eq!(request.form, Form::Legacy);
            assert_eq!(request.options.shim_cgroup, cgroup);
            assert!(!request.debug);
            assert_eq!(request.grpc_address, "/nonexistent/containerd.sock");
            assert_eq!(
                request.reply("unix:///s/x"),
                b"unix:///s/x",
                "no daemon answers: the reply that all can read"
            );
        }
        let garbage = Request::read(&args(), b"\x0a\x7fx").unwrap();
        assert_eq!(
            (garbage.form, garbage.options),
            (Form::Legacy, RuncOptions::default())
        );
    }
}
