//! The checkpoint of a GPU container as a sequence of phases, each a type whose methods consume it.
//!
//! ```text
//! Begun --lock--> Locked --take--> Taken --dump--> Dumped --finish--> gone (exit) or running on (leave running)
//!   |               |                |               |
//!   +---------------+----- fail -----+---------------+--> undo --> the workload as before, or Lost
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
//! found. Only when the driver will not give a state back is the workload [`Failure::lost`]: it then stays frozen,
//! because code that runs without its GPU state would compute garbage, and the image, if any, is named in the error.
//!
//! The module knows no containerd, no runc and no driver: what it touches is behind [`Effects`], so that every
//! failure of every phase is tested.

use std::collections::BTreeSet;
use std::future::Future;

use firn_gpu::CudaState;

pub(crate) use crate::journal::Phase;
use crate::logger::Chain;
use crate::worker::CudaProcess;

/// What the transaction does to the world. Every method is bounded in time by its implementation.
pub(crate) trait Effects: Send {
    /// Why an effect failed.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Whether the container has ended or is about to be killed: then there is no way back, and nothing to give back.
    fn is_ended(&self) -> bool;
    /// Notes durably that `phase` is about to begin.
    fn enter(&mut self, phase: Phase) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Notes what became of `phase`.
    fn leave(&mut self, phase: Phase, ok: bool) -> impl Future<Output = ()> + Send;
    /// Turns the freezer on; nothing to do when it is.
    fn freeze(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Turns the freezer off; nothing to do when it is.
    fn thaw(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// CUDA processes of the container, and a refusal of what cannot be checkpointed. No side effect; works while
    /// frozen.
    fn inspect(&mut self) -> impl Future<Output = Result<Vec<CudaProcess>, Self::Error>> + Send;
    /// Refuses processes that somebody else has locked or checkpointed. The driver can tell of a process that runs only.
    fn expect_running(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Holds all threads but the restore threads; called while frozen.
    fn hold(&mut self, except: BTreeSet<i32>) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Lets go of what is held; called while frozen. Nothing to do when nothing is held.
    fn release(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Locks all of these.
    fn lock(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Takes the GPU state of all of these into their memory.
    fn take(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Gives the GPU state of all of these back.
    fn give_back(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Unlocks all of these.
    fn unlock(&mut self, pids: &[i32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// State of each as the driver tells: running, locked or checkpointed; a process that has gone is left out.
    fn states(
        &mut self,
        pids: &[i32],
    ) -> impl Future<Output = Result<Vec<(i32, CudaState)>, Self::Error>> + Send;
    /// Dumps the frozen container and completes the image; a failure leaves no image and all tasks alive.
    fn dump(&mut self, processes: &[CudaProcess]) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// A checkpoint that failed. Unless it says [`Failure::lost`], the workload goes on as before.
#[derive(Debug, thiserror::Error)]
#[error("cannot {phase}")]
pub(crate) struct Failure<E: std::error::Error + 'static> {
    pub phase: Phase,
    #[source]
    pub source: E,
    /// Why the way back failed too: the workload is frozen without its GPU state.
    pub lost: Option<E>,
}

/// Nothing has been touched.
pub(crate) struct Begun<'e, E: Effects> {
    effects: &'e mut E,
    was_frozen: bool,
}

/// All CUDA processes wait at the driver.
pub(crate) struct Locked<'e, E: Effects> {
    at: Begun<'e, E>,
    /// CUDA processes as last seen: these are taken and dumped.
    processes: Vec<CudaProcess>,
    /// All that were ever locked: these are given back.
    locked: Vec<CudaProcess>,
    /// Whether the driver has been asked to take GPU state: from then on no thread may run before it is back.
    taking: bool,
}

/// No process holds a GPU; their memory holds its state; the container is frozen.
pub(crate) struct Taken<'e, E: Effects>(Locked<'e, E>);

/// The image is complete.
pub(crate) struct Dumped<'e, E: Effects>(Locked<'e, E>);

/// How often processes that appear between lock and freeze are locked too before the checkpoint is given up.
const ROUNDS: usize = 4;

impl<'e, E: Effects> Begun<'e, E> {
    /// A checkpoint of a container whose freezer was found on (`was_frozen`) or off.
    pub(crate) fn new(effects: &'e mut E, was_frozen: bool) -> Self {
        Self { effects, was_frozen }
    }

    /// Refuses what cannot be checkpointed, then locks all CUDA processes. The application's threads must run for
    /// that, also in a container that the client has paused.
    pub(crate) async fn lock(self) -> Result<Locked<'e, E>, Failure<E::Error>> {
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
                    lost: None,
                });
            }
        };
        let pids = pids(&processes);
        let free = async {
            self.effects.enter(Phase::Lock).await?;
            self.effects.thaw().await?;
            self.effects.expect_running(&pids).await
        };
        if let Err(source) = free.await {
            // Not the way back of the others: nothing is locked by us, and what somebody else has locked stays so.
            let lost = if self.was_frozen && !self.effects.is_ended() {
                self.effects.freeze().await.err()
            } else {
                None
            };
            return Err(Failure {
                phase: Phase::Inspect,
                source,
                lost,
            });
        }
        let locked = self.effects.lock(&pids).await;
        self.effects.leave(Phase::Lock, locked.is_ok()).await;
        let at = Locked {
            at: self,
            locked: processes.clone(),
            processes,
            taking: false,
        };
        match locked {
            Ok(()) => Ok(at),
            Err(source) => Err(at.fail(Phase::Lock, source).await),
        }
    }
}

impl<'e, E: Effects> Locked<'e, E> {
    /// Takes the GPU state, no thread of the application running from the last freeze on.
    pub(crate) async fn take(mut self) -> Result<Taken<'e, E>, Failure<E::Error>> {
        let taken = self.try_take().await;
        self.at.effects.leave(Phase::Take, taken.is_ok()).await;
        match taken {
            Ok(()) => Ok(Taken(self)),
            Err(source) => Err(self.fail(Phase::Take, source).await),
        }
    }

    async fn try_take(&mut self) -> Result<(), E::Error> {
        let effects = &mut *self.at.effects;
        effects.enter(Phase::Take).await?;
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
        let taken = effects.take(&pids(&self.processes)).await;
        // Also after a failure: what is thawed and held must be frozen before it is let go.
        effects.freeze().await?;
        effects.release().await?;
        taken
    }

    async fn fail(self, phase: Phase, source: E::Error) -> Failure<E::Error> {
        if self.at.effects.is_ended() {
            let lost = None;
            return Failure { phase, source, lost };
        }
        note(self.at.effects, Phase::Undo).await;
        let lost = self.way_back().await.err().and_then(|stuck| stuck.again);
        Failure { phase, source, lost }
    }

    async fn way_back(self) -> Result<(), Stuck<E::Error>> {
        way_back(self.at.effects, &self.locked, self.at.was_frozen, self.taking).await
    }
}

/// A way back that failed.
struct Stuck<E> {
    first: E,
    /// None when the container has ended meanwhile.
    again: Option<E>,
}

/// Undoes everything; once more when that fails, as a worker that was cut off may have been the only trouble.
async fn way_back<E: Effects>(
    effects: &mut E,
    locked: &[CudaProcess],
    was_frozen: bool,
    taking: bool,
) -> Result<(), Stuck<E::Error>> {
    let Err(first) = undo(effects, locked, was_frozen, taking).await else {
        return Ok(());
    };
    if effects.is_ended() {
        return Err(Stuck { first, again: None });
    }
    match undo(effects, locked, was_frozen, taking).await {
        Ok(()) => Ok(()),
        Err(_) if effects.is_ended() => Err(Stuck { first, again: None }),
        Err(again) => Err(Stuck {
            first,
            again: Some(again),
        }),
    }
}

/// The way back of a transaction that has ended without it: its code failed. `locked` are the processes that it has
/// seen, `taking` whether it may have taken GPU state.
pub(crate) async fn take_back<E: Effects>(
    effects: &mut E,
    locked: &[CudaProcess],
    was_frozen: bool,
    taking: bool,
) -> Result<(), E::Error> {
    note(effects, Phase::Undo).await;
    let done = way_back(effects, locked, was_frozen, taking).await;
    done.map_err(|stuck| stuck.again.unwrap_or(stuck.first))
}

impl<'e, E: Effects> Taken<'e, E> {
    /// Dumps the container. After a failure the GPU state is given back.
    pub(crate) async fn dump(self) -> Result<Dumped<'e, E>, Failure<E::Error>> {
        let at = self.0;
        let effects = &mut *at.at.effects;
        let dumped = match effects.enter(Phase::Dump).await {
            Ok(()) => effects.dump(&at.processes).await,
            Err(error) => Err(error),
        };
        effects.leave(Phase::Dump, dumped.is_ok()).await;
        match dumped {
            Ok(()) => Ok(Dumped(at)),
            Err(source) => Err(at.fail(Phase::Dump, source).await),
        }
    }
}

impl<E: Effects> Dumped<'_, E> {
    /// The container goes on: GPU state back, unlocked, freezer as it was found. A failure leaves the image valid.
    pub(crate) async fn run_on(self) -> Result<(), Failure<E::Error>> {
        let lost = |stuck: Stuck<E::Error>| Failure {
            phase: Phase::GiveBack,
            source: stuck.first,
            lost: stuck.again,
        };
        note(self.0.at.effects, Phase::GiveBack).await;
        self.0.way_back().await.map_err(lost)
    }
}

/// Notes a phase that has to happen, whether it can be noted or not.
async fn note<E: Effects>(effects: &mut E, phase: Phase) {
    if let Err(error) = effects.enter(phase).await {
        log::warn!("{}", Chain(&error));
    }
}

/// Gives every process back what was taken, whatever was done before, and leaves the freezer as it was found.
///
/// Safe to repeat. On an error after something was taken the container is left frozen, or its threads held.
async fn undo<E: Effects>(
    effects: &mut E,
    locked: &[CudaProcess],
    was_frozen: bool,
    taking: bool,
) -> Result<(), E::Error> {
    let pids = pids(locked);
    if !taking {
        // Every process has its GPU state, so its threads may run: nothing needs holding, which may be what failed.
        effects.release().await?;
        effects.thaw().await?;
        settle(effects, &pids).await?;
        return if was_frozen {
            effects.freeze().await
        } else {
            Ok(())
        };
    }
    // Order matters: CRIU that is killed leaves the tasks thawed, and none may run without its GPU state.
    effects.freeze().await?;
    effects.release().await?;
    effects.hold(restore_tids(locked)).await?;
    effects.thaw().await?;
    let settled = settle(effects, &pids).await;
    effects.freeze().await?;
    settled?;
    effects.release().await?;
    if was_frozen { Ok(()) } else { effects.thaw().await }
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
    processes.iter().map(|p| p.restore_tid).collect()
}

#[cfg(test)]
#[path = "transaction_tests.rs"]
mod tests;
