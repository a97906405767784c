//! Runs a restore, up to its commit or rollback.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_host::ProblemReport;
use firn_oci::job_hook::JobHook;
use firn_oci::{Spec, criu_config, criu_script};
use firn_process::OrWarn;
use firn_process::blocking::{remove, stoppable, tidy};
use firn_process::cancel::{CancellationToken, Interrupted};
use firn_process::panics::{caught, twice};
use firn_process::reaper::Reaper;

use super::container::RestoreEffects;
use super::error::Cause;
use super::place::in_use;
use super::prepare::left_image;
use super::rollback::{LOG, rollback, work_dir};
use super::{RestoreError, phases, remove_unpacked};
use crate::configured::configured;
use crate::container::Container;
use crate::image_dir::error_lines;
use crate::job_hook::{Caller, HookError};
use crate::journal::{Journal, Operation, Outcome, point};
use crate::phase::Phase;
use crate::pod_shm::PodShm;
use crate::prepared_restore::PreparedRestore;
use crate::recording;
use crate::recovery::Recovery;
use crate::runc::{Bounds, Restore, RuncError, read_pid};
use crate::transaction::{Intent, Transaction};

/// How long runc and CRIU may take to end after a panic of firn's own code.
const PROGRAMS: Duration = Duration::from_secs(30);

/// What a front end has for a container that is restored: the stdio of its init.
pub trait FrontEnd: Send {
    /// Why it cannot give it, or why the restore failed.
    type Error: From<RestoreError> + Send;

    /// Opens the stdio. It may wait for the client.
    fn open(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Where the OCI runtime writes the pid of init.
    fn pid_file(&self) -> PathBuf;
    /// The socket that gets the terminal.
    fn console(&self) -> Option<PathBuf>;
    /// Gives the stdio to the call of the OCI runtime.
    fn attach(&mut self, command: &mut Command);
    /// Connects the stdio with the processes, which run.
    fn connect(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Lets go of stdio that was opened and not connected.
    fn close(&mut self) -> impl Future<Output = ()> + Send;
}

/// A restore that did not happen.
pub struct NotRestored<E> {
    pub error: E,
    /// Whoever killed the container relies on its end.
    pub is_killed: bool,
}

/// A container whose processes run again. Its transaction is open until it is committed or rolled back.
struct Restored<'c> {
    /// Pid of init.
    pid: i32,
    transaction: Transaction<'c>,
    /// Whether its cgroup was empty before.
    was_free: bool,
}

impl Restored<'_> {
    /// Calls the job's hook `restored`. After an error the caller rolls the restore back. Order matters: the
    /// container's output must be read meanwhile, or a job that writes much would wait for that.
    async fn call_hook(&self, prepared: &PreparedRestore) -> Result<(), RestoreError> {
        let Some(facts) = &prepared.facts else {
            return Ok(());
        };
        let transaction = &self.transaction;
        let caller = Caller {
            container: transaction.container,
            config: &transaction.config,
            reaper: transaction.reaper,
            cancel: transaction.cancel(),
        };
        let called = async {
            // With GPU state, the facts were there before the processes ran.
            if prepared.gpu.is_none() {
                caller.write_facts(self.pid, facts.clone()).await?;
            }
            if caller.names(JobHook::Restored)? {
                transaction.journal.enter_anyway(Phase::Restored).await;
                caller.call(self.pid, facts.clone()).await?;
            }
            Ok::<_, Interrupted<HookError>>(())
        };
        let called = called.await.map_err(Cause::from);
        called.map_err(|cause| failed(prepared, cause))
    }

    /// Rolls the restore back: nothing of the container is left but its bundle.
    async fn roll_back(self) {
        let (container, journal) = (self.transaction.container, &self.transaction.journal);
        // A second time if the rollback panics: every step may be repeated.
        twice(|| roll_back(container, self.was_free, journal)).await;
        // Others' processes are in the cgroup: only the runtime's state is deleted.
        if !self.was_free {
            let deleted = container.runc.ensure_deleted().await;
            deleted.or_warn(format_args!("cannot delete {}", container.id));
        }
        self.transaction.end(Outcome::Failed, None, false).await;
    }
}

/// Restores `container` from its checkpoint, with the stdio of `front_end`. The caller holds the container's
/// operation lock. After a failure nothing of the container is left but its bundle, and it has its checkpoint
/// again.
pub async fn run<F: FrontEnd>(
    container: &Container,
    prepared: PreparedRestore,
    reaper: &Reaper,
    mut front_end: F,
) -> Result<(), NotRestored<F::Error>> {
    // From here on whoever kills or deletes the container finds a transaction to cut off, or the pid of init.
    let guard = container.transaction.begin();
    point("restore-begun").await;
    let cancel = guard.cancel.clone();
    let mut shm = None;
    let brought_up = Box::pin(bring_up(
        container,
        &prepared,
        reaper,
        &cancel,
        &mut front_end,
        &mut shm,
    ));
    let (guard, error) = match unless_panicked(&prepared, brought_up).await {
        Ok(restored) => match guard.commit(|| container.init.set_pid(restored.pid)) {
            Ok(()) => {
                point("restore-committed").await;
                restored.transaction.end(Outcome::Done, None, true).await;
                // Nothing reads the image any more.
                remove_unpacked(&container.bundle).await;
                return Ok(());
            }
            Err(guard) => {
                restored.roll_back().await;
                (guard, failed(&prepared, Cause::Killed).into())
            }
        },
        Err(error) => (guard, error),
    };
    if let Some(shm) = shm {
        shm.empty(reaper).await;
    }
    // The image is still good: the client may try again.
    container.put_checkpoint(prepared);
    Err(NotRestored {
        error,
        is_killed: guard.end(),
    })
}

/// Restores the container and connects its stdio. A failure leaves nothing of it.
async fn bring_up<'c, F: FrontEnd>(
    container: &'c Container,
    prepared: &PreparedRestore,
    reaper: &'c Reaper,
    cancel: &CancellationToken,
    front_end: &mut F,
    shm: &mut Option<PodShm>,
) -> Result<Restored<'c>, F::Error> {
    front_end.open().await?;
    let restored = async {
        fill_shm(container, prepared, reaper, cancel, shm).await?;
        Box::pin(restore(container, prepared, reaper, cancel, front_end)).await
    };
    let restored = match restored.await {
        Ok(restored) => restored,
        Err(error) => {
            front_end.close().await;
            return Err(error.into());
        }
    };
    point("restore-restored").await;
    let connected = async {
        front_end.connect().await?;
        point("restore-connected").await;
        Ok::<_, F::Error>(restored.call_hook(prepared).await?)
    };
    match unless_panicked(prepared, Box::pin(connected)).await {
        Ok(()) => Ok(restored),
        Err(error) => {
            restored.roll_back().await;
            Err(error)
        }
    }
}

/// Waits for `work`, which is boxed: the futures of all phases together are large. A panic of it is an error.
async fn unless_panicked<T, E: From<RestoreError>>(
    prepared: &PreparedRestore,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    match caught(work).await {
        Ok(done) => done,
        Err(_) => Err(failed(prepared, Cause::Panicked).into()),
    }
}

/// Makes the files of the checkpoint in the pod's /dev/shm, which `shm` is afterwards, also after an error.
async fn fill_shm(
    container: &Container,
    prepared: &PreparedRestore,
    reaper: &Reaper,
    cancel: &CancellationToken,
    shm: &mut Option<PodShm>,
) -> Result<(), RestoreError> {
    let cause = |cause| failed(prepared, cause);
    *shm = PodShm::of(container, &prepared.image)
        .await
        .map_err(|error| cause(error.into()))?;
    let Some(shm) = shm else {
        return Ok(());
    };
    check_again(prepared, cancel).await?;
    let filled = cancel.unless_cancelled(shm.fill(reaper)).await;
    let filled = filled
        .ok_or(Cause::Killed)
        .and_then(|filled| filled.map_err(Cause::from));
    filled.map_err(cause)
}

/// Begins the transaction, unless the container is being killed.
async fn begin<'c>(
    container: &'c Container,
    prepared: &PreparedRestore,
    reaper: &'c Reaper,
    cancel: &CancellationToken,
) -> Result<Transaction<'c>, RestoreError> {
    if let Some(recording) = recording::current() {
        recording.image_bytes(prepared.bytes);
    }
    let intent = Intent {
        operation: Operation::Restore,
        gpu: prepared.gpu.is_some(),
        id: String::new(),
        exit: false,
        image: prepared.image.clone(),
        work: work_dir(container),
        work_is_ours: container.options.criu_work_path.is_empty(),
        was_frozen: false,
    };
    let config = match &prepared.gpu {
        Some(gpu) => gpu.config.clone(),
        None => configured(),
    };
    let transaction = Transaction::begin_within(container, config, intent, reaper, cancel.clone())
        .await
        .map_err(|error| failed(prepared, error.into()))?;
    point("restore-journalled").await;
    if cancel.is_cancelled() {
        transaction.end(Outcome::Failed, None, false).await;
        return Err(failed(prepared, Cause::Killed));
    }
    Ok(transaction)
}

/// Restores the processes. After a failure nothing of the container is left but its bundle.
async fn restore<'c>(
    container: &'c Container,
    prepared: &PreparedRestore,
    reaper: &'c Reaper,
    cancel: &CancellationToken,
    front_end: &mut impl FrontEnd,
) -> Result<Restored<'c>, RestoreError> {
    check_again(prepared, cancel).await?;
    let (work, pid_file) = (work_dir(container), front_end.pid_file());
    let plugins = container.bundle.join(firn_config::names::BUNDLE_CRIU_LIBS);
    let console = front_end.console();
    let gpu = prepared.gpu.as_ref();
    let transaction = begin(container, prepared, reaper, cancel).await?;
    let restore = Restore {
        image: &prepared.image,
        work: &work,
        bundle: &container.bundle,
        pid_file: &pid_file,
        console_socket: console.as_deref(),
        no_pivot: container.options.no_pivot_root,
        flags: &prepared.flags,
        plugins: gpu
            .map(|_| plugins.as_path())
            .or(prepared.plain.plugins.as_deref()),
        bounds: Bounds {
            deadline: gpu.map(|_| transaction.config.deadlines.criu_restore),
            journal: &transaction.journal,
            cancel,
            freezer: None,
        },
    };
    let log = work.join(LOG);
    forget_log(&log).await;
    // Order matters: a rollback kills all processes in this cgroup, so it must be empty before.
    let free = free_cgroup(container);
    let was_free = free.is_ok();
    let stdio = |command: &mut Command| front_end.attach(command);
    let restoring = async {
        match gpu {
            None => Box::pin(plain(&transaction, prepared, restore, log, was_free, stdio)).await,
            Some(gpu) => {
                free.map_err(|cause| failed(prepared, cause))?;
                let effects = RestoreEffects::new(&transaction, gpu, prepared, restore, stdio, log);
                let restored = Box::pin(with_gpu(effects)).await;
                restored.map_err(|cause| failed(prepared, cause))
            }
        }
    };
    let restored = match caught(restoring).await {
        Ok(restored) => restored,
        Err(_) => {
            roll_back_after_panic(container, was_free, &transaction.journal).await;
            Err(failed(prepared, Cause::Panicked))
        }
    };
    match restored {
        Ok(pid) => Ok(Restored {
            pid,
            transaction,
            was_free,
        }),
        Err(error) => {
            transaction.end(Outcome::Failed, None, false).await;
            Err(error)
        }
    }
}

/// Rolls back a restore whose code has panicked; a second time if the rollback panics too: every step may be
/// repeated.
async fn roll_back_after_panic(container: &Container, was_free: bool, journal: &Journal) {
    twice(async || {
        if let Some(recovery) = Recovery::of(&container.bundle) {
            recovery.end_programs(PROGRAMS).await;
        }
        roll_back(container, was_free, journal).await;
    })
    .await;
}

/// Rolls back a restore, unless other processes were in its cgroup before.
async fn roll_back(container: &Container, was_free: bool, journal: &Journal) {
    if was_free {
        journal.enter_anyway(Phase::Rollback).await;
        // Boxed: the future of a rollback is large, and mostly not needed.
        Box::pin(rollback(container)).await;
    }
}

/// Restores the container by the phases of [`phases`]. Returns the pid of init.
async fn with_gpu<S: FnOnce(&mut Command) + Send>(mut effects: RestoreEffects<'_, S>) -> Result<i32, Cause> {
    // Boxed: the futures of all phases together are large.
    Box::pin(phases::run(&mut effects)).await?;
    effects.init()
}

/// Checks that the image's files are unchanged since they were verified. Order matters: right before CRIU
/// reads them, because nothing detects a later change.
async fn check_again(prepared: &PreparedRestore, cancel: &CancellationToken) -> Result<(), RestoreError> {
    let refused = |cause| RestoreError::Refused {
        id: prepared.id.clone(),
        image: prepared.image.clone(),
        cause,
    };
    let Some(verified) = prepared.verified.clone() else {
        return Ok(());
    };
    let limit = configured().deadlines.look;
    let unchanged = stoppable(limit, cancel, move |_| verified.expect_unchanged()).await;
    unchanged
        .map_err(|left| refused(left_image(left, limit)))?
        .map_err(|error| refused(error.into()))
}

/// Restores an image without GPU state as the stock shim does, except that a failed restore leaves nothing.
async fn plain(
    transaction: &Transaction<'_>,
    prepared: &PreparedRestore,
    restore: Restore<'_>,
    log: PathBuf,
    was_free: bool,
    stdio: impl FnOnce(&mut Command) + Send,
) -> Result<i32, RestoreError> {
    let (container, journal) = (transaction.container, &transaction.journal);
    let pid_file = restore.pid_file;
    journal.enter_anyway(Phase::CriuRestore).await;
    let criu = prepared.plain.criu.as_ref();
    if let Some(criu) = criu {
        forget_refusal(container).await;
        criu.write(criu_config::Operation::Restore)
            .map_err(|error| failed(prepared, error.into()))?;
    }
    match container.runc.restore(restore, stdio).await {
        Ok(()) => {
            point("restore-running").await;
            // The next dump must not run the action script.
            if let Some(criu) = criu {
                criu.write(criu_config::Operation::Dump).or_log();
            }
            let pid = read_pid(pid_file).map_err(|cause| failed(prepared, cause.into()));
            if pid.is_err() {
                roll_back(container, was_free, journal).await;
            }
            pid
        }
        Err(error) => {
            let lines = match error {
                RuncError::Cancelled { .. } => Vec::new(),
                _ => read_log(&log).await,
            };
            // The runtime and CRIU may have been killed before they could clean up.
            roll_back(container, was_free, journal).await;
            Err(match (error, refusal_of_script(container).await) {
                (RuncError::Cancelled { .. }, _) => failed(prepared, Cause::Killed),
                (_, Some(refusal)) => failed(prepared, Cause::Script(refusal)),
                (error, None) => RestoreError::Plain { error, lines, log },
            })
        }
    }
}

fn free_cgroup(container: &Container) -> Result<(), Cause> {
    let spec = Spec::load(&container.bundle)?;
    if in_use(&container.id, &container.options, &spec, &container.bundle)? {
        Err(Cause::CgroupBusy)
    } else {
        Ok(())
    }
}

fn failed(prepared: &PreparedRestore, cause: Cause) -> RestoreError {
    RestoreError::Failed {
        id: prepared.id.clone(),
        image: prepared.image.clone(),
        cause,
    }
}

/// Why firn-hook, as CRIU's action script, has refused a restore; none if it has not. Removes the file with
/// the reason.
pub(super) async fn refusal_of_script(container: &Container) -> Option<ProblemReport> {
    let bundle = container.bundle.clone();
    tidy("read the refusal of firn-hook", move || {
        criu_script::take(&bundle)
    })
    .await
}

/// Removes the refusal of an earlier restore.
pub(super) async fn forget_refusal(container: &Container) {
    let _ = refusal_of_script(container).await;
}

/// Removes the log of an earlier restore, whose errors are not this one's.
async fn forget_log(log: &Path) {
    let what = "remove the log of an earlier restore";
    remove(what, log.to_owned(), |log| std::fs::remove_file(log)).await;
}

/// The first errors of CRIU's log, which the history is to keep.
pub(super) async fn read_log(log: &Path) -> Vec<String> {
    let log = log.to_owned();
    let read = move || {
        if let Some(recording) = recording::current() {
            recording.keep_log(&log);
        }
        error_lines(&log)
    };
    tidy("read CRIU's log", read).await
}

#[cfg(test)]
mod tests;
