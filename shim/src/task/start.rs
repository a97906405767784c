//! Start: init of a created container, a container from its checkpoint, or an exec.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use containerd_shim_protos::api::{StartRequest, StartResponse};
use containerd_shim_protos::events::task::{TaskExecStarted, TaskStart};

use super::create::{INIT_PID, open_stdio, owner};
use super::state::{find, pid_field};
use super::{SIGKILL, Service, TaskError, exit, moves};
use crate::procfs;
use firn_host::Chain;
use firn_transaction::checkpoint::park;
use firn_transaction::container::{Action, Container, InitState, Process};
use firn_transaction::journal::Operation;
use firn_transaction::prepared_restore::PreparedRestore;
use firn_transaction::restore::{self, FrontEnd, NotRestored};
use firn_transaction::runc::{Exec, read_pid};
use firn_transaction::stdio;

/// How often is looked whether init, which was killed, is dead.
const DYING: std::time::Duration = std::time::Duration::from_millis(20);

pub(super) async fn start(service: &Arc<Service>, request: StartRequest) -> Result<StartResponse, TaskError> {
    let container = service.container(&request.id)?;
    let pid = if request.exec_id.is_empty() {
        start_init(service, &container).await?
    } else {
        start_exec(service, &container, &request.exec_id).await?
    };
    Ok(StartResponse {
        pid: pid_field(pid),
        ..StartResponse::default()
    })
}

async fn start_init(service: &Arc<Service>, container: &Arc<Container>) -> Result<i32, TaskError> {
    let _operation = container.operation.write().await;
    container.admit(Action::Start)?;
    if container.traits.has_nvidia() {
        // Of an earlier task that was parked when its shim ended.
        moves::label(service, container).await;
    }
    // Order matters: a short-lived init can be gone before Start returns, but not in the events.
    container.begin_start();
    let started = match container.take_checkpoint() {
        None => {
            let hooks = container.hooks.begin();
            let killed = async {
                hooks.cancel.cancelled().await;
                while procfs::is_alive(container.init.pid()) {
                    tokio::time::sleep(DYING).await;
                }
            };
            let started = container.runc.start(killed).await;
            started.map_err(TaskError::runtime("start"))
        }
        Some(prepared) => {
            let transaction = service.begin(Operation::Restore, &container.id);
            let restored = restore_init(service, container, prepared).await;
            service.end(container, transaction, restored)
        }
    };
    let pid = container.init.pid();
    if started.is_ok() {
        container.set_state(InitState::Running);
        // Whatever made the cgroups above, this one has every controller that it can have.
        match container.cgroup() {
            Ok(cgroup) => cgroup.enable_controllers(),
            Err(error) => log::warn!("cannot find the cgroup of {}: {}", container.id, Chain(&error)),
        }
        park::note_gpus(container).await;
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

async fn restore_init(
    service: &Arc<Service>,
    container: &Arc<Container>,
    prepared: PreparedRestore,
) -> Result<(), TaskError> {
    let expectation = service.exits.expect();
    let front_end = Client {
        service,
        container,
        stdio: None,
    };
    match restore::run(container, prepared, &service.reaper, front_end).await {
        Ok(()) => {
            exit::watch_oom(service, container);
            exit::claim(service, expectation, container, &container.init);
            Ok(())
        }
        Err(NotRestored { error, is_killed }) => {
            if is_killed {
                exit::restore_killed(service, container).await;
            }
            Err(error)
        }
    }
}

/// The client of a container that is restored.
struct Client<'a> {
    service: &'a Service,
    container: &'a Container,
    /// Its stdio, from its opening until it is connected.
    stdio: Option<stdio::Prepared>,
}

impl FrontEnd for Client<'_> {
    type Error = TaskError;

    async fn open(&mut self) -> Result<(), TaskError> {
        let mut stdio = open_stdio(self.service, self.container, &self.container.init).await?;
        stdio.avoid_null(owner(self.container))?;
        self.stdio = Some(stdio);
        Ok(())
    }

    fn pid_file(&self) -> PathBuf {
        self.container.bundle.join(INIT_PID)
    }

    fn console(&self) -> Option<PathBuf> {
        self.stdio.as_ref()?.console_socket().map(Path::to_owned)
    }

    fn attach(&mut self, command: &mut Command) {
        if let Some(stdio) = &mut self.stdio {
            stdio.attach(command);
        }
    }

    async fn connect(&mut self) -> Result<(), TaskError> {
        if let Some(stdio) = self.stdio.take() {
            self.container.init.set_copier(stdio.start().await?);
        }
        Ok(())
    }

    async fn close(&mut self) {
        if let Some(stdio) = self.stdio.take() {
            stdio.abort().await;
        }
    }
}

async fn start_exec(
    service: &Arc<Service>,
    container: &Arc<Container>,
    exec_id: &str,
) -> Result<i32, TaskError> {
    // Not while a dump is under way: the new process would freeze half-way into the container.
    let _operation = container.operation.read().await;
    container.begin_exec()?;
    let started = run_exec(service, container, exec_id).await;
    if started.is_err() {
        exit::exec_ended(service, container);
    }
    started
}

async fn run_exec(
    service: &Arc<Service>,
    container: &Arc<Container>,
    exec_id: &str,
) -> Result<i32, TaskError> {
    let process = find(container, exec_id)?;
    let refused = |state| TaskError::ExecState { verb: "start", state };
    if process.exit().is_some() {
        return Err(refused("stopped"));
    }
    if !process.begin() {
        return Err(refused("running"));
    }
    let expectation = service.exits.expect();
    let pid = match spawn_exec(service, container, &process).await {
        Ok(pid) => pid,
        Err(error) => {
            // Whoever waits for it must not wait for ever.
            process.fail();
            return Err(error);
        }
    };
    process.set_pid(pid);
    service.publisher.publish(&TaskExecStarted {
        container_id: container.id.clone(),
        exec_id: process.exec_id.clone(),
        pid: pid_field(pid),
        ..TaskExecStarted::default()
    });
    // Order matters: an exit is published after the start.
    exit::claim(service, expectation, container, &process);
    Ok(pid)
}

async fn spawn_exec(service: &Service, container: &Container, process: &Process) -> Result<i32, TaskError> {
    let mut stdio = open_stdio(service, container, process).await?;
    let pid_file = exec_pid_file(container, process);
    let console = stdio.console_socket().map(std::path::Path::to_owned);
    let exec = Exec {
        process: &process.spec,
        pid_file: &pid_file,
        console_socket: console.as_deref(),
    };
    if let Err(source) = container.runc.exec(exec, |command| stdio.attach(command)).await {
        stdio.abort().await;
        return Err(TaskError::runtime("exec")(source));
    }
    let pid = read_pid(&pid_file)?;
    match stdio.start().await {
        Ok(copier) => process.set_copier(copier),
        Err(error) => {
            // The client gets an error, so it must not run.
            if let Err(errno) = service.reaper.signal(pid, SIGKILL) {
                log::debug!("exec {} of {} is gone: {errno}", process.exec_id, container.id);
            }
            return Err(error.into());
        }
    }
    Ok(pid)
}

/// Where the runtime writes the pid of an exec.
pub(super) fn exec_pid_file(container: &Container, process: &Process) -> PathBuf {
    container.bundle.join(format!("{}.pid", process.exec_id))
}
