//! A client that runs processes in a container by calling its shim, with stdio of its own making.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use containerd_shim_protos::api::{
    CloseIORequest, CreateTaskRequest, CreateTaskResponse, DeleteRequest, DeleteResponse, Empty,
    ExecProcessRequest, Mount, ResizePtyRequest, StartRequest, StartResponse, WaitRequest, WaitResponse,
};
use firn_lab::{BUNDLES, Container, Pending, Task, describe};
use firn_node::wait_for;
use protobuf::well_known_types::any::Any;
use serde_json::{Value, json};

use crate::conformance::Place;

/// How long anything here may take.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Where fifos, logs and loggers are on the node.
const DIR: &str = "/tmp/stdio";

/// `O_NONBLOCK` of Linux on all architectures that containers run on.
const NONBLOCK: i32 = 0o4000;

/// `ENXIO`: what opening a fifo to write is answered with when nobody reads.
const NO_READER: i32 = 6;

/// The container, whose init only waits.
pub const ID: &str = "c";

/// A container and a directory for what its processes are connected with.
pub struct Client<'p> {
    pub place: &'p Place<'p>,
    pub container: Container<'p>,
    pub task: Task,
}

/// What an exec is asked to have.
#[derive(Default)]
pub struct Stdio<'a> {
    pub stdin: &'a str,
    pub stdout: &'a str,
    pub stderr: &'a str,
    pub terminal: bool,
}

impl<'p> Client<'p> {
    /// Runs the container.
    pub fn start(place: &'p Place<'p>) -> Result<Self> {
        Self::start_with(place, &["--null-io"], "sleep 1000")
    }

    /// Runs the container with options, and a script as its init.
    pub fn start_with(place: &'p Place<'p>, options: &[&str], script: &str) -> Result<Self> {
        fs::create_dir_all(place.node().path(DIR))?;
        let container = place.start(ID, options, script)?;
        let task = Task::of(place.host, ID)?;
        Ok(Self {
            place,
            container,
            task,
        })
    }

    /// Ends the container and removes the directory.
    pub fn end(self) -> Result<()> {
        drop(self.task);
        self.container.remove()?;
        clean(self.place)
    }

    /// Makes a fifo; gives its path on the node.
    pub fn fifo(&self, name: &str) -> Result<Fifo> {
        let path = path(name);
        self.place.node().run(&["mkfifo", &path])?;
        let host = self.place.node().path(&path);
        Ok(Fifo { path, host })
    }

    /// Takes an id for a script and starts it.
    pub fn exec(&self, id: &str, stdio: &Stdio<'_>, script: &str) -> ttrpc::Result<()> {
        self.exec_as(0, id, stdio, &["sh", "-c", script])
    }

    /// Takes an id for a command that this user runs, and starts it.
    pub fn exec_as(&self, user: u32, id: &str, stdio: &Stdio<'_>, argv: &[&str]) -> ttrpc::Result<()> {
        self.add(user, id, stdio, argv)?;
        let started = self.begin(id)?;
        self.task.end(started).map(drop)
    }

    /// Begins to start an exec.
    pub fn begin(&self, id: &str) -> ttrpc::Result<Pending<StartResponse>> {
        let mut start = StartRequest::new();
        start.id = ID.to_owned();
        start.exec_id = id.to_owned();
        self.task.begin("Start", &start, LIMIT)
    }

    /// Takes an id for a command that this user will run.
    pub fn add(&self, user: u32, id: &str, stdio: &Stdio<'_>, argv: &[&str]) -> ttrpc::Result<()> {
        let process = json!({
            "terminal": stdio.terminal,
            "user": { "uid": user, "gid": user },
            "args": argv,
            "env": ["PATH=/usr/bin:/bin", "TERM=xterm"],
            "cwd": "/",
        });
        let mut request = ExecProcessRequest::new();
        request.id = ID.to_owned();
        request.exec_id = id.to_owned();
        request.terminal = stdio.terminal;
        request.stdin = stdio.stdin.to_owned();
        request.stdout = stdio.stdout.to_owned();
        request.stderr = stdio.stderr.to_owned();
        request.spec = Some(Any {
            type_url: "types.containerd.io/opencontainers/runtime-spec/1/Process".to_owned(),
            value: process.to_string().into_bytes(),
            ..Any::default()
        })
        .into();
        self.task.call::<Empty>("Exec", &request).map(drop)
    }

    /// Waits for the end of a process; its exit code.
    pub fn code(&self, id: &str) -> Result<u32> {
        let waiting = self.task.wait(id).map_err(|error| anyhow!("wait: {error}"))?;
        wait_for(&format!("the end of {id:?}"), LIMIT, || {
            Ok(waiting.is_there().then_some(()))
        })?;
        let answer = self.task.end(waiting).map_err(|error| anyhow!("wait: {error}"))?;
        Ok(answer.exit_status)
    }

    /// Deletes an exec.
    pub fn delete(&self, id: &str) -> ttrpc::Result<DeleteResponse> {
        let mut request = DeleteRequest::new();
        request.id = ID.to_owned();
        request.exec_id = id.to_owned();
        self.task.call("Delete", &request)
    }

    /// Waits for the end of a process and deletes it; its exit code.
    pub fn finish(&self, id: &str) -> Result<u32> {
        let code = self.code(id)?;
        let deleted = self.delete(id).map_err(|error| anyhow!("delete: {error}"))?;
        if deleted.exit_status != code {
            bail!("Wait returns {code}, Delete {}", deleted.exit_status);
        }
        Ok(code)
    }

    /// Lets the stdin of a process end.
    pub fn close_stdin(&self, id: &str) -> Result<()> {
        let mut request = CloseIORequest::new();
        request.id = ID.to_owned();
        request.exec_id = id.to_owned();
        request.stdin = true;
        self.task
            .call::<Empty>("CloseIO", &request)
            .map_err(|error| anyhow!("CloseIO: {error}"))?;
        Ok(())
    }

    /// Sets the size of a terminal; how that went.
    pub fn resize(&self, id: &str, width: u32, height: u32) -> String {
        let mut request = ResizePtyRequest::new();
        request.id = ID.to_owned();
        request.exec_id = id.to_owned();
        request.width = width;
        request.height = height;
        describe(&self.task.call::<Empty>("ResizePty", &request), |_| "ok".into())
    }

    /// Runs a second container in the same shim to its end, as this user, whose pipes belong to that user
    /// too; its exit code.
    pub fn second(
        &self,
        user: u32,
        stdio: &Stdio<'_>,
        script: &str,
        before_start: impl FnOnce() -> Result<()>,
    ) -> Result<u32> {
        let (node, bundle) = (self.place.node(), path("second"));
        let mut spec: Value = serde_json::from_str(&node.read(format!("{BUNDLES}/{ID}/config.json"))?)?;
        spec["linux"]["cgroupsPath"] = "/default/second".into();
        spec["process"]["args"] = json!(["sh", "-c", script]);
        spec["process"]["user"] = json!({ "uid": user, "gid": user });
        node.write(format!("{bundle}/config.json"), spec.to_string())?;
        let mut root = Mount::new();
        root.type_ = "bind".to_owned();
        root.source = format!("{BUNDLES}/{ID}/rootfs");
        root.options = vec!["rbind".to_owned(), "rw".to_owned()];
        let mut create = CreateTaskRequest::new();
        create.id = "second".to_owned();
        create.bundle = bundle;
        create.rootfs = vec![root];
        create.stdin = stdio.stdin.to_owned();
        create.stdout = stdio.stdout.to_owned();
        create.stderr = stdio.stderr.to_owned();
        // Fields 4 and 5 of runc's options: io_uid and io_gid.
        let mut owner = Vec::new();
        let mut encoded = protobuf::CodedOutputStream::vec(&mut owner);
        encoded.write_uint32(4, user)?;
        encoded.write_uint32(5, user)?;
        drop(encoded);
        create.options = Some(Any {
            type_url: "containerd.runc.v1.Options".to_owned(),
            value: owner,
            ..Any::default()
        })
        .into();
        self.task.call::<CreateTaskResponse>("Create", &create)?;
        before_start()?;
        let mut start = StartRequest::new();
        start.id = "second".to_owned();
        self.task.call::<StartResponse>("Start", &start)?;
        let mut wait = WaitRequest::new();
        wait.id = "second".to_owned();
        let code = self.task.call::<WaitResponse>("Wait", &wait)?.exit_status;
        let mut delete = DeleteRequest::new();
        delete.id = "second".to_owned();
        self.task.call::<DeleteResponse>("Delete", &delete)?;
        Ok(code)
    }

    /// Writes a program of the node that reads a process's output; its path.
    pub fn logger(&self, script: &str) -> Result<String> {
        logger(self.place, script)
    }

    /// Reads a file of the container's root file system.
    pub fn inside(&self, file: &str) -> Result<String> {
        self.place.node().read(format!("{BUNDLES}/{ID}/rootfs/{file}"))
    }
}

/// A path in the directory.
pub fn path(name: &str) -> String {
    format!("{DIR}/{name}")
}

/// Runs a container that logs to this URI to its end; its exit code.
pub fn logged(place: &Place<'_>, uri: &str, script: &str) -> Result<i32> {
    let container = place.start(ID, &["--log-uri", uri], script)?;
    container.becomes("STOPPED")?;
    let code = container.exit_code()?;
    container.forget()?;
    Ok(code)
}

/// Writes a program of the node that reads a process's output; its path.
pub fn logger(place: &Place<'_>, script: &str) -> Result<String> {
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), format!("#!/bin/sh\ncd {DIR}\n{script}\n"))?;
    let path = path("logger");
    place.node().install(file.path(), &path, 0o755)?;
    Ok(path)
}

/// Waits until a file of the directory is there and not empty, and gives its text.
pub fn text(place: &Place<'_>, name: &str) -> Result<String> {
    let path = path(name);
    wait_for(&path, LIMIT, || {
        Ok(place.node().read(&path).ok().filter(|text| !text.is_empty()))
    })
}

/// Removes the directory.
pub fn clean(place: &Place<'_>) -> Result<()> {
    Ok(fs::remove_dir_all(place.node().path(DIR))?)
}

/// A fifo on the node.
pub struct Fifo {
    /// Its path there.
    pub path: String,
    host: PathBuf,
}

impl Fifo {
    /// Opens it to read, whether anybody writes or not.
    pub fn reader(&self) -> Result<Reader> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(NONBLOCK)
            .open(&self.host)
            .with_context(|| format!("open {} to read", self.path))?;
        Ok(Reader {
            file,
            got: Vec::new(),
        })
    }

    /// Opens it to write, once somebody reads.
    pub fn writer(&self) -> Result<Writer> {
        let open = || {
            OpenOptions::new()
                .write(true)
                .custom_flags(NONBLOCK)
                .open(&self.host)
        };
        wait_for(&format!("a reader of {}", self.path), LIMIT, || match open() {
            Ok(file) => Ok(Some(Writer(file))),
            Err(error) if error.raw_os_error() == Some(NO_READER) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("open {} to write", self.path)),
        })
    }
}

/// The client's side of an output.
pub struct Reader {
    file: File,
    /// What it has read so far.
    pub got: Vec<u8>,
}

impl Reader {
    /// Reads until this has come.
    pub fn until(&mut self, text: &str) -> Result<()> {
        wait_for(&format!("{text:?} after {:?}", self.shown()), LIMIT, || {
            self.some()?;
            Ok(self.shown().contains(text).then_some(()))
        })
    }

    /// Reads until all writers are gone; everything that came.
    pub fn rest(mut self) -> Result<Vec<u8>> {
        wait_for("the end of a fifo", LIMIT, || Ok(self.some()?.then_some(())))?;
        Ok(self.got)
    }

    /// As [`Reader::rest`], as text.
    pub fn text(self) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.rest()?).into_owned())
    }

    /// Reads what is there; whether that was the end.
    fn some(&mut self) -> Result<bool> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            match self.file.read(&mut buffer) {
                Ok(0) => return Ok(true),
                Ok(count) => self.got.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn shown(&self) -> String {
        let start = self.got.len().saturating_sub(500);
        String::from_utf8_lossy(&self.got[start..]).into_owned()
    }
}

/// The client's side of an input.
pub struct Writer(File);

impl Writer {
    /// Writes all of it, as fast as it is read.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        wait_for("room in a fifo", LIMIT, || {
            while !bytes.is_empty() {
                match self.0.write(bytes) {
                    Ok(count) => bytes = &bytes[count..],
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(Some(()))
        })
    }
}
