//! The checkpoint of a container with GPUs: its phases, and what follows them whatever became of them.

use std::path::PathBuf;

use firn_config::{Keys, find_criu_plugin};
use firn_host::procfs;
use firn_process::OrWarn;
use firn_process::cancel::Interrupted;
use firn_process::reaper::Reaper;

use super::Request;
use super::container::{ContainerEffects, Progress};
use super::error::{CheckpointError, EffectError, EndError};
use super::phases::{Begun, Checkpointed, Failure};
use crate::container::{Container, InitState};
use crate::effects::{Device, Dump};
use crate::end_proof::EndProof;
use crate::image_dir::ImageDirError;
use crate::job_hook::HookError;
use crate::journal::{self, Outcome};
use crate::phase::Phase;
use crate::recording;
use crate::timings;
use crate::transaction::{Intent, Transaction};

pub(super) async fn run(
    container: &Container,
    request: &Request,
    reaper: &Reaper,
) -> Result<(), CheckpointError> {
    let is_runc = container.runc.expect_runc().await;
    is_runc.map_err(|error| CheckpointError::refused(container, error))?;
    let intent = Intent {
        id: recording::new_id(),
        ..request.intent(container)
    };
    let begun = Transaction::begin(container, Keys::CHECKPOINT, intent, reaper).await;
    let (transaction, means) = begun.map_err(|error| CheckpointError::not_begun(container, error))?;
    let progress = Progress::of(container.parked());
    let mut effects = ContainerEffects::new(&transaction, means, request, progress);
    effects.criu_plugin = find_criu_plugin(transaction.config.criu.libs_dir.as_deref());
    let result = phases(&mut effects).await;
    timings::stop(result.is_ok());
    journal::point("checkpoint-transacted").await;
    let end = conclude(result, &mut effects).await;
    let is_ok = end.is_ok();
    transaction.end_worker(&mut effects.gpu, is_ok).await;
    drop(effects);
    transaction.end(end.outcome(), end.reason(), is_ok).await;
    end.into_result(container, request)
}

async fn phases(effects: &mut ContainerEffects<'_>) -> Result<Option<EndProof>, Failure<EffectError>> {
    let (was_frozen, exit) = (effects.transaction.was_frozen, effects.request.exit);
    // A container that its client has parked stays so.
    let checkpointed = match effects.progress.parked {
        Some(_) => Checkpointed::parked(effects).await?,
        None => {
            let locked = Begun::new(effects, was_frozen).gpu_lock().await?;
            locked.gpu_checkpoint().await?
        }
    };
    let dumped = checkpointed.dump().await?;
    if exit {
        dumped.sync().await.map(Some)
    } else {
        dumped.leave_running().await.map(|()| None)
    }
}

/// Ends a container. One that cannot be killed is suspended: what is left of it has no GPU state.
async fn end(effects: &mut ContainerEffects<'_>, proof: EndProof) -> Result<(), EndError> {
    let ended = effects.finish_container(proof).await;
    let container = effects.transaction.container;
    if ended.is_err() && procfs::is_alive(container.init.pid()) {
        let frozen = effects.keep_frozen().await;
        frozen.or_warn(format_args!("cannot freeze {}", container.id));
        if !container.is_parked() {
            container.set_state(InitState::Suspended);
        }
    }
    ended
}

/// Makes sure that the image of a container that continues is on its disk. One that is not is removed.
async fn sync(effects: &mut ContainerEffects<'_>) -> Result<(), Failure<EffectError>> {
    let synced = effects.sync().await;
    if synced.is_err() {
        effects.tidy(None).await;
    }
    synced
        .map(drop)
        .map_err(|source| Failure::new(Phase::Sync, source))
}

/// How a checkpoint has ended.
struct End {
    /// Of the phases.
    result: Result<(), Failure<EffectError>>,
    /// Of the end of a container that was to end.
    ended: Result<(), EndError>,
    /// Of the hook `resumed`.
    resumed: Result<(), Interrupted<HookError>>,
    is_alive: bool,
    /// Its client has parked it.
    is_parked: bool,
    /// The container has ended, and its client has gone and removed the image.
    gone: bool,
    /// Where a complete image is, if the client gets an error.
    image: Option<PathBuf>,
}

/// Concludes a checkpoint whatever became of its phases: ends what is to end, cleans up, calls the job's
/// hook, and keeps a complete image.
async fn conclude(
    result: Result<Option<EndProof>, Failure<EffectError>>,
    effects: &mut ContainerEffects<'_>,
) -> End {
    let (container, request) = (effects.transaction.container, effects.request);
    let (mut result, proof) = match result {
        Ok(proof) => (Ok(()), proof),
        Err(failure) => (Err(failure), None),
    };
    // Order matters: if init ends from now on, the handler of its exit thaws the container.
    if result.as_ref().is_err_and(|failure| failure.suspended.is_some()) {
        container.set_state(InitState::Suspended);
    }
    let ended = match proof {
        Some(proof) => end(effects, proof).await,
        None => Ok(()),
    };
    let mut is_alive = match &result {
        Ok(()) => procfs::is_alive(container.init.pid()),
        Err(_) => effects.is_left_alive().await,
    };
    let failure = result.as_mut().err();
    effects.tidy(failure.map(|failure| &mut failure.source)).await;
    let mut resumed = Ok(());
    match &result {
        Ok(()) if !request.exit && !container.is_parked() => resumed = effects.call_resumed().await,
        // A checkpoint that was refused before the hook `prepare` is none of the job's.
        Err(failure) if is_alive && failure.suspended.is_none() && effects.progress.prepared => {
            effects.call_failed(&failure.source).await;
        }
        _ => {}
    }
    // Order matters: what continues does not wait for the disk.
    if result.is_ok() && resumed.is_ok() && !request.exit && !request.image.is_containerds() {
        result = sync(effects).await;
        is_alive = result.is_ok() || effects.is_left_alive().await;
    }
    let gone = result.is_ok() && request.exit && effects.has_lost_image().await;
    let mut end = End {
        result,
        ended,
        resumed,
        is_alive,
        is_parked: container.is_parked(),
        gone,
        image: None,
    };
    if effects.progress.complete && (!end.is_ok() || gone) {
        end.image = effects.keep_image().await;
    } else {
        effects.drop_rescue().await;
    }
    end
}

impl End {
    /// Whether all was done that the client wanted, but for an image that it has removed itself.
    fn is_ok(&self) -> bool {
        self.result.is_ok() && self.ended.is_ok() && self.resumed.is_ok()
    }

    /// For the journal.
    fn outcome(&self) -> Outcome {
        match &self.result {
            Ok(()) if self.is_left() => Outcome::Suspended,
            Ok(()) => Outcome::Done,
            Err(_) if !self.is_alive => Outcome::Ended,
            Err(failure) if failure.suspended.is_some() => Outcome::Suspended,
            Err(_) => Outcome::Failed,
        }
    }

    /// Whether it was to end, and what is left of it stands still without its GPU state.
    fn is_left(&self) -> bool {
        self.ended.is_err() && self.is_alive && !self.is_parked
    }

    /// Why the container is suspended, for the journal.
    fn reason(&self) -> Option<String> {
        if let (true, Err(error)) = (self.is_left(), &self.ended) {
            return Some(error.line());
        }
        let suspended = self.result.as_ref().err()?.suspended.as_ref()?;
        Some(suspended.line())
    }

    /// For the client.
    fn into_result(self, container: &Container, request: &Request) -> Result<(), CheckpointError> {
        let (id, image, is_alive) = (&container.id, self.image, self.is_alive);
        let path = request.image.path();
        let at_image = || image.clone().unwrap_or_else(|| path.to_owned());
        if let (Ok(()), Err(cause)) = (&self.result, self.resumed) {
            return Err(match cause {
                Interrupted::Cancelled => CheckpointError::Ended {
                    container: id.clone(),
                    phase: Phase::Resumed,
                    cause: EffectError::Killed,
                    image,
                },
                Interrupted::Failed(cause) => CheckpointError::NotResumed {
                    container: id.clone(),
                    image: at_image(),
                    cause,
                },
            });
        }
        match (self.result, self.ended) {
            (Err(failure), _) => Err(CheckpointError::from_failure(id, failure, image, is_alive)),
            (Ok(()), Err(cause)) => Err(CheckpointError::NotEnded {
                container: id.clone(),
                image: at_image(),
                cause,
            }),
            (Ok(()), Ok(())) if self.gone => Err(CheckpointError::Ended {
                container: id.clone(),
                phase: Phase::End,
                cause: ImageDirError::gone(path).into(),
                image,
            }),
            (Ok(()), Ok(())) => Ok(()),
        }
    }
}
