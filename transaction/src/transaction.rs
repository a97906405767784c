//! The owner of a transaction on a container that runs: a checkpoint, a pause that gives GPUs free, a resume,
//! a move to other GPUs, or the rollback of one of these.
//!
//! It has what all of them begin with (configuration, state of the freezer, journal, cancellation), and ends
//! the driver's worker, the journal and the clock in one place. What a phase does is behind
//! [`crate::effects`]; which phase follows which, in `checkpoint::phases`.

use std::path::PathBuf;

use firn_config::{Config, ConfigError, Keys, ProgramError, find_program, names};
use firn_process::cancel::{CancellationToken, TransactionGuard};
use firn_process::cgroup::{Cgroup, CgroupError, FreezerState};
use firn_process::reaper::Reaper;

use crate::configured::configured;
use crate::container::Container;
use crate::driver::Driver;
use crate::journal::{self, Begin, Journal, JournalError, Operation, Outcome, Record};
use crate::recording;
use crate::timings;

/// A transaction that has begun and not ended.
pub(crate) struct Transaction<'c> {
    pub container: &'c Container,
    pub operation: Operation,
    /// Random id, for the job's hooks.
    pub id: String,
    pub config: Config,
    pub cgroup: Cgroup,
    /// Whether the container was frozen before.
    pub was_frozen: bool,
    pub journal: Journal,
    pub reaper: &'c Reaper,
    worker: PathBuf,
    guard: TransactionGuard<'c>,
    /// Its timings are those of the transaction that was begun.
    is_reopened: bool,
}

/// What a transaction is to do, for its journal.
pub(crate) struct Intent {
    pub operation: Operation,
    /// The configuration that it goes by.
    pub keys: Keys,
    /// Of a pause, for its resume; none: a new one.
    pub id: Option<String>,
    /// The container ends with its dump.
    pub exit: bool,
    /// The image directory; empty if it writes none.
    pub image: PathBuf,
    /// CRIU's work directory; empty if it has none.
    pub work: PathBuf,
    pub work_is_ours: bool,
}

/// Why a transaction could not begin, or not be opened again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BeginError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Journal(#[from] JournalError),
}

impl Intent {
    /// Of a transaction that writes no image.
    pub fn without_image(operation: Operation, id: Option<String>) -> Self {
        Self {
            operation,
            keys: Keys::PAUSE,
            id,
            exit: false,
            image: PathBuf::new(),
            work: PathBuf::new(),
            work_is_ours: false,
        }
    }
}

impl<'c> Transaction<'c> {
    /// Begins it: what is to be done is in the journal. After an error nothing has begun.
    pub async fn begin(
        container: &'c Container,
        intent: Intent,
        reaper: &'c Reaper,
    ) -> Result<Self, BeginError> {
        let config = Config::load(intent.keys)?;
        let worker = find_program(names::WORKER_PROGRAM, config.worker.path.as_deref())?;
        let cgroup = container.cgroup()?;
        let was_frozen = cgroup.freezer_state()? != FreezerState::Thawed;
        let id = intent.id.unwrap_or_else(recording::new_id);
        let begin = Begin {
            op: intent.operation,
            container: container.id.clone(),
            gpu: true,
            exit: intent.exit,
            image: intent.image,
            work: intent.work,
            work_is_ours: intent.work_is_ours,
            was_frozen,
            checkpoint: id.clone(),
        };
        let journal = Journal::begin(&container.bundle, begin).await?;
        journal.follow(intent.operation, container.follower.get());
        Ok(Self {
            container,
            operation: intent.operation,
            id,
            config,
            cgroup,
            was_frozen,
            journal,
            reaper,
            worker,
            guard: container.transaction.begin(),
            is_reopened: false,
        })
    }

    /// Opens one again whose code has panicked, or that has left the container suspended, to roll it back.
    pub async fn reopen(
        container: &'c Container,
        record: &Record,
        reaper: &'c Reaper,
    ) -> Result<Self, BeginError> {
        let config = configured();
        let worker = find_program(names::WORKER_PROGRAM, config.worker.path.as_deref())?;
        Ok(Self {
            container,
            operation: record.begin.op,
            id: record.begin.checkpoint.clone(),
            config,
            cgroup: container.cgroup()?,
            was_frozen: record.begin.was_frozen,
            journal: Journal::resume(&container.bundle).await?,
            reaper,
            worker,
            guard: container.transaction.begin(),
            is_reopened: true,
        })
    }

    /// Cancelled when the container is to end.
    pub fn cancel(&self) -> &CancellationToken {
        &self.guard.cancel
    }

    /// A driver whose worker is in the journal.
    pub fn driver(&self) -> Driver {
        let deadlines = self.config.deadlines.clone();
        Driver::new(self.worker.clone(), self.reaper.clone(), deadlines).with_journal(self.journal.clone())
    }

    /// Ends it: no worker is left, the journal has its outcome, and the bundle its timings. `suspended_by`
    /// is why the container stands still without its GPU state.
    pub async fn end(self, mut driver: Driver, outcome: Outcome, suspended_by: Option<String>, ok: bool) {
        timings::stop(ok);
        driver.end().await;
        journal::point("checkpoint-worker-gone").await;
        self.journal.end_for(outcome, suspended_by).await;
        journal::point("checkpoint-ended").await;
        if !self.is_reopened {
            timings::write(&self.container.bundle, ok).await;
        }
    }
}
