//! Update: new limits, handed to the runtime as the client wrote them.

use std::sync::Arc;

use containerd_shim_protos::api::{Empty, UpdateTaskRequest};

use super::{Service, TaskError};

pub(super) async fn update(service: &Arc<Service>, request: UpdateTaskRequest) -> Result<Empty, TaskError> {
    let container = service.container(&request.id)?;
    let resources = request.resources.into_option().unwrap_or_default().value;
    container
        .runc
        .update(&resources)
        .await
        .map_err(|source| TaskError::Runtime {
            verb: "update",
            source,
        })?;
    Ok(Empty::default())
}
