//! Resume of a parked container, and the move of a running one.

use firn_config::{GpuBusy, names};
use firn_gpu::{DeviceNode, Gpu, SourceGpu};
use firn_oci::Spec;
use firn_preflight::Workload;
use firn_process::OrWarn;
use firn_process::blocking::blocking;
use firn_process::panics::caught;
use firn_process::reaper::Reaper;

use super::grant::NewGrant;
use super::{
    ParkError, after_failure, begin, end, give_free, lease_of, note_gpus, park, refused, setting,
    unless_panicked,
};
use crate::checkpoint::Request;
use crate::checkpoint::container::{ContainerEffects, Progress, is_exchange};
use crate::checkpoint::error::EffectError;
use crate::checkpoint::phases;
use crate::container::{Container, InitState};
use crate::effects::{Device, Gpu as _};
use crate::journal::Operation;
use crate::lease::{Lease, LeaseError};
use crate::look::{self, Checked};
use crate::parked::Parked;
use crate::phase::Phase;
use crate::recording;
use crate::timings;
use crate::transaction::Intent;

/// What a client wants of a resume or move.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// GPUs by UUID or index, or pairs `GPU-old=GPU-new`. None: those that the container has.
    pub gpus: Option<String>,
    /// What happens if another container has one. None: the container's annotation or the configuration
    /// decides.
    pub busy: Option<GpuBusy>,
}

impl Wanted {
    /// Whether it must be these GPUs.
    pub fn names_gpus(&self) -> bool {
        self.chosen().is_some()
    }

    fn chosen(&self) -> Option<&str> {
        self.gpus.as_deref().filter(|gpus| *gpus != names::SAME_GPUS)
    }
}

/// Other GPUs that a container has got.
#[derive(Clone, Debug)]
pub struct Moved {
    pub gpus: Vec<Gpu>,
    /// The driver's nodes that belong to no single GPU.
    pub common: Vec<DeviceNode>,
}

/// A container that continues.
#[derive(Debug)]
pub struct Resumed {
    /// None if it has the GPUs that it had.
    pub moved: Option<Moved>,
    /// Of the job's hook `resumed`.
    pub hook: Result<(), ParkError>,
}

/// Resumes a parked container. After an error it stays parked, unless it has ended. The caller holds its
/// operation lock, and does the wait of an error that is [`ParkError::awaited`].
pub async fn resume(container: &Container, wanted: &Wanted, reaper: &Reaper) -> Result<Resumed, ParkError> {
    let resumed = Box::pin(resume_gpus(container, wanted, reaper));
    unless_panicked(container, reaper, resumed).await
}

async fn resume_gpus(container: &Container, wanted: &Wanted, reaper: &Reaper) -> Result<Resumed, ParkError> {
    let operation = Operation::Resume;
    let Some(parked) = container.parked() else {
        return Err(refused(operation, container, EffectError::NoJournal));
    };
    let intent = Intent::without_image(operation, parked.id.clone());
    let (transaction, means) = begin(container, intent, reaper).await?;
    let request = Request::without_image();
    let mut effects = ContainerEffects::new(&transaction, means, &request, Progress::of(Some(parked)));
    let resumed = match Box::pin(unpark(&mut effects, wanted)).await {
        Ok(moved) => Ok(goes_on(&mut effects, moved).await),
        Err(cause @ EffectError::Lease(LeaseError::Busy { awaited: true, .. })) => {
            Err(refused(operation, container, cause))
        }
        Err(cause) => Err(stays_parked(&mut effects, cause).await),
    };
    transaction.end_worker(&mut effects.gpu, resumed.is_ok()).await;
    drop(effects);
    end(transaction, resumed).await
}

/// Moves a running container to other GPUs. After an error it runs on those that it had, unless that fails,
/// too: then it is parked. The caller holds its operation lock, and does the wait of an error that is
/// [`ParkError::awaited`].
pub async fn move_gpus(
    container: &Container,
    wanted: &Wanted,
    reaper: &Reaper,
) -> Result<Resumed, ParkError> {
    let moved = Box::pin(transact_move(container, wanted, reaper));
    unless_panicked(container, reaper, moved).await
}

async fn transact_move(
    container: &Container,
    wanted: &Wanted,
    reaper: &Reaper,
) -> Result<Resumed, ParkError> {
    let intent = Intent::without_image(Operation::Move, recording::new_id());
    let (transaction, means) = begin(container, intent, reaper).await?;
    let request = Request::without_image();
    let mut effects = ContainerEffects::new(&transaction, means, &request, Progress::default());
    let moved = Box::pin(run_move(&mut effects, wanted)).await;
    transaction.end_worker(&mut effects.gpu, moved.is_ok()).await;
    drop(effects);
    end(transaction, moved).await
}

async fn run_move(effects: &mut ContainerEffects<'_>, wanted: &Wanted) -> Result<Resumed, ParkError> {
    let container = effects.transaction.container;
    // Order matters: what takes time and may be refused comes before the container stands still.
    let planned = async {
        let spec = load(container)?;
        let (grant, common) = plan(effects, &spec, wanted).await?;
        Ok::<_, EffectError>((spec, grant, common))
    };
    let refuse = |cause| refused(Operation::Move, container, cause);
    let (spec, grant, common) = planned.await.map_err(refuse)?;
    let Some(grant) = grant else {
        return Ok(Resumed {
            moved: None,
            hook: Ok(()),
        });
    };
    let lease = lease_of(container, &grant.new).map_err(refuse)?;
    // Order matters: it keeps its own GPUs until it has left them.
    let own = lease_of(container, &spec).map_err(refuse)?;
    let busy = busy(&spec, effects, wanted).map_err(refuse)?;
    grant.check(effects).await.map_err(refuse)?;
    take(effects, lease, own, &[], busy).await.map_err(refuse)?;
    effects.prepare_copies(&grant.pairs()).await.map_err(refuse)?;
    match park(effects).await {
        Ok((parked, _)) => {
            container.put_parked(Some(parked.clone()));
            effects.progress.parked = Some(parked);
        }
        Err(failure) => {
            note_gpus(container).await;
            return Err(after_failure(effects, failure).await);
        }
    }
    let moved = Moved {
        gpus: grant.gpus.clone(),
        common,
    };
    let cause = match onto(effects, &grant).await {
        Ok(()) => return Ok(goes_on(effects, Some(moved)).await),
        Err(cause) => cause,
    };
    timings::fail();
    // Back to where it was, unless some of its processes could not leave the new GPUs.
    let is_back = is_parked(effects);
    note_gpus(container).await;
    if !effects.is_ended() && restore(effects).await.or_log().is_some() {
        if !is_back {
            return Ok(goes_on(effects, Some(moved)).await);
        }
        container.put_parked(None);
        container.set_state(InitState::Running);
        effects.call_failed(&cause).await;
        return Err(ParkError::RolledBack {
            operation: Operation::Move,
            container: container.id.clone(),
            phase: Phase::GpuRestore,
            cause,
        });
    }
    Err(stays_parked(effects, cause).await)
}

/// Brings a parked container to its GPUs, or to those that are wanted.
async fn unpark(effects: &mut ContainerEffects<'_>, wanted: &Wanted) -> Result<Option<Moved>, EffectError> {
    let container = effects.transaction.container;
    let parked = parked(effects)?.clone();
    effects.transaction.journal.cuda(&parked.processes).await?;
    effects.transaction.journal.memory(&parked.memory).await?;
    let spec = load(container)?;
    let (mut grant, mut common) = plan(effects, &spec, wanted).await?;
    let target = grant.as_ref().map_or(&spec, |grant| &grant.new);
    let lease = lease_of(container, target)?;
    let busy = busy(&spec, effects, wanted)?;
    if let Err(error) = take(effects, lease, None, &parked.sharers, busy).await {
        let is_busy = matches!(error, EffectError::Lease(LeaseError::Busy { .. }));
        if !(is_busy && busy == GpuBusy::Elsewhere && grant.is_none()) {
            return Err(error);
        }
        let found = elsewhere(effects, &spec).await?;
        (grant, common) = (Some(found.0), found.1);
    }
    match grant {
        Some(grant) => {
            onto(effects, &grant).await?;
            Ok(Some(Moved {
                gpus: grant.gpus.clone(),
                common,
            }))
        }
        None => {
            let left = left_with(effects).await?;
            restore(effects).await?;
            Ok(left)
        }
    }
}

/// The GPUs that a failed resume has left the container with, if they are not those of its pause: containerd
/// does not know of them yet.
async fn left_with(effects: &mut ContainerEffects<'_>) -> Result<Option<Moved>, EffectError> {
    let Parked { home, gpus, .. } = parked(effects)?.clone();
    if home == gpus {
        return Ok(None);
    }
    let inventory = effects.gpu.inventory().await?;
    let has = |gpu: &Gpu| gpus.iter().any(|own| own.uuid == gpu.uuid);
    Ok(Some(Moved {
        gpus: inventory.gpus.iter().filter(|gpu| has(gpu)).cloned().collect(),
        common: inventory.common_nodes,
    }))
}

/// Gives a parked container other GPUs and restores its GPU state there. After an error it has its old GPUs,
/// unless its state could not be parked again.
async fn onto(effects: &mut ContainerEffects<'_>, grant: &NewGrant) -> Result<(), EffectError> {
    refuse_open(effects, grant.given_up()).await?;
    effects.enter(Phase::Grant).await?;
    if !is_exchange(&grant.pairs()) {
        effects.transaction.container.put_other_gpus();
    }
    grant.apply(effects).await?;
    let before = parked(effects)?.clone();
    set_gpus(effects, grant.in_order_of(&before.gpus));
    let restored = restore(effects).await;
    if restored.is_err() && !effects.is_ended() && is_parked(effects) {
        // Order matters: the worker may have memory of its own on the old GPUs.
        effects.gpu.end().await;
        grant.revert(effects).await;
        set_gpus(effects, before.gpus);
    }
    restored
}

/// The driver restores the GPU state onto the container's GPUs, and the container continues. After an error
/// all of it is parked again, if that can be done.
async fn restore(effects: &mut ContainerEffects<'_>) -> Result<(), EffectError> {
    effects.copy_pieces().await?;
    let processes = parked(effects)?.processes.clone();
    let Err(error) = phases::unpark(effects, &processes).await else {
        return Ok(());
    };
    timings::fail();
    if !effects.is_ended() {
        let mut restored = Vec::new();
        let reparked = phases::repark(effects, &processes, &mut restored).await;
        if let Some(parked) = &mut effects.progress.parked {
            // Wherever they are now, their state was on these GPUs last.
            parked.note_moved(&restored);
            parked.partly = reparked.or_log() != Some(true);
        }
    }
    Err(error)
}

/// Whether no process has its state on a GPU.
fn is_parked(effects: &ContainerEffects<'_>) -> bool {
    effects
        .progress
        .parked
        .as_ref()
        .is_none_or(|parked| !parked.partly)
}

fn parked<'a>(effects: &'a ContainerEffects<'_>) -> Result<&'a Parked, EffectError> {
    effects.progress.parked.as_ref().ok_or(EffectError::NoJournal)
}

/// The container has these GPUs from now on. That is remembered at once: a panic that follows leaves it
/// parked with them.
fn set_gpus(effects: &mut ContainerEffects<'_>, gpus: Vec<SourceGpu>) {
    if let Some(parked) = &mut effects.progress.parked {
        parked.gpus = gpus;
        effects.transaction.container.put_parked(Some(parked.clone()));
    }
}

/// The container runs. Its hook is called.
async fn goes_on(effects: &mut ContainerEffects<'_>, moved: Option<Moved>) -> Resumed {
    let container = effects.transaction.container;
    container.put_parked(None);
    container.set_state(InitState::Running);
    if moved.is_some() {
        note_gpus(container).await;
    }
    // It runs already: after a panic nothing is to be rolled back.
    let hook = caught(Box::pin(effects.call_resumed())).await;
    if hook.is_err() {
        timings::fail();
    }
    let hook = hook.map_or(Err(EffectError::Panicked), |called| {
        called.map_err(EffectError::from)
    });
    Resumed {
        moved,
        hook: hook.map_err(|cause| ParkError::Hook {
            container: container.id.clone(),
            cause,
        }),
    }
}

/// A resume has failed, or a move whose rollback has failed, too.
async fn stays_parked(effects: &mut ContainerEffects<'_>, cause: EffectError) -> ParkError {
    let (container, operation) = (effects.transaction.container, effects.transaction.operation);
    let id = container.id.clone();
    if !effects.is_left_alive().await {
        container.put_parked(None);
        return ParkError::Ended {
            operation,
            container: id,
            cause,
        };
    }
    container.set_state(InitState::Parked);
    if let Some(parked) = &mut effects.progress.parked {
        if parked.partly || container.has_pieces() {
            note_gpus(container).await;
        } else if let Ok(spec) = load(container) {
            let sharers = give_free(container, &spec).await;
            // For a resume they were found at the pause.
            if operation == Operation::Move {
                parked.sharers = sharers;
            }
        }
        container.put_parked(Some(parked.clone()));
    }
    ParkError::Parked {
        operation,
        container: id,
        cause,
    }
}

fn load(container: &Container) -> Result<Spec, EffectError> {
    Ok(Spec::load(&container.bundle)?)
}

/// Decides which GPUs the container gets. None if it keeps its own.
async fn plan(
    effects: &mut ContainerEffects<'_>,
    spec: &Spec,
    wanted: &Wanted,
) -> Result<(Option<NewGrant>, Vec<DeviceNode>), EffectError> {
    let Some(wanted) = wanted.chosen() else {
        return Ok((None, Vec::new()));
    };
    let inventory = effects.gpu.inventory().await?;
    let grant = NewGrant::plan(spec, &inventory, wanted)?;
    Ok((
        Some(grant).filter(|grant| !grant.is_same()),
        inventory.common_nodes,
    ))
}

/// Free GPUs of the node's pool for a container whose own are taken.
async fn elsewhere(
    effects: &mut ContainerEffects<'_>,
    spec: &Spec,
) -> Result<(NewGrant, Vec<DeviceNode>), EffectError> {
    let inventory = effects.gpu.inventory().await?;
    let container = effects.transaction.container;
    let init = container.init.pid();
    let taken = blocking(move || Lease::taken_by_others(init)).await;
    let taken = taken.map_err(LeaseError::from)?;
    let is_taken = |node: &DeviceNode| taken.contains(&node.id());
    let grant = NewGrant::among(
        spec,
        &inventory,
        &effects.transaction.config.restore.gpus,
        is_taken,
    )?;
    let lease = lease_of(container, &grant.new)?;
    take(effects, lease, None, &[], GpuBusy::Refuse).await?;
    Ok((grant, inventory.common_nodes))
}

/// What happens if another container has the GPUs.
fn busy(spec: &Spec, effects: &ContainerEffects<'_>, wanted: &Wanted) -> Result<GpuBusy, EffectError> {
    if let Some(busy) = wanted.busy {
        return Ok(busy);
    }
    // A pod's author has no influence on who shares a GPU.
    let annotation = spec.annotation(names::ANNOTATION_GPU_BUSY);
    match annotation.filter(|_| spec.author().owns_node()) {
        None => Ok(effects.transaction.config.pause.gpu_busy),
        Some(word) => GpuBusy::of_word(word).ok_or_else(|| setting(names::ANNOTATION_GPU_BUSY, word).into()),
    }
}

/// Takes GPUs for the container, and lets it keep others until it has left them.
async fn take(
    effects: &ContainerEffects<'_>,
    lease: Option<Lease>,
    keeps: Option<Lease>,
    sharers: &[Lease],
    busy: GpuBusy,
) -> Result<(), EffectError> {
    let Some(lease) = lease else { return Ok(()) };
    let sharers = sharers.to_vec();
    let taken = blocking(move || match busy {
        GpuBusy::Share => lease.with(keeps.as_ref()).note().map_err(LeaseError::from),
        _ => lease.take(keeps.as_ref(), &sharers),
    });
    match taken.await {
        // Without this file nobody is refused; the container continues all the same.
        Err(LeaseError::Files(error)) => {
            log::warn!(
                "cannot see who has the GPUs of {}: {error}",
                effects.transaction.container.id
            );
            Ok(())
        }
        Err(LeaseError::Busy { holder, gpu, .. }) => Err(LeaseError::Busy {
            holder,
            gpu,
            awaited: busy == GpuBusy::Wait,
        }
        .into()),
        Ok(()) => Ok(()),
    }
}

/// Refuses to take GPUs from a container of which a process keeps them open.
async fn refuse_open(effects: &ContainerEffects<'_>, leaves: Vec<DeviceNode>) -> Result<(), EffectError> {
    let container = effects.transaction.container;
    let workload = Workload {
        init: container.init.pid(),
        pids: effects.cgroup.pids()?,
        leaves,
        ..Workload::default()
    };
    let request = look::Request::Check(Box::new(workload));
    let limit = effects.transaction.config.deadlines.look;
    let _nobody: Checked = look::look(
        &request,
        effects.transaction.reaper,
        limit,
        effects.transaction.cancel(),
    )
    .await?;
    Ok(())
}
