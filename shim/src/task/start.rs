//! Start: init of a created container, a container from its checkpoint, or an exec.

use std::sync::Arc;

use containerd_shim_protos::api::{StartRequest, StartResponse};
use containerd_shim_protos::events::task::{TaskExecStarted, TaskStart};

use super::create::{INIT_PID, open_stdio, read_pid};
use super::state::{find, pid_field};
use super::{Service, TaskError, exit};
use crate::container::{Action, Container, InitState, Owner, Process};
use crate::restore;
use crate::runc::Exec;

pub(super) async fn start(service: &Arc<Service>, request: StartRequest) -> Result<StartResponse, TaskError> {
    let container = service.container(&request.id)?;
    let pid = if request.exec_id.is_empty() {
        start_init(service, &container).await?
    } else {
        let process = find(&container, &request.exec_id)?;
        start_exec(service, &container, process).await?
    };
    Ok(StartResponse {
        pid: pid_field(pid),
        ..StartResponse::default()
    })
}

async fn start_init(service: &Arc<Service>, container: &Arc<Container>) -> Result<i32, TaskError> {
    let _operation = container.operation.write().await;
    container.admit(Action::Start)?;
    // Order matters: a short-lived init can be gone before Start is told, but not in the events.
    container.begin_start();
    let started = match container.take_checkpoint() {
        None => {
            let started = container.runc.start().await;
            started.map_err(|source| TaskError::Runtime {
                verb: "start",
                source,
            })
        }
        Some(prepared) => restore_init(service, container, prepared).await,
    };
    let pid = container.init.pid();
    if started.is_ok() {
        container.set_state(InitState::Running);
        service.publisher.publish(&TaskStart {
            container_id: container.id.clone(),
            pid: pid_field(pid),
            ..TaskStart::default()
        });
    }
    if let Some(exit) = container.end_start() {
        exit::init_exited(service, container, exit);
    }
    started.map(|()| pid)
}

type Early = Option<(Owner, crate::reaper::Exit)>;

async fn restore_init(
    service: &Arc<Service>,
    container: &Arc<Container>,
    prepared: restore::Prepared,
) -> Result<(), TaskError> {
    let mut stdio = match open_stdio(service, container, &container.init).await {
        Ok(stdio) => stdio,
        Err(error) => {
            container.put_checkpoint(prepared);
            return Err(error);
        }
    };
    let pid_file = container.bundle.join(INIT_PID);
    let console = stdio.console_socket().map(std::path::Path::to_owned);
    let expectation = service.exits.expect();
    let restored = restore::run(
        container,
        &prepared,
        &pid_file,
        console,
        &service.reaper,
        |command| {
            stdio.attach(command);
        },
    );
    let pid = match restored.await {
        Ok(pid) => pid,
        Err(error) => {
            stdio.abort().await;
            // The image is still good: the client may try again.
            container.put_checkpoint(prepared);
            return Err(error.into());
        }
    };
    match stdio.start().await {
        Ok(copier) => container.init.set_copier(copier),
        Err(error) => {
            restore::abandon(container).await;
            container.put_checkpoint(prepared);
            return Err(error.into());
        }
    }
    container.init.set_pid(pid);
    exit::watch_oom(service, container);
    let owner = Owner {
        container: Arc::downgrade(container),
        process: container.init.clone(),
    };
    if let Some(early) = expectation.claim(pid, owner.clone()) {
        exit::handle(service, &owner, early);
    }
    Ok(())
}

async fn start_exec(
    service: &Arc<Service>,
    container: &Arc<Container>,
    process: Arc<Process>,
) -> Result<i32, TaskError> {
    // Not while a dump is under way: the new process would freeze half-way into the container.
    let _operation = container.operation.read().await;
    if process.exit().is_some() || !process.begin() {
        let state = if process.exit().is_some() {
            "stopped"
        } else {
            "running"
        };
        return Err(TaskError::ExecState { verb: "start", state });
    }
    container.begin_exec()?;
    match run_exec(service, container, &process).await {
        Ok(early) => {
            service.publisher.publish(&TaskExecStarted {
                container_id: container.id.clone(),
                exec_id: process.exec_id.clone(),
                pid: pid_field(process.pid()),
                ..TaskExecStarted::default()
            });
            if let Some((owner, exit)) = early {
                exit::handle(service, &owner, exit);
            }
            Ok(process.pid())
        }
        Err(error) => {
            // Whoever waits for it must not wait for ever; containerd's own shim tells 0 here.
            process.set_exit(crate::reaper::Exit {
                pid: 0,
                code: 0,
                at: std::time::SystemTime::now(),
            });
            exit::exec_ended(service, container);
            Err(error)
        }
    }
}

async fn run_exec(
    service: &Arc<Service>,
    container: &Arc<Container>,
    process: &Arc<Process>,
) -> Result<Early, TaskError> {
    let mut stdio = open_stdio(service, container, process).await?;
    let pid_file = container.bundle.join(format!("{}.pid", process.exec_id));
    let console = stdio.console_socket().map(std::path::Path::to_owned);
    let expectation = service.exits.expect();
    let exec = Exec {
        process: &process.spec,
        pid_file: &pid_file,
        console_socket: console.as_deref(),
    };
    if let Err(source) = container.runc.exec(exec, |command| stdio.attach(command)).await {
        stdio.abort().await;
        return Err(TaskError::Runtime { verb: "exec", source });
    }
    process.set_copier(stdio.start().await?);
    let pid = read_pid(&pid_file)?;
    process.set_pid(pid);
    let owner = Owner {
        container: Arc::downgrade(container),
        process: process.clone(),
    };
    Ok(expectation.claim(pid, owner.clone()).map(|exit| (owner, exit)))
}
