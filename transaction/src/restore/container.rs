//! The effects of a restore on a real container with GPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use firn_host::procfs;
use firn_image::criu::was_stopped;
use firn_image::manifest::{CheckpointedProcess, InheritedGpus, Verified};
use firn_image::memory::call::{Fill, Request};
use firn_oci::job_hook::Facts;
use firn_oci::{Spec, criu_config, dev_repair};
use firn_preflight::Inherited;
use firn_process::blocking::{Left, blocking, stoppable};
use firn_process::cancel::CancellationToken;
use firn_process::cgroup::Cgroup;
use firn_process::pidfd::{self, Signal};
use firn_process::tracer::TracedThreads;

use super::compare;
use super::error::Cause;
use super::rollback::rollback;
use super::run::{forget_refusal, read_log, refusal_of_script};
use crate::driver::Driver;
use crate::effects;
use crate::job_hook::Caller;
use crate::journal::point;
use crate::memory::Copier;
use crate::phase::Phase;
use crate::prepared_restore::{GpuPart, PreparedRestore};
use crate::runc::{Restore, RuncError, read_pid};
use crate::transaction::Transaction;
use firn_gpu::CudaProcess;

/// The processes that CRIU has restored.
struct Tasks {
    init: i32,
    cgroup: Cgroup,
    pids: Vec<i32>,
}

/// A container under restore.
pub(super) struct RestoreEffects<'a, S> {
    transaction: &'a Transaction<'a>,
    gpu: &'a GpuPart,
    /// For the job.
    facts: Option<&'a Facts>,
    /// The image.
    verified: Option<Arc<Verified>>,
    /// The call of runc.
    restore: Restore<'a>,
    /// Gives the call stdio; none once it was made.
    stdio: Option<S>,
    /// CRIU's log.
    log: PathBuf,
    driver: Driver,
    tasks: Option<Tasks>,
    selected: Option<TracedThreads>,
}

impl<'a, S: FnOnce(&mut Command) + Send> RestoreEffects<'a, S> {
    pub(super) fn new(
        transaction: &'a Transaction<'a>,
        gpu: &'a GpuPart,
        prepared: &'a PreparedRestore,
        restore: Restore<'a>,
        stdio: S,
        log: PathBuf,
    ) -> Self {
        Self {
            transaction,
            gpu,
            facts: prepared.facts.as_ref(),
            verified: prepared.verified.clone(),
            log,
            driver: transaction.driver(gpu.worker.clone()),
            restore,
            stdio: Some(stdio),
            tasks: None,
            selected: None,
        }
    }

    /// Pid of init, once CRIU has restored it.
    pub(super) fn init(&self) -> Result<i32, Cause> {
        self.tasks().map(|tasks| tasks.init)
    }

    fn tasks(&self) -> Result<&Tasks, Cause> {
        self.tasks.as_ref().ok_or(Cause::Killed)
    }
}

/// Waits for an effect, unless the container is to end meanwhile.
fn unless_cancelled<T, E: Into<Cause>>(
    cancel: &CancellationToken,
    effect: impl Future<Output = Result<T, E>>,
) -> impl Future<Output = Result<T, Cause>> {
    let done = cancel.unless_cancelled(effect);
    async move { done.await.ok_or(Cause::Killed)?.map_err(Into::into) }
}

/// Does `work` on files of the container. Waits no longer than `limit`.
async fn in_time<T: Send + 'static>(
    what: &'static str,
    limit: Duration,
    cancel: &CancellationToken,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Cause> {
    let done = stoppable(limit, cancel, move |_| work()).await;
    done.map_err(|left| match left {
        Left::Cancelled => Cause::Killed,
        Left::Late => Cause::Late { what, limit },
    })
}

impl<S: FnOnce(&mut Command) + Send> effects::Gpu for RestoreEffects<'_, S> {
    type Error = Cause;

    async fn enter(&mut self, phase: Phase) -> Result<(), Cause> {
        Ok(self.transaction.journal.enter(phase).await?)
    }

    async fn gpu_restore(&mut self, pids: &[i32]) -> Result<(), Cause> {
        let needs = self.gpu.needs.clone();
        let restore = self.driver.restore(pids, &self.gpu.pairs, needs, pids.to_vec());
        unless_cancelled(self.transaction.cancel(), restore).await?;
        Ok(())
    }

    async fn gpu_unlock(&mut self, pids: &[i32]) -> Result<(), Cause> {
        self.transaction.journal.show(Phase::GpuUnlock);
        unless_cancelled(self.transaction.cancel(), self.driver.unlock(pids)).await?;
        Ok(())
    }
}

/// Compares the memory in the image with its checksums.
async fn verify_memory(
    verified: Option<Arc<Verified>>,
    limit: Duration,
    cancel: &CancellationToken,
) -> Result<(), Cause> {
    let Some(verified) = verified else {
        return Ok(());
    };
    let verify = stoppable(limit, cancel, move |stop| verified.memory(stop));
    match verify.await {
        Ok(verified) => Ok(verified?),
        Err(Left::Cancelled) => Err(Cause::Killed),
        Err(Left::Late) => Err(Cause::Late {
            what: "compare the image with its checksums",
            limit,
        }),
    }
}

impl<S: FnOnce(&mut Command) + Send> effects::Restore for RestoreEffects<'_, S> {
    async fn criu_restore(&mut self) -> Result<(), Cause> {
        let stdio = self.stdio.take().ok_or(Cause::Panicked)?;
        forget_refusal(self.transaction.container).await;
        self.gpu.criu.write(criu_config::Operation::Restore)?;
        // The worker starts up while CRIU works.
        if self.gpu.has_nvidia {
            self.driver.warm_up()?;
        }
        let restoring = self.transaction.container.runc.restore(self.restore, stdio);
        // CRIU uses one processor. Both to their ends: nobody cleans up after a CRIU that is left alone.
        let limit = self.transaction.config.deadlines.verify;
        let verifying = verify_memory(self.verified.clone(), limit, self.transaction.cancel());
        let (restored, verified) = tokio::join!(restoring, verifying);
        verified?;
        if let Err(error) = restored {
            return Err(
                match (error, refusal_of_script(self.transaction.container).await) {
                    (RuncError::Cancelled { .. }, _) => Cause::Killed,
                    (_, Some(refusal)) => Cause::Script(refusal),
                    (error, None) => Cause::Runtime {
                        error,
                        lines: read_log(&self.log).await,
                        log: self.log.clone(),
                    },
                },
            );
        }
        point("restore-stopped").await;
        Ok(())
    }

    async fn compare(&mut self) -> Result<(), Cause> {
        self.transaction.journal.show(Phase::Compare);
        let init = read_pid(self.restore.pid_file)?;
        let compared = compare::tasks(
            self.transaction.container,
            &self.gpu.hook,
            init,
            self.transaction.reaper,
        );
        let (cgroup, pids) = unless_cancelled(self.transaction.cancel(), compared).await?;
        self.tasks = Some(Tasks { init, cgroup, pids });
        Ok(())
    }

    async fn dev_repair(&mut self) -> Result<(), Cause> {
        self.transaction.journal.measure(Phase::DevRepair);
        let (spec, init) = (Spec::load(&self.transaction.container.bundle)?, self.init()?);
        let repair = move || dev_repair::repair(init, &spec);
        let limit = self.transaction.config.deadlines.look;
        let repaired = in_time(
            "repair /dev of the container",
            limit,
            self.transaction.cancel(),
            repair,
        )
        .await??;
        let id = &self.transaction.container.id;
        if let Some(left) = &repaired.left {
            log::warn!("graphics device nodes of {id} are not replaced: {left}");
        }
        if self.gpu.device_free {
            log::info!("device nodes of {id}: {repaired:?}");
        } else if !(repaired.made.is_empty() && repaired.removed.is_empty()) {
            log::warn!("device nodes of {id} were not as CRIU's script had left them: {repaired:?}");
        }
        Ok(())
    }

    async fn fill_memory(&mut self) -> Result<(), Cause> {
        let Some(stored) = self.gpu.stored.clone() else {
            return Ok(());
        };
        self.transaction.journal.show(Phase::FillMemory);
        let of = self.tasks()?.pids.clone();
        let pids = unless_cancelled(self.transaction.cancel(), async {
            Ok::<_, Cause>(blocking(move || outer_pids(&of)).await)
        });
        let copier = Copier {
            hook: self.gpu.hook.clone(),
            reaper: self.transaction.reaper.clone(),
            limit: self.transaction.config.deadlines.criu_restore,
            container: self.transaction.container.id.clone(),
            bundle: self.transaction.container.bundle.clone(),
            journal: Some(self.transaction.journal.clone()),
        };
        let fill = Request::Fill(Fill {
            stored,
            pids: pids.await?,
        });
        let _bytes: u64 = copier.ask(fill, self.transaction.cancel()).await?;
        Ok(())
    }

    async fn find_cuda(&mut self) -> Result<Vec<CudaProcess>, Cause> {
        let (processes, pids) = (self.gpu.processes.clone(), self.tasks()?.pids.clone());
        let (others, of) = (self.gpu.inherited.clone(), pids.clone());
        let find = move || {
            let outer = outer_pids(&of);
            Ok::<_, Cause>((find(&processes, &outer)?, find_inherited(&others, &outer)))
        };
        let (cuda, inherited) = unless_cancelled(self.transaction.cancel(), blocking(find)).await?;
        self.transaction.journal.keep_inherited(inherited).await;
        if !self.gpu.has_nvidia {
            return Ok(cuda);
        }
        // The manifest is not trusted: a CUDA process that it leaves out must not run without its GPU state.
        let discovered = unless_cancelled(self.transaction.cancel(), self.driver.discover(pids)).await?;
        let is_listed = |found: &&CudaProcess| cuda.iter().any(|listed| listed.pid == found.pid);
        match discovered.iter().find(|found| !is_listed(found)) {
            Some(other) => Err(Cause::Unlisted { pid: other.pid }),
            None => Ok(cuda),
        }
    }

    async fn run_selected(&mut self, tids: BTreeSet<i32>) -> Result<(), Cause> {
        let tids = tids.into_iter().collect();
        let selected = TracedThreads::run_selected(tids, self.transaction.config.deadlines.hold);
        self.selected = Some(unless_cancelled(self.transaction.cancel(), selected).await?);
        Ok(())
    }

    async fn stop_selected(&mut self) -> Result<(), Cause> {
        match self.selected.take() {
            Some(selected) => unless_cancelled(self.transaction.cancel(), selected.release()).await,
            None => Ok(()),
        }
    }

    async fn configure_dump(&mut self) -> Result<(), Cause> {
        Ok(self.gpu.criu.write(criu_config::Operation::Dump)?)
    }

    async fn write_facts(&mut self) -> Result<(), Cause> {
        let caller = Caller {
            container: self.transaction.container,
            config: &self.transaction.config,
            reaper: self.transaction.reaper,
            cancel: self.transaction.cancel(),
        };
        if let Some(facts) = self.facts {
            Box::pin(caller.write_facts(self.init()?, facts.clone())).await?;
        }
        Ok(())
    }

    async fn continue_processes(&mut self) -> Result<(), Cause> {
        let (image, pids) = (self.restore.image.to_owned(), self.tasks()?.pids.clone());
        let running = move || {
            let was_stopped = |pid: &i32| {
                procfs::inner_pid(&pid.to_string()).is_some_and(|inner| was_stopped(&image, inner))
            };
            pids.into_iter()
                .filter(|pid| !was_stopped(pid))
                .collect::<Vec<_>>()
        };
        let (what, limit) = (
            "read which processes were stopped",
            self.transaction.config.deadlines.look,
        );
        let running = in_time(what, limit, self.transaction.cancel(), running).await?;
        let cgroup = &self.tasks()?.cgroup;
        for pid in running {
            // The pid of a process that has ended may belong to another one.
            let sent = pidfd::signal(pid, Signal::CONT, || cgroup.holds(pid));
            sent.map_err(|source| Cause::Continue { pid, source })?;
        }
        Ok(())
    }

    async fn end(&mut self, ok: bool) {
        // Order matters: the restore threads are released before the worker that works on them ends.
        drop(self.selected.take());
        point("restore-continued").await;
        self.transaction.end_worker(&mut self.driver, ok).await;
    }

    async fn rollback(&mut self) {
        rollback(self.transaction.container).await;
    }
}

/// Pids on the host by the pids in the container.
fn outer_pids(pids: &[i32]) -> BTreeMap<i32, i32> {
    let inner = pids
        .iter()
        .filter_map(|pid| Some((procfs::inner_pid(&pid.to_string())?, *pid)));
    firn_host::ordered::map_of(inner)
}

/// What processes have inherited that the manifest names. A process that has gone has nothing.
fn find_inherited(inherited: &[InheritedGpus], outer: &BTreeMap<i32, i32>) -> Vec<Inherited> {
    let find = |process: &InheritedGpus| {
        Some(Inherited {
            pid: *outer.get(&process.pid)?,
            open: process.open.clone(),
        })
    };
    inherited.iter().filter_map(find).collect()
}

/// Pids and restore threads on the host of the processes that the manifest names by their ids in the
/// container.
fn find(processes: &[CheckpointedProcess], outer: &BTreeMap<i32, i32>) -> Result<Vec<CudaProcess>, Cause> {
    let find = |process: &CheckpointedProcess| {
        let pid = *outer.get(&process.pid)?;
        let restore_tid = procfs::outer_tid(pid, process.restore_tid)?;
        Some(CudaProcess { pid, restore_tid })
    };
    let missing = |process: &CheckpointedProcess| Cause::ProcessMissing {
        pid: process.pid,
        tid: process.restore_tid,
    };
    let found = processes
        .iter()
        .map(|process| find(process).ok_or_else(|| missing(process)));
    found.collect()
}

#[cfg(test)]
mod tests;
