//! The rollback of a checkpoint by its journal: after firn's own code has failed, and when a suspended container is resumed.

use std::path::PathBuf;
use std::time::Duration;

use firn_config::{Config, find_program, names};
use firn_host::Chain;
use firn_image::manifest::DumpFlags;

use super::Request;
use super::container::{ContainerEffects, Context};
use super::dump::LEFTOVERS;
use super::error::{CheckpointError, EffectError};
use super::phases::{self, Failure, Rollback};
use super::plain::{RESET, reset_freezer};
use crate::container::{Container, InitState};
use crate::image_dir::ImageDir;
use crate::journal::{Journal, Outcome, Record};
use crate::panics::caught;
use crate::phase::Phase;
use crate::procfs;
use crate::reaper::Reaper;
use crate::recovery::Recovery;
use crate::timings::PhaseTimings;

/// How long the programs of a checkpoint whose code has failed may take to end.
const PROGRAMS: Duration = Duration::from_secs(30);

/// Takes back what a checkpoint has begun whose code has failed, by its journal; once more when that fails too.
pub async fn take_back(container: &Container, reaper: &Reaper) -> CheckpointError {
    for _ in 0..2 {
        if let Ok(error) = caught(try_take_back(container, reaper)).await {
            return error;
        }
    }
    give_up(container).await
}

/// Takes the way back of a suspended container once more. Afterwards it runs, also when its client had paused it.
pub async fn resume(container: &Container, reaper: &Reaper) -> Result<(), CheckpointError> {
    match caught(try_resume(container, reaper)).await {
        Ok(resumed) => resumed,
        Err(_) => Err(give_up(container).await),
    }
}

async fn try_resume(container: &Container, reaper: &Reaper) -> Result<(), CheckpointError> {
    let recovery = Recovery::of(&container.bundle);
    let undone = match &recovery {
        Some(recovery) => undo_gpu(container, recovery.record(), false, reaper).await,
        None => Err(EffectError::NoJournal),
    };
    undone.map_err(|suspended| {
        let failure = Failure {
            phase: Phase::GpuRestore,
            source: EffectError::Killed,
            suspended: Some(suspended),
        };
        stopped(container, failure, recovery.as_ref().and_then(image_of))
    })
}

/// A transaction that has failed as the client hears of it. A container that is left as it is stays suspended.
fn stopped(container: &Container, failure: Failure<EffectError>, image: Option<PathBuf>) -> CheckpointError {
    // A killed process that frees its memory is no zombie yet.
    let is_killed = matches!(failure.suspended, Some(EffectError::Killed));
    // Order matters: an init that ends from now on is thawed by who hears of its end.
    if failure.suspended.is_some() && !is_killed {
        container.set_state(InitState::Suspended);
    }
    let is_alive = !is_killed && procfs::is_alive(container.init.pid());
    CheckpointError::from_failure(&container.id, failure, image, is_alive)
}

/// The image that a transaction has completed.
fn image_of(recovery: &Recovery) -> Option<PathBuf> {
    let is_complete = recovery.is_complete();
    is_complete.then(|| recovery.image().to_owned())
}

/// The way back has failed, and nobody knows where: a container with GPUs must not run on.
async fn give_up(container: &Container) -> CheckpointError {
    let frozen = async { container.cgroup()?.keep_frozen(RESET).await };
    if container.gpu
        && let Err(error) = frozen.await
        && !error.is_absent()
    {
        log::error!("cannot freeze {}: {}", container.id, Chain(&error));
    }
    let outcome = if container.gpu {
        Outcome::Suspended
    } else {
        Outcome::Failed
    };
    let image = Recovery::of(&container.bundle).as_ref().and_then(image_of);
    match Journal::resume(&container.bundle).await {
        Ok(journal) => journal.end(outcome).await,
        Err(error) => log::warn!("{}", Chain(&error)),
    }
    let failure = Failure {
        phase: Phase::Rollback,
        source: EffectError::Panicked,
        suspended: container.gpu.then_some(EffectError::Panicked),
    };
    stopped(container, failure, image)
}

async fn try_take_back(container: &Container, reaper: &Reaper) -> CheckpointError {
    let Some(recovery) = Recovery::of(&container.bundle) else {
        return CheckpointError::refused(container, EffectError::Panicked);
    };
    // Order matters: tasks run on when CRIU is ended, which holds them.
    if recovery.record().gpu_checkpointing
        && let Err(error) = container.cgroup().and_then(|cgroup| cgroup.begin_freeze())
    {
        log::warn!("cannot freeze {}: {}", container.id, Chain(&error));
    }
    // It works on an image that is not complete.
    recovery.end_programs(PROGRAMS).await;
    let was_frozen = recovery.record().begin.was_frozen;
    let undone = match container.gpu {
        true => undo_gpu(container, recovery.record(), was_frozen, reaper).await,
        false => {
            let guard = container.begin_transaction();
            reset_freezer(container, was_frozen, &guard.cancel).await;
            Ok(())
        }
    };
    let is_alive = procfs::is_alive(container.init.pid());
    let failure = Failure {
        phase: recovery.record().phase.unwrap_or(Phase::Inspect),
        source: EffectError::Panicked,
        suspended: undone.err().filter(|_| is_alive),
    };
    if tokio::time::timeout(LEFTOVERS, recovery.clear()).await.is_err() {
        log::warn!(
            "the files of the checkpoint of {} cannot be tidied in time",
            container.id
        );
    }
    if failure.suspended.is_none() {
        recovery.forget(&container.bundle).await;
    }
    stopped(container, failure, image_of(&recovery))
}

/// The way back by the journal of a transaction that is over.
async fn undo_gpu(
    container: &Container,
    record: &Record,
    was_frozen: bool,
    reaper: &Reaper,
) -> Result<(), EffectError> {
    let config = Config::load()?;
    let worker = find_program(names::WORKER_PROGRAM, config.worker.path.as_deref())?;
    let journal = Journal::resume(&container.bundle).await?;
    let begin = &record.begin;
    let request = Request {
        image: ImageDir::unopened(&begin.image),
        work: None,
        parent: None,
        exit: begin.exit,
        flags: DumpFlags::default(),
        empty_namespaces: Vec::new(),
    };
    let guard = container.begin_transaction();
    let mut timings = PhaseTimings::begin("undo", &container.id);
    let mut live = ContainerEffects::new(
        container,
        &request,
        &config,
        Context {
            cgroup: container.cgroup()?,
            worker,
            reaper,
            timings: &mut timings,
            journal: journal.clone(),
            cancel: guard.cancel.clone(),
        },
    )
    .with_needs(record.memory.clone());
    let back = Rollback {
        locked: &record.cuda,
        was_frozen,
        gpu_checkpointing: record.gpu_checkpointing,
    };
    let undone = phases::rollback(&mut live, back).await;
    let is_cancelled = undone.is_err() && guard.cancel.is_cancelled();
    if is_cancelled {
        live.kill().await;
    }
    if is_cancelled || undone.is_err() && !procfs::is_alive(container.init.pid()) {
        live.leave_thawed().await;
    }
    live.end().await;
    journal
        .end(match &undone {
            Ok(()) => Outcome::Failed,
            Err(_) => Outcome::Suspended,
        })
        .await;
    undone
}
