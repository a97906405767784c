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
    pub(super) is_anothers: AtomicBool,
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
                    self.is_anothers.store(true, Ordering::Relaxed);
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
        if self.was_paused || self.is_anothers.load(Ordering::Relaxed) {
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
mod tests {
    use tonic::Status;

    use firn_containerd::tasks::{GetResponse, Process, status};

    use super::*;
    use crate::containerd::block_on;
    use crate::containerd::fake::{Fake, Reply, reply};

    const PID: u32 = 41;

    fn task(pid: u32, status: i32) -> Reply {
        let process = Some(Process {
            pid,
            status,
            ..Process::default()
        });
        reply(Ok(GetResponse { process }))
    }

    fn paused() -> Reply {
        task(PID, status::PAUSED)
    }

    fn lost() -> Reply {
        reply::<()>(Err(Status::unavailable("containerd has ended")))
    }

    async fn source(fake: &Fake, dir: &Path) -> Source {
        Source {
            containerd: Containerd::connect(&fake.socket(), "default").await.unwrap(),
            container: Container {
                id: "job".to_owned(),
                ..Container::default()
            },
            namespace: "default".to_owned(),
            overrides: HashMap::new(),
            lease: String::new(),
            pid: PID,
            was_paused: false,
            paused_for: None,
            is_anothers: AtomicBool::new(false),
            _alone: Alone::take(dir, "default", "job").unwrap().unwrap(),
        }
    }

    #[test]
    fn a_container_ends_though_containerd_is_started_again_meanwhile() {
        let fake = Fake::new(|call, before| {
            let is_first = !before.iter().any(|made| made == call);
            match call {
                "Tasks/Get" => paused(),
                _ if is_first => lost(),
                "Tasks/Delete" => reply::<()>(Err(Status::not_found("gone"))),
                _ => reply(Ok(())),
            }
        });
        let dir = tempfile::tempdir().unwrap();
        let ended = block_on(async {
            let source = source(&fake, dir.path()).await;
            source.end(EndProof::of_test(), &mut Steps::new(true)).await
        });
        ended.unwrap().unwrap();
        for call in ["Tasks/Kill", "Tasks/Wait", "Tasks/Delete"] {
            assert_eq!(fake.count(call), 2, "{call}");
        }
    }

    fn refused() -> Reply {
        reply::<()>(Err(Status::failed_precondition("not in this state")))
    }

    fn done() -> Reply {
        reply(Ok(()))
    }

    /// How containerd's calls end: an update by the shim, a pause, and the state of the task after it.
    /// Returns the calls of Pause and Resume, whether it was paused for this command, and by its user.
    fn paused_after(updated: fn() -> Reply, pause: fn() -> Reply, now: i32) -> ([usize; 2], bool, bool) {
        let fake = Fake::new(move |call, _| match call {
            "Tasks/Update" => updated(),
            "Tasks/Pause" => pause(),
            "Tasks/Get" => task(PID, now),
            _ => done(),
        });
        let dir = tempfile::tempdir().unwrap();
        let source = block_on(async {
            let mut source = source(&fake, dir.path()).await;
            source.pause(&mut Steps::new(true)).await.unwrap();
            source.stay_paused().await.unwrap();
            source.resume(StaysHere::never_sent()).await.unwrap();
            source
        });
        let source = source.unwrap();
        let calls = ["Tasks/Pause", "Tasks/Resume"].map(|call| fake.count(call));
        assert!(source.paused_for.is_none() || source.paused_for == ProcessTag::own());
        (calls, source.paused_for.is_some(), source.was_paused())
    }

    #[test]
    fn a_shim_that_does_not_pause_for_a_command_gets_a_plain_pause() {
        use status::{PAUSED, RUNNING, UNKNOWN};
        let unknown = || reply::<()>(Err(Status::unimplemented("no such update")));
        assert_eq!(paused_after(unknown, done, RUNNING), ([1, 1], false, false));
        assert_eq!(paused_after(done, done, RUNNING), ([1, 1], false, false));
        assert_eq!(paused_after(done, done, PAUSED), ([0, 1], true, false));
        assert_eq!(paused_after(done, done, UNKNOWN), ([0, 1], true, false));
        // Its user has paused it since it was looked at.
        assert_eq!(paused_after(refused, refused, PAUSED), ([0, 0], false, true));
    }

    /// What containerd answers when a command withdraws its name, and then whether its pause is its own.
    #[test]
    fn a_pause_that_is_anothers_by_now_is_left_alone() {
        for (kept, now, wanted) in [
            (refused as fn() -> Reply, status::PAUSED, false),
            (refused, status::RUNNING, false),
            (refused, status::STOPPED, true),
            (lost, status::PAUSED, true),
        ] {
            let fake = Fake::new(move |call, before| match call {
                // The answer is lost once.
                "Tasks/Update" if before.iter().filter(|made| *made == call).count() == 1 => kept(),
                "Tasks/Get" if before.contains(&"Tasks/Update".to_owned()) => task(PID, now),
                _ => done(),
            });
            let dir = tempfile::tempdir().unwrap();
            let kept = block_on(async {
                let mut source = source(&fake, dir.path()).await;
                source.paused_for = ProcessTag::own();
                source
                    .annotate(names::ANNOTATION_PAUSE_FOR, ProcessTag::own().unwrap())
                    .await
                    .unwrap();
                let kept = source.stay_paused().await;
                source.resume(StaysHere::never_sent()).await.unwrap();
                kept
            });
            let kept = kept.unwrap();
            let resumed = fake.count("Tasks/Resume") == 1;
            assert_eq!((kept.is_ok(), resumed), (wanted, wanted), "{now}");
            if let Err(error) = kept {
                assert!(error.shown().contains("FIRN-FREEZER: "), "{}", error.shown());
            }
        }
    }

    #[test]
    fn a_container_whose_pause_is_anothers_by_now_is_not_ended() {
        for (kept, kills) in [(refused as fn() -> Reply, 0), (done, 1)] {
            let fake = Fake::new(move |call, _| match call {
                "Tasks/Update" => kept(),
                "Tasks/Get" => paused(),
                _ => done(),
            });
            let dir = tempfile::tempdir().unwrap();
            let ended = block_on(async {
                let mut source = source(&fake, dir.path()).await;
                source.paused_for = ProcessTag::own();
                crate::checkpoint::end(&source, EndProof::of_test(), &mut Steps::new(true)).await
            });
            assert_eq!(ended.unwrap().is_ok(), kills == 1);
            assert_eq!(fake.count("Tasks/Kill"), kills);
        }
    }

    /// What it has done since is in no checkpoint.
    #[test]
    fn a_container_that_somebody_has_resumed_or_started_again_is_not_ended() {
        for (pid, status) in [(PID, 2), (PID + 1, 4), (PID + 1, 2)] {
            let fake = Fake::new(move |call, _| match call {
                "Tasks/Get" => task(pid, status),
                _ => reply(Ok(())),
            });
            let dir = tempfile::tempdir().unwrap();
            let ended = block_on(async {
                let source = source(&fake, dir.path()).await;
                source.end(EndProof::of_test(), &mut Steps::new(true)).await
            });
            let shown = ended.unwrap().unwrap_err().shown();
            assert!(shown.contains("FIRN-FREEZER: "), "{shown}");
            for call in ["Tasks/Kill", "Tasks/Delete"] {
                assert_eq!(fake.count(call), 0, "{call}");
            }
        }
    }

    #[test]
    fn a_container_that_cannot_be_ended_is_paused_next_to_its_checkpoint() {
        let fake = Fake::new(|call, _| if call == "Tasks/Get" { paused() } else { lost() });
        let dir = tempfile::tempdir().unwrap();
        let killed = block_on(async { source(&fake, dir.path()).await.kill(Instant::now()).await });
        let shown = killed
            .unwrap()
            .unwrap_err()
            .with("checkpoint/job".to_owned())
            .shown();
        for part in [
            "FIRN-CONTAINERD: ",
            "checkpoint/job is complete",
            "job was paused",
            "resume",
        ] {
            assert!(shown.contains(part), "{shown}");
        }
    }
}
