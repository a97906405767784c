//! The action `start`: a socket, a server that inherits it, and the reply with its address for containerd.
//!
//! The containers of a pod share one shim: when the group's socket is served already, its address is the
//! reply and nothing is started. When anything fails after the socket was made, socket and server are gone
//! again.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use command_fds::{CommandFdExt, FdMapping};
use firn_host::UnlessAbsent;
use rustix::process::getpid;
use rustix::thread::{CoreSchedulingScope, create_core_scheduling_cookie};
use serde::Deserialize;

use super::LISTENER_FD;
use super::params::Request;
use super::socket::{self, Socket};
use super::{confine, env};
use crate::action_io::{print, read_stdin};
use crate::args::Args;
use crate::error::{ActionError, failed, failed_at};

/// Annotations that put containers into one shim; the first one present counts.
pub(super) const GROUP_ANNOTATIONS: [&str; 2] =
    ["io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id"];
/// The container's spec, in the bundle.
const CONFIG_FILE: &str = "config.json";
/// Where containerd 1.x finds the shim again after a restart, in the bundle.
const ADDRESS_FILE: &str = "address";
/// Link to the socket directory when the daemon chose it, in the bundle.
const SOCKET_DIR_LINK: &str = "s";
/// No spec is larger; Create refuses one.
const MAX_SPEC: u64 = 16 << 20;
/// More than any daemon sends.
const MAX_STDIN: u64 = 10 << 20;

/// Starts a shim for the bundle in the working directory, or finds the one of its group.
pub fn start(args: &Args) -> Result<(), ActionError> {
    let request = Request::read(args, &read_stdin(MAX_STDIN)?).map_err(ActionError::Request)?;
    let group = group(Path::new(CONFIG_FILE))?.unwrap_or_else(|| args.id.clone());
    if request.socket_dir_given {
        keep_socket_dir(&request.socket_dir)?;
    }
    let path = socket::path(
        &request.socket_dir,
        &request.grpc_address,
        &args.namespace,
        &group,
    );
    let address = format!("unix://{}", path.display());
    match socket::claim(&path)? {
        Socket::Taken => write_address(&address)?,
        Socket::Ours(listener) => {
            if let Err(error) = launch(args, &request, listener, &address) {
                // The first failure is what the caller has to know.
                let _gone = fs::remove_file(&path);
                return Err(error);
            }
        }
    }
    print(&request.reply(&address))
}

/// Starts the server on the listener and confines it; when that fails, it is not left behind.
fn launch(args: &Args, request: &Request, listener: UnixListener, address: &str) -> Result<(), ActionError> {
    write_address(address)?;
    if std::env::var_os(env::SCHED_CORE).is_some_and(|value| !value.is_empty()) {
        // The cookie is this process group's; the server inherits it.
        create_core_scheduling_cookie(getpid(), CoreSchedulingScope::ProcessGroup)
            .map_err(|errno| ActionError::SchedCore(errno.into()))?;
    }
    let mut server = spawn(args, request, listener.into()).map_err(failed("start the server"))?;
    let confined = confine(&request.options.shim_cgroup, server.id());
    if confined.is_err() {
        // Both fail only when it has ended by itself.
        let _killed = server.kill();
        let _waited = server.wait();
    }
    confined
}

fn spawn(args: &Args, request: &Request, listener: OwnedFd) -> io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args([
        "-namespace",
        &args.namespace,
        "-id",
        &args.id,
        "-address",
        &request.grpc_address,
    ]);
    if request.debug {
        command.arg("-debug");
    }
    command
        .env(env::TTRPC_ADDRESS, &request.ttrpc_address)
        .process_group(0)
        // containerd waits until nobody holds our stdout and stderr any more.
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .fd_mappings(vec![FdMapping {
            parent_fd: listener,
            child_fd: LISTENER_FD,
        }])
        .map_err(io::Error::other)?
        .spawn()
}

fn confine(cgroup: &str, pid: u32) -> Result<(), ActionError> {
    if !cgroup.is_empty() {
        confine::join_cgroup(pid, cgroup)?;
    }
    confine::adjust_oom_score(pid)
}

/// As much of a spec as is needed here; the rest is not even decoded.
#[derive(Deserialize)]
struct Spec {
    #[serde(default)]
    annotations: Option<std::collections::HashMap<String, String>>,
}

fn group(config: &Path) -> Result<Option<String>, ActionError> {
    let mut json = Vec::new();
    File::open(config)
        .and_then(|file| file.take(MAX_SPEC).read_to_end(&mut json))
        .map_err(failed_at("read", config))?;
    group_in(&json).map_err(|source| ActionError::Spec {
        path: config.to_owned(),
        source,
    })
}

pub(super) fn group_in(json: &[u8]) -> Result<Option<String>, serde_json::Error> {
    let spec: Spec = serde_json::from_slice(json)?;
    let mut annotations = spec.annotations.unwrap_or_default();
    Ok(GROUP_ANNOTATIONS
        .iter()
        .find_map(|name| annotations.remove(*name)))
}

/// Replaces the address file at once: a daemon may be reading it.
fn write_address(address: &str) -> Result<(), ActionError> {
    let temporary = format!(".{ADDRESS_FILE}");
    fs::write(&temporary, address).map_err(failed_at("write", &temporary))?;
    fs::rename(&temporary, ADDRESS_FILE).map_err(failed_at("write", ADDRESS_FILE))
}

fn keep_socket_dir(dir: &Path) -> Result<(), ActionError> {
    let removed = fs::remove_file(SOCKET_DIR_LINK).unless_absent();
    removed.map_err(failed_at("replace", SOCKET_DIR_LINK))?;
    symlink(dir, SOCKET_DIR_LINK).map_err(failed_at("make", SOCKET_DIR_LINK))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group_of(json: &str) -> Result<Option<String>, ActionError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), json).unwrap();
        group(file.path())
    }

    #[test]
    fn pods_share_a_shim() {
        let pod = r#"{"ociVersion":"1.2.1","annotations":{"io.kubernetes.cri.sandbox-id":"pod1","x":"y"}}"#;
        assert_eq!(group_of(pod).unwrap().as_deref(), Some("pod1"));
        let both =
            r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"p","io.containerd.runc.v2.group":"g"}}"#;
        assert_eq!(group_of(both).unwrap().as_deref(), Some("g"));
        for none in [
            "{}",
            r#"{"annotations":null}"#,
            r#"{"annotations":{"a":"b"},"mounts":[{"x":1}]}"#,
        ] {
            assert_eq!(group_of(none).unwrap(), None, "{none}");
        }
        assert!(matches!(group_of("{"), Err(ActionError::Spec { .. })));
        let missing = group(Path::new("/nonexistent/config.json")).unwrap_err();
        assert_eq!(missing.to_string(), "cannot read /nonexistent/config.json");
    }
}
