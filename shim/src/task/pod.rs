//! Checkpoint of several containers of a pod at one moment: all stand still before the first is dumped and
//! until the last is, and there are images of all or of none.
//!
//! containerd has no call for it. A client calls Update of one of the containers with an annotation, which
//! containerd hands on.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use containerd_shim_protos::api::Empty;
use firn_config::{Config, names};
use firn_host::Chain;
use firn_image::form;
use firn_image::manifest::DumpFlags;
use firn_process::panics::lock;
use firn_transaction::checkpoint::{self, CheckpointError, Overrides, Request};
use firn_transaction::container::{Action, Container};
use firn_transaction::image_dir::ImageDir;
use firn_transaction::layer;
use firn_transaction::meeting::Meeting;
use firn_transaction::recording;
use tokio::sync::{oneshot, watch};

use super::{Service, TaskError};

/// How long another call may work on a container before this one is refused.
const PATIENCE: Duration = Duration::from_secs(10);

/// The image directory of each container.
type Images = BTreeMap<String, PathBuf>;

/// A checkpoint in progress.
pub(super) struct Progress {
    images: Images,
    overrides: Overrides,
    meeting: Arc<Meeting>,
    over: watch::Sender<bool>,
    /// The containers whose operation lock it holds.
    held: Mutex<BTreeMap<String, Arc<Container>>>,
}

/// What the annotations of an update want to be checkpointed; none if they name nothing.
pub(super) fn wanted(annotations: &HashMap<String, String>) -> Result<Option<Images>, TaskError> {
    named(annotations, names::ANNOTATION_CHECKPOINT_POD)
}

/// The checkpoint that its client wants no more; none if the annotations name none.
pub(super) fn withdrawn(annotations: &HashMap<String, String>) -> Result<Option<Images>, TaskError> {
    named(annotations, names::ANNOTATION_WITHDRAW_POD)
}

fn named(annotations: &HashMap<String, String>, key: &str) -> Result<Option<Images>, TaskError> {
    let Some(text) = annotations.get(key) else {
        return Ok(None);
    };
    let images: Option<Images> = serde_json::from_str(text).ok();
    let places = |images: &Images| {
        images
            .values()
            .map(|path| path.parent())
            .collect::<BTreeSet<_>>()
            .len()
    };
    let images = images.filter(|images| {
        // Each has a directory of its own, for its files are there, too.
        !images.is_empty() && places(images) == images.len() && images.values().all(|path| path.is_absolute())
    });
    images.map(Some).ok_or(TaskError::PodSetting)
}

/// Withdraws a checkpoint, and waits until it is over. One whose images are complete, or that is over, is
/// left as it is.
pub(super) async fn withdraw(service: &Service, images: &Images) -> Empty {
    let pods = lock(&service.pods).clone();
    let withdrawn: Vec<_> = pods
        .iter()
        .filter(|progress| progress.images == *images)
        .collect();
    for progress in &withdrawn {
        // Order matters: who begins after it has been looked at finds that nobody meets.
        progress.meeting.withdraw();
        for container in lock(&progress.held).values() {
            container.transaction.withdraw();
        }
    }
    for progress in withdrawn {
        let mut over = progress.over.subscribe();
        let _ended = over.wait_for(|over| *over).await;
    }
    Empty::default()
}

/// Checkpoints these containers, which continue.
pub(super) async fn checkpoint(
    service: &Arc<Service>,
    images: Images,
    overrides: Overrides,
) -> Result<Empty, TaskError> {
    let containers = images.keys().map(|id| service.container(id));
    let containers = containers.collect::<Result<Vec<_>, _>>()?;
    let (config, _mistake) = Config::load_what_is_valid();
    let limit = Meeting::limit(&config.deadlines);
    let progress = Arc::new(Progress {
        meeting: Arc::new(Meeting::of(containers.len(), limit)),
        images,
        overrides,
        over: watch::Sender::new(false),
        held: Mutex::default(),
    });
    lock(&service.pods).push(progress.clone());
    let done = at_one_moment(service, containers, &progress).await;
    lock(&service.pods).retain(|other| !Arc::ptr_eq(other, &progress));
    progress.over.send_replace(true);
    done.map(|()| Empty::default())
}

async fn at_one_moment(
    service: &Arc<Service>,
    containers: Vec<Arc<Container>>,
    progress: &Arc<Progress>,
) -> Result<(), TaskError> {
    let mut tasks = Vec::new();
    for (container, image) in containers.into_iter().zip(progress.images.values().cloned()) {
        let (service, part) = (service.clone(), Part(progress.clone()));
        let (send, done) = oneshot::channel();
        // Boxed as in `detached`.
        let work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            let done = one(&service, &container, &image, &part.0).await;
            drop(send.send(done.map_err(|error| (container.id.clone(), error))));
        });
        tokio::spawn(recording::within_call(work));
        tasks.push(done);
    }
    let mut failure: Option<(String, TaskError)> = None;
    for task in tasks {
        let Err(failed) = task
            .await
            .unwrap_or_else(|_| Err((String::new(), TaskError::Closing)))
        else {
            continue;
        };
        log::warn!("container {} of a pod: {}", failed.0, Chain(&failed.1));
        // The first cause, and not what follows from it.
        if failure.as_ref().is_none_or(|(_, error)| is_of_others(error)) {
            failure = Some(failed);
        }
    }
    match failure {
        None => Ok(()),
        Some((id, cause)) => Err(TaskError::Pod {
            id,
            cause: Box::new(cause),
        }),
    }
}

/// Somebody who takes part in a checkpoint. Whatever ends it, nobody waits for it any more.
struct Part(Arc<Progress>);

impl Drop for Part {
    fn drop(&mut self) {
        self.0.meeting.give_up();
    }
}

/// The operation lock of a container is held.
struct Held<'a>(&'a Progress, &'a str);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        lock(&self.0.held).remove(self.1);
    }
}

/// Checkpoints one of them.
async fn one(
    service: &Arc<Service>,
    container: &Arc<Container>,
    path: &Path,
    progress: &Arc<Progress>,
) -> Result<(), TaskError> {
    let found = ImageDir::find(path, !container.traits.by_firn()).await;
    let operation = tokio::time::timeout(PATIENCE, container.operation.write());
    let _operation = operation.await.map_err(|_| TaskError::Busy {
        id: container.id.clone(),
        waited: PATIENCE,
    })?;
    // Order matters: dropped before the lock, after which another operation may have a transaction.
    let _held = Held(progress, &container.id);
    lock(&progress.held).insert(container.id.clone(), container.clone());
    container.admit(Action::Checkpoint)?;
    let layer = path.with_file_name(form::LAYER);
    layer::expect_none(&layer).await?;
    let request = Request {
        image: checkpoint::usable(container, found, path)?,
        work: None,
        parent: None,
        exit: false,
        flags: DumpFlags {
            open_tcp: progress.overrides.keeps_connections(),
            ..DumpFlags::default()
        },
        empty_namespaces: Vec::new(),
        meeting: Some(progress.meeting.clone()),
        layer: Some(layer.clone()),
        files_copied: false,
        inline: false,
        overrides: progress.overrides.clone(),
    };
    let done = super::checkpoint::transact(service, container, &request).await;
    let keeps_image =
        |error: &TaskError| matches!(error, TaskError::Checkpoint(cause) if cause.keeps_image());
    if done.as_ref().is_err_and(|error| !keeps_image(error)) {
        layer::remove(layer).await;
    }
    done
}

fn is_of_others(error: &TaskError) -> bool {
    matches!(error, TaskError::Checkpoint(cause) if CheckpointError::is_of_others(cause))
}
