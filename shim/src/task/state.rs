//! State, Pids, Wait, Stats and Connect: they only look, and answer at once whatever else is under way.

use std::sync::Arc;
use std::time::SystemTime;

use containerd_shim_protos::api::{
    ConnectRequest, ConnectResponse, PidsRequest, PidsResponse, ProcessInfo, StateRequest, StateResponse,
    StatsRequest, StatsResponse, Status, WaitRequest, WaitResponse,
};
use protobuf::MessageField;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::timestamp::Timestamp;

use super::{Service, TaskError};
use crate::container::{Container, InitState, Process};
use crate::reaper::Exit;

pub(super) async fn state(service: &Arc<Service>, request: StateRequest) -> Result<StateResponse, TaskError> {
    let container = service.container(&request.id)?;
    let process = find(&container, &request.exec_id)?;
    let exit = process.exit();
    let mut response = StateResponse {
        id: request.id,
        exec_id: request.exec_id,
        bundle: container.bundle.display().to_string(),
        pid: pid_field(process.pid()),
        status: status(&container, &process).into(),
        stdin: process.stdio.stdin.clone(),
        stdout: process.stdio.stdout.clone(),
        stderr: process.stdio.stderr.clone(),
        terminal: process.stdio.terminal,
        // Before the exit clients expect the zero time, not an absent one.
        exited_at: MessageField::some(Timestamp::new()),
        ..StateResponse::default()
    };
    if let Some(exit) = exit {
        response.exit_status = exit.code;
        response.exited_at = exited_at(&exit);
    }
    Ok(response)
}

pub(super) async fn pids(service: &Arc<Service>, request: PidsRequest) -> Result<PidsResponse, TaskError> {
    let container = service.container(&request.id)?;
    let pids = match container.runc.ps().await {
        Ok(pids) => pids,
        Err(source) => return Err(TaskError::Runtime { verb: "ps", source }),
    };
    let processes = pids
        .into_iter()
        .map(|pid| ProcessInfo {
            pid: pid_field(pid),
            info: container.exec_of_pid(pid).map(process_details).into(),
            ..ProcessInfo::default()
        })
        .collect();
    Ok(PidsResponse {
        processes,
        ..PidsResponse::default()
    })
}

/// `containerd.runc.v1.ProcessDetails`: one string field, the exec id. The protos crate does not have it.
fn process_details(exec_id: String) -> Any {
    let mut value = Vec::new();
    // Writing to memory fails for want of memory only, which aborts.
    let written = protobuf::CodedOutputStream::vec(&mut value).write_string(1, &exec_id);
    debug_assert!(written.is_ok());
    Any {
        type_url: "containerd.runc.v1.ProcessDetails".to_owned(),
        value,
        ..Any::default()
    }
}

pub(super) async fn wait(service: &Arc<Service>, request: WaitRequest) -> Result<WaitResponse, TaskError> {
    let container = service.container(&request.id)?;
    let process = find(&container, &request.exec_id)?;
    // The container may be deleted while somebody waits; only the process is needed.
    drop(container);
    let exit = process.wait().await.ok_or(TaskError::Closing)?;
    Ok(WaitResponse {
        exit_status: exit.code,
        exited_at: exited_at(&exit),
        ..WaitResponse::default()
    })
}

pub(super) async fn stats(service: &Arc<Service>, request: StatsRequest) -> Result<StatsResponse, TaskError> {
    let container = service.container(&request.id)?;
    let stats = container.cgroup()?.stats()?;
    Ok(StatsResponse {
        stats: MessageField::some(stats),
        ..StatsResponse::default()
    })
}

pub(super) async fn connect(
    service: &Arc<Service>,
    request: ConnectRequest,
) -> Result<ConnectResponse, TaskError> {
    let task_pid = service
        .container(&request.id)
        .map(|container| container.init.pid())
        .unwrap_or_default();
    Ok(ConnectResponse {
        shim_pid: std::process::id(),
        task_pid: pid_field(task_pid),
        ..ConnectResponse::default()
    })
}

/// Init or the exec that a request names.
pub(super) fn find(container: &Container, exec_id: &str) -> Result<Arc<Process>, TaskError> {
    container.process(exec_id).ok_or_else(|| TaskError::NoProcess {
        exec_id: exec_id.to_owned(),
    })
}

/// A pid as the protocol has it. Pids are never negative.
pub(super) fn pid_field(pid: i32) -> u32 {
    pid.unsigned_abs()
}

/// A time as the protocol has it.
pub(super) fn timestamp(at: SystemTime) -> MessageField<Timestamp> {
    MessageField::some(Timestamp::from(at))
}

/// When a process ended.
pub(super) fn exited_at(exit: &Exit) -> MessageField<Timestamp> {
    timestamp(exit.at)
}

fn status(container: &Container, process: &Process) -> Status {
    let init = container.state();
    if process.exec_id.is_empty() {
        return match init {
            InitState::Created | InitState::CreatedCheckpoint => Status::CREATED,
            InitState::Running => Status::RUNNING,
            InitState::Pausing => Status::PAUSING,
            InitState::Paused | InitState::Lost => Status::PAUSED,
            InitState::Stopped | InitState::Deleted => Status::STOPPED,
        };
    }
    match (process.exit(), process.pid(), init) {
        (Some(_), ..) => Status::STOPPED,
        (None, 0, _) => Status::CREATED,
        (None, _, InitState::Paused | InitState::Lost) => Status::PAUSED,
        (None, _, InitState::Pausing) => Status::PAUSING,
        (None, _, _) => Status::RUNNING,
    }
}
