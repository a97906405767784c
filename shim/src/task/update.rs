//! Update: new limits, handed to the runtime as the client wrote them; other GPUs; a checkpoint of a pod; the
//! pause of a command of firn.

use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::api::{Empty, UpdateTaskRequest};

use super::{Service, TaskError, commands, moves, pod};
use firn_transaction::checkpoint::Overrides;
use firn_transaction::container::Action;
use firn_transaction::runc::RuntimeMessage;

/// How long an update waits for another operation. The kubelet gives the call 2 minutes, of which the runtime
/// may take one, and tries again after an error; a call that it has given up must not change the limits
/// later.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) async fn update(service: &Arc<Service>, request: UpdateTaskRequest) -> Result<Empty, TaskError> {
    if let Some(images) = pod::wanted(&request.annotations)? {
        let overrides = Overrides::among(&request.annotations)?;
        return pod::checkpoint(service, images, overrides).await;
    }
    if let Some(images) = pod::withdrawn(&request.annotations)? {
        return Ok(pod::withdraw(service, &images).await);
    }
    let container = service.container(&request.id)?;
    container.admit(Action::Update)?;
    if let Some(wanted) = commands::wanted(&request.annotations)? {
        commands::expect(&container, &wanted)?;
        let _operation = container.operation.write().await;
        container.admit(Action::Update)?;
        return commands::serve(service, &container, wanted).await;
    }
    // The runtime looks at the freezer, and may turn it off and on: not while somebody relies on it.
    let operation = tokio::time::timeout(PATIENCE, container.operation.write());
    let operation = operation.await.map_err(|_| TaskError::Busy {
        id: request.id,
        waited: PATIENCE,
    })?;
    container.admit(Action::Update)?;
    if let Some(wanted) = moves::wanted(&request.annotations)? {
        return moves::bring(service, &container, operation, wanted).await;
    }
    let resources = request.resources.into_option().unwrap_or_default().value;
    let updated = container.runc.update(&resources).await;
    updated.map_err(RuntimeMessage::from)?;
    Ok(Empty::default())
}
