//! Resume of a parked container and the move of a running one, with what containerd is to know of it.
//!
//! containerd's Resume has no arguments. A client that wants other GPUs calls Update with annotations, which
//! containerd hands on: `firn.dev/move-gpu` and, if it likes, `firn.dev/gpu-busy`.

use std::collections::HashMap;
use std::sync::Arc;

use containerd_shim_protos::api::Empty;
use firn_config::text::one_line;
use firn_config::{GpuBusy, names};
use firn_host::Chain;
use firn_transaction::checkpoint::park::{self, Moved, ParkError, Resumed, Wait, Wanted};
use firn_transaction::container::{Action, Container, InitState, NotAllowed};
use firn_transaction::journal::Operation;
use tokio::sync::RwLockWriteGuard;

use super::pause::resumed;
use super::{Service, TaskError, Transaction};
use crate::daemon;

/// The longest text of the label: containerd's limit is 4096 for name and value together.
const LABEL: usize = 2048;

/// What the annotations of an update want of the container's GPUs; none if they name none.
pub(super) fn wanted(annotations: &HashMap<String, String>) -> Result<Option<Wanted>, TaskError> {
    let Some(gpus) = annotations.get(names::ANNOTATION_MOVE_GPU) else {
        return Ok(None);
    };
    let busy = match annotations.get(names::ANNOTATION_GPU_BUSY) {
        None => None,
        Some(word) => Some(GpuBusy::of_word(word).ok_or_else(|| TaskError::Annotation {
            name: names::ANNOTATION_GPU_BUSY,
            value: word.chars().take(64).collect(),
        })?),
    };
    let gpus = Some(gpus.clone());
    Ok(Some(Wanted { gpus, busy }))
}

/// Resumes a parked container, or moves a running one. While another container has the GPUs, and this one is
/// to wait for them, it does not hold the operation lock, so that everybody else may work on the container.
pub(super) async fn bring<'c>(
    service: &Arc<Service>,
    container: &'c Arc<Container>,
    mut operation: RwLockWriteGuard<'c, ()>,
    mut wanted: Wanted,
) -> Result<Empty, TaskError> {
    let mut wait = None;
    loop {
        let is_parked = container.is_parked();
        let done = if is_parked {
            resume(service, container, &wanted).await
        } else {
            move_gpus(service, container, &wanted).await
        };
        let Err(TaskError::Park(error)) = &done else {
            return done;
        };
        let Some(holder) = error.awaited() else {
            return done;
        };
        let wait = match &mut wait {
            Some(wait) => wait,
            none => none.insert(Wait::begin(container)?),
        };
        drop(operation);
        if !wait.for_holder(container, holder).await {
            // The last attempt, whose error names who has the GPUs.
            wanted.busy = Some(GpuBusy::Refuse);
        }
        operation = container.operation.write().await;
        if !wait.check(container)? {
            return overtaken(is_parked, &wanted);
        }
    }
}

/// Somebody else has resumed the container that was to be resumed, or has paused the one that was to move.
fn overtaken(was_parked: bool, wanted: &Wanted) -> Result<Empty, TaskError> {
    let (action, state) = match was_parked {
        // A client that asked again, as after its own deadline, has got what it wants twice.
        true if !wanted.names_gpus() => return Ok(Empty::default()),
        true => (Action::Resume, InitState::Running),
        false => (Action::Pause, InitState::Parked),
    };
    Err(NotAllowed { action, state }.into())
}

/// The caller holds the operation lock.
async fn resume(
    service: &Arc<Service>,
    container: &Arc<Container>,
    wanted: &Wanted,
) -> Result<Empty, TaskError> {
    container.admit(Action::Resume)?;
    let transaction = service.begin(Operation::Resume, &container.id);
    let done = park::resume(container, wanted, &service.reaper).await;
    end(service, container, transaction, done).await
}

/// The caller holds the operation lock.
async fn move_gpus(
    service: &Arc<Service>,
    container: &Arc<Container>,
    wanted: &Wanted,
) -> Result<Empty, TaskError> {
    container.admit(Action::Pause)?;
    container.set_state(InitState::Pausing);
    let transaction = service.begin(Operation::Move, &container.id);
    let done = park::move_gpus(container, wanted, &service.reaper).await;
    let done = end(service, container, transaction, done).await;
    if container.state() == InitState::Pausing {
        container.set_state(InitState::Running);
    }
    done
}

/// Shows containerd and its clients how it has ended.
async fn end(
    service: &Arc<Service>,
    container: &Arc<Container>,
    transaction: Transaction,
    done: Result<Resumed, ParkError>,
) -> Result<Empty, TaskError> {
    match done {
        Ok(Resumed { moved, hook }) => {
            let empty = resumed(service, container);
            describe(service, container, moved, "").await;
            let done = hook.map(|()| empty).map_err(TaskError::from);
            service.end(container, transaction, done)
        }
        Err(error) => {
            if container.is_parked() && error.awaited().is_none() {
                let why = format!("; the last resume failed: {}", Chain(&error));
                describe(service, container, None, &why).await;
            }
            let is_tried_again = error.awaited().is_some();
            let failed = Err(error.into());
            if is_tried_again {
                failed
            } else {
                service.end(container, transaction, failed)
            }
        }
    }
}

/// Writes into containerd's metadata whether the container is parked.
pub(super) async fn label(service: &Arc<Service>, container: &Arc<Container>) {
    describe(service, container, None, "").await;
}

/// Writes into containerd's metadata what its clients show of a container: its GPUs, and that it is parked.
async fn describe(service: &Arc<Service>, container: &Arc<Container>, moved: Option<Moved>, why: &str) {
    let label = container.parked().map(|parked| {
        let gpus: Vec<&str> = parked.gpus().iter().map(|gpu| gpu.uuid.as_str()).collect();
        let mut text = one_line(&format!(
            "{} MiB of {} in host memory{why}",
            parked.bytes().div_ceil(1 << 20),
            gpus.join(", ")
        ));
        text.truncate(text.floor_char_boundary(LABEL));
        text
    });
    let change = daemon::Change { label, moved };
    daemon::describe(&service.address, &service.namespace, &container.id, change).await;
}
