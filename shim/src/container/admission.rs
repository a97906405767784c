//! Which action is allowed in which state of a task. Plain code, no I/O.

use std::fmt;

/// State of a container's task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InitState {
    /// `runc create` is done.
    Created,
    /// Made from a checkpoint: the runtime is called by Start only.
    CreatedCheckpoint,
    /// Init runs.
    Running,
    /// The freezer is being turned on.
    Pausing,
    /// The freezer is on.
    Paused,
    /// Init has ended.
    Stopped,
    /// Nothing is left of it.
    Deleted,
}

/// What a client may ask of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Start,
    Pause,
    Resume,
    Checkpoint,
    Exec,
    Delete,
}

/// An action that the task's state does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {action} a {state} {}", if matches!(action, Action::Start | Action::Delete) { "process" } else { "container" })]
pub(crate) struct NotAllowed {
    pub action: Action,
    pub state: InitState,
}

impl fmt::Display for InitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created | Self::CreatedCheckpoint => "created",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Deleted => "deleted",
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Checkpoint => "checkpoint",
            Self::Exec => "exec in",
            Self::Delete => "delete",
        })
    }
}

/// Whether `action` may begin on a task in `state`.
///
/// Resume is allowed on a running task because the real freezer decides: after a dump that was cut off a client may
/// resume what already runs.
pub(crate) fn admit(action: Action, state: InitState) -> Result<(), NotAllowed> {
    use Action::{Checkpoint, Delete, Exec, Pause, Resume, Start};
    use InitState::{Created, CreatedCheckpoint, Deleted, Paused, Pausing, Running, Stopped};
    let allowed = match (state, action) {
        (Created, Start | Delete | Exec) => true,
        (Created, Pause | Resume | Checkpoint) => false,
        (CreatedCheckpoint, Start | Delete) => true,
        (CreatedCheckpoint, Pause | Resume | Checkpoint | Exec) => false,
        (Running, Pause | Resume | Checkpoint | Exec) => true,
        (Running, Start | Delete) => false,
        (Pausing, Start | Pause | Resume | Checkpoint | Exec | Delete) => false,
        (Paused, Resume | Checkpoint) => true,
        (Paused, Start | Pause | Exec | Delete) => false,
        (Stopped, Delete) => true,
        (Stopped, Start | Pause | Resume | Checkpoint | Exec) => false,
        (Deleted, Start | Pause | Resume | Checkpoint | Exec | Delete) => false,
    };
    if allowed {
        Ok(())
    } else {
        Err(NotAllowed { action, state })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_are_those_that_clients_know() {
        let text = |action, state| admit(action, state).unwrap_err().to_string();
        assert_eq!(
            text(Action::Delete, InitState::Running),
            "cannot delete a running process"
        );
        assert_eq!(
            text(Action::Pause, InitState::Paused),
            "cannot pause a paused container"
        );
        assert_eq!(
            text(Action::Checkpoint, InitState::Stopped),
            "cannot checkpoint a stopped container"
        );
    }

    #[test]
    fn only_a_running_or_paused_task_is_checkpointed() {
        for state in [
            InitState::Created,
            InitState::CreatedCheckpoint,
            InitState::Stopped,
            InitState::Deleted,
        ] {
            assert!(admit(Action::Checkpoint, state).is_err(), "{state:?}");
        }
        assert!(admit(Action::Checkpoint, InitState::Running).is_ok());
        assert!(admit(Action::Checkpoint, InitState::Paused).is_ok());
    }
}
