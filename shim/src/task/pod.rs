//! Checkpoint of several containers of a pod at one moment: all stand still before the first is dumped, all
//! go on afterwards, and there are images of all or of none.
//!
//! containerd has no call for it. A client calls Update of one of the containers with an annotation, which
//! containerd hands on.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::api::{Empty, PauseRequest, ResumeRequest};
use firn_config::names;
use firn_image::manifest::DumpFlags;
use firn_transaction::blocking::tidy;
use firn_transaction::checkpoint::{self, CheckpointError, Request};
use firn_transaction::container::{Action, Container, InitState};
use firn_transaction::image_dir::ImageDir;
use firn_transaction::meeting::Meeting;

use super::{Service, TaskError};

/// How long another call may work on a container before this one is refused.
const PATIENCE: Duration = Duration::from_secs(10);

/// The image directory of each container.
type Images = BTreeMap<String, PathBuf>;

/// What the annotations of an update want to be checkpointed; none if they name nothing.
pub(super) fn wanted(annotations: &HashMap<String, String>) -> Result<Option<Images>, TaskError> {
    let Some(text) = annotations.get(names::ANNOTATION_CHECKPOINT_POD) else {
        return Ok(None);
    };
    let images: Option<Images> = serde_json::from_str(text).ok();
    let images = images.filter(|images| !images.is_empty() && images.values().all(|path| path.is_absolute()));
    images.map(Some).ok_or_else(|| TaskError::Annotation {
        name: names::ANNOTATION_CHECKPOINT_POD,
        value: text.chars().take(64).collect(),
    })
}

/// Checkpoints these containers, which go on.
pub(super) async fn checkpoint(service: &Arc<Service>, images: Images) -> Result<Empty, TaskError> {
    let containers = images.keys().map(|id| service.container(id));
    let containers = containers.collect::<Result<Vec<_>, _>>()?;
    let (paused, mut done) = pause(service, &containers).await;
    if done.is_ok() {
        done = Box::pin(all(service, containers, images)).await;
    }
    for id in paused {
        let request = ResumeRequest {
            id,
            ..ResumeRequest::default()
        };
        let resumed = super::pause::resume(service, request).await;
        done = done.and(resumed.map(drop));
    }
    done.map(|()| Empty::default())
}

/// Pauses the containers that run. Returns the ids of those that were paused, also after a failure.
async fn pause(
    service: &Arc<Service>,
    containers: &[Arc<Container>],
) -> (Vec<String>, Result<(), TaskError>) {
    let mut paused = Vec::new();
    for container in containers {
        if container.state() != InitState::Running {
            continue;
        }
        let id = container.id.clone();
        let request = PauseRequest {
            id,
            ..PauseRequest::default()
        };
        if let Err(error) = super::pause::pause(service, request).await {
            return (paused, Err(error));
        }
        paused.push(container.id.clone());
    }
    (paused, Ok(()))
}

async fn all(
    service: &Arc<Service>,
    containers: Vec<Arc<Container>>,
    images: Images,
) -> Result<(), TaskError> {
    let meeting = Arc::new(Meeting::of(containers.len()));
    let mut tasks = Vec::new();
    for (container, image) in containers.into_iter().zip(images.into_values()) {
        let (service, meeting) = (service.clone(), meeting.clone());
        tasks.push(tokio::spawn(async move {
            let done = one(&service, &container, &image, &meeting).await;
            meeting.give_up();
            done
        }));
    }
    let (mut complete, mut failure) = (Vec::new(), None);
    for task in tasks {
        match task.await.unwrap_or(Err(TaskError::Closing)) {
            Ok(kept) => complete.push(kept),
            // The first cause, and not what follows from it.
            Err(error) if failure.as_ref().is_none_or(is_of_others) => failure = Some(error),
            Err(_) => {}
        }
    }
    let Some(failure) = failure else {
        return Ok(());
    };
    for kept in complete {
        kept.remove().await;
    }
    Err(failure)
}

/// What is kept of a container.
struct Kept {
    image: ImageDir,
    /// The files that it has written.
    layer: PathBuf,
}

impl Kept {
    async fn remove(self) {
        tidy("remove an image of a pod", move || {
            self.image.clear();
            // There may be none.
            let _gone = std::fs::remove_file(&self.layer);
        })
        .await;
    }
}

/// Checkpoints one of them.
async fn one(
    service: &Arc<Service>,
    container: &Arc<Container>,
    path: &Path,
    meeting: &Arc<Meeting>,
) -> Result<Kept, TaskError> {
    let found = ImageDir::find(path, !container.traits.by_firn()).await;
    let operation = tokio::time::timeout(PATIENCE, container.operation.write());
    let _operation = operation.await.map_err(|_| TaskError::Busy {
        id: container.id.clone(),
        waited: PATIENCE,
    })?;
    container.admit(Action::Checkpoint)?;
    let layer = path.with_file_name(names::ARCHIVE_LAYER);
    let request = Request {
        image: checkpoint::usable(container, found, path)?,
        work: None,
        parent: None,
        exit: false,
        flags: DumpFlags::default(),
        empty_namespaces: Vec::new(),
        meeting: Some(meeting.clone()),
        layer: Some(layer.clone()),
    };
    let done = super::checkpoint::transact(service, container, &request).await;
    let kept = Kept {
        image: request.image,
        layer,
    };
    match done {
        Ok(()) => Ok(kept),
        Err(error) => {
            kept.remove().await;
            Err(error)
        }
    }
}

fn is_of_others(error: &TaskError) -> bool {
    matches!(error, TaskError::Checkpoint(cause) if CheckpointError::is_of_others(cause))
}
