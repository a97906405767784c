//! A container that is checkpointed into containerd's content store.
//!
//! It stands still from before its processes are dumped until the checkpoint is complete, so that the files
//! that it has written are those of that moment. It is ended only after that: a failure never costs it.

use std::collections::HashMap;
use std::future::Future;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firn_config::names;
use firn_containerd::Message;
use firn_containerd::runc::{CHECKPOINT_OPTIONS, CheckpointOptions};
use firn_host::{Alone, ProcessTag};
use firn_image::manifest::Manifest;
use firn_transaction::end_proof::EndProof;
use firn_transaction::transfer::StaysHere;
use tokio::time::sleep;

use super::candidate::Candidate;
use super::error::CheckpointError;
use crate::containerd::{Any, CallError, Container, Containerd, Snapshot, TaskState};
use crate::oci_image::{self, Blob, Index, Part, media};
use crate::steps::Steps;

/// How long a container is tried to be resumed, or ended.
const ROLLBACK: Duration = Duration::from_secs(120);

/// How often.
const POLL: Duration = Duration::from_millis(200);

/// The options that ctr sends, with where large memory goes, and what counts for this checkpoint.
fn checkpoint_options(bulk: &str, overrides: &HashMap<String, String>) -> Any {
    let keep = overrides
        .get(names::ANNOTATION_TCP)
        .is_some_and(|word| word == "keep");
    let options = CheckpointOptions {
        // That containerd's own shim understands.
        open_tcp: keep,
        file_locks: true,
        files_follow: true,
        bulk: bulk.to_owned(),
        overrides: overrides.clone(),
        ..CheckpointOptions::default()
    };
    Any {
        type_url: CHECKPOINT_OPTIONS.to_owned(),
        value: options.encode_to_vec(),
    }
}

/// A checkpoint that is complete in the content store.
pub struct Taken {
    /// The blob of the index.
    pub part: Part,
    pub index: Index,
}

/// A container that runs or is paused.
pub struct Source {
    /// Under the lease.
    pub containerd: Containerd,
    pub container: Container,
    pub namespace: String,
    /// What counts instead of the container's annotations.
    pub overrides: HashMap<String, String>,
    pub(super) lease: String,
    /// Of its init.
    pub(super) pid: u32,
    pub(super) was_paused: bool,
    /// The shim resumes it if this command is killed.
    pub(super) paused_for: Option<ProcessTag>,
    /// Somebody has resumed it since, and paused it for himself.
    pub(super) not_ours: AtomicBool,
    pub(super) _alone: Alone,
}

impl Source {
    /// Looks the container up, which no other command of firn may work on. Changes nothing.
    pub async fn find(
        containerd: &Containerd,
        namespace: &str,
        word: &str,
    ) -> Result<Candidate, CheckpointError> {
        let namespace = namespace.to_owned();
        let container = match <[Container; 1]>::try_from(containerd.called(word).await?) {
            Ok([container]) => container,
            Err(none) if none.is_empty() => {
                let id = word.to_owned();
                return Err(CheckpointError::NoContainer { id, namespace });
            }
            Err(_) => {
                return Err(CheckpointError::Several {
                    word: word.to_owned(),
                });
            }
        };
        let id = container.id.clone();
        // Order matters: a pause that the other command has made is not how the container was found.
        let alone =
            Alone::take(Path::new(names::COMMANDS), &namespace, &id).map_err(CheckpointError::Lock)?;
        let Some(alone) = alone else {
            return Err(CheckpointError::Busy { id });
        };
        match containerd.task(&id).await? {
            Some(task) if matches!(task.state, TaskState::Running | TaskState::Paused) => Ok(Candidate {
                container,
                namespace,
                pid: task.pid,
                was_paused: task.state == TaskState::Paused,
                alone,
            }),
            _ => Err(CheckpointError::NotRunning { id }),
        }
    }

    fn id(&self) -> &str {
        &self.container.id
    }

    /// Whether its user has paused it. It stays so.
    pub fn was_paused(&self) -> bool {
        self.was_paused
    }

    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// Pauses it. One that its user has paused stays so.
    pub async fn pause(&mut self, steps: &mut Steps) -> Result<(), CheckpointError> {
        if !self.was_paused {
            steps.begin("pause");
        }
        self.paused_for = self.paused_by_shim().await?;
        if self.paused_for.is_none() && !self.was_paused {
            // Its user may have paused it since it was looked at.
            self.was_paused = self.state().await? == Some(TaskState::Paused);
            if !self.was_paused {
                self.containerd.pause(self.id()).await?;
            }
        }
        if self.paused_for.is_some() && self.was_paused {
            // A command that was killed had paused it.
            steps.begin("pause");
            self.was_paused = false;
        }
        Ok(())
    }

    /// Has the shim pause it until this command resumes it or ends. None: it has not; it is of somebody else
    /// or of an older firn, it does not see this process, or the user has paused the container.
    async fn paused_by_shim(&self) -> Result<Option<ProcessTag>, CallError> {
        let Some(own) = ProcessTag::own() else {
            return Ok(None);
        };
        match self.annotate(names::ANNOTATION_PAUSE_FOR, own).await {
            Ok(()) => {
                // One that it has no name for would do nothing. What is not known is left to the next call.
                let state = self.state().await?;
                Ok((state != Some(TaskState::Running)).then_some(own))
            }
            Err(error) if error.is_lost() => Err(error),
            Err(_) => Ok(None),
        }
    }

    async fn annotate(&self, name: &str, own: ProcessTag) -> Result<(), CallError> {
        let annotations = HashMap::from([(name.to_owned(), own.to_string())]);
        self.containerd.annotate(self.id(), annotations).await
    }

    /// From now on it stays paused if this command is killed: a copy may run. One that has ended runs no
    /// more.
    ///
    /// # Errors
    /// Somebody has resumed it, or containerd does not answer.
    pub async fn stay_paused(&self) -> Result<(), CheckpointError> {
        let Some(own) = self.paused_for else {
            return Ok(());
        };
        let until = Instant::now() + ROLLBACK;
        loop {
            let Err(failed) = self.annotate(names::ANNOTATION_PAUSE_KEPT, own).await else {
                return Ok(());
            };
            let failed = match self.state().await {
                Ok(None | Some(TaskState::Stopped)) => return Ok(()),
                Ok(_) if !failed.is_lost() => {
                    self.not_ours.store(true, Ordering::Relaxed);
                    let id = self.id().to_owned();
                    return Err(CheckpointError::NotOurs { id });
                }
                Ok(_) => failed,
                Err(error) => error,
            };
            if !failed.is_lost() || Instant::now() > until {
                return Err(failed.into());
            }
            sleep(POLL).await;
        }
    }

    async fn state(&self) -> Result<Option<TaskState>, CallError> {
        self.containerd.task_state(self.id()).await
    }

    /// Checkpoints the container, which stands still. Its memory goes where the configuration has it.
    pub async fn take(&self, steps: &mut Steps) -> Result<Taken, CheckpointError> {
        self.taken("", steps).await
    }

    /// As [`Self::take`], with all memory in the checkpoint: it goes where no store is.
    pub async fn take_whole(&self, steps: &mut Steps) -> Result<Taken, CheckpointError> {
        let taken = self.taken(names::BULK_INLINE, steps).await?;
        let part = taken.index.part(media::CHECKPOINT).cloned().unwrap_or_default();
        let manifest = oci_image::manifest(&self.containerd, &part).await?;
        let manifest = manifest.map(|bytes| Manifest::decode(&bytes, Path::new(names::MANIFEST)));
        // A shim of an older firn does not know the option.
        match manifest.transpose()?.and_then(|manifest| manifest.bulk) {
            None => Ok(taken),
            Some(_) => Err(CheckpointError::NotWhole {
                id: self.id().to_owned(),
            }),
        }
    }

    async fn taken(&self, bulk: &str, steps: &mut Steps) -> Result<Taken, CheckpointError> {
        let containerd = &self.containerd;
        let options = checkpoint_options("", &HashMap::new());
        steps.begin("checkpoint");
        let dump = containerd.checkpoint(self.id(), checkpoint_options(bulk, &self.overrides));
        let dumped = steps.follow(containerd, &self.namespace, self.id(), dump).await;
        let mut parts = match dumped {
            Ok(descriptors) => descriptors.into_iter().map(Part::here).collect(),
            Err(error) if error.is_there() => self.dumped_before(error).await?,
            Err(error) => return Err(error.into()),
        };
        steps.begin("files");
        let own = Snapshot::of(&self.container);
        let below = containerd.parent_of(own).await?.unwrap_or_default();
        parts.push(self.files(own, &below).await?);
        steps.begin("index");
        let mut blobs = vec![Blob::new(media::OPTIONS, options.encode_to_vec())];
        let runtime = self.container.runtime.clone().unwrap_or_default();
        if let Some(options) = runtime.options.filter(|options| !options.value.is_empty()) {
            blobs.push(Blob::new(media::RUNTIME_OPTIONS, options.encode_to_vec()));
        }
        for blob in &blobs {
            blob.upload(containerd, &[]).await?;
            parts.push(blob.part.clone());
        }
        let index = Index::new(&self.container, &below, parts);
        let json = serde_json::to_vec(&index).unwrap_or_default();
        let blob = Blob::new(media::INDEX, json);
        blob.upload(containerd, &index.manifests).await?;
        steps.end();
        Ok(Taken {
            part: blob.part,
            index,
        })
    }

    /// containerd 1.7 fails after the dump if it has the container's spec already, as from a checkpoint
    /// before: what it has written is under the lease.
    async fn dumped_before(&self, failed: CallError) -> Result<Vec<Part>, CheckpointError> {
        let spec = self.container.spec.clone().unwrap_or_default().encode_to_vec();
        let spec = Blob::new(media::SPEC, spec).part;
        let mut parts = Vec::new();
        for digest in self.containerd.leased_blobs(&self.lease).await? {
            if digest != spec.digest {
                let size = self.containerd.size(&digest).await?;
                let media_type = media::CHECKPOINT.to_owned();
                parts.push(Part::here(crate::containerd::Descriptor {
                    media_type,
                    digest,
                    size,
                    ..Default::default()
                }));
            }
        }
        if parts.is_empty() {
            return Err(failed.into());
        }
        parts.push(spec);
        Ok(parts)
    }

    /// The files that the container has written into its own snapshot, which is above `parent`.
    async fn files(&self, own: Snapshot<'_>, parent: &str) -> Result<Part, CheckpointError> {
        let containerd = &self.containerd;
        let view = format!("firn-{}-parent", self.lease);
        let below = Snapshot { key: &view, ..own };
        let left = containerd.view(below, parent).await?;
        let right = containerd.mounts(&self.container).await?;
        let made = containerd.diff(left, right, media::LAYER).await;
        let removed = containerd.remove_snapshot(below).await;
        let made = made?;
        removed?;
        Ok(Part::here(made))
    }

    /// Lets it continue as it was found.
    ///
    /// Order matters: the shim resumes it after the rollback of a checkpoint that was interrupted, for which
    /// the call waits. What the freezer is in the middle of one means nothing.
    pub async fn resume(&self, _proof: StaysHere) -> Result<(), CheckpointError> {
        if self.was_paused || self.not_ours.load(Ordering::Relaxed) {
            return Ok(());
        }
        let until = Instant::now() + ROLLBACK;
        loop {
            let Err(failed) = self.containerd.resume(self.id()).await else {
                return Ok(());
            };
            // A containerd that is started again answers in a while.
            match self.state().await {
                Ok(Some(TaskState::Paused)) | Err(_) if Instant::now() > until => {
                    let (id, message) = (self.id().to_owned(), failed.to_string());
                    return Err(CheckpointError::StillPaused { id, message });
                }
                Ok(Some(TaskState::Paused)) | Err(_) => sleep(POLL).await,
                Ok(_) => return Ok(()),
            }
        }
    }

    /// Ends it, while it stands still: none of its threads runs again.
    pub async fn end(&self, _proof: EndProof, steps: &mut Steps) -> Result<(), CheckpointError> {
        steps.begin("exit");
        let until = Instant::now() + ROLLBACK;
        if self.stands_still(until).await? {
            self.kill(until).await?;
        }
        self.insist(until, || self.containerd.wait(self.id())).await?;
        self.insist(until, || self.containerd.delete(self.id())).await?;
        steps.end();
        Ok(())
    }

    /// Whether it is still the task that was checkpointed, and has not run since; false if it has ended.
    async fn stands_still(&self, until: Instant) -> Result<bool, CheckpointError> {
        loop {
            match self.containerd.task(self.id()).await {
                Ok(None) => return Ok(false),
                Ok(Some(task)) if task.state == TaskState::Stopped => return Ok(false),
                Ok(Some(task)) if task.state == TaskState::Paused && task.pid == self.pid => return Ok(true),
                Ok(Some(_)) => {
                    return Err(CheckpointError::Resumed {
                        id: self.id().to_owned(),
                    });
                }
                Err(error) if error.is_lost() && Instant::now() < until => sleep(POLL).await,
                Err(failed) => {
                    let (id, message) = (self.id().to_owned(), failed.to_string());
                    return Err(CheckpointError::NotEnded { id, message });
                }
            }
        }
    }

    /// A containerd that is started again answers in a while.
    async fn kill(&self, until: Instant) -> Result<(), CheckpointError> {
        loop {
            let Err(failed) = self.containerd.kill(self.id()).await else {
                return Ok(());
            };
            match self.state().await {
                Ok(None | Some(TaskState::Stopped)) => return Ok(()),
                state if Instant::now() > until || state.is_ok() && !failed.is_lost() => {
                    let (id, message) = (self.id().to_owned(), failed.to_string());
                    return Err(CheckpointError::NotEnded { id, message });
                }
                _ => sleep(POLL).await,
            }
        }
    }

    /// Repeats a call whose answer was lost, for a task that may be gone.
    async fn insist<C: Future<Output = Result<(), CallError>>>(
        &self,
        until: Instant,
        call: impl Fn() -> C,
    ) -> Result<(), CallError> {
        loop {
            match CallError::allow_absent(call().await) {
                Err(error) if error.is_lost() && Instant::now() < until => sleep(POLL).await,
                done => return done,
            }
        }
    }

    /// Removes what only the lease keeps.
    pub async fn release(&self) -> Result<(), CallError> {
        self.containerd.end_lease(&self.lease).await
    }
}

#[cfg(test)]
mod tests;
