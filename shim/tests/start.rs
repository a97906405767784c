//! `start` and the server as containerd runs them: the real binary, a bundle, and a fifo for its log.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use containerd_shim_protos::api::{ConnectRequest, ShutdownRequest};
use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::{Client, TaskClient};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, mkfifo};
use protobuf::Message;

const SHIM: &str = env!("CARGO_BIN_EXE_containerd-shim-firn-v2");
const NAMESPACE: &str = "firn-start-test";
const SOON: Duration = Duration::from_secs(20);

/// A directory of bundles whose containers all belong to one pod, and a directory for their socket.
struct Node {
    dir: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        // Short, because the length of socket paths is limited.
        let dir = tempfile::Builder::new()
            .prefix("firn")
            .tempdir_in("/tmp")
            .unwrap();
        Self { dir }
    }

    fn sockets(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    fn bundle(&self, id: &str) -> PathBuf {
        let bundle = self.dir.path().join("b").join(id);
        fs::create_dir_all(&bundle).unwrap();
        let config = r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"pod"}}"#;
        fs::write(bundle.join("config.json"), config).unwrap();
        mkfifo(&bundle.join("log"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        bundle
    }

    /// Runs `start` as containerd 2.3 does.
    fn start(&self, id: &str) -> Output {
        let params = BootstrapParams {
            instance_id: id.into(),
            namespace: NAMESPACE.into(),
            containerd_grpc_address: "/nonexistent.sock".into(),
            socket_dir: Some(self.sockets().to_str().unwrap().into()),
            ..BootstrapParams::default()
        };
        let mut start: Child = Command::new(SHIM)
            .args([
                "-namespace",
                NAMESPACE,
                "-id",
                id,
                "-address",
                "/nonexistent.sock",
                "start",
            ])
            .current_dir(self.dir.path().join("b").join(id))
            .env_remove("TTRPC_ADDRESS")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        start
            .stdin
            .take()
            .unwrap()
            .write_all(&params.write_to_bytes().unwrap())
            .unwrap();
        // Returns only when no process holds stdout or stderr, so it also proves that the server does not.
        start.wait_with_output().unwrap()
    }

    fn started(&self, id: &str) -> String {
        let output = self.start(id);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(output.stderr.is_empty());
        let reply = BootstrapResult::parse_from_bytes(&output.stdout).unwrap();
        assert_eq!((reply.version, reply.protocol.as_str()), (3, "ttrpc"));
        let bundle = self.dir.path().join("b").join(id);
        assert_eq!(fs::read_to_string(bundle.join("address")).unwrap(), reply.address);
        assert_eq!(fs::read_link(bundle.join("s")).unwrap(), self.sockets());
        reply.address
    }
}

/// Kills the servers that a failed test would leave behind.
impl Drop for Node {
    fn drop(&mut self) {
        for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let cwd = fs::read_link(process.path().join("cwd"));
            let pid = process.file_name().to_str().and_then(|name| name.parse().ok());
            if let Some(pid) = pid.filter(|_| cwd.is_ok_and(|cwd| cwd.starts_with(self.dir.path()))) {
                let _gone = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
}

fn client(address: &str) -> TaskClient {
    TaskClient::new(Client::connect(address).unwrap())
}

fn context() -> ttrpc::context::Context {
    ttrpc::context::with_duration(SOON)
}

fn shim_pid(address: &str) -> Pid {
    let answer = client(address)
        .connect(context(), &ConnectRequest::default())
        .unwrap();
    Pid::from_raw(i32::try_from(answer.shim_pid).unwrap())
}

fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The server is the test's child only until `start` has ended, so it does not remain as a zombie.
fn until_gone(pid: Pid) {
    until("the end of the server", || {
        !Path::new(&format!("/proc/{pid}")).exists()
    });
}

#[test]
fn a_pod_has_one_server_until_it_is_shut_down() {
    let node = Node::new();
    let (first, second) = (node.bundle("c1"), node.bundle("c2"));
    let address = node.started("c1");
    assert_eq!(node.started("c2"), address);
    let socket = PathBuf::from(address.strip_prefix("unix://").unwrap());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&socket), mode(&node.sockets())), (0o600, 0o700));

    let pid = shim_pid(&address);
    assert_eq!(fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), first);
    assert_ne!(fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), second);
    assert_eq!(
        fs::read_link(format!("/proc/{pid}/fd/2")).unwrap(),
        first.join("log")
    );
    assert_eq!(
        nix::unistd::getpgid(Some(pid)).unwrap(),
        pid,
        "a process group of its own"
    );
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(status.contains("Threads:\t1\n"), "{status}");

    client(&address)
        .shutdown(context(), &ShutdownRequest::default())
        .unwrap();
    until_gone(pid);
    assert!(!socket.exists());
    assert_ne!(shim_pid(&node.started("c1")), pid, "a new one");
}

#[test]
fn a_killed_server_is_replaced_and_a_terminated_one_cleans_up() {
    let node = Node::new();
    node.bundle("c1");
    let address = node.started("c1");
    let pid = shim_pid(&address);
    kill(pid, Signal::SIGKILL).unwrap();
    until_gone(pid);
    let socket = Path::new(address.strip_prefix("unix://").unwrap());
    assert!(socket.exists(), "a killed server removed it");

    assert_eq!(node.started("c1"), address);
    let pid = shim_pid(&address);
    kill(pid, Signal::SIGTERM).unwrap();
    until_gone(pid);
    assert!(!socket.exists());
}

#[test]
fn the_servers_log_goes_into_the_fifo() {
    let node = Node::new();
    let bundle = node.bundle("c1");
    let mut log = File::options()
        .read(true)
        .write(true)
        .open(bundle.join("log"))
        .unwrap();
    let address = node.started("c1");
    let pid = shim_pid(&address);
    kill(pid, Signal::SIGUSR1).unwrap();
    let mut text = Vec::new();
    while !text.ends_with(b"\n") || !String::from_utf8_lossy(&text).contains("tasks alive") {
        let mut chunk = [0; 4096];
        let count = log.read(&mut chunk).unwrap();
        text.extend(&chunk[..count]);
    }
    let text = String::from_utf8(text).unwrap();
    let line = text.lines().last().unwrap();
    assert!(
        line.starts_with("time=\"20") && line.contains("\" level=info msg=\""),
        "{line}"
    );
    assert!(
        line.ends_with(&format!(" tasks alive\" id=c1 namespace={NAMESPACE} pid={pid}")),
        "{line}"
    );
    kill(pid, Signal::SIGTERM).unwrap();
    until_gone(pid);
}

#[test]
fn a_failed_start_leaves_nothing() {
    let node = Node::new();
    let bundle = node.bundle("c1");
    fs::remove_file(bundle.join("config.json")).unwrap();
    let output = node.start("c1");
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        message,
        "containerd-shim-firn-v2: cannot read config.json: No such file or directory (os error 2)\n"
    );
    assert!(!bundle.join("address").exists() && !node.sockets().exists());

    // The socket is created before this failure.
    fs::write(bundle.join("config.json"), "{}").unwrap();
    fs::create_dir_all(bundle.join("address/in-the-way")).unwrap();
    let output = node.start("c1");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        fs::read_dir(node.sockets()).unwrap().count(),
        0,
        "no socket is left"
    );
}

#[test]
fn a_wrong_command_line_is_distinguished_from_a_failure() {
    let run = |args: &[&str]| {
        Command::new(SHIM)
            .args(args)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let output = run(&["-bogus"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let output = run(&["-v"]);
    assert!(output.status.success());
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        format!(
            "containerd-shim-firn-v2:\n  Version:  {}\n",
            env!("CARGO_PKG_VERSION")
        )
    );
    assert!(
        String::from_utf8(run(&["-h"]).stdout)
            .unwrap()
            .starts_with("usage: containerd-shim-firn-v2")
    );
}
