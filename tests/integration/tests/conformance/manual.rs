//! A shim's actions run by hand, as a daemon runs them, in a bundle that no daemon knows of.
//!
//! What `ctr` cannot send (options, requests of other daemons) goes this way, and what a daemon keeps to
//! itself (the reply of `start`) is seen.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{
    ConnectRequest, ConnectResponse, CreateTaskRequest, CreateTaskResponse, DeleteRequest, DeleteResponse,
    Empty, ShutdownRequest, StartRequest, StartResponse,
};
use containerd_shim_protos::bootstrap_api::BootstrapResult;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::types::mount::Mount;
use firn_lab::{Task, nothing_left};
use firn_node::wait_for;
use protobuf::{Message, MessageField};
use serde_json::{Value, json};

use crate::conformance::Place;

/// containerd's gRPC socket, part of the name of a shim's.
pub const ADDRESS: &str = "/run/containerd/containerd.sock";
/// Type under which options of runc go over the wire.
pub const RUNC_OPTIONS: &str = "containerd.runc.v1.Options";
/// What containers by hand have as root file system.
const ROOT: &str = "/run/by-hand-root";
/// How long what is waited for may take.
pub const STEP: Duration = Duration::from_secs(60);
/// Ends with 3 when it is asked to.
const SCRIPT: &str = "trap 'exit 3' TERM; while :; do sleep 0.05; done";
/// Becomes what containerd is to a shim: its parent, with this place in the OOM killer's order.
const DAEMON: &str = r#"cd "$1"; shift; [ -z "$OOM" ] || echo "$OOM" >/proc/$$/oom_score_adj; "$@"; exit $?"#;

/// How an action went.
#[derive(Debug)]
pub struct Done {
    pub code: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Done {
    /// Where the shim listens, and the version that the reply promises.
    pub fn address(&self) -> Result<(String, u64)> {
        let socket = |address: &str| -> Result<String> {
            let path = address.strip_prefix("unix://");
            Ok(path.with_context(|| format!("no socket in {self:?}"))?.to_owned())
        };
        if let Ok(json) = serde_json::from_slice::<Value>(&self.stdout) {
            let address = json["address"].as_str().unwrap_or_default();
            return Ok((socket(address)?, json["version"].as_u64().unwrap_or_default()));
        }
        match std::str::from_utf8(&self.stdout) {
            Ok(text) if text.starts_with("unix://") => Ok((socket(text)?, 2)),
            _ => {
                let result = BootstrapResult::parse_from_bytes(&self.stdout)?;
                Ok((socket(&result.address)?, u64::try_from(result.version)?))
            }
        }
    }

    /// The form of the reply of `start` and all else that was printed.
    pub fn reply(&self) -> String {
        let form = if let Ok(json) = serde_json::from_slice::<Value>(&self.stdout) {
            format!("JSON {json}")
        } else if self.stdout.starts_with(b"unix://") {
            format!("plain {}", String::from_utf8_lossy(&self.stdout))
        } else {
            match BootstrapResult::parse_from_bytes(&self.stdout) {
                Ok(BootstrapResult {
                    version,
                    address,
                    protocol,
                    ..
                }) => {
                    format!("BootstrapResult {version} {address} {protocol}")
                }
                Err(_) => format!("{:?}", String::from_utf8_lossy(&self.stdout)),
            }
        };
        format!("code {:?}\n{form}\nstderr {:?}", self.code, self.stderr)
    }
}

/// A bundle.
pub struct Bundle<'p> {
    place: &'p Place<'p>,
    pub id: &'static str,
    pub dir: String,
    /// Both ends of the fifo that a daemon would read.
    log: File,
}

/// A shim that was started by hand.
pub struct Shim<'p> {
    place: &'p Place<'p>,
    pub socket: String,
    pub task: Task,
    pub pid: u32,
}

impl<'p> Bundle<'p> {
    /// A bundle with a container that runs until it gets SIGTERM; `annotations` go into its spec.
    pub fn new(place: &'p Place<'p>, id: &'static str, annotations: &Value) -> Result<Self> {
        let dir = format!("/run/containerd/by-hand/{id}");
        let node = place.node();
        let make = format!(
            "mkdir -p {dir}/rootfs {ROOT}/bin {ROOT}/proc {ROOT}/dev; mkfifo {dir}/log; \
             cp -u /bin/busybox {ROOT}/bin/busybox;
             for name in sh sleep; do ln -sf busybox {ROOT}/bin/$name; done"
        );
        node.run(&["sh", "-euc", &make])?;
        let spec = json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0}, "cwd": "/", "env": ["PATH=/bin"],
                "args": ["/bin/sh", "-c", SCRIPT]
            },
            "root": {"path": "rootfs"},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            ],
            "annotations": annotations,
            "linux": {
                "cgroupsPath": format!("/by-hand/{id}"),
                "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}],
            },
        });
        node.write(format!("{dir}/config.json"), spec.to_string())?;
        let mut both = OpenOptions::new();
        both.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        let log = both
            .open(node.path(format!("{dir}/log")))
            .context("open the log fifo")?;
        Ok(Self { place, id, dir, log })
    }

    /// Runs the shim with these words after those that a daemon gives always.
    pub fn act(&self, words: &[&str], env: &[(&str, &str)], stdin: &[u8]) -> Result<Done> {
        let usual = [
            "-namespace",
            "default",
            "-address",
            ADDRESS,
            "-publish-binary",
            "/usr/bin/containerd",
            "-id",
            self.id,
        ];
        self.call(&[&usual, words].concat(), env, stdin)
    }

    /// Runs the shim with these words.
    pub fn call(&self, words: &[&str], env: &[(&str, &str)], stdin: &[u8]) -> Result<Done> {
        let mut input = tempfile::tempfile()?;
        input.write_all(stdin)?;
        input.rewind()?;
        let mut command = self.place.node().command("timeout");
        command
            .args(["--kill-after=5", "60", "sh", "-c", DAEMON, "daemon", &self.dir])
            .arg(self.place.program())
            .args(words)
            .env("TTRPC_ADDRESS", format!("{ADDRESS}.ttrpc"))
            .env("GRPC_ADDRESS", ADDRESS)
            .env("NAMESPACE", "default")
            .env("MAX_SHIM_VERSION", "2")
            .env("GOMAXPROCS", "2")
            .envs(env.iter().copied());
        let output = command.stdin(input).output().context("run the shim")?;
        Ok(Done {
            code: output.status.code(),
            stdout: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Starts its shim, or finds the one of its group.
    pub fn start(&self) -> Result<Shim<'p>> {
        let done = self.act(&["start"], &[], b"")?;
        self.connect(&done)
    }

    /// The shim that a reply names.
    pub fn connect(&self, done: &Done) -> Result<Shim<'p>> {
        ensure!(done.code == Some(0), "start failed: {done:?}");
        let (socket, version) = done.address()?;
        let task = Task::connect(self.place.host, &socket, self.id, version)?;
        let answer: ConnectResponse = task
            .call("Connect", &ConnectRequest::new())
            .context("call Connect")?;
        Ok(Shim {
            place: self.place,
            socket,
            task,
            pid: answer.shim_pid,
        })
    }

    /// What the shim has written into its log so far.
    pub fn log(&self) -> String {
        let mut text = Vec::new();
        // Ends with "would block": the fifo has no end.
        let _ = (&self.log).read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Creates its container with these options.
    pub fn create(&self, shim: &Shim<'_>, options: Option<Any>) -> ttrpc::Result<CreateTaskResponse> {
        shim.task.call("Create", &self.create_request(options))
    }

    /// The request that does.
    pub fn create_request(&self, options: Option<Any>) -> CreateTaskRequest {
        CreateTaskRequest {
            id: self.id.to_owned(),
            bundle: self.dir.clone(),
            rootfs: vec![Mount {
                type_: "bind".into(),
                source: ROOT.into(),
                options: vec!["rbind".into(), "rw".into()],
                ..Mount::default()
            }],
            options: options.map_or_else(MessageField::none, MessageField::some),
            ..CreateTaskRequest::default()
        }
    }

    /// Creates and starts its container. Gives its pid.
    pub fn run(&self, shim: &Shim<'_>, options: Option<Any>) -> Result<u32> {
        self.create(shim, options).context("create")?;
        let mut request = StartRequest::new();
        request.id = self.id.to_owned();
        Ok(shim
            .task
            .call::<StartResponse>("Start", &request)
            .context("start")?
            .pid)
    }

    /// Kills and deletes its container.
    pub fn kill(&self, shim: &Shim<'_>) -> Result<DeleteResponse> {
        let ended = shim.task.wait("").context("wait")?;
        shim.task.kill("", 9, false).context("kill")?;
        shim.task.end(ended).context("wait")?;
        let mut request = DeleteRequest::new();
        request.id = self.id.to_owned();
        shim.task.call("Delete", &request).context("delete")
    }

    /// Removes the bundle and makes sure that nothing is left of the container.
    pub fn remove(self) -> Result<()> {
        self.place.node().run(&["rm", "-r", &self.dir])?;
        nothing_left(self.place.host, self.id)
    }
}

impl Shim<'_> {
    /// Asks it to end and waits until it has. Its socket may be left: containerd's own forgets one of a
    /// group.
    pub fn end(self) -> Result<()> {
        // Its last answer may not arrive.
        let _ = self.task.call::<Empty>("Shutdown", &ShutdownRequest::new());
        self.is_gone()?;
        self.place.node().run(&["rm", "-f", &self.socket]).map(drop)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: &str) -> Result<()> {
        let pid = self.pid.to_string();
        self.place.node().run(&["kill", "-s", signal, &pid]).map(drop)
    }

    /// Waits until its process is gone.
    pub fn is_gone(&self) -> Result<()> {
        wait_for("the end of the shim", STEP, || Ok((!self.lives()).then_some(())))
    }

    /// Whether its process is there.
    pub fn lives(&self) -> bool {
        self.place.has_process(self.pid)
    }

    /// A file of its process.
    pub fn proc(&self, file: &str) -> Result<String> {
        self.place.node().read(format!("/proc/{}/{file}", self.pid))
    }

    /// Whether its socket is there.
    pub fn has_socket(&self) -> bool {
        self.place.node().path(&self.socket).exists()
    }
}
