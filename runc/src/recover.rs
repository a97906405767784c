//! What becomes of a transaction whose process was killed, and of a suspended container: the next call for
//! the container rolls it back. A call that ends the container ends it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firn_host::UnlessAbsent;
use firn_process::cgroup::Cgroup;
use firn_process::reaper::Reaper;
use firn_transaction::checkpoint;
use firn_transaction::container::{Container, InitState};
use firn_transaction::create;
use firn_transaction::history::{self, HistoryDir, code_of};
use firn_transaction::journal::{Operation, Outcome};
use firn_transaction::recording;
use firn_transaction::recovery::Recovery;
use firn_transaction::restore;
use firn_transaction::runc::Runc;
use firn_transaction::{huge_pages, killed_criu};

use crate::action::CallEnd;
use crate::command_line::{CommandLine, Verb};
use crate::container::{NAMESPACE, made, options, running, state};
use crate::error::{Failure, Trouble};
use crate::open::Open;

/// How long killed processes may take to end.
const ENDED: Duration = Duration::from_secs(20);

/// Rolls back the transaction of container `id` that is noted in `open`.
pub async fn run(line: &CommandLine, id: &str, mut open: Open, reaper: &Reaper) -> Result<CallEnd, Failure> {
    let mut done = CallEnd::Pass;
    let bundle = open.bundle().map_err(Trouble::Notes)?;
    let recovery = bundle.as_deref().and_then(Recovery::of);
    if let (Some(bundle), Some(recovery)) = (bundle, recovery) {
        recovery.record().adopt();
        history::write_killed(&HistoryDir::default(), &bundle).await;
        log::warn!(
            "{} of container {id} was cut off and is rolled back",
            recovery.record().begin.op
        );
        match recovery.record().begin.op {
            Operation::Restore => roll_back_restore(line, id, &bundle, &recovery, reaper).await?,
            _ => done = checkpointed(line, id, &bundle, &recovery, reaper).await?,
        }
    }
    open.end().map_err(Trouble::Notes)?;
    Ok(done)
}

/// Leaves nothing of a restore.
async fn roll_back_restore(
    line: &CommandLine,
    id: &str,
    bundle: &Path,
    recovery: &Recovery,
    reaper: &Reaper,
) -> Result<(), Failure> {
    let mut options = options(line, bundle)?;
    options.criu_work_path = recovery.record().begin.work.to_string_lossy().into_owned();
    let runc = Runc::new(id, NAMESPACE, bundle, &options, reaper.clone());
    let container = made(id, bundle, runc, options, create::reopen(bundle)?, None);
    restore::after_kill(&container, recovery).await;
    Ok(())
}

/// Lets the container of a checkpoint continue, unless it is to end.
async fn checkpointed(
    line: &CommandLine,
    id: &str,
    bundle: &Path,
    recovery: &Recovery,
    reaper: &Reaper,
) -> Result<CallEnd, Failure> {
    let state = state(line, id, reaper).await?;
    let container = match &state {
        Some(state) if state.is_alive() => Some(running(line, id, state, reaper)?),
        _ => None,
    };
    match (container, line.verb) {
        (Some(container), Verb::Kill | Verb::Delete) => {
            end(bundle, Some(&container), recovery, reaper).await;
            let is_killed = line.verb == Verb::Kill;
            Ok(if is_killed { CallEnd::Here } else { CallEnd::Pass })
        }
        (Some(container), Verb::Resume) => {
            rolled_back(&container, recovery, reaper).await?;
            let state = self::state(line, id, reaper).await?;
            // Paused it is if the client had paused it before the checkpoint.
            let runs = state.is_some_and(|state| state.is_running());
            Ok(if runs { CallEnd::Here } else { CallEnd::Pass })
        }
        (Some(container), _) => rolled_back(&container, recovery, reaper).await,
        (None, _) => {
            end(bundle, None, recovery, reaper).await;
            Ok(CallEnd::Pass)
        }
    }
}

async fn rolled_back(
    container: &Arc<Container>,
    recovery: &Recovery,
    reaper: &Reaper,
) -> Result<CallEnd, Failure> {
    if recovery.record().outcome == Some(Outcome::Suspended) {
        let recording = recording::begin(Operation::Resume, &container.id, NAMESPACE);
        let done = checkpoint::resume(container, reaper).await;
        let code = done.as_ref().err().and_then(code_of);
        let outcome = recording.outcome(container, done.is_ok());
        history::write(
            &HistoryDir::default(),
            recording.entry(outcome, code),
            recording.take_log(),
        )
        .await;
        done?;
        return Ok(CallEnd::Pass);
    }
    let error = checkpoint::rollback_after_panic(container, reaper).await;
    match container.state() {
        InitState::Suspended => Err(error.into()),
        _ => Ok(CallEnd::Pass),
    }
}

/// Ends what works for a checkpoint, and the container.
async fn end(bundle: &Path, container: Option<&Arc<Container>>, recovery: &Recovery, reaper: &Reaper) {
    huge_pages::recover().await;
    recovery.end_programs(ENDED).await;
    if let Some(container) = container {
        let cgroup = Cgroup::of_pid(container.init.pid());
        let pids = cgroup
            .as_ref()
            .ok()
            .and_then(|cgroup| cgroup.pids().ok())
            .unwrap_or_default();
        let (log, limit) = (recovery.criu_log(), killed_criu::LIMIT_KILLED);
        killed_criu::release_of(&container.bundle, &log, &pids, limit, reaper).await;
        let killed = async { cgroup?.kill_all(ENDED).await };
        if let Err(error) = killed.await.unless_absent() {
            log::warn!("cannot kill container {}: {error}", container.id);
        }
    }
    recovery.clear().await;
    recovery.forget(bundle).await;
}
