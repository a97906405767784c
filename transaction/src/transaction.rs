//! The owner of a transaction: a checkpoint with GPUs or without, a pause that gives GPUs free, a resume, a
//! move to other GPUs, the rollback of one of these, or a restore.
//!
//! It has what all of them begin with (configuration, journal, cancellation), and ends the driver's worker,
//! the journal and the clock in one place. What a phase does is behind [`crate::effects`]; which phase
//! follows which, in `checkpoint::phases` and `restore::phases`.

use std::path::PathBuf;

use firn_config::{Config, ConfigError, Keys, ProgramError, find_program, names};
use firn_process::cancel::{CancellationToken, TransactionGuard};
use firn_process::cgroup::{Cgroup, CgroupError, FreezerState};
use firn_process::reaper::Reaper;

use crate::configured::configured;
use crate::container::Container;
use crate::driver::Driver;
use crate::journal::{self, Begin, Journal, JournalError, Operation, Outcome, Record};
use crate::timings;

/// A transaction that has begun and not ended.
pub(crate) struct Transaction<'c> {
    pub container: &'c Container,
    pub operation: Operation,
    /// Random id, for the job's hooks. Empty where no hook gets it.
    pub id: String,
    pub config: Config,
    /// Whether the container was frozen before.
    pub was_frozen: bool,
    pub journal: Journal,
    pub reaper: &'c Reaper,
    cancel: CancellationToken,
    /// None: the caller's, which ends it.
    _guard: Option<TransactionGuard<'c>>,
    /// Whether the bundle gets its timings: not without GPUs, as with the stock shim, and those of a rollback
    /// are of the transaction that was begun.
    is_timed: bool,
}

/// What a transaction is to do, for its journal.
pub(crate) struct Intent {
    pub operation: Operation,
    /// Whether the container's GPU state is a part of it.
    pub gpu: bool,
    /// As in [`Transaction`].
    pub id: String,
    /// The container ends with its dump.
    pub exit: bool,
    /// The image directory; empty if it has none.
    pub image: PathBuf,
    /// CRIU's work directory; empty if it has none.
    pub work: PathBuf,
    pub work_is_ours: bool,
    pub was_frozen: bool,
}

/// What works on the container of a transaction with GPUs.
pub(crate) struct Means {
    pub cgroup: Cgroup,
    /// The driver's worker.
    pub worker: PathBuf,
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
    /// Of a transaction on GPU state that writes no image.
    pub fn without_image(operation: Operation, id: String) -> Self {
        Self {
            operation,
            gpu: true,
            id,
            exit: false,
            image: PathBuf::new(),
            work: PathBuf::new(),
            work_is_ours: false,
            was_frozen: false,
        }
    }
}

impl Means {
    fn find(container: &Container, config: &Config) -> Result<Self, BeginError> {
        Ok(Self {
            worker: find_program(names::WORKER_PROGRAM, config.worker.path.as_deref())?,
            cgroup: container.cgroup()?,
        })
    }
}

impl<'c> Transaction<'c> {
    /// Begins one on GPU state, by these keys of the configuration: what is to be done is in the journal.
    /// After an error nothing has begun.
    pub async fn begin(
        container: &'c Container,
        keys: Keys,
        intent: Intent,
        reaper: &'c Reaper,
    ) -> Result<(Self, Means), BeginError> {
        let config = Config::load(keys)?;
        let means = Means::find(container, &config)?;
        let intent = Intent {
            was_frozen: means.cgroup.freezer_state()? != FreezerState::Thawed,
            ..intent
        };
        let guard = container.transaction.begin();
        let cancel = guard.cancel.clone();
        let begun = Self::begin_within(container, config, intent, reaper, cancel).await?;
        let transaction = Self {
            _guard: Some(guard),
            ..begun
        };
        Ok((transaction, means))
    }

    /// Begins one that `cancel` belongs to, whose guard the caller has. After an error nothing has begun.
    pub async fn begin_within(
        container: &'c Container,
        config: Config,
        intent: Intent,
        reaper: &'c Reaper,
        cancel: CancellationToken,
    ) -> Result<Self, JournalError> {
        let (operation, was_frozen) = (intent.operation, intent.was_frozen);
        let begin = Begin {
            op: operation,
            container: container.id.clone(),
            gpu: intent.gpu,
            exit: intent.exit,
            image: intent.image,
            work: intent.work,
            work_is_ours: intent.work_is_ours,
            was_frozen,
            checkpoint: intent.id.clone(),
        };
        let is_timed = begin.gpu;
        let journal = Journal::begin(&container.bundle, begin).await?;
        journal.follow(operation, container.follower.get());
        Ok(Self {
            container,
            operation,
            id: intent.id,
            config,
            was_frozen,
            journal,
            reaper,
            cancel,
            _guard: None,
            is_timed,
        })
    }

    /// Opens one again whose code has panicked, or that has left the container suspended, to roll it back.
    pub async fn reopen(
        container: &'c Container,
        record: &Record,
        reaper: &'c Reaper,
    ) -> Result<(Self, Means), BeginError> {
        let config = configured();
        let means = Means::find(container, &config)?;
        let journal = Journal::resume(&container.bundle).await?;
        let guard = container.transaction.begin();
        let transaction = Self {
            container,
            operation: record.begin.op,
            id: record.begin.checkpoint.clone(),
            config,
            was_frozen: record.begin.was_frozen,
            journal,
            reaper,
            cancel: guard.cancel.clone(),
            _guard: Some(guard),
            is_timed: false,
        };
        Ok((transaction, means))
    }

    /// Cancelled when the container is to end.
    pub fn cancel(&self) -> &CancellationToken {
        &self.cancel
    }

    /// A driver whose worker is in the journal.
    pub fn driver(&self, worker: PathBuf) -> Driver {
        let deadlines = self.config.deadlines.clone();
        Driver::new(worker, self.reaper.clone(), deadlines).with_journal(self.journal.clone())
    }

    /// Ends the driver's worker and the clock of one that has succeeded or not: the phases are over.
    pub async fn end_worker(&self, driver: &mut Driver, ok: bool) {
        timings::stop(ok);
        driver.end().await;
        if self.operation == Operation::Restore {
            journal::point("restore-worker-gone").await;
        } else {
            journal::point("checkpoint-worker-gone").await;
        }
    }

    /// Ends it: the journal has its outcome, and the bundle its timings. `suspended_by` is why the container
    /// stands still without its GPU state; `ok`, whether the client gets what it wanted.
    pub async fn end(self, outcome: Outcome, suspended_by: Option<String>, ok: bool) {
        // A hook or a rollback may have followed the worker's end.
        timings::stop(ok);
        self.journal.end_for(outcome, suspended_by).await;
        if !self.is_timed {
            return;
        }
        if self.operation != Operation::Restore {
            journal::point("checkpoint-ended").await;
        }
        timings::write(&self.container.bundle, ok).await;
    }
}
