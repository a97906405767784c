//! The restore itself.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_gpu::protocol::GpuMemory;
use firn_host::ProblemReport;
use firn_image::manifest::CheckpointedProcess;
use firn_oci::criu_script;
use firn_oci::dev_repair;
use firn_oci::{Spec, criu_config};
use tokio::time::timeout;

use super::error::{Cause, Refusal};
use super::prepare::{GpuPart, Prepared, in_use, left_image};
use super::rollback::{LOG, abandon, work_dir};
use super::{RestoreError, compare};
use crate::blocking::{blocking, stoppable, tidy};
use crate::cancel::CancellationToken;
use crate::container::Container;
use crate::driver::Gpu;
use crate::image_dir::error_lines;
use crate::journal::{Begin, Journal, Operation, Outcome, point};
use crate::panics::caught;
use crate::phase::Phase;
use crate::pidfd;
use crate::procfs;
use crate::reaper::Reaper;
use crate::recovery::Recovery;
use crate::runc::{Bounds, Restore, RuncError, RuntimeKind, read_pid};
use crate::timings::PhaseTimings;
use crate::tracer::RunSelected;
use firn_host::Chain;
use firn_image::criu::was_stopped;

/// How long runc and CRIU may take to end when firn's own code has failed.
const PROGRAMS: Duration = Duration::from_secs(30);

/// A container whose processes run again. It is committed or abandoned, for its transaction is not over.
#[must_use]
pub struct Restored {
    pid: i32,
    journal: Journal,
    /// Whether nobody else was in its cgroup.
    was_free: bool,
}

impl Restored {
    /// Pid of init.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The container goes on.
    pub async fn commit(self) {
        self.journal.end(Outcome::Done).await;
    }

    /// Nothing of the container is left but its bundle. The error is that of one that was killed.
    pub async fn abandon(self, container: &Container, prepared: &Prepared) -> RestoreError {
        // Once more when firn's own code fails: every step of it may be repeated.
        for _ in 0..2 {
            if caught(roll_back(container, self.was_free, &self.journal))
                .await
                .is_ok()
            {
                break;
            }
        }
        // Only what the runtime knows: somebody else is in the cgroup.
        if !self.was_free
            && let Err(error) = container.runc.ensure_deleted().await
        {
            log::warn!("cannot delete {}: {}", container.id, Chain(&error));
        }
        self.journal.end(Outcome::Failed).await;
        failed(prepared, Cause::Killed)
    }
}

/// Restores `container`; `stdio` gives the runtime the container's stdio.
///
/// The caller holds the container's operation lock, and has begun the transaction that `cut` cuts off. After a failure
/// nothing of the container is left but its bundle.
pub async fn run(
    container: &Container,
    prepared: &Prepared,
    pid_file: &Path,
    console: Option<PathBuf>,
    reaper: &Reaper,
    cancel: &CancellationToken,
    stdio: impl FnOnce(&mut Command) + Send,
) -> Result<Restored, RestoreError> {
    check_again(prepared, cancel).await?;
    let work = work_dir(container);
    let plugins = container.bundle.join(firn_config::names::BUNDLE_CRIU_LIBS);
    let gpu = prepared.gpu.as_ref();
    let begin = Begin {
        op: Operation::Restore,
        container: container.id.clone(),
        gpu: gpu.is_some(),
        exit: false,
        image: prepared.image.clone(),
        work: work.clone(),
        work_is_ours: container.options.criu_work_path.is_empty(),
        was_frozen: false,
    };
    let journal = Journal::begin(&container.bundle, begin)
        .await
        .map_err(|error| failed(prepared, error.into()))?;
    point("restore-journalled").await;
    if cancel.is_cancelled() {
        journal.end(Outcome::Failed).await;
        return Err(failed(prepared, Cause::Killed));
    }
    let restore = Restore {
        image: &prepared.image,
        work: &work,
        bundle: &container.bundle,
        pid_file,
        console_socket: console,
        no_pivot: container.options.no_pivot_root,
        flags: &prepared.flags,
        plugins: gpu
            .map(|gpu| gpu.config.criu.libs_dir.as_deref().unwrap_or(&plugins))
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
    // Order matters: what abandon kills later are the processes in this cgroup, so it must be empty before.
    let free = free_cgroup(container);
    let is_free = free.is_ok();
    let restoring = async {
        match gpu {
            None => plain(container, prepared, restore, log, is_free, stdio).await,
            Some(gpu) => {
                free.map_err(|cause| failed(prepared, cause))?;
                let restored = with_gpu(container, gpu, restore, log, reaper, stdio).await;
                restored.map_err(|cause| failed(prepared, cause))
            }
        }
    };
    let restored = match caught(restoring).await {
        Ok(restored) => restored,
        Err(_) => {
            // Once more when that fails too: every step of it may be repeated.
            for _ in 0..2 {
                if caught(take_back(container, is_free, &journal)).await.is_ok() {
                    break;
                }
            }
            Err(failed(prepared, Cause::Panicked))
        }
    };
    match restored {
        Ok(pid) => Ok(Restored {
            pid,
            journal,
            was_free: is_free,
        }),
        Err(error) => {
            journal.end(Outcome::Failed).await;
            Err(error)
        }
    }
}

/// The way back of a restore whose code has failed.
async fn take_back(container: &Container, was_free: bool, journal: &Journal) {
    if let Some(recovery) = Recovery::of(&container.bundle) {
        recovery.end_programs(PROGRAMS).await;
    }
    roll_back(container, was_free, journal).await;
}

/// Ends what was restored, unless others were in its cgroup before.
async fn roll_back(container: &Container, was_free: bool, journal: &Journal) {
    if was_free {
        enter(journal, Phase::Rollback).await;
        abandon(container).await;
    }
}

async fn with_gpu(
    container: &Container,
    gpu: &GpuPart,
    restore: Restore<'_>,
    log: PathBuf,
    reaper: &Reaper,
    stdio: impl FnOnce(&mut Command) + Send,
) -> Result<i32, Cause> {
    let Bounds { journal, .. } = restore.bounds;
    let mut timings = PhaseTimings::begin("restore", &container.id);
    let restored = restore_gpu(container, gpu, restore, log, reaper, &mut timings, stdio).await;
    timings.end(&container.bundle, restored.is_ok());
    point("restore-accounted").await;
    if restored.is_err() {
        roll_back(container, true, journal).await;
    }
    restored
}

/// Notes a phase that has to happen, whether it can be noted or not.
async fn enter(journal: &Journal, phase: Phase) {
    if let Err(error) = journal.enter(phase).await {
        log::warn!("{}", Chain(&error));
    }
}

/// Order matters: right before CRIU reads them. What is written from now on is between CRIU and whoever writes.
async fn check_again(prepared: &Prepared, cancel: &CancellationToken) -> Result<(), RestoreError> {
    let refused = |cause| RestoreError::Refused {
        image: prepared.image.clone(),
        cause,
    };
    let Some(verified) = prepared.verified.clone() else {
        return Ok(());
    };
    let limit = compare::configured().deadlines.look;
    let unchanged = stoppable(limit, cancel, move |_| verified.unchanged()).await;
    unchanged
        .map_err(|left| refused(left_image(left, limit)))?
        .map_err(|error| refused(error.into()))
}

/// As the stock shim does it, but that nothing is left of a restore that failed.
async fn plain(
    container: &Container,
    prepared: &Prepared,
    restore: Restore<'_>,
    log: PathBuf,
    was_free: bool,
    stdio: impl FnOnce(&mut Command) + Send,
) -> Result<i32, RestoreError> {
    let (pid_file, Bounds { journal, .. }) = (restore.pid_file, restore.bounds);
    enter(journal, Phase::CriuRestore).await;
    let criu = prepared.plain.criu.as_ref();
    if let Some(criu) = criu {
        forget_refusal(container).await;
        criu.write(criu_config::Operation::Restore)
            .map_err(|error| failed(prepared, error.into()))?;
    }
    match container.runc.restore(restore, stdio).await {
        Ok(()) => {
            point("restore-running").await;
            // For the next dump, to which the script has nothing to say.
            if let Some(Err(error)) = criu.map(|criu| criu.write(criu_config::Operation::Dump)) {
                log::warn!("{}", Chain(&error));
            }
            let pid = read_pid(pid_file).map_err(|cause| failed(prepared, cause.into()));
            if pid.is_err() {
                roll_back(container, was_free, journal).await;
            }
            pid
        }
        Err(_) if container.runc.kind().await == RuntimeKind::Youki => Err(RestoreError::Refused {
            image: prepared.image.clone(),
            cause: Refusal::Runtime {
                runtime: RuntimeKind::Youki.name(),
            },
        }),
        Err(error) => {
            let lines = last_errors(&log).await;
            // The runtime may have been killed before it could clean up, and CRIU too.
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

fn failed(prepared: &Prepared, cause: Cause) -> RestoreError {
    RestoreError::Failed {
        image: prepared.image.clone(),
        cause,
    }
}

async fn restore_gpu(
    container: &Container,
    gpu: &GpuPart,
    restore: Restore<'_>,
    log: PathBuf,
    reaper: &Reaper,
    timings: &mut PhaseTimings,
    stdio: impl FnOnce(&mut Command) + Send,
) -> Result<i32, Cause> {
    let Bounds { journal, cancel, .. } = restore.bounds;
    journal.enter(Phase::CriuRestore).await?;
    forget_refusal(container).await;
    gpu.criu.write(criu_config::Operation::Restore)?;
    // The worker starts up while CRIU works.
    let (image, pid_file) = (restore.image.to_owned(), restore.pid_file);
    let worker_end = gpu.config.deadlines.worker_end;
    let mut driver = Gpu::new(gpu.worker.clone(), reaper.clone(), worker_end).with_journal(journal.clone());
    driver.warm_up()?;
    if let Err(error) = container.runc.restore(restore, stdio).await {
        let lines = last_errors(&log).await;
        return Err(match (error, refusal_of_script(container).await) {
            (RuncError::Cancelled { .. }, _) => Cause::Killed,
            (_, Some(refusal)) => Cause::Script(refusal),
            (error, None) => Cause::Runtime { error, lines, log },
        });
    }
    timings.mark(Phase::CriuRestore);
    point("restore-stopped").await;
    let restored = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(Cause::Killed),
        restored = bring_back(container, gpu, &mut driver, image, pid_file, reaper, (journal, timings)) => restored,
    };
    point("restore-continued").await;
    driver.end().await;
    point("restore-worker-gone").await;
    restored
}

/// Gives the stopped processes their GPU state and lets them run.
async fn bring_back(
    container: &Container,
    gpu: &GpuPart,
    driver: &mut Gpu,
    image: PathBuf,
    pid_file: &Path,
    reaper: &Reaper,
    (journal, timings): (&Journal, &mut PhaseTimings),
) -> Result<i32, Cause> {
    journal.enter(Phase::DevRepair).await?;
    let pid = read_pid(pid_file)?;
    // Order matters: whom CRIU has made is not known before, nor where its /dev is.
    let (cgroup, pids) = compare::tasks(container, &gpu.hook, pid, reaper).await?;
    timings.mark(Phase::Compare);
    let spec = Spec::load(&container.bundle)?;
    let limit = gpu.config.deadlines.look;
    let late = |what| move |_| Cause::Late { what, limit };
    let repaired = timeout(limit, blocking(move || dev_repair::repair(pid, &spec))).await;
    let repaired = repaired.map_err(late("repair /dev of the container"))??;
    if let Some(left) = &repaired.left {
        log::warn!("nodes of graphics of {} are as they were: {left}", container.id);
    }
    if !(repaired.made.is_empty() && repaired.removed.is_empty()) {
        log::warn!(
            "device nodes of {} were not as CRIU's script had left them: {repaired:?}",
            container.id
        );
    }
    timings.mark(Phase::DevRepair);

    let (processes, of) = (gpu.processes.clone(), pids.clone());
    let (cuda, tids) = blocking(move || find(&processes, &of)).await?;
    // The manifest is not trusted: a CUDA process that it leaves out must not run without its GPU state.
    let found = driver
        .discover(pids.clone(), gpu.config.deadlines.discover)
        .await?;
    if let Some(other) = found.iter().find(|process| !cuda.contains(&process.pid)) {
        return Err(Cause::Unlisted { pid: other.pid });
    }
    journal.enter(Phase::GpuRestore).await?;
    let only = RunSelected::start(tids, gpu.config.deadlines.hold).await?;
    let given_back = give_back(driver, &cuda, gpu, timings).await;
    only.stop().await?;
    given_back?;
    // For the next dump of this container, which must not leave its tasks stopped. Before anything runs: it may fail.
    gpu.criu.write(criu_config::Operation::Dump)?;
    journal.enter(Phase::Continue).await?;
    let stopped =
        move |pid: &i32| procfs::inner_pid(&pid.to_string()).is_some_and(|inner| was_stopped(&image, inner));
    let running = blocking(move || pids.into_iter().filter(|pid| !stopped(pid)).collect::<Vec<_>>());
    let running = timeout(limit, running).await;
    let running = running.map_err(late("read which processes were stopped"))?;
    for pid in running {
        // One that is gone may have left its number to somebody else.
        let sent = pidfd::signal(pid, libc::SIGCONT, || cgroup.holds(pid));
        sent.map_err(|source| Cause::Continue { pid, source })?;
    }
    timings.mark(Phase::Continue);
    Ok(pid)
}

async fn give_back(
    driver: &mut Gpu,
    pids: &[i32],
    gpu: &GpuPart,
    timings: &mut PhaseTimings,
) -> Result<(), Cause> {
    driver
        .restore(
            pids,
            &gpu.pairs,
            &GpuMemory::new(),
            gpu.config.deadlines.gpu_restore,
        )
        .await?;
    timings.mark(Phase::GpuRestore);
    driver.unlock(pids, gpu.config.deadlines.gpu_unlock).await?;
    timings.mark(Phase::GpuUnlock);
    Ok(())
}

/// Host pids and restore threads of the processes that the manifest names by their ids in the container.
fn find(processes: &[CheckpointedProcess], pids: &[i32]) -> Result<(Vec<i32>, Vec<i32>), Cause> {
    let (mut cuda, mut tids) = (Vec::new(), Vec::new());
    let inner = pids
        .iter()
        .filter_map(|pid| Some((procfs::inner_pid(&pid.to_string())?, *pid)));
    let outer = firn_host::ordered::map_of(inner);
    for process in processes {
        let missing = || Cause::ProcessMissing {
            pid: process.pid,
            tid: process.restore_tid,
        };
        let pid = *outer.get(&process.pid).ok_or_else(missing)?;
        cuda.push(pid);
        tids.push(procfs::outer_tid(pid, process.restore_tid).ok_or_else(missing)?);
    }
    Ok((cuda, tids))
}

/// Why firn-hook, as CRIU's script, has ended a restore; none when something else has.
async fn refusal_of_script(container: &Container) -> Option<ProblemReport> {
    let bundle = container.bundle.clone();
    tidy("read what firn-hook has refused", move || {
        criu_script::take(&bundle)
    })
    .await
}

/// Forgets why an earlier restore was ended.
async fn forget_refusal(container: &Container) {
    let _ = refusal_of_script(container).await;
}

/// Removes the log of an earlier restore, whose errors are not this one's.
async fn forget_log(log: &Path) {
    let path = log.to_owned();
    let removed = tidy("remove the log of an earlier restore", move || {
        Some(std::fs::remove_file(path))
    });
    if let Some(Err(error)) = removed.await
        && error.kind() != std::io::ErrorKind::NotFound
    {
        log::warn!("cannot remove {}: {error}", log.display());
    }
}

async fn last_errors(log: &Path) -> Vec<String> {
    let log = log.to_owned();
    tidy("read CRIU's log", move || error_lines(&log)).await
}

#[cfg(test)]
mod tests;
