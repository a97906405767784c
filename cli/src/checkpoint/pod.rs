//! `firn checkpoint --pod`: the containers of a pod at one moment.
//!
//! The pod's shim does it. containerd hands it the annotations of an update, and has no call for pods.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use firn_config::names;
use firn_host::{Problem, ProblemLine, UnlessAbsent};
use firn_image::form;
use firn_image::manifest::Manifest;
use firn_transaction::transfer::StaysHere;
use serde::{Deserialize, Serialize};

use crate::containerd::{CallError, Container, Containerd, block_on};
use crate::moves::{is_firns, with_progress};
use crate::outcome::Outcome;
use crate::output::{self, line, note};
use crate::state_after::StateAfter;
use crate::stored::InStore;
use crate::text;

use super::{CheckpointOutput, Interrupts, PodCall};
use crate::args::checkpoint::CheckpointArgs;

/// The label that containerd's CRI gives containers of pods.
const KIND: &str = "io.cri-containerd.kind";
/// Its value.
const CONTAINER: &str = "container";

/// Why there are no checkpoints of a pod.
#[derive(Debug, thiserror::Error, Problem)]
enum PodError {
    #[error("{pod:?} names no pod")]
    #[problem("FIRN-POD", "give the pod as NAMESPACE/NAME")]
    Name { pod: String },
    #[error("no container of pod {pod} runs here")]
    #[problem("FIRN-NO-CONTAINER", "see `crictl ps`; the pod must be on this node")]
    None { pod: String },
    #[error("two containers {name} of pods {pod} run here")]
    #[problem("FIRN-POD", "wait until the former pod of this name has ended")]
    Two { pod: String, name: String },
    #[error("cannot make {}", path.display())]
    #[problem(
        "FIRN-POD",
        "name a directory that has nothing of these containers, and whose parent is there"
    )]
    Directory { path: PathBuf, source: io::Error },
    #[error("the shim of container {id} does not checkpoint pods: {message}")]
    #[problem(
        "FIRN-POD",
        "run the pod with firn's runtime handler, and the shim of this version"
    )]
    Shim { id: String, message: String },
    #[error("{0}")]
    #[problem("FIRN-POD", "every container of the pod continues")]
    Checkpoint(String),
    #[error("cannot handle signals")]
    #[problem("FIRN-FILE", "see the cause")]
    Signals(#[from] io::Error),
    #[error(transparent)]
    #[problem("FIRN-CONTAINERD", "see containerd's log; --address names its socket")]
    Call(#[from] CallError),
}

impl PodError {
    /// Whether the shim was not called. What it refuses for one container may have begun for another one.
    fn is_before_the_call(&self) -> bool {
        matches!(
            self,
            Self::Name { .. } | Self::None { .. } | Self::Two { .. } | Self::Directory { .. }
        )
    }
}

/// The containers of a pod were checkpointed.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PodCheckpoints<'a> {
    /// Namespace and name of the pod, as `default/train`.
    pod: &'a str,
    /// The image directory of each container, by the container's name in the pod.
    images: &'a BTreeMap<String, PathBuf>,
    /// What a store has of the memory of each container that has some there, by the same names.
    memory: &'a BTreeMap<&'a str, InStore>,
    /// How long the command took, in milliseconds.
    ms: u64,
}

pub fn run(args: &CheckpointArgs) -> Result<Outcome> {
    let begun = Instant::now();
    let pod = args.pod.as_deref().unwrap_or_default();
    let doing = format!("checkpoint of pod {pod}");
    let mut ids = Vec::new();
    match block_on(with_progress(args.quiet, &doing, checkpoint(args, pod, &mut ids)))? {
        Ok(images) => {
            let took = begun.elapsed();
            let memory = images.iter().filter_map(|(name, image)| {
                let manifest = Manifest::read(image).ok()??;
                Some((&**name, InStore::pin(&manifest)?))
            });
            let memory = memory.collect();
            if args.json {
                output::json(&CheckpointOutput::Pod(PodCheckpoints {
                    pod,
                    images: &images,
                    memory: &memory,
                    ms: text::ms(took),
                }))?
            } else {
                for (name, image) in &images {
                    line!("{name}: {}", image.display());
                    if let Some(memory) = memory.get(&**name) {
                        line!("{name}: {}", memory.shown());
                    }
                }
                line!("{pod} continues, after {:.1} s", took.as_secs_f64());
            }
            Ok(Outcome::Done)
        }
        Err(error) => {
            let message = match &error {
                // It has its own code and remedy.
                PodError::Checkpoint(message) => message.clone(),
                error => ProblemLine(error).to_string(),
            };
            output::failed_with(args.json, message, &block_on(states(args, &ids))?)?;
            Ok(Outcome::failed(error.is_before_the_call()))
        }
    }
}

/// How the containers of the pod are now.
async fn states(args: &CheckpointArgs, ids: &[String]) -> Vec<StateAfter> {
    let mut states = Vec::new();
    for id in ids {
        states.push(StateAfter::of_id(&args.containerd.address, args.namespace(), id).await);
    }
    states
}

/// Returns the image of each container, by its name in the pod. `ids` gets those of the containers.
async fn checkpoint(
    args: &CheckpointArgs,
    pod: &str,
    ids: &mut Vec<String>,
) -> Result<BTreeMap<String, PathBuf>, PodError> {
    let containerd = Containerd::connect(&args.containerd.address, args.namespace()).await?;
    let containers = containers(&containerd, pod).await?;
    ids.extend(containers.values().cloned());
    let dir = std::path::absolute(&args.container).map_err(|source| PodError::Directory {
        path: args.container.clone().into(),
        source,
    })?;
    let mut made = NewDirs(Vec::new());
    if !dir.is_dir() {
        made.directory(&dir)?;
    }
    let (mut images, mut by_id) = (BTreeMap::new(), BTreeMap::new());
    for (name, id) in containers {
        let place = dir.join(&name);
        made.directory(&place)?;
        let image = place.join(form::IMAGE);
        by_id.insert(id, image.clone());
        images.insert(name, image);
    }
    let call = PodCall::new(&containerd, by_id, args.overrides.annotations());
    let mut interrupts = Interrupts::new()?;
    let mut answer = call.begin();
    let answer = match interrupts.unless(&mut answer).await {
        Some(answer) => answer,
        None => {
            note!(
                "firn: interrupted: every container of {pod} continues as soon as what was begun has ended"
            );
            call.withdraw(answer).await
        }
    };
    match answer {
        Ok(()) => {
            made.0.clear();
            Ok(images)
        }
        Err(CallError::Call { status, .. }) if is_firns(status.message()) => {
            Err(PodError::Checkpoint(status.message().to_owned()))
        }
        Err(lost) if lost.is_lost() => {
            made.discard(call.lost().await);
            Err(lost.into())
        }
        Err(CallError::Call { status, .. }) => Err(PodError::Shim {
            id: call.one().to_owned(),
            message: status.message().to_owned(),
        }),
        Err(error) => Err(error.into()),
    }
}

/// Ids of the pod's containers that run, by their names.
async fn containers(containerd: &Containerd, pod: &str) -> Result<BTreeMap<String, String>, PodError> {
    let named = pod
        .split_once('/')
        .filter(|(space, name)| !space.is_empty() && !name.is_empty());
    let (space, name) = named.ok_or_else(|| PodError::Name { pod: pod.to_owned() })?;
    let (all, running) = (
        containerd.with_label(KIND, CONTAINER).await?,
        containerd.running().await?,
    );
    let mut found = BTreeMap::new();
    for container in all.into_iter().filter(|one| running.contains(&one.id)) {
        let annotations = annotations(&container);
        let has = |key: &str, value: &str| annotations.get(key).is_some_and(|has| has == value);
        if !has(names::ANNOTATION_CRI_NAMESPACE, space) || !has(names::ANNOTATION_CRI_POD, name) {
            continue;
        }
        let name = annotations
            .get(names::ANNOTATION_CRI_NAME)
            .cloned()
            .unwrap_or_default();
        if found.insert(name.clone(), container.id).is_some() {
            return Err(PodError::Two {
                pod: pod.to_owned(),
                name,
            });
        }
    }
    if found.is_empty() {
        Err(PodError::None { pod: pod.to_owned() })
    } else {
        Ok(found)
    }
}

/// Those of the container's spec.
fn annotations(container: &Container) -> BTreeMap<String, String> {
    #[derive(Default, Deserialize)]
    struct Annotated {
        #[serde(default)]
        annotations: BTreeMap<String, String>,
    }
    let spec = container.spec.as_ref().map_or(&[][..], |spec| &spec.value);
    serde_json::from_slice::<Annotated>(spec)
        .unwrap_or_default()
        .annotations
}

/// Directories that are removed again, if there are no checkpoints in them.
struct NewDirs(Vec<PathBuf>);

impl NewDirs {
    /// Makes a directory for root alone.
    fn directory(&mut self, path: &Path) -> Result<(), PodError> {
        let made = DirBuilder::new().mode(0o700).create(path);
        made.map_err(|source| PodError::Directory {
            path: path.to_owned(),
            source,
        })?;
        self.0.push(path.to_owned());
        Ok(())
    }

    /// Removes the images of containers that continue, with what is next to them.
    fn discard(&self, images: Vec<(&Path, StaysHere)>) {
        for (image, _proof) in images {
            let Some(place) = image.parent() else { continue };
            let ours = self.0.iter().find(|made| *made == place);
            if let Some(Err(error)) = ours.map(|place| std::fs::remove_dir_all(place).unless_absent()) {
                note!("firn: {} is left: {error}", place.display());
            }
        }
    }
}

impl Drop for NewDirs {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            // One that is not empty stays for whoever looks.
            let _removed = std::fs::remove_dir(path);
        }
    }
}
