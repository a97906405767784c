//! Runs a restore, up to its commit or rollback.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_host::ProblemReport;
use firn_oci::job_hook::JobHook;
use firn_oci::{Spec, criu_config, criu_script};
use firn_process::OrWarn;
use firn_process::blocking::{remove, stoppable, tidy};
use firn_process::cancel::CancellationToken;
use firn_process::panics::{caught, twice};
use firn_process::reaper::Reaper;

use super::container::RestoreEffects;
use super::error::Cause;
use super::place::in_use;
use super::prepare::left_image;
use super::rollback::{LOG, rollback, work_dir};
use super::{RestoreError, phases};
use crate::configured::configured;
use crate::container::Container;
use crate::image_dir::error_lines;
use crate::job_hook::{Caller, HookError};
use crate::journal::{Begin, Journal, Operation, Outcome, point};
use crate::phase::Phase;
use crate::prepared_restore::PreparedRestore;
use crate::recording;
use crate::recovery::Recovery;
use crate::runc::{Bounds, Restore, RuncError, read_pid};

/// How long runc and CRIU may take to end after a panic of firn's own code.
const PROGRAMS: Duration = Duration::from_secs(30);

/// A container whose processes run again. Its transaction is open until it is committed or rolled back.
#[must_use]
pub struct Restored {
    pid: i32,
    journal: Journal,
    /// Whether its cgroup was empty before.
    was_free: bool,
}

impl Restored {
    /// Pid of init.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Calls the job's hook `restored`. After an error the caller rolls the restore back. Order matters: the
    /// container's output must be read meanwhile, or a job that writes much would wait for that.
    pub async fn call_hook(
        &self,
        container: &Container,
        prepared: &PreparedRestore,
        reaper: &Reaper,
        cancel: &CancellationToken,
    ) -> Result<(), RestoreError> {
        let Some(facts) = &prepared.facts else {
            return Ok(());
        };
        let of_node;
        let config = match &prepared.gpu {
            Some(gpu) => &gpu.config,
            None => {
                of_node = configured();
                &of_node
            }
        };
        let caller = Caller {
            container,
            config,
            reaper,
            cancel,
        };
        let called = async {
            // With GPU state, the facts were there before the processes ran.
            if prepared.gpu.is_none() {
                caller.write_facts(self.pid, facts.clone()).await?;
            }
            if caller.names(JobHook::Restored)? {
                self.journal.enter_anyway(Phase::Restored).await;
                caller.call(self.pid, facts.clone()).await?;
            }
            Ok::<_, HookError>(())
        };
        let called = match caught(Box::pin(called)).await {
            Ok(called) => called.map_err(Cause::from),
            Err(_) => Err(Cause::Panicked),
        };
        called.map_err(|cause| failed(prepared, cause))
    }

    /// Ends the transaction: the container keeps running.
    pub async fn commit(self) {
        self.journal.end(Outcome::Done).await;
    }

    /// Rolls the restore back: nothing of the container is left but its bundle. Returns the error of a killed
    /// container.
    pub async fn roll_back(self, container: &Container, prepared: &PreparedRestore) -> RestoreError {
        // A second time if the rollback panics: every step may be repeated.
        twice(|| roll_back(container, self.was_free, &self.journal)).await;
        // Others' processes are in the cgroup: only the runtime's state is deleted.
        if !self.was_free {
            let deleted = container.runc.ensure_deleted().await;
            deleted.or_warn(format_args!("cannot delete {}", container.id));
        }
        self.journal.end(Outcome::Failed).await;
        failed(prepared, Cause::Killed)
    }
}

/// Begins the journal, unless the container is being killed.
async fn begin_journal(
    container: &Container,
    prepared: &PreparedRestore,
    work: &Path,
    cancel: &CancellationToken,
) -> Result<Journal, RestoreError> {
    if let Some(recording) = recording::current() {
        recording.image_bytes(prepared.bytes);
    }
    let begin = Begin {
        op: Operation::Restore,
        container: container.id.clone(),
        gpu: prepared.gpu.is_some(),
        exit: false,
        image: prepared.image.clone(),
        work: work.to_owned(),
        work_is_ours: container.options.criu_work_path.is_empty(),
        was_frozen: false,
        checkpoint: String::new(),
    };
    let journal = Journal::begin(&container.bundle, begin)
        .await
        .map_err(|error| failed(prepared, error.into()))?;
    journal.follow(Operation::Restore, container.follower.get());
    point("restore-journalled").await;
    if cancel.is_cancelled() {
        journal.end(Outcome::Failed).await;
        return Err(failed(prepared, Cause::Killed));
    }
    Ok(journal)
}

/// Restores `container`; `stdio` gives the runtime the container's stdio.
///
/// The caller holds the container's operation lock, and has begun the transaction that `cancel` belongs to.
/// After a failure nothing of the container is left but its bundle.
pub async fn run(
    container: &Container,
    prepared: &PreparedRestore,
    pid_file: &Path,
    console: Option<&Path>,
    reaper: &Reaper,
    cancel: &CancellationToken,
    stdio: impl FnOnce(&mut Command) + Send,
) -> Result<Restored, RestoreError> {
    check_again(prepared, cancel).await?;
    let work = work_dir(container);
    let plugins = container.bundle.join(firn_config::names::BUNDLE_CRIU_LIBS);
    let gpu = prepared.gpu.as_ref();
    let journal = begin_journal(container, prepared, &work, cancel).await?;
    let restore = Restore {
        image: &prepared.image,
        work: &work,
        bundle: &container.bundle,
        pid_file,
        console_socket: console,
        no_pivot: container.options.no_pivot_root,
        flags: &prepared.flags,
        plugins: gpu
            .map(|_| plugins.as_path())
            .or(prepared.plain.plugins.as_deref()),
        bounds: Bounds {
            deadline: gpu.map(|gpu| gpu.config.deadlines.criu_restore),
            journal: &journal,
            cancel,
            freezer: None,
        },
    };
    let log = work.join(LOG);
    forget_log(&log).await;
    // Order matters: a rollback kills all processes in this cgroup, so it must be empty before.
    let free = free_cgroup(container);
    let was_free = free.is_ok();
    let restoring = async {
        match gpu {
            None => Box::pin(plain(container, prepared, restore, log, was_free, stdio)).await,
            Some(gpu) => {
                free.map_err(|cause| failed(prepared, cause))?;
                let effects = RestoreEffects::new(container, gpu, prepared, restore, stdio, log, reaper);
                let restored = Box::pin(with_gpu(effects)).await;
                restored.map_err(|cause| failed(prepared, cause))
            }
        }
    };
    let restored = match caught(restoring).await {
        Ok(restored) => restored,
        Err(_) => {
            roll_back_after_panic(container, was_free, &journal).await;
            Err(failed(prepared, Cause::Panicked))
        }
    };
    match restored {
        Ok(pid) => Ok(Restored {
            pid,
            journal,
            was_free,
        }),
        Err(error) => {
            journal.end(Outcome::Failed).await;
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
        rollback(container).await;
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
    let unchanged = stoppable(limit, cancel, move |_| verified.unchanged()).await;
    unchanged
        .map_err(|left| refused(left_image(left, limit)))?
        .map_err(|error| refused(error.into()))
}

/// Restores an image without GPU state as the stock shim does, except that a failed restore leaves nothing.
async fn plain(
    container: &Container,
    prepared: &PreparedRestore,
    restore: Restore<'_>,
    log: PathBuf,
    was_free: bool,
    stdio: impl FnOnce(&mut Command) + Send,
) -> Result<i32, RestoreError> {
    let (pid_file, Bounds { journal, .. }) = (restore.pid_file, restore.bounds);
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
            let lines = last_errors(&log).await;
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

pub(super) async fn last_errors(log: &Path) -> Vec<String> {
    let log = log.to_owned();
    tidy("read CRIU's log", move || error_lines(&log)).await
}

#[cfg(test)]
mod tests;
