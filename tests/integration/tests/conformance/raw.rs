//! A second container in the shim of one that ctr has made: only the test calls the shim for it, so that each
//! call is seen by itself, and states that ctr never leaves a container in can be looked at.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, Mount,
    PauseRequest, PidsRequest, PidsResponse, ResizePtyRequest, ResumeRequest, StartRequest, StartResponse,
    StateRequest, StateResponse, StatsRequest, StatsResponse, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp;
use firn_lab::{BUNDLES, Container, Pending, Task, describe, nothing_left};
use firn_node::wait_for;
use serde_json::{Value, json};

use crate::conformance::Place;

/// Where the bundles of raw containers are.
const DIR: &str = "/run/raw";

/// Where a checkpoint goes.
pub const IMAGE: &str = "/run/raw/image";

/// How long an answer to a call that was begun may take.
pub const LIMIT: Duration = Duration::from_secs(60);

/// The zero time of Go, in seconds.
const ZERO_TIME: i64 = -62_135_596_800;

/// Makes a request with these fields.
macro_rules! request {
    ($type:ident { $($field:ident $(: $value:expr)?),+ $(,)? }) => {{
        let mut request = $type::new();
        $(request.$field = request!(@ $field $(, $value)?).into();)+
        request
    }};
    (@ $field:ident) => { $field };
    (@ $field:ident, $value:expr) => { $value };
}
pub(crate) use request;

/// Only "ok".
pub fn ok(_: &Empty) -> String {
    "ok".to_owned()
}

/// A shim with a host container made by ctr, whose only use is that it has a shim.
pub struct Raw<'h> {
    place: &'h Place<'h>,
    host: Container<'h>,
    pub task: Task,
}

impl<'h> Raw<'h> {
    /// Runs a container `c` that sleeps, for its shim.
    pub fn begin(place: &'h Place<'h>) -> Result<Self> {
        let host = place.start("c", &[], "exec sleep 1000")?;
        let task = Task::of(place.host, "c")?;
        Ok(Self { place, host, task })
    }

    /// Ends and deletes a raw container, if it is there.
    pub fn end_of(&self, id: &str) -> Result<()> {
        if self.state(id, "").starts_with("NOT_FOUND") {
            return Ok(());
        }
        self.resume(id);
        self.kill(id, "", 9, true);
        let mut last = String::new();
        let ended = wait_for(&format!("end of raw container {id}"), LIMIT, || {
            last = self.state(id, "");
            Ok((last.starts_with("STOPPED") || last.starts_with("CREATED")).then_some(()))
        });
        ended.with_context(|| last)?;
        let deleted = self.delete(id, "");
        ensure!(deleted.starts_with("pid"), "{id} cannot be deleted: {deleted}");
        Ok(())
    }

    /// Deletes what is left of raw containers, then the host container, and makes sure that nothing is left.
    pub fn end(self, ids: &[&str]) -> Result<()> {
        ids.iter().try_for_each(|id| self.end_of(id))?;
        // The shim ends with its last container: no connection may keep it.
        drop(self.task);
        self.host.remove()?;
        self.place.node().run(&["rm", "-rf", DIR])?;
        ids.iter().try_for_each(|id| nothing_left(self.place.host, id))
    }

    /// Where the bundle of a raw container is.
    pub fn bundle(id: &str) -> String {
        format!("{DIR}/{id}")
    }

    /// Makes a bundle like that of the host container, whose init runs this script, and edits its spec.
    pub fn make_bundle(&self, id: &str, script: &str, edit: impl FnOnce(&mut Value)) -> Result<()> {
        let text = self.place.node().read(format!("{BUNDLES}/c/config.json"))?;
        let mut spec: Value = serde_json::from_str(&text)?;
        spec["linux"]["cgroupsPath"] = format!("/default/{id}").into();
        spec["process"]["args"] = json!(["sh", "-c", script]);
        edit(&mut spec);
        self.place
            .node()
            .write(format!("{DIR}/{id}/config.json"), spec.to_string())?;
        // Where the stock shim has CRIU write its log.
        self.place
            .node()
            .run(&["mkdir", "-p", &format!("{DIR}/{id}/work")])?;
        Ok(())
    }

    /// What Create is asked for that bundle: the root file system is the host container's.
    pub fn create_request(id: &str) -> CreateTaskRequest {
        let rootfs = request!(Mount {
            type_: "bind",
            source: format!("{BUNDLES}/c/rootfs"),
            options: vec!["rbind".to_owned(), "rw".to_owned()],
        });
        request!(CreateTaskRequest {
            id,
            bundle: Self::bundle(id),
            rootfs: vec![rootfs],
        })
    }

    /// Create.
    pub fn create(&self, request: &CreateTaskRequest) -> String {
        describe(
            &self.task.call::<CreateTaskResponse>("Create", request),
            |answer| pid(answer.pid),
        )
    }

    /// Makes a container whose init runs this script; it is not started yet.
    pub fn make(&self, id: &str, script: &str) -> Result<()> {
        self.make_with(id, script, |_| {})
    }

    /// As [`Raw::make`], with an edited spec.
    pub fn make_with(&self, id: &str, script: &str, edit: impl FnOnce(&mut Value)) -> Result<()> {
        self.make_bundle(id, script, edit)?;
        let created = self.create(&Self::create_request(id));
        ensure!(created == "pid set", "create: {created}");
        Ok(())
    }

    /// Makes and starts a container.
    pub fn run(&self, id: &str, script: &str) -> Result<()> {
        self.run_with(id, script, |_| {})
    }

    /// As [`Raw::run`], with an edited spec.
    pub fn run_with(&self, id: &str, script: &str, edit: impl FnOnce(&mut Value)) -> Result<()> {
        self.make_with(id, script, edit)?;
        let started = self.start(id, "");
        ensure!(started == "pid set", "start: {started}");
        self.is_up(id, "init.pid", script)
    }

    /// Waits until a process runs its script and is no more the runtime's preparation for it, which takes
    /// signals in its own way and cannot be dumped; or until it has ended.
    fn is_up(&self, id: &str, pid_file: &str, script: &str) -> Result<()> {
        let node = self.place.node();
        let pid = node.read(format!("{}/{pid_file}", Self::bundle(id)))?;
        let pid: u32 = pid.trim().parse()?;
        // A script that becomes another program does so at once.
        let program = script
            .strip_prefix("exec ")
            .and_then(|rest| rest.split(' ').next());
        wait_for(&format!("{id}'s {pid_file} to be up"), LIMIT, || {
            let comm = node.read(format!("/proc/{pid}/comm")).unwrap_or_default();
            let is_up = match program {
                Some(program) => comm.trim_end() == program,
                None => !comm.starts_with("runc"),
            };
            Ok((is_up || !self.place.has_process(pid)).then_some(()))
        })
    }

    /// Adds and starts an exec without stdio that runs this script.
    pub fn exec_runs(&self, id: &str, exec: &str, script: &str) -> Result<()> {
        let added = self.exec(id, exec, script);
        ensure!(added == "ok", "exec: {added}");
        let started = self.start(id, exec);
        ensure!(started == "pid set", "start of exec: {started}");
        Ok(())
    }

    /// As [`Raw::exec_runs`], and waits until it is this script that runs and not the runtime's preparation
    /// for it, which takes signals in its own way.
    pub fn exec_is_up(&self, id: &str, exec: &str, script: &str) -> Result<()> {
        self.exec_runs(id, exec, script)?;
        self.is_up(id, &format!("{exec}.pid"), script)
    }

    /// Start.
    pub fn start(&self, id: &str, exec: &str) -> String {
        let request = request!(StartRequest { id, exec_id: exec });
        describe(&self.task.call::<StartResponse>("Start", &request), |answer| {
            pid(answer.pid)
        })
    }

    /// State.
    pub fn state(&self, id: &str, exec: &str) -> String {
        let request = request!(StateRequest { id, exec_id: exec });
        describe(&self.task.call("State", &request), |state: &StateResponse| {
            format!(
                "{:?} id {:?} exec {:?} bundle {} {} code {} at {} stdio {:?} {:?} {:?} terminal {}",
                state.status.enum_value_or_default(),
                state.id,
                state.exec_id,
                state.bundle,
                pid(state.pid),
                state.exit_status,
                at(&state.exited_at),
                state.stdin,
                state.stdout,
                state.stderr,
                state.terminal,
            )
        })
    }

    /// Waits for this status of init, or of an exec.
    pub fn becomes(&self, id: &str, exec: &str, status: &str) -> Result<()> {
        let mut last = String::new();
        let waited = wait_for(&format!("{id} {exec} to be {status}"), LIMIT, || {
            last = self.state(id, exec);
            Ok(last.starts_with(status).then_some(()))
        });
        waited.with_context(|| last)
    }

    /// Pause.
    pub fn pause(&self, id: &str) -> String {
        describe(&self.task.call("Pause", &request!(PauseRequest { id })), ok)
    }

    /// Resume.
    pub fn resume(&self, id: &str) -> String {
        describe(&self.task.call("Resume", &request!(ResumeRequest { id })), ok)
    }

    /// Checkpoint into that directory, the container running on.
    pub fn checkpoint(&self, id: &str, dir: &str) -> String {
        let request = request!(CheckpointTaskRequest { id, path: dir });
        describe(&self.task.call("Checkpoint", &request), ok)
    }

    /// What Exec is asked for this script.
    pub fn exec_request(id: &str, exec: &str, script: &str) -> ExecProcessRequest {
        let spec = json!({
            "args": ["sh", "-c", script],
            "cwd": "/",
            "env": ["PATH=/bin:/sbin"],
            "user": {"uid": 0, "gid": 0},
        });
        request!(ExecProcessRequest {
            id,
            exec_id: exec,
            spec: MessageField::some(process(&spec)),
        })
    }

    /// Exec.
    pub fn exec(&self, id: &str, exec: &str, script: &str) -> String {
        self.exec_as(&Self::exec_request(id, exec, script))
    }

    /// Exec, as requested.
    pub fn exec_as(&self, request: &ExecProcessRequest) -> String {
        describe(&self.task.call("Exec", request), ok)
    }

    /// Kill.
    pub fn kill(&self, id: &str, exec: &str, signal: u32, all: bool) -> String {
        let request = request!(KillRequest {
            id,
            exec_id: exec,
            signal,
            all
        });
        describe(&self.task.call("Kill", &request), ok)
    }

    /// Delete.
    pub fn delete(&self, id: &str, exec: &str) -> String {
        let request = request!(DeleteRequest { id, exec_id: exec });
        describe(&self.task.call("Delete", &request), deleted)
    }

    /// Begins a Delete.
    pub fn begin_delete(&self, id: &str) -> Result<Pending<DeleteResponse>> {
        let request = request!(DeleteRequest { id });
        Ok(self.task.begin("Delete", &request, LIMIT)?)
    }

    /// Begins a Start of an exec.
    pub fn begin_start(&self, id: &str, exec: &str) -> Result<Pending<StartResponse>> {
        let request = request!(StartRequest { id, exec_id: exec });
        Ok(self.task.begin("Start", &request, LIMIT)?)
    }

    /// Pids: how many, and which of them are which exec's.
    pub fn pids(&self, id: &str) -> String {
        let answer = self
            .task
            .call::<PidsResponse>("Pids", &request!(PidsRequest { id }));
        describe(&answer, |answer| {
            let details = answer
                .processes
                .iter()
                .filter_map(|process| process.info.as_ref());
            let details =
                details.map(|any| format!("{} {:?}", any.type_url, String::from_utf8_lossy(&any.value)));
            let mut details: Vec<String> = details.collect();
            details.sort();
            format!("{} processes, execs {details:?}", answer.processes.len())
        })
    }

    /// Update with these resources, JSON.
    pub fn update(&self, id: &str, resources: &str) -> String {
        let any = Any {
            type_url: "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources".to_owned(),
            value: resources.as_bytes().to_vec(),
            ..Any::default()
        };
        let request = request!(UpdateTaskRequest {
            id,
            resources: MessageField::some(any)
        });
        describe(&self.task.call("Update", &request), ok)
    }

    /// ResizePty.
    pub fn resize(&self, id: &str, exec: &str, width: u32, height: u32) -> String {
        let request = request!(ResizePtyRequest {
            id,
            exec_id: exec,
            width,
            height
        });
        describe(&self.task.call("ResizePty", &request), ok)
    }

    /// CloseIO; whether it names stdin makes no difference.
    pub fn close_io(&self, id: &str, exec: &str, stdin: bool) -> String {
        let request = request!(CloseIORequest {
            id,
            exec_id: exec,
            stdin
        });
        describe(&self.task.call("CloseIO", &request), ok)
    }

    /// Stats, which are looked at elsewhere.
    pub fn stats(&self, id: &str) -> String {
        let answer = self.task.call("Stats", &request!(StatsRequest { id }));
        describe(&answer, |stats: &StatsResponse| {
            stats
                .stats
                .as_ref()
                .map_or("none".to_owned(), |any| any.type_url.clone())
        })
    }

    /// Connect.
    pub fn connect(&self, id: &str) -> String {
        let answer = self.task.call("Connect", &request!(ConnectRequest { id }));
        describe(&answer, |answer: &ConnectResponse| {
            format!("shim {} task {}", pid(answer.shim_pid), pid(answer.task_pid))
        })
    }

    /// Pid of a raw container's init, as the node's processes are numbered.
    pub fn pid_of(&self, id: &str) -> Result<i32> {
        let file = format!("{}/init.pid", Self::bundle(id));
        Ok(self.place.node().read(file)?.trim().parse()?)
    }

    /// Pid of the host container's init.
    pub fn host_pid(&self) -> Result<i32> {
        self.host.pid()
    }

    /// Pid of the shim.
    pub fn shim_pid(&self) -> Result<i32> {
        let init = self.host.pid()?;
        let status = self.place.node().read(format!("/proc/{init}/status"))?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        Ok(parent.context("no parent")?.trim().parse()?)
    }

    /// Begins a Wait, of which the shim knows then.
    pub fn begin_wait(&self, id: &str, exec: &str) -> Result<Pending<WaitResponse>> {
        let request = request!(WaitRequest { id, exec_id: exec });
        Ok(self.task.begin_known("Wait", &request, LIMIT)?)
    }

    /// What a Wait that was begun has answered.
    pub fn waited(&self, pending: Pending<WaitResponse>) -> String {
        describe(&self.task.end(pending), |answer| {
            format!("code {} at {}", answer.exit_status, at(&answer.exited_at))
        })
    }

    /// Wait.
    pub fn wait(&self, id: &str, exec: &str) -> Result<String> {
        Ok(self.waited(self.begin_wait(id, exec)?))
    }
}

/// An OCI process as a client sends it.
pub fn process(spec: &Value) -> Any {
    Any {
        type_url: "types.containerd.io/opencontainers/runtime-spec/1/Process".to_owned(),
        value: spec.to_string().into_bytes(),
        ..Any::default()
    }
}

/// What Delete has answered.
pub fn deleted(answer: &DeleteResponse) -> String {
    format!(
        "{} code {} at {}",
        pid(answer.pid),
        answer.exit_status,
        at(&answer.exited_at)
    )
}

/// Whether a pid is there.
pub fn pid(pid: u32) -> String {
    format!("pid {}", if pid == 0 { "0" } else { "set" })
}

/// Whether a time is there.
pub fn at(time: &MessageField<Timestamp>) -> &'static str {
    match time.as_ref() {
        None => "absent",
        Some(time) if time.seconds == ZERO_TIME && time.nanos == 0 => "zero",
        Some(time) if time.seconds == 0 => "1970",
        Some(_) => "set",
    }
}
