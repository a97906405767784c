//! Kill: works in any state, also while a checkpoint or restore is under way.

use firn_host::Absent;
use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::api::{Empty, KillRequest};
use firn_process::cgroup::{CgroupError, FreezerState};
use nix::errno::Errno;
use tokio::task::JoinError;
use tokio::time::{Instant, sleep};

use super::state::find;
use super::{SIGKILL, Service, TaskError};
use crate::procfs;
use firn_host::Chain;
use firn_transaction::container::{Container, InitState};
use firn_transaction::runc::RuncError;

/// How long CRIU may take to end before the tasks are killed all the same.
const CRIU: Duration = Duration::from_secs(5);

/// How long a dump may take that has ended its container: runc ends, and the image is written to its disk.
const DUMP: Duration = Duration::from_secs(60);

/// How long killed processes may take to be gone.
const KILLED: Duration = Duration::from_secs(30);

/// How often is looked whether a killed init is held up.
const LOOK: Duration = Duration::from_millis(100);

/// How long the freezer may take to be turned off.
const THAW: Duration = Duration::from_secs(5);

pub(super) async fn kill(service: &Arc<Service>, request: KillRequest) -> Result<Empty, TaskError> {
    let container = service.container(&request.id)?;
    let process = find(&container, &request.exec_id)?;
    if process.exec_id.is_empty() {
        let _killing = container.killing();
        let stands = matches!(container.state(), InitState::Suspended | InitState::Parked);
        if stands && request.signal == SIGKILL {
            if let Some(cancel) = container.transaction.cancel() {
                // Order matters: CRIU first, which holds the tasks of a parked container that it dumps.
                cancel.untraced(CRIU).await;
            }
            give_up(&container).await?;
            return Ok(Empty::default());
        }
        if request.signal == SIGKILL {
            wait_for_dump(&container).await;
        }
        let (cancel, hooks) = match request.signal {
            SIGKILL => (container.transaction.cancel(), container.hooks.cancel().is_some()),
            _ => (None, false),
        };
        if let Some(cancel) = &cancel {
            // Order matters: CRIU first, which holds the tasks and may have turned the freezer on.
            cancel.untraced(CRIU).await;
            if container.init.pid() == 0 {
                // Of a restore that was cut off nothing is left; its Start returns the error.
                return Ok(Empty::default());
            }
        }
        return match signal_init(&container, request.signal, request.all).await {
            Ok(()) => {
                if request.signal == SIGKILL {
                    see_to_the_end(&container);
                }
                Ok(Empty::default())
            }
            // The transaction that was cut off has killed it, or what was left of it were hooks.
            Err(_)
                if (cancel.is_some() || hooks)
                    && (container.init.exit().is_some() || !procfs::is_alive(container.init.pid())) =>
            {
                Ok(Empty::default())
            }
            Err(error) if error.is_finished() => Err(TaskError::Finished),
            Err(error) if error.is_absent() => Err(TaskError::Absent),
            Err(source) => Err(TaskError::Kill(source.into())),
        };
    }
    let pid = process.pid();
    if pid == 0 {
        return Err(TaskError::NotStarted);
    }
    if process.exit().is_some() {
        return Err(TaskError::Finished);
    }
    match service.reaper.signal(pid, request.signal) {
        Ok(()) => Ok(Empty::default()),
        Err(Errno::ESRCH) => Err(TaskError::Finished),
        Err(source) => Err(TaskError::KillExec(source)),
    }
}

/// Waits for a dump of the runtime that has ended init, as its client wanted: cut off now, it would
/// have no image, and its container is gone. Kubernetes kills what has ended.
async fn wait_for_dump(container: &Container) {
    let pid = container.init.pid();
    let has_ended = || container.init.exit().is_some() || pid != 0 && !procfs::is_alive(pid);
    let begun = Instant::now();
    while !container.traits.by_firn()
        && container.transaction.is_taken()
        && has_ended()
        && begun.elapsed() < DUMP
    {
        sleep(LOOK).await;
    }
}

/// Has the runtime send a signal. When init is dead of a SIGKILL the runtime is not waited for: runc may look
/// for 10 s whether one that was paused is frozen.
async fn signal_init(container: &Arc<Container>, signal: u32, all: bool) -> Result<(), RuncError> {
    let pid = container.init.pid();
    let was_alive = procfs::is_alive(pid);
    let killing = container.clone();
    let mut call = tokio::spawn(async move { killing.runc.kill(signal, all).await });
    let dead = async {
        while signal != SIGKILL || procfs::is_alive(pid) {
            sleep(LOOK).await;
        }
    };
    tokio::select! {
        biased;
        done = &mut call => match done.map_err(JoinError::try_into_panic) {
            Ok(done) => done,
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and this task with it.
            Err(Err(_)) => std::future::pending().await,
        },
        () = dead, if was_alive => Ok(()),
    }
}

/// Sees to it that a SIGKILL which was acknowledged ends init. With cgroup v1 none that is frozen does: the
/// runtime thaws it when it kills, and a pause, a checkpoint or an update that is under way may freeze it
/// once more.
fn see_to_the_end(container: &Arc<Container>) {
    if !container.cgroup().is_ok_and(|cgroup| cgroup.is_v1()) {
        return;
    }
    let container = container.clone();
    tokio::spawn(async move {
        let begun = Instant::now();
        while procfs::is_alive(container.init.pid())
            && container.init.exit().is_none()
            && begun.elapsed() < KILLED
        {
            sleep(LOOK).await;
            // A transaction that is cut off ends it.
            if container.transaction.is_taken() {
                continue;
            }
            if let Err(error) = let_it_end(&container).await
                && !error.is_absent()
            {
                log::warn!(
                    "cannot thaw {}, which was killed: {}",
                    container.id,
                    Chain(&error)
                );
            }
        }
    });
}

async fn let_it_end(container: &Container) -> Result<(), CgroupError> {
    let cgroup = container.cgroup()?;
    if cgroup.freezer_state()? == FreezerState::Thawed {
        return Ok(());
    }
    // Of a container with GPUs no other process may run on either: its state may be at the driver.
    if container.traits.by_firn() {
        cgroup.kill_all(KILLED).await
    } else {
        cgroup.thaw(THAW).await
    }
}

/// Kills a suspended or parked container. Frozen as it is, a signal alone would not end it with cgroup v1; no
/// thread runs again.
pub(super) async fn give_up(container: &Container) -> Result<(), CgroupError> {
    // A resume that is under way is not wanted any more.
    drop(container.transaction.cancel());
    container.cgroup()?.kill_all(KILLED).await?;
    // Order matters: they are let go of when they cannot run any more.
    drop(container.take_held());
    container.free_pieces();
    Ok(())
}

#[cfg(test)]
mod tests;
