//! What is done to running tasks.

use firn_containerd::tasks::{
    CHECKPOINT, CheckpointRequest, CheckpointResponse, GET, GetResponse, KILL, KillRequest, PAUSE, Process,
    RESUME, WAIT, status,
};
use serde::{Deserialize, Serialize};

use super::{Any, CallError, Containerd, Descriptor};

const SIGKILL: u32 = 9;

/// A task, with how it has ended if it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    pub pid: u32,
    pub state: TaskState,
    pub exit_status: u32,
}

/// `containerd.v1.types.Status`, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaskState {
    Running,
    Stopped,
    Paused,
    /// Created, or about to be paused.
    Other,
}

impl Containerd {
    /// None: there is no task.
    pub async fn task_state(&self, id: &str) -> Result<Option<TaskState>, CallError> {
        Ok(self.task(id).await?.map(|task| task.state))
    }

    /// None: there is no task.
    pub async fn task(&self, id: &str) -> Result<Option<Task>, CallError> {
        Ok(self.process(id).await?.map(|process| Task {
            pid: process.pid,
            state: match process.status {
                status::RUNNING => TaskState::Running,
                status::STOPPED => TaskState::Stopped,
                status::PAUSED => TaskState::Paused,
                _ => TaskState::Other,
            },
            exit_status: process.exit_status,
        }))
    }

    /// Where a task's client has standard output go, as containerd names it; empty if nowhere. None: there is
    /// no task.
    pub async fn stdout(&self, id: &str) -> Result<Option<String>, CallError> {
        Ok(self.process(id).await?.map(|process| process.stdout))
    }

    async fn process(&self, id: &str) -> Result<Option<Process>, CallError> {
        match self.call::<_, GetResponse>(GET, id.to_owned()).await {
            Err(error) if error.is_absent() => Ok(None),
            got => Ok(Some(got?.process.unwrap_or_default())),
        }
    }

    pub async fn pause(&self, id: &str) -> Result<(), CallError> {
        self.call(PAUSE, id.to_owned()).await
    }

    pub async fn resume(&self, id: &str) -> Result<(), CallError> {
        self.call(RESUME, id.to_owned()).await
    }

    /// Checkpoints a task into the content store. Returns what was written there.
    pub async fn checkpoint(&self, id: &str, options: Any) -> Result<Vec<Descriptor>, CallError> {
        let request = CheckpointRequest {
            container_id: id.to_owned(),
            options: Some(options),
        };
        let done: CheckpointResponse = self.call(CHECKPOINT, request).await?;
        Ok(done.descriptors)
    }

    /// Kills all processes of a task, which may be paused.
    pub async fn kill(&self, id: &str) -> Result<(), CallError> {
        let request = KillRequest {
            container_id: id.to_owned(),
            signal: SIGKILL,
            all: true,
        };
        self.call(KILL, request).await
    }

    /// Waits for the end of a task.
    pub async fn wait(&self, id: &str) -> Result<(), CallError> {
        self.call(WAIT, id.to_owned()).await
    }
}
