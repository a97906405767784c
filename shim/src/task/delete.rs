//! Delete and Shutdown.

use firn_host::Absent;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use containerd_shim_protos::api::{DeleteRequest, DeleteResponse, Empty, ShutdownRequest};
use containerd_shim_protos::events::task::TaskDelete;
use firn_process::cgroup::FreezerState;
use firn_process::reaper::Exit;
use firn_process::unmount::unmount_recursive;
use tokio::time::{Instant, sleep};

use super::kill::give_up;
use super::start::exec_pid_file;
use super::state::{exited_at, find, pid_field};
use super::{Service, TaskError, moves};
use firn_config::names::BUNDLE_OTHERS_CGROUP;
use firn_host::Chain;
use firn_transaction::container::{Action, Container, InitState, Process};
use firn_transaction::lease::Lease;
use firn_transaction::stdio::Patience;

/// How long a client that does not read, or one that reads slowly, may delay a delete; below the 10 s after
/// which CRI gives up.
const DRAIN: Patience = Patience {
    idle: Duration::from_secs(2),
    limit: Duration::from_secs(8),
};

pub(super) async fn delete(
    service: &Arc<Service>,
    request: DeleteRequest,
) -> Result<DeleteResponse, TaskError> {
    if request.exec_id.is_empty() {
        // containerd does not report that its client has gone in the middle of a Create: it deletes and shuts
        // down.
        service.cancel_create(&request.id);
    }
    let container = service.container(&request.id)?;
    let process = find(&container, &request.exec_id)?;
    if request.exec_id.is_empty() {
        // What cannot be deleted is refused at once, also while a dump is under way.
        container.admit(Action::Delete)?;
        if matches!(
            container.state(),
            InitState::CreatedCheckpoint | InitState::Suspended
        ) {
            // A restore or resume that is under way is not wanted any more.
            drop(container.transaction.cancel());
        }
        let _operation = container.operation.write().await;
        delete_init(&container).await?;
        if container.take_parked() {
            moves::label(service, &container).await;
        }
        service.containers().remove(&request.id);
    } else {
        if process.exit().is_none() && process.has_begun() {
            return Err(TaskError::ExecState {
                verb: "delete",
                state: "running",
            });
        }
        drain(&process).await;
        container.remove_exec(&request.exec_id);
        // There is none when it never ran.
        let _absent = std::fs::remove_file(exec_pid_file(&container, &process));
    }
    let exit = process.exit();
    let response = DeleteResponse {
        pid: pid_field(process.pid()),
        exit_status: exit.map_or(0, |exit| exit.code),
        exited_at: exited_at(exit.as_ref()),
        ..DeleteResponse::default()
    };
    if request.exec_id.is_empty() {
        service.publisher.publish(&TaskDelete {
            container_id: request.id,
            pid: response.pid,
            exit_status: response.exit_status,
            exited_at: response.exited_at.clone(),
            ..TaskDelete::default()
        });
    }
    Ok(response)
}

/// How long the exit of a process that was deleted before it ran may take to arrive.
const LAST_EXIT: Duration = Duration::from_secs(2);

/// The same for a suspended container, which is thawed first.
const GIVEN_UP: Duration = Duration::from_secs(10);

/// 128 + SIGKILL.
const KILLED: u32 = 137;

async fn delete_init(container: &Arc<Container>) -> Result<(), TaskError> {
    container.admit(Action::Delete)?;
    if container.state() == InitState::Suspended {
        give_up(container).await?;
        let _ended = tokio::time::timeout(GIVEN_UP, container.init.wait()).await;
    }
    // Only what has ended lets go of its streams.
    let has_ended = container.init.exit().is_some();
    if has_ended {
        drain(&container.init).await;
        thaw(container).await;
    }
    let hooks = container.hooks.begin();
    match container.runc.delete(hooks.cancel.cancelled()).await {
        Ok(()) => {}
        // A dump that ended the container, or a restore that was never started, leaves nothing to delete.
        Err(error) if error.is_absent() => {}
        Err(error) => return Err(TaskError::Delete(error)),
    }
    if !has_ended {
        // Never started: its end is on its way, or there was no process. Whoever waits must hear of it.
        if container.init.pid() != 0 {
            let _ended = tokio::time::timeout(LAST_EXIT, container.init.wait()).await;
        }
        if container.init.exit().is_none() {
            container.init.set_exit(Exit {
                pid: container.init.pid(),
                code: KILLED,
                at: SystemTime::now(),
            });
        }
        drain(&container.init).await;
    }
    remove_cgroup(container).await;
    // A client that gets the error may try again.
    unmount_recursive(&container.bundle.join("rootfs"))
        .await
        .map_err(TaskError::Unmount)?;
    if container.traits.has_nvidia() {
        Lease::drop_of(&container.bundle, &container.id, container.init.pid());
    }
    container.set_state(InitState::Deleted);
    Ok(())
}

/// How long the freezer of a container without processes may take to be turned off.
const THAW: Duration = Duration::from_secs(2);

/// The runtime takes a frozen cgroup for a paused container, which it does not delete, also when nobody is
/// left in it. Who was about to freeze a container when it was killed leaves one.
async fn thaw(container: &Container) {
    let thawed = async {
        let cgroup = container.cgroup()?;
        match cgroup.freezer_state()? {
            FreezerState::Thawed => Ok(()),
            _ => cgroup.thaw(THAW).await,
        }
    };
    if let Err(error) = thawed.await
        && !error.is_absent()
    {
        log::debug!("cannot thaw {}: {}", container.id, Chain(&error));
    }
}

/// How long the kernel may take to let go of the cgroup of a container that has ended.
const LET_GO: Duration = Duration::from_secs(2);

/// Pause between two looks at who is in it.
const LET_GO_PAUSE: Duration = Duration::from_millis(10);

/// runc waits a third of a second for the kernel to take the killed processes out of the cgroup. A busy host
/// needs longer: runc then reports a success, and leaves the cgroup.
async fn remove_cgroup(container: &Container) {
    // A copy may run in its source's cgroup.
    if container.bundle.join(BUNDLE_OTHERS_CGROUP).exists() {
        return;
    }
    let removed = async {
        let cgroup = container.cgroup()?;
        if !cgroup.primary_dir().ends_with(&container.id) {
            return Ok(());
        }
        let end = Instant::now() + LET_GO;
        while !cgroup.pids()?.is_empty() && Instant::now() < end {
            sleep(LET_GO_PAUSE).await;
        }
        cgroup.remove(end.saturating_duration_since(Instant::now())).await
    };
    if let Err(error) = removed.await
        && !error.is_absent()
    {
        log::warn!("the cgroup of {} is left: {}", container.id, Chain(&error));
    }
}

async fn drain(process: &Process) {
    if let Some(copier) = process.take_copier() {
        copier.drain(DRAIN).await;
    }
}

/// Ends the shim once it has no containers.
pub(super) async fn shutdown(service: &Arc<Service>, _: ShutdownRequest) -> Result<Empty, TaskError> {
    if !service.is_used() {
        service.serving.cancel();
    }
    Ok(Empty::default())
}
