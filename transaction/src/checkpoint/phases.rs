//! The checkpoint of a GPU container as a sequence of phases, each a type whose methods consume it.
//!
//! ```text
//! Begun --lock--> Locked --take--> Taken --dump--> Dumped --finish--> gone (exit) or running on (leave running)
//!   |               |                |               |
//!   +---------------+----- fail -----+---------------+--> undo --> the workload as before, or Suspended
//! ```
//!
//! | phase   | freezer | driver state   | application threads           |
//! |---------|---------|----------------|-------------------------------|
//! | Begun   | as found| running        | as found                      |
//! | Locked  | thawed  | locked         | run, wait at the driver       |
//! | Taken   | frozen  | checkpointed   | have not run since the freeze |
//! | Dumped  | frozen  | checkpointed   | the same; the image is valid  |
//!
//! There is one way back, [`undo`], for every failure: it trusts no record of what was done but asks the driver for
//! the state of every process, gives back what was taken and unlocks what is locked, and leaves the freezer as it was
//! found. It may be taken again at any time. What it cannot give back now is [`Failure::suspended`]: the container stays
//! frozen, its GPU state in its own memory, until somebody takes the way back once more or ends it.
//!
//! After a failure threads are stopped before anything else happens: no note, no file.
//!
//! The module knows no containerd, no runc and no driver: what it touches is behind [`Effects`], so that every
//! failure of every phase is tested.

use std::collections::BTreeSet;
use std::future::Future;

use firn_gpu::CudaState;

use crate::driver::CudaProcess;
pub use crate::phase::Phase;
use firn_host::Chain;

/// What the transaction does to the world. Every method is bounded in time by its implementation.
pub trait Effects: Send {
    /// Why an effect failed.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Whether the container has ended or is about to be killed: then there is no way back, and nothing to give back.
    fn is_ended(&self) -> bool;
    /// Notes durably that `phase` is about to begin.
    fn enter(&mut self, phase: Phase) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Notes what became of `phase`.
    fn leave(&mut self, phase: Phase, ok: bool) -> impl Future<Output = ()> + Send;
    /// Turns the freezer on; nothing to do when it is. A failure turns it off.
    fn freeze(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Turns the freezer on for threads that must not run: a failure leaves it on, and whoever can stop stops.
    fn keep_frozen(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Turns the freezer off; nothing to do when it is.
    fn thaw(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// CUDA processes of the container, and a refusal of what cannot be checkpointed. No side effect; works while
    /// frozen.
    fn inspect(&mut self) -> impl Future<Output = Result<Vec<CudaProcess>, Self::Error>> + Send;
    /// Refuses processes that somebody else has locked or checkpointed. The driver can tell of a process that runs only.
    fn expect_running(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Holds all threads but the restore threads; called while frozen.
    fn hold(&mut self, except: BTreeSet<i32>) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Whether threads are held.
    fn is_held(&self) -> bool;
    /// Lets go of what is held, which runs on unless it is frozen. Nothing to do when nothing is held.
    fn release(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Locks all of these.
    fn lock(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Takes the GPU state of all of these into their memory.
    fn take(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Gives the GPU state of all of these back.
    fn give_back(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Unlocks all of these.
    fn unlock(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// State of each as the driver tells: running, locked or checkpointed; a process that has gone is left out. The driver
    /// ends what it has begun with a process before it answers, also for a caller that was killed: this waits for that.
    fn states(
        &mut self,
        pids: &[i32],
    ) -> impl Future<Output = Result<Vec<(i32, CudaState)>, Self::Error>> + Send;
    /// Dumps the frozen container and completes the image. A failure leaves all tasks alive, and the freezer off when CRIU
    /// was killed; it cleans nothing up, which would keep the way back waiting.
    fn dump(&mut self, processes: &[CudaProcess]) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// A checkpoint that failed. Unless it says [`Failure::suspended`], the workload goes on as before.
#[derive(Debug, thiserror::Error)]
#[error("cannot {phase}")]
pub struct Failure<E: std::error::Error + 'static> {
    pub phase: Phase,
    #[source]
    pub source: E,
    /// Why the way back failed too: the workload stands still until that is mended.
    pub suspended: Option<E>,
}

/// What a way back has to undo.
#[derive(Clone, Copy)]
pub struct Back<'p> {
    /// All processes that may be locked or taken.
    pub locked: &'p [CudaProcess],
    pub was_frozen: bool,
    /// Whether the driver may have been asked to take GPU state: from then on no thread may run before it is back.
    pub taking: bool,
}

/// Nothing has been touched.
pub struct Begun<'e, E: Effects> {
    effects: &'e mut E,
    was_frozen: bool,
}

/// All CUDA processes wait at the driver.
pub struct Locked<'e, E: Effects> {
    at: Begun<'e, E>,
    /// CUDA processes as last seen: these are taken and dumped.
    processes: Vec<CudaProcess>,
    /// All that were ever locked: these are given back.
    locked: Vec<CudaProcess>,
    /// Whether the driver has been asked to take GPU state: from then on no thread may run before it is back.
    taking: bool,
}

/// No process holds a GPU; their memory holds its state; the container is frozen.
pub struct Taken<'e, E: Effects>(Locked<'e, E>);

/// The image is complete.
pub struct Dumped<'e, E: Effects>(Locked<'e, E>);

/// How often processes that appear between lock and freeze are locked too before the checkpoint is given up.
const ROUNDS: usize = 4;

impl<'e, E: Effects> Begun<'e, E> {
    /// A checkpoint of a container whose freezer was found on (`was_frozen`) or off.
    pub fn new(effects: &'e mut E, was_frozen: bool) -> Self {
        Self { effects, was_frozen }
    }

    /// Refuses what cannot be checkpointed, then locks all CUDA processes. The application's threads must run for
    /// that, also in a container that the client has paused.
    pub async fn lock(self) -> Result<Locked<'e, E>, Failure<E::Error>> {
        let entered = self.effects.enter(Phase::Inspect).await;
        let inspected = match entered {
            Ok(()) => self.effects.inspect().await,
            Err(error) => Err(error),
        };
        let processes = match inspected {
            Ok(processes) => processes,
            Err(source) => {
                return Err(Failure {
                    phase: Phase::Inspect,
                    source,
                    suspended: None,
                });
            }
        };
        let pids = pids(&processes);
        let free = async {
            self.effects.enter(Phase::GpuLock).await?;
            self.effects.thaw().await?;
            self.effects.expect_running(&pids).await
        };
        if let Err(source) = free.await {
            // Not the way back of the others: nothing is locked by us, and what somebody else has locked stays so.
            if self.was_frozen && !self.effects.is_ended() {
                refreeze(self.effects).await;
            }
            return Err(Failure {
                phase: Phase::Inspect,
                source,
                suspended: None,
            });
        }
        let locked = self.effects.lock(&pids).await;
        let at = Locked {
            at: self,
            locked: processes.clone(),
            processes,
            taking: false,
        };
        at.entered(Phase::GpuLock, locked).await
    }
}

impl<'e, E: Effects> Locked<'e, E> {
    /// Takes the GPU state, no thread of the application running from the last freeze on.
    pub async fn take(mut self) -> Result<Taken<'e, E>, Failure<E::Error>> {
        let taken = self.try_take().await;
        self.entered(Phase::GpuCheckpoint, taken).await.map(Taken)
    }

    async fn try_take(&mut self) -> Result<(), E::Error> {
        let effects = &mut *self.at.effects;
        effects.enter(Phase::GpuCheckpoint).await?;
        for round in 1.. {
            effects.freeze().await?;
            self.processes = effects.inspect().await?;
            let is_new = |p: &&CudaProcess| !self.locked.iter().any(|locked| locked.pid == p.pid);
            let new: Vec<CudaProcess> = self.processes.iter().filter(is_new).cloned().collect();
            // A process that came in the last round is not locked: the driver refuses to take it, and all is undone.
            if new.is_empty() || round == ROUNDS {
                break;
            }
            log::debug!("{} CUDA processes appeared after the lock", new.len());
            effects.thaw().await?;
            let pids = pids(&new);
            self.locked.extend(new);
            effects.lock(&pids).await?;
        }
        effects.hold(restore_tids(&self.processes)).await?;
        effects.thaw().await?;
        self.taking = true;
        effects.take(&pids(&self.processes)).await?;
        // What is thawed and held must be frozen before it is let go.
        effects.keep_frozen().await?;
        effects.release().await
    }

    /// Notes what became of `phase`, and goes back when it failed.
    async fn entered(self, phase: Phase, done: Result<(), E::Error>) -> Result<Self, Failure<E::Error>> {
        let Err(source) = done else {
            self.at.effects.leave(phase, true).await;
            return Ok(self);
        };
        if self.at.effects.is_ended() {
            return Err(Failure {
                phase,
                source,
                suspended: None,
            });
        }
        // Order matters: CRIU that is killed leaves the tasks thawed, and a note may hang on its file system.
        if self.taking && !self.at.effects.is_held() {
            stop(self.at.effects).await;
        }
        self.at.effects.leave(phase, false).await;
        note(self.at.effects, Phase::Rollback).await;
        let suspended = self.way_back().await.err().and_then(|stuck| stuck.last);
        Err(Failure {
            phase,
            source,
            suspended,
        })
    }

    async fn way_back(self) -> Result<(), Stuck<E::Error>> {
        let back = Back {
            locked: &self.locked,
            was_frozen: self.at.was_frozen,
            taking: self.taking,
        };
        way_back(self.at.effects, back).await
    }
}

/// A way back that failed.
struct Stuck<E> {
    first: E,
    /// What was in the way in the end; none when the container has ended meanwhile.
    last: Option<E>,
}

/// What was in the way of an attempt.
enum Hindrance<E> {
    /// Threads cannot be stopped or held.
    Threads(E),
    Other(E),
}

impl<E> Hindrance<E> {
    fn into_error(self) -> E {
        match self {
            Self::Threads(error) | Self::Other(error) => error,
        }
    }
}

/// Undoes everything; once more when that fails, as a worker that was cut off may have been the only trouble. When threads
/// cannot be stopped, a last attempt is made while they run: the driver allows that, their calls of it wait. On an error no
/// thread runs that can be stopped.
async fn way_back<E: Effects>(effects: &mut E, back: Back<'_>) -> Result<(), Stuck<E::Error>> {
    let Err(hindrance) = undo(effects, back, Threads::Held).await else {
        return Ok(());
    };
    let first = hindrance.into_error();
    if effects.is_ended() {
        return Err(Stuck { first, last: None });
    }
    let mut again = undo(effects, back, Threads::Held).await;
    if let Err(Hindrance::Threads(error)) = &again
        && back.taking
        && !effects.is_ended()
    {
        log::warn!(
            "threads go on while their GPU state is given back: {}",
            Chain(error)
        );
        again = undo(effects, back, Threads::Running).await;
    }
    match again {
        Ok(()) => Ok(()),
        Err(_) if effects.is_ended() => Err(Stuck { first, last: None }),
        Err(last) => {
            stop(effects).await;
            Err(Stuck {
                first,
                last: Some(last.into_error()),
            })
        }
    }
}

/// The way back of a transaction that has ended without it: its code failed, or it was hindered.
pub async fn take_back<E: Effects>(effects: &mut E, back: Back<'_>) -> Result<(), E::Error> {
    if back.taking && !effects.is_held() {
        stop(effects).await;
    }
    note(effects, Phase::Rollback).await;
    let done = way_back(effects, back).await;
    done.map_err(|stuck| stuck.last.unwrap_or(stuck.first))
}

/// Lets no thread run any more, as far as that can be had. What is held stays held until it is frozen: nobody traces a
/// container for as long as it is suspended.
async fn stop<E: Effects>(effects: &mut E) {
    let stopped = match effects.keep_frozen().await {
        Ok(()) => effects.release().await,
        failed => failed,
    };
    if let Err(error) = stopped {
        log::warn!("cannot stop the threads: {}", Chain(&error));
    }
}

/// Turns the freezer on again for the client that had. That a thread takes its time to stop is no failure: it has its GPU
/// state.
async fn refreeze<E: Effects>(effects: &mut E) {
    if let Err(error) = effects.keep_frozen().await {
        log::warn!("the container is not frozen again yet: {}", Chain(&error));
    }
}

impl<'e, E: Effects> Taken<'e, E> {
    /// Dumps the container. After a failure the GPU state is given back.
    pub async fn dump(self) -> Result<Dumped<'e, E>, Failure<E::Error>> {
        let at = self.0;
        let effects = &mut *at.at.effects;
        let dumped = match effects.enter(Phase::CriuDump).await {
            Ok(()) => effects.dump(&at.processes).await,
            Err(error) => Err(error),
        };
        at.entered(Phase::CriuDump, dumped).await.map(Dumped)
    }
}

impl<E: Effects> Dumped<'_, E> {
    /// The container goes on: GPU state back, unlocked, freezer as it was found. A failure leaves the image valid.
    pub async fn run_on(self) -> Result<(), Failure<E::Error>> {
        let suspended = |stuck: Stuck<E::Error>| Failure {
            phase: Phase::GpuRestore,
            source: stuck.first,
            suspended: stuck.last,
        };
        note(self.0.at.effects, Phase::GpuRestore).await;
        self.0.way_back().await.map_err(suspended)
    }
}

/// Notes a phase that has to happen, whether it can be noted or not.
async fn note<E: Effects>(effects: &mut E, phase: Phase) {
    if let Err(error) = effects.enter(phase).await {
        log::warn!("{}", Chain(&error));
    }
}

/// What threads do while the driver gives GPU state back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Threads {
    Held,
    Running,
}

/// Gives every process back what was taken, whatever was done before, and leaves the freezer as it was found.
///
/// Safe to repeat. What it has stopped or held stays so on an error.
async fn undo<E: Effects>(
    effects: &mut E,
    back: Back<'_>,
    threads: Threads,
) -> Result<(), Hindrance<E::Error>> {
    // Of a process that has its GPU state the threads may run: nothing needs holding, which may be what failed.
    if back.taking && threads == Threads::Held {
        if !effects.is_held() {
            effects.keep_frozen().await.map_err(Hindrance::Threads)?;
            let held = effects.hold(restore_tids(back.locked)).await;
            held.map_err(Hindrance::Threads)?;
        }
    } else {
        effects.release().await.map_err(Hindrance::Other)?;
    }
    effects.thaw().await.map_err(Hindrance::Other)?;
    let settled = settle(effects, &pids(back.locked)).await;
    settled.map_err(Hindrance::Other)?;
    if back.was_frozen {
        refreeze(effects).await;
    }
    effects.release().await.map_err(Hindrance::Other)
}

/// Brings every process from the state that the driver tells to running.
async fn settle<E: Effects>(effects: &mut E, pids: &[i32]) -> Result<(), E::Error> {
    let states = effects.states(pids).await?;
    let of = |wanted| {
        let those = states.iter().filter(|(_, state)| *state == wanted);
        those.map(|(pid, _)| *pid).collect::<Vec<_>>()
    };
    let (taken, mut locked) = (of(CudaState::Checkpointed), of(CudaState::Locked));
    if !taken.is_empty() {
        effects.give_back(&taken).await?;
        locked.extend(taken);
    }
    if locked.is_empty() {
        Ok(())
    } else {
        effects.unlock(&locked).await
    }
}

fn pids(processes: &[CudaProcess]) -> Vec<i32> {
    processes.iter().map(|p| p.pid).collect()
}

fn restore_tids(processes: &[CudaProcess]) -> BTreeSet<i32> {
    firn_host::ordered::set_of(processes.iter().map(|p| p.restore_tid))
}

#[cfg(test)]
mod tests;
