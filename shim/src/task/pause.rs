//! Pause and Resume. A pause may give the container's GPUs free. Resume of a suspended container rolls its
//! checkpoint back once more.

use std::sync::Arc;

use containerd_shim_protos::api::{Empty, PauseRequest, ResumeRequest};
use containerd_shim_protos::events::task::{TaskPaused, TaskResumed};
use firn_config::names;
use firn_process::cgroup::FreezerState;

use super::{Service, TaskError, moves};
use firn_transaction::checkpoint;
use firn_transaction::checkpoint::park::{self, Wanted};
use firn_transaction::container::{Action, Container, InitState};
use firn_transaction::journal::Operation;
use tokio::sync::RwLockWriteGuard;

pub(super) async fn pause(service: &Arc<Service>, request: PauseRequest) -> Result<Empty, TaskError> {
    let container = service.container(&request.id)?;
    let _operation = container.operation.write().await;
    stop(service, &container, freeze(service, &container)).await
}

/// Pauses a container by `freeze`. The caller holds its operation lock.
pub(super) async fn stop(
    service: &Service,
    container: &Container,
    freeze: impl Future<Output = Result<(), TaskError>>,
) -> Result<Empty, TaskError> {
    if container.state() == InitState::Paused && !is_paused(container) {
        // Somebody else has resumed it.
        container.set_state(InitState::Running);
    }
    container.admit(Action::Pause)?;
    forget_kept(container);
    container.set_state(InitState::Pausing);
    if let Err(error) = freeze.await {
        if container.state() == InitState::Pausing {
            container.set_state(InitState::Running);
        }
        return Err(error);
    }
    service.publisher.publish(&TaskPaused {
        container_id: container.id.clone(),
        ..TaskPaused::default()
    });
    Ok(Empty::default())
}

/// Whether it is paused and stands still, or that cannot be seen.
pub(super) fn is_paused(container: &Container) -> bool {
    container.state() == InitState::Paused && freezer(container) != Some(FreezerState::Thawed)
}

async fn freeze(service: &Arc<Service>, container: &Arc<Container>) -> Result<(), TaskError> {
    if park::is_requested(container)? {
        let transaction = service.begin(Operation::Pause, &container.id);
        let parked = park::pause(container, &service.reaper).await;
        let parked = parked.map_err(TaskError::from);
        service.end(container, transaction, parked)?;
        moves::label(service, container).await;
        return Ok(());
    }
    by_runtime(container).await
}

/// Has the runtime freeze it, which keeps its GPUs.
pub(super) async fn by_runtime(container: &Container) -> Result<(), TaskError> {
    let paused = container.runc.pause().await;
    paused.map_err(TaskError::runtime("pause"))?;
    container.set_state(InitState::Paused);
    Ok(())
}

pub(super) async fn resume(service: &Arc<Service>, request: ResumeRequest) -> Result<Empty, TaskError> {
    let container = service.container(&request.id)?;
    let operation = container.operation.write().await;
    go_on(service, &container, operation).await
}

/// Resumes a container, whose operation lock the caller holds.
pub(super) async fn go_on<'c>(
    service: &Arc<Service>,
    container: &'c Arc<Container>,
    operation: RwLockWriteGuard<'c, ()>,
) -> Result<Empty, TaskError> {
    if container.is_parked() {
        return moves::bring(service, container, operation, Wanted::default()).await;
    }
    if container.state() == InitState::Suspended {
        let transaction = service.begin(Operation::Resume, &container.id);
        let done = checkpoint::resume(container, &service.reaper).await;
        let done = done
            .map(|()| resumed(service, container))
            .map_err(TaskError::from);
        return service.end(container, transaction, done);
    }
    // The freezer itself decides, not what the shim remembers: a dump that was cut off may have turned it off
    // or on.
    let freezer = freezer(container);
    if container.state() == InitState::Running && freezer == Some(FreezerState::Frozen) {
        container.set_state(InitState::Paused);
    }
    container.admit(Action::Resume)?;
    if freezer != Some(FreezerState::Thawed) {
        let resumed = container.runc.resume().await;
        resumed.map_err(TaskError::runtime("resume"))?;
    }
    let empty = resumed(service, container);
    checkpoint::call_pending(container, &service.reaper).await?;
    Ok(empty)
}

pub(super) fn resumed(service: &Service, container: &Container) -> Empty {
    container.set_state(InitState::Running);
    forget_kept(container);
    service.publisher.publish(&TaskResumed {
        container_id: container.id.clone(),
        ..TaskResumed::default()
    });
    Empty::default()
}

/// The pause from now on, if there is one, is no command's that was about to end it.
fn forget_kept(container: &Container) {
    let _absent = std::fs::remove_file(container.bundle.join(names::BUNDLE_PAUSE_KEPT));
}

/// The freezer as it is; none when it cannot be read.
fn freezer(container: &Container) -> Option<FreezerState> {
    container.cgroup().and_then(|cgroup| cgroup.freezer_state()).ok()
}
