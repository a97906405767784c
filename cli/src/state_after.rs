//! How a container is after a command that has failed: whether the job is alive.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use tokio::time::timeout;

use crate::containerd::{CallError, Containerd, TaskState};

/// How long containerd may take to answer.
pub const LIMIT: Duration = Duration::from_secs(5);

/// How a container is after a command that has failed.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StateAfter {
    /// Its id.
    id: String,
    /// Its namespace in containerd.
    namespace: String,
    /// `running`, `paused`, `stopped` (it has ended), `absent` (it has no task) or `unknown` (containerd does
    /// not answer).
    state: &'static str,
}

impl StateAfter {
    /// None: there is no such container. Waits for containerd 5 s at most.
    pub async fn of(socket: &Path, namespace: &str, word: &str) -> Option<Self> {
        let (id, state) = match timeout(LIMIT, look(socket, namespace, word)).await {
            Ok(Ok(found)) => found?,
            Ok(Err(_)) | Err(_) => (word.to_owned(), "unknown"),
        };
        Some(Self {
            id,
            namespace: namespace.to_owned(),
            state,
        })
    }

    pub fn is_paused(&self) -> bool {
        self.state == "paused"
    }

    /// In words.
    pub fn shown(&self) -> String {
        let Self { id, namespace, state } = self;
        match *state {
            "running" => format!("{id} runs"),
            "paused" => {
                let option = match &**namespace {
                    "default" => String::new(),
                    namespace => format!(" -n {namespace}"),
                };
                format!("{id} is paused: `firn ps{option} {id}` shows what resumes it")
            }
            "stopped" => format!("{id} has ended"),
            "absent" => format!("{id} has no task: it does not run"),
            _ => format!("whether {id} runs is not known: containerd does not answer"),
        }
    }
}

async fn look(
    socket: &Path,
    namespace: &str,
    word: &str,
) -> Result<Option<(String, &'static str)>, CallError> {
    let containerd = Containerd::connect(socket, namespace).await?;
    let Ok([container]) = <[_; 1]>::try_from(containerd.called(word).await?) else {
        return Ok(None);
    };
    let state = match containerd.task_state(&container.id).await? {
        Some(TaskState::Running) => "running",
        Some(TaskState::Paused) => "paused",
        Some(TaskState::Stopped) => "stopped",
        None => "absent",
        Some(TaskState::Other) => "unknown",
    };
    Ok(Some((container.id, state)))
}
