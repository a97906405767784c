//! State, Pids, Wait, Stats and Connect: they only look, and answer at once whatever else is under way.

use firn_host::Absent;
use std::sync::Arc;

use crate::metrics;
use containerd_shim_protos::api::{
    ConnectRequest, ConnectResponse, PidsRequest, PidsResponse, ProcessInfo, StateRequest, StateResponse,
    StatsRequest, StatsResponse, Status, WaitRequest, WaitResponse,
};
use protobuf::MessageField;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::timestamp::Timestamp;

use firn_process::reaper::Exit;

use super::{Service, TaskError};
use firn_transaction::container::{Container, InitState, Process};
use firn_transaction::runc::RuntimeMessage;

pub(super) async fn state(service: &Arc<Service>, request: StateRequest) -> Result<StateResponse, TaskError> {
    let container = service.container(&request.id)?;
    let process = find(&container, &request.exec_id)?;
    let exit = process.exit();
    Ok(StateResponse {
        id: id_of(&container, &process).to_owned(),
        bundle: container.bundle.display().to_string(),
        pid: pid_field(process.pid()),
        status: status(&container, &process).into(),
        stdin: process.stdio.stdin.clone(),
        stdout: process.stdio.stdout.clone(),
        stderr: process.stdio.stderr.clone(),
        terminal: process.stdio.terminal,
        exit_status: exit.map_or(0, |exit| exit.code),
        exited_at: exited_at(exit.as_ref()),
        ..StateResponse::default()
    })
}

pub(super) async fn pids(service: &Arc<Service>, request: PidsRequest) -> Result<PidsResponse, TaskError> {
    let container = service.container(&request.id)?;
    let pids = match container.runc.ps().await {
        Ok(pids) => pids,
        // Not every runtime lists pids, or lists them so; the cgroup has them too.
        Err(source) => match container.cgroup().and_then(|cgroup| cgroup.pids()) {
            Ok(pids) if !source.is_absent() => pids,
            _ => return Err(RuntimeMessage::from(source).into()),
        },
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
        exited_at: exited_at(process.exit().as_ref()),
        ..WaitResponse::default()
    })
}

pub(super) async fn stats(service: &Arc<Service>, request: StatsRequest) -> Result<StatsResponse, TaskError> {
    let container = service.container(&request.id)?;
    let stats = metrics::of(&container.cgroup()?)?;
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

/// The id by which the protocol knows a process: an exec goes by its own alone.
pub(super) fn id_of<'a>(container: &'a Container, process: &'a Process) -> &'a str {
    match &*process.exec_id {
        "" => &container.id,
        exec_id => exec_id,
    }
}

/// A pid as the protocol has it. Pids are never negative.
pub(crate) fn pid_field(pid: i32) -> u32 {
    pid.unsigned_abs()
}

/// Seconds from the zero time of Go to that of Unix: clients ask whether a time is zero in their way.
const ZERO_TIME: i64 = -62_135_596_800;

/// When a process ended; the zero time for one that has not.
pub(super) fn exited_at(exit: Option<&Exit>) -> MessageField<Timestamp> {
    MessageField::some(exit.map_or(
        Timestamp {
            seconds: ZERO_TIME,
            ..Timestamp::default()
        },
        |exit| Timestamp::from(exit.at),
    ))
}

fn status(container: &Container, process: &Process) -> Status {
    let init = container.state();
    if process.exec_id.is_empty() {
        return match init {
            InitState::Created | InitState::CreatedCheckpoint => Status::CREATED,
            InitState::Running => Status::RUNNING,
            InitState::Pausing => Status::PAUSING,
            InitState::Paused | InitState::Parked | InitState::Suspended => Status::PAUSED,
            InitState::Stopped | InitState::Deleted => Status::STOPPED,
        };
    }
    match (init, process.exit(), process.pid()) {
        // All of a container is frozen, or nothing.
        (InitState::Paused | InitState::Parked | InitState::Suspended, ..) => Status::PAUSED,
        (InitState::Pausing, ..) => Status::PAUSING,
        (_, Some(_), _) => Status::STOPPED,
        (_, None, 0) => Status::CREATED,
        (_, None, _) => Status::RUNNING,
    }
}
