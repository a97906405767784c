//! The actions that are allowed in each state of a task. No I/O.

use std::fmt;

/// State of a container's task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InitState {
    /// `runc create` is done.
    #[default]
    Created,
    /// Created from a checkpoint: the runtime is called only by Start.
    CreatedCheckpoint,
    /// Init is running.
    Running,
    /// The cgroup is being frozen.
    Pausing,
    /// The cgroup is frozen.
    Paused,
    /// The cgroup is frozen, and the GPUs are free: the GPU state of the processes is in their memory, as the
    /// client requested.
    Parked,
    /// The cgroup is frozen: the GPU state of the processes is in their memory and could not be restored.
    /// Resume tries again.
    Suspended,
    /// Init has ended.
    Stopped,
    /// The task was deleted.
    Deleted,
}

/// An action that a client may request of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Start,
    Pause,
    Resume,
    Checkpoint,
    Exec,
    Update,
    Delete,
}

/// An action that the task's state does not allow. Clients compare the texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct NotAllowed {
    pub action: Action,
    pub state: InitState,
}

impl fmt::Display for NotAllowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { action, state } = self;
        // This request came while the cgroup was being frozen: the text names the state that follows.
        let state = if *state == InitState::Pausing {
            &InitState::Paused
        } else {
            state
        };
        match (action, state) {
            (_, InitState::Suspended) => write!(
                f,
                "FIRN-GPU-SUSPENDED: cannot {action} a suspended container, \
                 whose GPU state could not be restored. \
                 hint: resume it (`ctr tasks resume`), or kill and delete it"
            ),
            (Action::Delete, InitState::Deleted) => {
                write!(f, "cannot {action} a {state} process: not found")
            }
            (Action::Exec, _) => write!(f, "cannot {action} a {state} state"),
            (Action::Checkpoint, InitState::Created | InitState::CreatedCheckpoint) => {
                write!(f, "cannot {action} a task in {state} state")
            }
            (Action::Pause | Action::Resume, InitState::Created | InitState::CreatedCheckpoint) => {
                write!(f, "cannot {action} task in {state} state")
            }
            (Action::Start | Action::Delete, _)
            | (Action::Resume, InitState::Running)
            | (_, InitState::Deleted) => write!(f, "cannot {action} a {state} process"),
            (Action::Pause | Action::Resume | Action::Checkpoint | Action::Update, _) => {
                write!(f, "cannot {action} a {state} container")
            }
        }
    }
}

impl fmt::Display for InitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created | Self::CreatedCheckpoint => "created",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused | Self::Parked | Self::Suspended => "paused",
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
            Self::Update => "update",
            Self::Delete => "delete",
        })
    }
}

/// Whether `action` may begin on a task in `state`.
///
/// Resume checks whether a paused task is really frozen: a cancelled dump may have thawed it.
pub fn admit(action: Action, state: InitState) -> Result<(), NotAllowed> {
    use Action::{Checkpoint, Delete, Exec, Pause, Resume, Start, Update};
    use InitState::{
        Created, CreatedCheckpoint, Deleted, Parked, Paused, Pausing, Running, Stopped, Suspended,
    };
    let allowed = match (state, action) {
        (Created | CreatedCheckpoint | Running | Pausing | Paused | Parked, Update) => true,
        (Stopped | Deleted, Update) => false,
        // With cgroup v1 and systemd the runtime may thaw the container that it updates.
        (Suspended, Start | Pause | Checkpoint | Exec | Update) => false,
        (Suspended, Resume | Delete) => true,
        (Created, Start | Delete | Exec) => true,
        (Created, Pause | Resume | Checkpoint) => false,
        (CreatedCheckpoint, Start | Delete) => true,
        (CreatedCheckpoint, Pause | Resume | Checkpoint | Exec) => false,
        (Running, Pause | Checkpoint | Exec) => true,
        (Running, Start | Resume | Delete) => false,
        (Pausing, Start | Pause | Resume | Checkpoint | Exec | Delete) => false,
        (Paused | Parked, Resume | Checkpoint) => true,
        (Paused | Parked, Start | Pause | Exec | Delete) => false,
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
    fn the_texts_are_those_that_clients_compare() {
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
            text(Action::Exec, InitState::Paused),
            "cannot exec in a paused state"
        );
        assert_eq!(
            text(Action::Resume, InitState::Running),
            "cannot resume a running process"
        );
        assert_eq!(
            text(Action::Checkpoint, InitState::Stopped),
            "cannot checkpoint a stopped container"
        );
    }

    #[test]
    fn a_suspended_task_is_resumed_or_deleted_and_nothing_else() {
        for action in [
            Action::Start,
            Action::Pause,
            Action::Checkpoint,
            Action::Exec,
            Action::Update,
        ] {
            let refused = admit(action, InitState::Suspended).unwrap_err().to_string();
            assert!(refused.starts_with("FIRN-GPU-SUSPENDED: "), "{refused}");
            assert!(refused.contains("hint: resume it"), "{refused}");
        }
        for action in [Action::Resume, Action::Delete] {
            assert_eq!(admit(action, InitState::Suspended), Ok(()));
        }
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
