//! Kill: works in any state, also while a checkpoint or restore is under way.

use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::api::{Empty, KillRequest};
use nix::errno::Errno;

use super::state::find;
use super::{SIGKILL, Service, TaskError};
use crate::container::InitState;
use crate::procfs;

/// How long CRIU may take to end before the tasks are killed all the same.
const CRIU: Duration = Duration::from_secs(5);

/// How long killed processes may take to be gone.
const KILLED: Duration = Duration::from_secs(30);

pub(super) async fn kill(service: &Arc<Service>, request: KillRequest) -> Result<Empty, TaskError> {
    let container = service.container(&request.id)?;
    let process = find(&container, &request.exec_id)?;
    if process.exec_id.is_empty() {
        if container.state() == InitState::Lost && request.signal == SIGKILL {
            // Frozen for good: with cgroup v1 a signal alone would not end it. No thread runs again.
            container.cgroup()?.kill_all(KILLED).await?;
            return Ok(Empty::default());
        }
        let _killing = container.killing();
        let cut = match request.signal {
            SIGKILL => container.cut_off(),
            _ => None,
        };
        if let Some(cut) = &cut {
            // Order matters: CRIU first, which holds the tasks and may have turned the freezer on.
            cut.untraced(CRIU).await;
            if container.init.pid() == 0 {
                // Of a restore that was cut off nothing is left; its Start tells.
                return Ok(Empty::default());
            }
        }
        return match container.runc.kill(request.signal, request.all).await {
            Ok(()) => Ok(Empty::default()),
            // The transaction that was cut off has killed it.
            Err(_) if cut.is_some() && !procfs::is_alive(container.init.pid()) => Ok(Empty::default()),
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
