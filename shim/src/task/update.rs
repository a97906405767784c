//! Update: new limits, handed to the runtime as the client wrote them.

use std::sync::Arc;

use containerd_shim_protos::api::{Empty, UpdateTaskRequest};

use super::{Service, TaskError};
use crate::container::Action;

pub(super) async fn update(service: &Arc<Service>, request: UpdateTaskRequest) -> Result<Empty, TaskError> {
    let container = service.container(&request.id)?;
    container.admit(Action::Update)?;
    let resources = request.resources.into_option().unwrap_or_default().value;
    container
        .runc
        .update(&resources)
        .await
        .map_err(|error| TaskError::Update(error.into()))?;
    Ok(Empty::default())
}
