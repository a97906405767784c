//! The call by which a pod's shim checkpoints containers of it, and the withdrawal of one that nobody wants
//! any more.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::{Duration, Instant};

use firn_config::names;
use firn_transaction::transfer::StaysHere;
use serde_json::json;
use tokio::time::sleep;

use crate::containerd::{CallError, Containerd, TaskState};
use crate::output::note;

/// How often a withdrawal is sent: the shim may not have begun the checkpoint yet.
const AGAIN: Duration = Duration::from_millis(500);

/// How long a containerd that was restarted may take to answer again.
const RESTART: Duration = Duration::from_secs(120);

/// A checkpoint of containers of a pod.
pub struct PodCall<'a> {
    containerd: &'a Containerd,
    /// The image of each container, by its id.
    images: BTreeMap<String, PathBuf>,
    /// What counts instead of the containers' annotations.
    overrides: HashMap<String, String>,
    sent: String,
}

/// The answer, for which somebody waits.
pub type Answer<'a> = Pin<Box<dyn Future<Output = Result<(), CallError>> + Send + 'a>>;

impl<'a> PodCall<'a> {
    pub fn new(
        containerd: &'a Containerd,
        images: BTreeMap<String, PathBuf>,
        overrides: HashMap<String, String>,
    ) -> Self {
        let sent = json!(images).to_string();
        Self {
            containerd,
            images,
            overrides,
            sent,
        }
    }

    /// Whom the shim is called for: any of them.
    pub fn one(&self) -> &str {
        self.images.keys().next().map_or("", String::as_str)
    }

    /// Begins it.
    pub fn begin(&self) -> Answer<'_> {
        let mut annotations = self.overrides.clone();
        annotations.insert(names::ANNOTATION_CHECKPOINT_POD.to_owned(), self.sent.clone());
        Box::pin(self.containerd.annotate(self.one(), annotations))
    }

    async fn withdraw_once(&self) -> Result<(), CallError> {
        let annotations = HashMap::from([(names::ANNOTATION_WITHDRAW_POD.to_owned(), self.sent.clone())]);
        self.containerd.annotate(self.one(), annotations).await
    }

    /// Waits until the pod continues whose checkpoint nobody wants any more. Returns the answer, which may be
    /// that it was complete before, or lost.
    pub async fn withdraw(&self, mut answer: Answer<'_>) -> Result<(), CallError> {
        loop {
            tokio::select! {
                answer = &mut answer => return answer,
                withdrawn = self.withdraw_once() => if let Err(error) = withdrawn {
                    note!("firn: cannot withdraw the checkpoint of container {}: {error}", self.one());
                },
            }
            tokio::select! {
                answer = &mut answer => return answer,
                () = sleep(AGAIN) => {}
            }
        }
    }

    /// Waits, after its answer was lost, until it is withdrawn and over. Returns the images of containers
    /// that run again: these are of no use. The others may be the only copies of their workloads.
    pub async fn lost(&self) -> Vec<(&Path, StaysHere)> {
        let until = Instant::now() + RESTART;
        loop {
            match self.withdraw_once().await {
                Ok(()) => break,
                Err(error) if error.is_absent() => break,
                Err(error) if Instant::now() > until => {
                    note!(
                        "firn: cannot withdraw the checkpoint of container {}: {error}",
                        self.one()
                    );
                    return Vec::new();
                }
                Err(_) => sleep(AGAIN).await,
            }
        }
        let mut useless = Vec::new();
        for (id, image) in &self.images {
            match self.containerd.task_state(id).await {
                Ok(Some(TaskState::Running)) => useless.push((&**image, StaysHere::seen())),
                _ => note!("firn: container {id} does not run; {} is left", image.display()),
            }
        }
        useless
    }
}
