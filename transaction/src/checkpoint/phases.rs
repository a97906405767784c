//! The phases of a GPU container's checkpoint. Each is a type whose methods consume it.
//!
//! ```text
//! Begun --gpu_lock--> Locked --gpu_checkpoint--> Checkpointed --dump--> Dumped --leave_running--> running
//!   |                   |                            |                   |
//!   |                   |                            |                   +--sync--> the container may end
//!   +-------------------+---- any failure -----------+-------------------+
//!                                  |
//!                               rollback --> the workload as before, or suspended
//! ```
//!
//! | type         | freezer  | driver state | application threads           |
//! |--------------|----------|--------------|-------------------------------|
//! | Begun        | as found | running      | as found                      |
//! | Locked       | thawed   | locked       | run; calls of the driver wait |
//! | Checkpointed | frozen   | checkpointed | have not run since the freeze |
//! | Dumped       | frozen   | checkpointed | the same; the image is valid  |
//!
//! All failures have one rollback, [`rollback`]. It trusts no record: it asks the driver for the state of
//! every process, restores the GPU state of those that are checkpointed, unlocks those that are locked, and
//! leaves the freezer as it was found. It may be repeated at any time. If it fails ([`Failure::suspended`]),
//! the container stays frozen with its GPU state in its own memory, until Resume repeats the rollback or the
//! container is ended.
//!
//! After a failure, threads are stopped before anything else: before a line in the journal, before any file.
//!
//! The module knows no containerd, no runc and no driver. What it touches is behind the traits of
//! [`crate::effects`], so that every failure of every phase is tested.

use std::collections::BTreeSet;

use firn_gpu::{CudaProcess, CudaState};

use crate::effects::{Device, Dump, note};
use crate::end_proof::EndProof;
pub use crate::phase::Phase;
use firn_host::Chain;
use firn_process::OrWarn;

/// A checkpoint that failed. Unless [`Failure::suspended`] is set, the workload continues as before.
#[derive(Debug, thiserror::Error)]
#[error("cannot {phase}")]
pub struct Failure<E: std::error::Error + 'static> {
    pub phase: Phase,
    #[source]
    pub source: E,
    /// Why the rollback failed too: the container is suspended.
    pub suspended: Option<E>,
}

impl<E: std::error::Error> Failure<E> {
    /// Nothing is suspended.
    pub fn new(phase: Phase, source: E) -> Self {
        Self {
            phase,
            source,
            suspended: None,
        }
    }
}

/// What a rollback starts from.
#[derive(Clone, Copy)]
pub struct Rollback<'p> {
    /// All processes that may be locked or checkpointed.
    pub locked: &'p [CudaProcess],
    pub was_frozen: bool,
    /// The driver may have begun to checkpoint: no thread may run before its GPU state is restored.
    pub gpu_checkpointing: bool,
}

/// Nothing has been touched.
pub(crate) struct Begun<'e, E: Dump> {
    effects: &'e mut E,
    was_frozen: bool,
}

/// All CUDA processes wait at the driver.
pub struct Locked<'e, E: Dump> {
    at: Begun<'e, E>,
    /// The CUDA processes as last seen: these are checkpointed and dumped.
    processes: Vec<CudaProcess>,
    /// All that were ever locked: a rollback deals with these.
    locked: Vec<CudaProcess>,
    /// The driver was called to checkpoint: no thread may run before its GPU state is restored.
    gpu_checkpointing: bool,
    /// The client has parked the container: a rollback leaves it so.
    parked: bool,
}

/// No process holds a GPU; their memory holds its state; the container is frozen.
pub struct Checkpointed<'e, E: Dump>(Locked<'e, E>);

/// The image is complete.
pub(crate) struct Dumped<'e, E: Dump>(Locked<'e, E>);

/// How often processes that appear between lock and freeze are locked too before the checkpoint fails.
const ROUNDS: usize = 4;

impl<'e, E: Dump> Begun<'e, E> {
    /// A checkpoint of a container whose freezer was found on (`was_frozen`) or off.
    pub fn new(effects: &'e mut E, was_frozen: bool) -> Self {
        Self { effects, was_frozen }
    }

    /// Refuses what cannot be checkpointed, then locks all CUDA processes. The application's threads must run
    /// for that, also in a container that the client has paused.
    pub async fn gpu_lock(self) -> Result<Locked<'e, E>, Failure<E::Error>> {
        let inspected = async {
            self.effects.enter(Phase::Inspect).await?;
            let processes = self.effects.inspect(true).await?;
            // Order matters: the others would stand still meanwhile.
            if !self.was_frozen {
                self.effects.expect_started().await?;
            }
            self.effects.meet().await?;
            Ok(processes)
        };
        let refused = |source| Failure::new(Phase::Inspect, source);
        let processes = inspected.await.map_err(refused)?;
        let pids = pids(&processes);
        let free = async {
            self.effects.enter(Phase::GpuLock).await?;
            self.effects.thaw().await?;
            if self.was_frozen {
                self.effects.expect_started().await?;
            }
            self.effects.expect_running(&pids).await
        };
        if let Err(source) = free.await {
            // No rollback: firn has locked nothing, and what another program has locked stays locked.
            if self.was_frozen && !self.effects.is_ended() {
                refreeze(self.effects).await;
            }
            return Err(refused(source));
        }
        let detached = self.effects.gpu_detach(&pids).await;
        let locked = match detached {
            Ok(()) => self.effects.gpu_lock(&pids).await,
            failed => failed,
        };
        let at = Locked {
            at: self,
            locked: processes.clone(),
            processes,
            gpu_checkpointing: false,
            parked: false,
        };
        at.finish(Phase::GpuLock, locked).await.map(|(at, ())| at)
    }
}

impl<'e, E: Dump> Locked<'e, E> {
    /// Checkpoints the GPU state. No thread of the application runs from the last freeze on.
    pub async fn gpu_checkpoint(mut self) -> Result<Checkpointed<'e, E>, Failure<E::Error>> {
        let done = self.try_gpu_checkpoint().await;
        let (at, ()) = self.finish(Phase::GpuCheckpoint, done).await?;
        Ok(Checkpointed(at))
    }

    async fn try_gpu_checkpoint(&mut self) -> Result<(), E::Error> {
        let effects = &mut *self.at.effects;
        effects.enter(Phase::GpuCheckpoint).await?;
        for round in 1.. {
            effects.freeze().await?;
            self.processes = effects.inspect(round < ROUNDS).await?;
            if effects.is_starting() {
                effects.thaw().await?;
                effects.expect_started().await?;
                continue;
            }
            let is_new = |p: &&CudaProcess| !self.locked.iter().any(|locked| locked.pid == p.pid);
            let new: Vec<CudaProcess> = self.processes.iter().filter(is_new).cloned().collect();
            // A process of the last round is not locked: the driver refuses to checkpoint it, and all is
            // rolled back.
            if new.is_empty() || round == ROUNDS {
                break;
            }
            log::debug!("{} CUDA processes appeared after the lock", new.len());
            effects.thaw().await?;
            let pids = pids(&new);
            self.locked.extend(new);
            effects.gpu_lock(&pids).await?;
        }
        effects.expect_files().await?;
        effects.meet().await?;
        effects.hold(restore_tids(&self.processes)).await?;
        effects.thaw().await?;
        self.gpu_checkpointing = true;
        effects.gpu_checkpoint(&pids(&self.processes)).await?;
        // Order matters: held threads that are released run, unless they are frozen.
        effects.keep_frozen().await?;
        effects.release().await
    }

    /// Writes to the journal whether `phase` succeeded, and rolls back if it failed.
    async fn finish<T>(
        self,
        phase: Phase,
        done: Result<T, E::Error>,
    ) -> Result<(Self, T), Failure<E::Error>> {
        let source = match done {
            Ok(done) => {
                self.at.effects.leave(phase, true).await;
                return Ok((self, done));
            }
            Err(source) => source,
        };
        if self.at.effects.is_ended() {
            return Err(Failure::new(phase, source));
        }
        // Order matters: a CRIU that is killed leaves the tasks thawed, and the journal's file system may
        // hang.
        if self.gpu_checkpointing && !self.at.effects.is_held() {
            stop(self.at.effects).await;
        }
        self.at.effects.leave(phase, false).await;
        if phase == Phase::CriuDump {
            self.at.effects.release_from_criu().await;
            if self.parked {
                end_criu_code_parked(self.at.effects, &self.processes).await;
            }
        }
        note(self.at.effects, Phase::Rollback).await;
        let suspended = self.roll_back().await.err().and_then(|stuck| stuck.last);
        Err(Failure {
            phase,
            source,
            suspended,
        })
    }

    async fn roll_back(self) -> Result<(), RollbackError<E::Error>> {
        if self.parked {
            stop(self.at.effects).await;
            return Ok(());
        }
        let back = Rollback {
            locked: &self.locked,
            was_frozen: self.at.was_frozen,
            gpu_checkpointing: self.gpu_checkpointing,
        };
        attempts(self.at.effects, back).await
    }
}

/// A rollback that failed.
struct RollbackError<E> {
    first: E,
    /// The error of the last attempt; none when the container has ended meanwhile.
    last: Option<E>,
}

/// Why an attempt failed.
enum Obstacle<E> {
    /// Threads cannot be stopped or held.
    Threads(E),
    Other(E),
}

impl<E> Obstacle<E> {
    fn into_error(self) -> E {
        match self {
            Self::Threads(error) | Self::Other(error) => error,
        }
    }
}

/// Rolls back; a second time if that fails, because a cancelled worker may have been the only reason. If the
/// threads cannot be stopped twice, the last attempt restores while they run. That is safe: their calls of
/// the driver wait. If that fails too, every thread that can be stopped is stopped.
async fn attempts<E: Device>(effects: &mut E, back: Rollback<'_>) -> Result<(), RollbackError<E::Error>> {
    let Err(obstacle) = attempt(effects, back, Threads::Held).await else {
        return Ok(());
    };
    let first = obstacle.into_error();
    if effects.is_ended() {
        return Err(RollbackError { first, last: None });
    }
    let mut again = attempt(effects, back, Threads::Held).await;
    if let Err(Obstacle::Threads(error)) = &again
        && back.gpu_checkpointing
        && !effects.is_ended()
    {
        log::warn!("threads run while their GPU state is restored: {}", Chain(error));
        again = attempt(effects, back, Threads::Running).await;
    }
    match again {
        Ok(()) => Ok(()),
        Err(_) if effects.is_ended() => Err(RollbackError { first, last: None }),
        Err(last) => {
            stop(effects).await;
            Err(RollbackError {
                first,
                last: Some(last.into_error()),
            })
        }
    }
}

/// The rollback of a checkpoint that has ended without one: its code failed, or its own rollback did.
pub async fn rollback<E: Device>(effects: &mut E, back: Rollback<'_>) -> Result<(), E::Error> {
    if back.gpu_checkpointing && !effects.is_held() {
        stop(effects).await;
    }
    note(effects, Phase::Rollback).await;
    let done = attempts(effects, back).await;
    done.map_err(|stuck| stuck.last.unwrap_or(stuck.first))
}

/// Lets CRIU's code end in a parked container, which stays so: the next CRIU would dump it with the process.
async fn end_criu_code_parked<E: Device>(effects: &mut E, processes: &[CudaProcess]) {
    stop(effects).await;
    let ended = async {
        effects.hold(restore_tids(processes)).await?;
        effects.thaw().await?;
        effects.end_criu_code().await
    };
    let ended = ended.await;
    ended.or_warn(format_args!("code of CRIU is left in the processes"));
    stop(effects).await;
}

/// Stops all threads as far as possible. Held threads stay held until they are frozen; then they are
/// released, because nobody should trace a container for as long as it is suspended.
async fn stop<E: Device>(effects: &mut E) {
    let stopped = match effects.keep_frozen().await {
        Ok(()) => effects.release().await,
        failed => failed,
    };
    stopped.or_warn(format_args!("cannot stop the threads"));
}

/// Freezes the container again for the client that had paused it. A thread that is slow to stop is no
/// failure: it has its GPU state.
async fn refreeze<E: Device>(effects: &mut E) {
    let frozen = effects.keep_frozen().await;
    frozen.or_warn(format_args!("the container is not frozen again yet"));
}

/// The pause of a container that gives its GPUs free: it stays frozen, with its GPU state in its own memory.
/// Returns its CUDA processes. A failure is rolled back.
pub(crate) async fn park<E: Dump>(
    effects: &mut E,
    was_frozen: bool,
) -> Result<Vec<CudaProcess>, Failure<E::Error>> {
    let locked = Begun::new(effects, was_frozen).gpu_lock().await?;
    let Checkpointed(at) = locked.gpu_checkpoint().await?;
    Ok(at.processes)
}

/// Restores the GPU state of a parked container, which continues. After a failure it stays parked; some of
/// its processes may be locked, with their state on GPUs.
pub(crate) async fn unpark<E: Device>(effects: &mut E, processes: &[CudaProcess]) -> Result<(), E::Error> {
    note(effects, Phase::GpuRestore).await;
    if processes.is_empty() {
        effects.thaw().await?;
        // Its CUDA processes may have ended since their memory was taken out.
        return effects.gpu_attach().await;
    }
    let back = Rollback {
        locked: processes,
        was_frozen: false,
        gpu_checkpointing: true,
    };
    let done = attempts(effects, back).await;
    done.map_err(|stuck| stuck.last.unwrap_or(stuck.first))
}

/// Parks the processes again whose GPU state a failed [`unpark`] has restored. They are in `restored`
/// afterwards, also after an error, which leaves it open which of them are parked. Returns whether all are: a
/// process that is unlocked already cannot be locked while its threads stand still.
pub(crate) async fn repark<E: Device>(
    effects: &mut E,
    processes: &[CudaProcess],
    restored: &mut Vec<i32>,
) -> Result<bool, E::Error> {
    effects.keep_frozen().await?;
    effects.hold(restore_tids(processes)).await?;
    effects.thaw().await?;
    let states = effects.states(&pids(processes)).await?;
    let locked = in_state(&states, CudaState::Locked);
    let running = in_state(&states, CudaState::Running);
    restored.extend(locked.iter().chain(&running));
    if !locked.is_empty() {
        effects.gpu_checkpoint(&locked).await?;
    }
    effects.keep_frozen().await?;
    effects.release().await?;
    Ok(running.is_empty())
}

impl<'e, E: Dump> Checkpointed<'e, E> {
    /// A container that its client has parked. What cannot be dumped is refused; nothing has been touched.
    pub(crate) async fn parked(effects: &'e mut E) -> Result<Self, Failure<E::Error>> {
        let inspected = async {
            effects.enter(Phase::Inspect).await?;
            let processes = effects.inspect(false).await?;
            effects.meet().await?;
            // It stands still already.
            effects.meet().await?;
            Ok(processes)
        };
        let processes = inspected.await;
        let processes = processes.map_err(|source| Failure::new(Phase::Inspect, source))?;
        Ok(Self(Locked {
            at: Begun::new(effects, true),
            locked: processes.clone(),
            processes,
            gpu_checkpointing: true,
            parked: true,
        }))
    }

    /// Dumps the container. A failure is rolled back.
    pub async fn dump(self) -> Result<Dumped<'e, E>, Failure<E::Error>> {
        let at = self.0;
        let effects = &mut *at.at.effects;
        let dumped = async {
            effects.enter(Phase::CriuDump).await?;
            effects.dump(&at.processes).await?;
            // Order matters: what is read from threads that run is of no moment.
            effects.expect_frozen().await?;
            effects.describe().await?;
            effects.expect_frozen().await?;
            effects.complete().await
        };
        let dumped = dumped.await;
        let (at, ()) = at.finish(Phase::CriuDump, dumped).await?;
        Ok(Dumped(at))
    }
}

impl<E: Dump> Dumped<'_, E> {
    /// Writes the image to its disk, for a container that is to end. It stays frozen until then: a failure is
    /// rolled back.
    pub(crate) async fn sync(self) -> Result<EndProof, Failure<E::Error>> {
        let at = self.0;
        note(at.at.effects, Phase::Sync).await;
        let synced = at.at.effects.sync().await;
        let (_, proof) = at.finish(Phase::Sync, synced).await?;
        Ok(proof)
    }

    /// Restores the GPU state, unlocks, and leaves the freezer as it was found; a parked container stays
    /// parked. After a failure the image is valid all the same.
    pub(crate) async fn leave_running(self) -> Result<(), Failure<E::Error>> {
        let suspended = |stuck: RollbackError<E::Error>| Failure {
            phase: Phase::GpuRestore,
            source: stuck.first,
            suspended: stuck.last,
        };
        if !self.0.parked {
            note(self.0.at.effects, Phase::GpuRestore).await;
        }
        self.0.roll_back().await.map_err(suspended)
    }
}

/// What threads do while the driver restores GPU state.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Threads {
    Held,
    Running,
}

/// One attempt of a rollback: restores and unlocks every process, and leaves the freezer as it was found.
///
/// Safe to repeat. What it has stopped or held stays so on an error.
async fn attempt<E: Device>(
    effects: &mut E,
    back: Rollback<'_>,
    threads: Threads,
) -> Result<(), Obstacle<E::Error>> {
    // Of a process that has its GPU state the threads may run: nothing needs holding, which may be what
    // failed.
    if back.gpu_checkpointing && threads == Threads::Held {
        if !effects.is_held() {
            effects.keep_frozen().await.map_err(Obstacle::Threads)?;
            let held = effects.hold(restore_tids(back.locked)).await;
            held.map_err(Obstacle::Threads)?;
        }
    } else {
        effects.release().await.map_err(Obstacle::Other)?;
    }
    effects.thaw().await.map_err(Obstacle::Other)?;
    let running = bring_to_running(effects, &pids(back.locked)).await;
    running.map_err(Obstacle::Other)?;
    if back.was_frozen {
        refreeze(effects).await;
    }
    effects.release().await.map_err(Obstacle::Other)?;
    effects.gpu_attach().await.map_err(Obstacle::Other)
}

/// Brings every process from the state that the driver reports to running.
async fn bring_to_running<E: Device>(effects: &mut E, pids: &[i32]) -> Result<(), E::Error> {
    let states = effects.states(pids).await?;
    let checkpointed = in_state(&states, CudaState::Checkpointed);
    let mut locked = in_state(&states, CudaState::Locked);
    if !checkpointed.is_empty() {
        // Order matters: CRIU's code would take away the memory that the driver maps.
        effects.end_criu_code().await?;
        effects.gpu_restore(&checkpointed).await?;
        locked.extend(checkpointed);
    }
    if locked.is_empty() {
        Ok(())
    } else {
        effects.gpu_unlock(&locked).await
    }
}

fn in_state(states: &[(i32, CudaState)], wanted: CudaState) -> Vec<i32> {
    let those = states.iter().filter(|(_, state)| *state == wanted);
    those.map(|(pid, _)| *pid).collect()
}

fn pids(processes: &[CudaProcess]) -> Vec<i32> {
    processes.iter().map(|p| p.pid).collect()
}

fn restore_tids(processes: &[CudaProcess]) -> BTreeSet<i32> {
    firn_host::ordered::set_of(processes.iter().map(|p| p.restore_tid))
}

#[cfg(test)]
mod tests;
