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

/// What containerd takes for the id of a container, which never is a path.
pub(super) fn is_id(word: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    word.len() <= 76 && word.chars().all(fits) && ends(word.chars().next()) && ends(word.chars().last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_in_a_checkpoint_is_no_path() {
        assert!(["job", "a-1_b.c", "0"].into_iter().all(is_id));
        let long = "a".repeat(77);
        for word in [
            "",
            ".",
            "..",
            "../../srv/x",
            "/srv/x",
            "a/b",
            "-a",
            "a-",
            "a b",
            &long,
        ] {
            assert!(!is_id(word), "{word}");
        }
    }
}
