//! Pause that gives GPUs free, resume from it, and both together: the move of a running container to other
//! GPUs of its node.
//!
//! A pause runs the phases of a checkpoint up to the one in which the driver copies GPU state into the memory
//! of the processes. The container then stays frozen, *parked*. A resume restores the GPU state as the
//! rollback of a checkpoint does. In between another container may have the GPUs. Nothing is written to disk,
//! and pids, files and connections stay.
//!
//! A failed pause is rolled back. A failed resume leaves the container parked, so that it can be tried again.
//! A failed move goes back to the GPUs that the container had.

mod error;
mod grant;
mod resume;
mod wait;

use std::collections::BTreeMap;
use std::future::Future;
use std::path::Path;

use firn_config::{Keys, names};
use firn_host::Alone;
use firn_oci::Spec;

pub use error::{GrantChangeError, ParkError};
pub use resume::{Moved, Resumed, Wanted, move_gpus, resume};
pub use wait::Wait;

use firn_process::OrWarn;
use firn_process::blocking::blocking;
use firn_process::panics::caught;
use firn_process::reaper::Reaper;

use super::Request;
use super::container::{ContainerEffects, Progress};
use super::error::EffectError;
use super::phases::{self, Failure};
use super::plain::RESET;
use crate::container::{Container, InitState};
use crate::journal::{Journal, Operation, Outcome};
use crate::lease::{Lease, namespace_of};
use crate::parked::Parked;
use crate::phase::Phase;
use crate::recording;
use crate::transaction::{BeginError, Intent, Means, Transaction};

/// What the annotation `firn.dev/pause` may be.
const RELEASE_GPU: &str = "release-gpu";

/// Whether a pause of this container gives its GPUs free. Not the pause of a command of firn, which resumes
/// the container in a moment: another container could have taken the GPU by then.
pub fn is_requested(container: &Container) -> Result<bool, ParkError> {
    if !container.traits.has_nvidia() {
        return Ok(false);
    }
    let refused = |cause| refused(Operation::Pause, container, cause);
    let spec = Spec::load(&container.bundle).map_err(|error| refused(error.into()))?;
    match spec.annotation(names::ANNOTATION_PAUSE) {
        None => Ok(false),
        Some(RELEASE_GPU) => Ok(!is_worked_on(container)),
        Some(value) => Err(refused(setting(names::ANNOTATION_PAUSE, value).into())),
    }
}

/// Whether a command of firn works on the container. Not if that cannot be seen, which is logged.
pub(super) fn is_worked_on(container: &Container) -> bool {
    let namespace = namespace_of(&container.bundle);
    let by_firn = Alone::is_taken(Path::new(names::COMMANDS), &namespace, &container.id);
    let what = format_args!("cannot see whether a command of firn works on {}", container.id);
    by_firn.or_warn(what) == Some(true)
}

fn setting(name: &'static str, value: &str) -> GrantChangeError {
    let value = value.chars().take(64).collect();
    GrantChangeError::Setting { name, value }
}

fn refused(operation: Operation, container: &Container, cause: EffectError) -> ParkError {
    ParkError::Refused {
        operation,
        container: container.id.clone(),
        cause,
    }
}

/// Pauses a running container and gives its GPUs free. The caller holds its operation lock.
pub async fn pause(container: &Container, reaper: &Reaper) -> Result<(), ParkError> {
    unless_panicked(container, reaper, Box::pin(pause_gpus(container, reaper))).await
}

async fn pause_gpus(container: &Container, reaper: &Reaper) -> Result<(), ParkError> {
    let intent = Intent::without_image(Operation::Pause, recording::new_id());
    let (transaction, means) = begin(container, intent, reaper).await?;
    let request = Request::without_image();
    let mut effects = ContainerEffects::new(&transaction, means, &request, Progress::default());
    let ended = match park(&mut effects).await {
        Ok((mut parked, spec)) => {
            parked.sharers = give_free(container, &spec).await;
            container.put_parked(Some(parked));
            container.set_state(InitState::Parked);
            Ok(())
        }
        Err(failure) => Err(after_failure(&mut effects, failure).await),
    };
    transaction.end_worker(&mut effects.gpu, ended.is_ok()).await;
    drop(effects);
    end(transaction, ended).await
}

/// Waits for `work`, which is boxed: the futures of all phases together are large. After a panic of firn's
/// own code a parked container stays parked, every other one is rolled back.
async fn unless_panicked<T>(
    container: &Container,
    reaper: &Reaper,
    work: impl Future<Output = Result<T, ParkError>>,
) -> Result<T, ParkError> {
    match caught(work).await {
        Ok(done) => done,
        Err(_) => Err(after_panic(container, reaper).await),
    }
}

async fn begin<'c>(
    container: &'c Container,
    intent: Intent,
    reaper: &'c Reaper,
) -> Result<(Transaction<'c>, Means), ParkError> {
    let operation = intent.operation;
    let begun = Transaction::begin(container, Keys::PAUSE, intent, reaper).await;
    begun.map_err(|error| match error {
        BeginError::Config(error) => error.into(),
        BeginError::Program(error) => error.into(),
        BeginError::Cgroup(error) => error.into(),
        BeginError::Journal(error) => refused(operation, container, error.into()),
    })
}

/// Ends a pause, resume or move that has come to this. Returns the result.
async fn end<T>(transaction: Transaction<'_>, result: Result<T, ParkError>) -> Result<T, ParkError> {
    let outcome = match &result {
        Ok(_) => Outcome::Done,
        Err(ParkError::ByJournal(_)) => Outcome::Suspended,
        Err(ParkError::Ended { .. }) => Outcome::Ended,
        Err(_) => Outcome::Failed,
    };
    let suspended_by = match &result {
        Err(ParkError::ByJournal(error)) => error.suspended_by(),
        _ => None,
    };
    transaction.end(outcome, suspended_by, result.is_ok()).await;
    result
}

async fn after_panic(container: &Container, reaper: &Reaper) -> ParkError {
    if !container.is_parked() {
        // It has its GPUs, and not those that a move has taken for it.
        note_gpus(container).await;
        return ParkError::ByJournal(super::rollback_after_panic(container, reaper).await);
    }
    let frozen = async { container.cgroup()?.keep_frozen(RESET).await };
    let frozen = frozen.await;
    frozen.or_warn(format_args!("cannot freeze {}", container.id));
    // Order matters: held threads are released when they cannot run any more.
    drop(container.take_held());
    container.set_state(InitState::Parked);
    if container.has_pieces() {
        note_gpus(container).await;
    } else if let Some(spec) = Spec::load(&container.bundle).or_log() {
        give_free(container, &spec).await;
    }
    if let Some(journal) = Journal::resume(&container.bundle).await.or_log() {
        journal.end(Outcome::Failed).await;
    }
    ParkError::Parked {
        operation: Operation::Resume,
        container: container.id.clone(),
        cause: EffectError::Panicked,
    }
}

/// Runs the phases of a pause. The container's lease stays as it is. Returns the container's spec, too.
async fn park(effects: &mut ContainerEffects<'_>) -> Result<(Parked, Spec), Failure<EffectError>> {
    let was_frozen = effects.transaction.was_frozen;
    let spec = Spec::load(&effects.transaction.container.bundle);
    let spec = spec.map_err(|error| Failure::new(Phase::Inspect, error.into()))?;
    let processes = Box::pin(phases::park(effects, was_frozen)).await?;
    let source = effects.progress.source.as_ref();
    let gpus = source.map(|source| source.gpus.clone()).unwrap_or_default();
    let parked = Parked {
        processes,
        memory: effects.needs.clone(),
        home: gpus.clone(),
        gpus,
        elsewhere: BTreeMap::new(),
        partly: false,
        sharers: Vec::new(),
        id: effects.transaction.id.clone(),
    };
    Ok((parked, spec))
}

/// Writes which GPUs a container has that runs, whoever else has them.
pub async fn note_gpus(container: &Container) {
    if !container.traits.has_nvidia() {
        return;
    }
    let Ok(spec) = Spec::load(&container.bundle) else {
        return;
    };
    if let Ok(Some(lease)) = lease_of(container, &spec) {
        let noted = blocking(move || lease.note()).await;
        noted.or_warn(format_args!("cannot write which GPUs {} has", container.id));
    }
}

fn lease_of(container: &Container, spec: &Spec) -> Result<Option<Lease>, EffectError> {
    let init = container.init.pid();
    Ok(Lease::of(&container.bundle, &container.id, init, spec)?)
}

/// Writes that the container's GPUs are free. Returns the containers that have one of them, too.
async fn give_free(container: &Container, spec: &Spec) -> Vec<Lease> {
    let Ok(Some(lease)) = lease_of(container, spec) else {
        return Vec::new();
    };
    let noted = blocking(move || lease.park()).await;
    let noted = noted.or_warn(format_args!(
        "cannot write that the GPUs of {} are free",
        container.id
    ));
    noted.unwrap_or_default()
}

/// What follows a failed pause, also in a move.
async fn after_failure(effects: &mut ContainerEffects<'_>, failure: Failure<EffectError>) -> ParkError {
    let container = effects.transaction.container;
    // Order matters: if init ends from now on, the handler of its exit thaws the container.
    if failure.suspended.is_some() {
        container.set_state(InitState::Suspended);
    }
    let is_alive = effects.is_left_alive().await;
    if is_alive && failure.suspended.is_none() && effects.progress.prepared {
        effects.call_failed(&failure.source).await;
    }
    ParkError::of_failure(effects.transaction.operation, &container.id, failure, is_alive)
}
