//! The container that a restore is into, and the ids that containerd takes.

use std::path::Path;

use firn_config::names;
use firn_host::Alone;

use super::error::RestoreError;
use crate::containerd::{Container, Containerd, TaskState};

/// containerd's label of Kubernetes' containers.
const CRI_LABEL: &str = "io.cri-containerd.kind";

/// The container that is called so, if a task can be made of it: it has none, or one that has ended. No other
/// command of firn works on it meanwhile.
pub(super) async fn known(
    containerd: &Containerd,
    namespace: &str,
    word: &str,
) -> Result<(Container, Alone), RestoreError> {
    let container = match <[Container; 1]>::try_from(containerd.called(word).await?) {
        Ok([container]) => container,
        Err(none) if none.is_empty() => {
            let (id, namespace) = (word.to_owned(), namespace.to_owned());
            return Err(RestoreError::NoContainer { id, namespace });
        }
        Err(_) => {
            return Err(RestoreError::Several {
                word: word.to_owned(),
            });
        }
    };
    let id = container.id.clone();
    if container.labels.contains_key(CRI_LABEL) {
        return Err(RestoreError::Kubernetes { id });
    }
    let alone = Alone::take(Path::new(names::COMMANDS), namespace, &id).map_err(RestoreError::Lock)?;
    let Some(alone) = alone else {
        return Err(RestoreError::Busy { id });
    };
    match containerd.task_state(&id).await? {
        None | Some(TaskState::Stopped) => Ok((container, alone)),
        Some(_) => Err(RestoreError::HasTask { id }),
    }
}
