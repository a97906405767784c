//! How a container is after a command that has failed: whether the job is alive.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use tokio::time::timeout;

use crate::containerd::{CallError, Containerd, TaskState};

/// How long containerd may take to answer.
const LIMIT: Duration = Duration::from_secs(5);

const UNKNOWN: &str = "unknown";

/// How a container is after a command that has failed.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StateAfter {
    /// Its id.
    id: String,
    /// Its namespace in containerd.
    namespace: String,
    /// `running`, `paused`, `stopped` (it has ended), `absent` (it has no task) or `unknown` (containerd does
    /// not answer, or has another state).
    state: &'static str,
    /// Whether it is for the person to resume it.
    #[serde(skip)]
    may_resume: bool,
}

impl StateAfter {
    /// None: there is no such container. Waits for containerd 5 s at most.
    pub async fn of(socket: &Path, namespace: &str, word: &str) -> Option<Self> {
        let found = async {
            let containerd = Containerd::connect(socket, namespace).await?;
            let Ok([container]) = <[_; 1]>::try_from(containerd.called(word).await?) else {
                return Ok(None);
            };
            look(&containerd, container.id).await.map(Some)
        };
        let (id, state) = within(word, found).await?;
        Some(Self::new(id, namespace, state))
    }

    /// As [`Self::of`], of a container whose id is known.
    pub async fn of_id(socket: &Path, namespace: &str, id: &str) -> Self {
        let found = async {
            let containerd = Containerd::connect(socket, namespace).await?;
            look(&containerd, id.to_owned()).await.map(Some)
        };
        let (id, state) = within(id, found).await.unwrap_or((id.to_owned(), UNKNOWN));
        Self::new(id, namespace, state)
    }

    fn new(id: String, namespace: &str, state: &'static str) -> Self {
        Self {
            id,
            namespace: namespace.to_owned(),
            state,
            may_resume: true,
        }
    }

    /// Its copy may run elsewhere.
    pub fn not_to_be_resumed(self) -> Self {
        Self {
            may_resume: false,
            ..self
        }
    }

    /// Whether it may stand still.
    pub fn may_stand_still(&self) -> bool {
        matches!(self.state, "paused" | UNKNOWN)
    }

    /// In words.
    pub fn shown(&self) -> String {
        let Self { id, namespace, .. } = self;
        match self.state {
            "running" => format!("{id} runs"),
            "paused" if self.may_resume => {
                let option = match &**namespace {
                    "default" => String::new(),
                    namespace => format!(" -n {namespace}"),
                };
                format!("{id} is paused: `firn ps{option} {id}` shows why")
            }
            "paused" => format!("{id} is paused"),
            "stopped" => format!("{id} has ended"),
            "absent" => format!("{id} has no task: it does not run"),
            _ => format!("whether {id} runs is not known"),
        }
    }
}

/// The id, and the state of its task.
async fn look(containerd: &Containerd, id: String) -> Result<(String, &'static str), CallError> {
    let state = match containerd.task_state(&id).await? {
        Some(TaskState::Running) => "running",
        Some(TaskState::Paused) => "paused",
        Some(TaskState::Stopped) => "stopped",
        None => "absent",
        Some(TaskState::Other) => UNKNOWN,
    };
    Ok((id, state))
}

type Found = Option<(String, &'static str)>;

async fn within(word: &str, found: impl Future<Output = Result<Found, CallError>>) -> Found {
    match timeout(LIMIT, found).await {
        Ok(Ok(found)) => found,
        Ok(Err(_)) | Err(_) => Some((word.to_owned(), UNKNOWN)),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Of the container `job`.
    pub fn state(state: &'static str) -> StateAfter {
        StateAfter::new("job".to_owned(), "default", state)
    }

    #[test]
    fn a_person_reads_whether_it_runs() {
        for (now, shown) in [
            ("running", "job runs"),
            ("paused", "job is paused: `firn ps job` shows why"),
            ("stopped", "job has ended"),
            ("absent", "job has no task: it does not run"),
            (UNKNOWN, "whether job runs is not known"),
        ] {
            assert_eq!(state(now).shown(), shown);
        }
        assert_eq!(state("paused").not_to_be_resumed().shown(), "job is paused");
        let other = StateAfter::new("job".to_owned(), "k8s.io", "paused");
        assert!(other.shown().contains("`firn ps -n k8s.io job`"));
    }
}
