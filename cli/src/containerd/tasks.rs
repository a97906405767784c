//! What is done to running tasks.

use prost::Message;
use serde::{Deserialize, Serialize};

use super::{Any, CallError, Containerd, Descriptor};

/// `containerd.services.tasks.v1.GetResponse`
#[derive(Clone, PartialEq, Message)]
struct Got {
    #[prost(message, optional, tag = "1")]
    process: Option<super::ListedTask>,
}

#[derive(Clone, PartialEq, Message)]
struct CheckpointTask {
    #[prost(string, tag = "1")]
    container_id: String,
    #[prost(message, optional, tag = "3")]
    options: Option<Any>,
}

#[derive(Clone, PartialEq, Message)]
struct Checkpointed {
    #[prost(message, repeated, tag = "1")]
    descriptors: Vec<Descriptor>,
}

#[derive(Clone, PartialEq, Message)]
struct KillTask {
    #[prost(string, tag = "1")]
    container_id: String,
    #[prost(uint32, tag = "3")]
    signal: u32,
    #[prost(bool, tag = "4")]
    all: bool,
}

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
        let call = "/containerd.services.tasks.v1.Tasks/Get";
        let got: Got = match self.call(call, id.to_owned()).await {
            Err(error) if error.is_absent() => return Ok(None),
            got => got?,
        };
        let process = got.process.unwrap_or_default();
        Ok(Some(Task {
            pid: process.pid,
            state: match process.status {
                2 => TaskState::Running,
                3 => TaskState::Stopped,
                4 => TaskState::Paused,
                _ => TaskState::Other,
            },
            exit_status: process.exit_status,
        }))
    }

    pub async fn pause(&self, id: &str) -> Result<(), CallError> {
        let call = "/containerd.services.tasks.v1.Tasks/Pause";
        self.call(call, id.to_owned()).await
    }

    pub async fn resume(&self, id: &str) -> Result<(), CallError> {
        let call = "/containerd.services.tasks.v1.Tasks/Resume";
        self.call(call, id.to_owned()).await
    }

    /// Checkpoints a task into the content store. Returns what was written there.
    pub async fn checkpoint(&self, id: &str, options: Any) -> Result<Vec<Descriptor>, CallError> {
        let call = "/containerd.services.tasks.v1.Tasks/Checkpoint";
        let request = CheckpointTask {
            container_id: id.to_owned(),
            options: Some(options),
        };
        let done: Checkpointed = self.call(call, request).await?;
        Ok(done.descriptors)
    }

    /// Kills all processes of a task, which may be paused.
    pub async fn kill(&self, id: &str) -> Result<(), CallError> {
        let call = "/containerd.services.tasks.v1.Tasks/Kill";
        let request = KillTask {
            container_id: id.to_owned(),
            signal: SIGKILL,
            all: true,
        };
        self.call(call, request).await
    }

    /// Waits for the end of a task.
    pub async fn wait(&self, id: &str) -> Result<(), CallError> {
        let call = "/containerd.services.tasks.v1.Tasks/Wait";
        self.call(call, id.to_owned()).await
    }
}
