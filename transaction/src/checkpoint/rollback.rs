//! Rollback of a checkpoint by its journal: after a panic of firn's own code, and when a suspended container
//! is resumed.

use std::path::PathBuf;
use std::time::Duration;

use firn_host::procfs;
use firn_host::{Chain, UnlessAbsent};
use firn_process::OrWarn;
use firn_process::cancel::CancellationToken;
use firn_process::panics::{caught, twice};
use firn_process::reaper::Reaper;

use super::Request;
use super::container::{ContainerEffects, Progress};
use super::dump::LEFTOVERS;
use super::error::{CheckpointError, EffectError};
use super::phases::{self, Failure, Rollback};
use super::plain::{RESET, reset_freezer};
use crate::container::{Container, InitState};
use crate::huge_pages;
use crate::image_dir::ImageDir;
use crate::journal::{Journal, Outcome, Record};
use crate::killed_criu;
use crate::phase::Phase;
use crate::recovery::Recovery;
use crate::transaction::Transaction;

/// How long the programs of a checkpoint may take to end after a panic.
const PROGRAMS: Duration = Duration::from_secs(30);

/// Rolls back a checkpoint whose code has panicked, by its journal. If the rollback panics too, it is tried
/// once more.
pub async fn rollback_after_panic(container: &Container, reaper: &Reaper) -> CheckpointError {
    match twice(|| Box::pin(try_rollback_after_panic(container, reaper))).await {
        Some(error) => error,
        None => keep_suspended(container).await,
    }
}

/// Repeats the rollback of a suspended container. Afterwards the container runs, even if its client had
/// paused it.
pub async fn resume(container: &Container, reaper: &Reaper) -> Result<(), CheckpointError> {
    match caught(Box::pin(try_resume(container, reaper))).await {
        Ok(resumed) => resumed,
        Err(_) => Err(keep_suspended(container).await),
    }
}

async fn try_resume(container: &Container, reaper: &Reaper) -> Result<(), CheckpointError> {
    let recovery = Recovery::of(&container.bundle);
    let rolled_back = match &recovery {
        Some(recovery) => {
            rollback_gpu(container, recovery.record(), false, &EffectError::Resumed, reaper).await
        }
        None => Err(EffectError::NoJournal),
    };
    rolled_back.map_err(|suspended| {
        let failure = Failure {
            phase: Phase::GpuRestore,
            source: EffectError::Killed,
            suspended: Some(suspended),
        };
        into_error(container, failure, recovery.as_ref().and_then(image_of))
    })
}

/// The client's error for a failed transaction. A container whose rollback failed becomes suspended.
fn into_error(
    container: &Container,
    failure: Failure<EffectError>,
    image: Option<PathBuf>,
) -> CheckpointError {
    // A killed process that still frees its memory is no zombie yet.
    let is_killed = matches!(failure.suspended, Some(EffectError::Killed));
    // Order matters: if init ends from now on, the handler of its exit thaws the container.
    if failure.suspended.is_some() && !is_killed {
        container.set_state(InitState::Suspended);
    }
    let is_alive = !is_killed && procfs::is_alive(container.init.pid());
    CheckpointError::from_failure(&container.id, failure, image, is_alive)
}

/// The image, if the transaction has completed it.
fn image_of(recovery: &Recovery) -> Option<PathBuf> {
    let is_complete = recovery.is_complete();
    is_complete.then(|| recovery.image().to_owned())
}

/// The rollback has panicked at an unknown point. A container with GPUs must not run: it stays frozen and
/// becomes suspended.
async fn keep_suspended(container: &Container) -> CheckpointError {
    let frozen = async { container.cgroup()?.keep_frozen(RESET).await };
    let outcome = if container.traits.by_firn() {
        if let Err(error) = frozen.await.unless_absent() {
            log::error!("cannot freeze {}: {}", container.id, Chain(&error));
        }
        Outcome::Suspended
    } else {
        Outcome::Failed
    };
    let image = Recovery::of(&container.bundle).as_ref().and_then(image_of);
    if let Some(journal) = Journal::resume(&container.bundle).await.or_log() {
        journal.end_for(outcome, Some(EffectError::Panicked.line())).await;
    }
    let failure = Failure {
        phase: Phase::Rollback,
        source: EffectError::Panicked,
        suspended: container.traits.by_firn().then_some(EffectError::Panicked),
    };
    into_error(container, failure, image)
}

async fn try_rollback_after_panic(container: &Container, reaper: &Reaper) -> CheckpointError {
    let Some(recovery) = Recovery::of(&container.bundle) else {
        return CheckpointError::refused(container, EffectError::Panicked);
    };
    // Order matters: CRIU holds the tasks, and they would run once it is killed.
    if recovery.record().gpu_checkpointing || container.is_parked() {
        let frozen = container.cgroup().and_then(|cgroup| cgroup.begin_freeze());
        frozen.or_warn(format_args!("cannot freeze {}", container.id));
    }
    huge_pages::recover().await;
    // runc and CRIU may still write to an incomplete image.
    recovery.end_programs(PROGRAMS).await;
    let log = recovery.criu_log();
    killed_criu::release(container, &log, &CancellationToken::default(), reaper).await;
    let was_frozen = recovery.record().begin.was_frozen;
    let rolled_back = match container.traits.by_firn() {
        // It was frozen above, and stays so.
        true if container.is_parked() => Ok(()),
        true => {
            let cause = EffectError::Panicked;
            rollback_gpu(container, recovery.record(), was_frozen, &cause, reaper).await
        }
        false => {
            let guard = container.transaction.begin();
            reset_freezer(container, was_frozen, &guard.cancel).await;
            Ok(())
        }
    };
    let is_alive = procfs::is_alive(container.init.pid());
    let failure = Failure {
        phase: recovery.record().phase.unwrap_or(Phase::Inspect),
        source: EffectError::Panicked,
        suspended: rolled_back.err().filter(|_| is_alive),
    };
    if tokio::time::timeout(LEFTOVERS, recovery.clear()).await.is_err() {
        log::warn!(
            "cannot remove the files of the checkpoint of {} in time",
            container.id
        );
    }
    if failure.suspended.is_none() {
        recovery.forget(&container.bundle).await;
    }
    into_error(container, failure, image_of(&recovery))
}

/// Rolls back the GPU side of a transaction that has ended, by its journal.
async fn rollback_gpu(
    container: &Container,
    record: &Record,
    was_frozen: bool,
    cause: &EffectError,
    reaper: &Reaper,
) -> Result<(), EffectError> {
    let (transaction, means) = Transaction::reopen(container, record, reaper).await?;
    let begin = &record.begin;
    let request = Request {
        image: ImageDir::unopened(&begin.image),
        exit: begin.exit,
        ..Request::without_image()
    };
    let progress = Progress::recorded(record.cuda.clone());
    let mut effects = ContainerEffects::new(&transaction, means, &request, progress);
    effects.needs = record.memory.clone();
    let back = Rollback {
        locked: &record.cuda,
        was_frozen,
        gpu_checkpointing: record.gpu_checkpointing,
    };
    let rolled_back = phases::rollback(&mut effects, back).await;
    if rolled_back.is_ok() {
        effects.call_failed(cause).await;
    }
    if rolled_back.is_err() {
        effects.is_left_alive().await;
    }
    let outcome = match &rolled_back {
        Ok(()) => Outcome::Failed,
        Err(_) => Outcome::Suspended,
    };
    let reason = rolled_back.as_ref().err().map(EffectError::line);
    transaction
        .end_worker(&mut effects.gpu, rolled_back.is_ok())
        .await;
    drop(effects);
    transaction.end(outcome, reason, rolled_back.is_ok()).await;
    rolled_back
}
