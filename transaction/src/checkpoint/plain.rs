//! The dump of a container without GPUs, as the stock shim would do it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::{Config, Keys, Tcp};
use firn_host::procfs;
use firn_host::{Chain, UnlessAbsent};
use firn_image::criu::set_expired_timers;
use firn_oci::amd;
use firn_preflight::{OtherGpus, is_outside_vfork};
use firn_process::OrWarn;
use firn_process::blocking::tidy;
use firn_process::cancel::CancellationToken;
use firn_process::cgroup::FreezerState;
use firn_process::reaper::Reaper;

use super::dump::{Leftovers, WorkDir, bounded, sync};
use super::error::{CheckpointError, EffectError};
use super::phases::Failure;
use super::{KEPT_LOG, Request, join};
use crate::configured::configured;
use crate::container::Container;
use crate::image_dir::{ImageDir, ImageDirError};
use crate::journal::{self, Journal, Outcome};
use crate::killed_criu;
use crate::layer;
use crate::meeting::Meeting;
use crate::phase::Phase;
use crate::pod_shm;
use crate::runc::{Bounds, Checkpoint, RuncError};
use crate::transaction::{Intent, Transaction};

/// How long a reset of the freezer may take.
pub(super) const RESET: Duration = Duration::from_secs(10);

/// CRIU's plugin directory for the GPUs that the processes have open; none: CRIU's own choice.
fn plugins_for(container: &Container, others: OtherGpus) -> Result<Option<PathBuf>, CheckpointError> {
    if others == OtherGpus::Unused {
        return Ok(None);
    }
    let config = Config::load(Keys::CRIU).map_err(CheckpointError::Config)?;
    let plugins = amd::plugin_directory(
        &container.bundle,
        config.criu.amdgpu_plugin.as_deref(),
        &amd::PLUGIN_DIRS,
    );
    plugins
        .map(Some)
        .map_err(|cause| CheckpointError::refused(container, cause))
}

pub(super) async fn run(
    container: &Container,
    request: &Request,
    others: OtherGpus,
    reaper: &Reaper,
) -> Result<(), CheckpointError> {
    // In a pod it is for the containers with GPUs.
    let chosen = request.overrides.tcp().filter(|_| request.meeting.is_none());
    if matches!(chosen, Some(Tcp::Close | Tcp::Auto)) {
        return Err(CheckpointError::refused(container, EffectError::PlainClose));
    }
    let plugins = plugins_for(container, others)?;
    let was_frozen = container
        .cgroup()
        .and_then(|cgroup| cgroup.freezer_state())
        .is_ok_and(|state| state != FreezerState::Thawed);
    let intent = Intent {
        was_frozen,
        ..request.intent(container)
    };
    let guard = container.transaction.begin();
    let cancel = guard.cancel.clone();
    let begun = Transaction::begin_within(container, configured(), intent, reaper, cancel).await;
    let dump = PlainDump {
        transaction: begun.map_err(|error| CheckpointError::refused(container, error))?,
        request,
        plugins,
    };
    let mut dumped = dump.run().await;
    if dumped.is_ok() {
        dump.set_expired_timers().await;
    }
    // Order matters: who kills it from now on does not cut off what brings its image to the disk.
    drop(guard);
    if dumped.is_ok() {
        dumped = dump.sync().await;
    }
    journal::point("dump-over").await;
    let outcome = if dumped.is_ok() {
        Outcome::Done
    } else {
        Outcome::Failed
    };
    dump.transaction.end(outcome, None, dumped.is_ok()).await;
    dumped
}

/// A dump in progress.
struct PlainDump<'a> {
    transaction: Transaction<'a>,
    request: &'a Request,
    /// CRIU's plugin directory; none: CRIU's own choice.
    plugins: Option<PathBuf>,
}

impl PlainDump<'_> {
    /// Dumps the container, with others at the same moment where there are some.
    async fn run(&self) -> Result<(), CheckpointError> {
        let (container, request) = (self.transaction.container, self.request);
        let cancel = self.transaction.cancel();
        let dump = self.dump(cancel);
        let Some(meeting) = &request.meeting else {
            return dump.await;
        };
        let still = async {
            stand_still(container, meeting, cancel).await?;
            // Order matters: after the dump it is for the runtime to keep it frozen.
            match &request.layer {
                Some(archive) => Ok(layer::keep(container, archive, self.transaction.reaper).await?),
                None => Ok(()),
            }
        };
        let still = cancel.unless_stopped(still).await;
        let mut dumped = match still.unwrap_or_else(|| Err(EffectError::stopped(cancel))) {
            Ok(()) => dump.await,
            Err(cause) => Err(CheckpointError::refused(container, cause)),
        };
        if cancel.is_withdrawn() && matches!(dumped, Err(CheckpointError::Plain { .. })) {
            let cause = EffectError::stopped(cancel);
            dumped = Err(CheckpointError::refused(container, cause));
        }
        if dumped.is_ok() {
            let met = join(meeting, 3, cancel).await;
            dumped = met.map_err(|cause| CheckpointError::refused(container, cause));
        }
        // Order matters: the workload does not wait for a file system.
        reset_freezer(container, self.transaction.was_frozen, cancel).await;
        if dumped.is_err() {
            let image = request.image.clone();
            tidy("remove the image", move || image.clear()).await;
        }
        dumped
    }

    /// Makes sure that the image is on its disk. The container continues, or CRIU has ended it. What
    /// containerd copies and syncs itself is left to it, unless its container has ended.
    async fn sync(&self) -> Result<(), CheckpointError> {
        let (container, image) = (self.transaction.container, &self.request.image);
        if image.is_containerds() && !self.request.exit {
            return Ok(());
        }
        let guard = container.transaction.begin();
        let limit = self.transaction.config.deadlines.criu_dump;
        let Err(cause) = sync(image, None, Vec::new(), limit, &guard.cancel).await else {
            return Ok(());
        };
        let is_alive = !guard.cancel.is_cancelled() && procfs::is_alive(container.init.pid());
        if is_alive {
            let image = image.clone();
            tidy("remove the image", move || image.clear()).await;
        }
        let kept = (!is_alive).then(|| image.path().to_owned());
        let failure = Failure::new(Phase::Sync, cause);
        Err(CheckpointError::from_failure(
            &container.id,
            failure,
            kept,
            is_alive,
        ))
    }

    /// Calls the runtime, and cleans up after it.
    async fn dump(&self, cancel: &CancellationToken) -> Result<(), CheckpointError> {
        let (transaction, request) = (&self.transaction, self.request);
        let container = transaction.container;
        let image = &request.image;
        enter_image(container, image, &transaction.journal).await?;
        let work = WorkDir::choose(container, request);
        let made = work.clone();
        tidy("make CRIU's work directory", move || made.make()).await;
        // With others it stands still already, and must not run any more.
        if request.meeting.is_none() {
            freeze_outside_vfork(container, cancel).await;
        }
        // Order matters: after the dump it may run again.
        let keeps_shm = self.keep_shm(&work, cancel).await?;
        let inside = image.inside();
        let dumped = self.call_runtime(&inside, &work, cancel).await;
        journal::point("dump-left").await;
        if dumped.is_err() {
            killed_criu::release(container, &work.log(), cancel, transaction.reaper).await;
        }
        if !cancel.is_cancelled() {
            // Not for a container that is being killed: a frozen cgroup would delay its end.
            self.set_freezer_after(dumped.is_ok(), cancel).await;
        }
        let is_whole = dumped.is_ok();
        let checked = image.at(move |image| {
            image.check()?;
            if is_whole { image.check_complete() } else { Ok(()) }
        });
        let gone = checked.await.err();
        let complete = dumped.is_ok() && gone.is_none();
        if keeps_shm {
            pod_shm::end_early(image, complete).await;
        }
        transaction.journal.leave(Phase::CriuDump, complete).await;
        if complete {
            seal(image).await;
        }
        let is_left = gone.is_some() || dumped.is_err() && cancel.is_cancelled();
        let left = Leftovers::of(is_left.then(|| image.clone()), work);
        let mut result = match dumped {
            _ if let Some(cause) = gone => Err(CheckpointError::from_failure(
                &container.id,
                Failure::new(Phase::CriuDump, cause.into()),
                None,
                procfs::is_alive(container.init.pid()),
            )),
            Ok(()) => Ok(()),
            Err(cause) => Err(CheckpointError::Plain {
                cause,
                lines: Vec::new(),
                log: container.bundle.join(KEPT_LOG),
            }),
        };
        let keep_log = matches!(result, Err(CheckpointError::Plain { .. }));
        let found = left.tidy(container, keep_log, complete, cancel).await;
        if let Err(CheckpointError::Plain { lines, .. }) = &mut result {
            *lines = found.lines;
        }
        journal::point("dump-tidied").await;
        result
    }

    /// Keeps the files of the pod's /dev/shm, if there are any. After an error the container is as it was
    /// found.
    async fn keep_shm(&self, work: &WorkDir, cancel: &CancellationToken) -> Result<bool, CheckpointError> {
        let (transaction, image) = (&self.transaction, &self.request.image);
        let container = transaction.container;
        let kept = cancel.unless_stopped(pod_shm::keep(container, image, true, transaction.reaper));
        let cause = match kept.await {
            Some(Ok(kept)) => return Ok(kept),
            Some(Err(error)) => error.into(),
            None => EffectError::stopped(cancel),
        };
        self.set_freezer_after(false, cancel).await;
        pod_shm::end_early(image, false).await;
        transaction.journal.leave(Phase::CriuDump, false).await;
        let left = Leftovers::of(Some(image.clone()), work.clone());
        left.tidy(container, false, false, cancel).await;
        Err(CheckpointError::refused(container, cause))
    }

    /// Sets the timers that would never expire again in a copy. A list of open files that firn cannot read is
    /// left as it is: the image is what the stock shim would have made.
    async fn set_expired_timers(&self) {
        let image = self.request.image.inside();
        let limit = self.transaction.config.deadlines.look;
        let (what, cancel) = ("set timers in the image", self.transaction.cancel());
        let id = &self.transaction.container.id;
        match bounded(what, limit, cancel, move || set_expired_timers(&image)).await {
            Ok(Ok(0)) => {}
            Ok(Ok(count)) => log::info!("{count} expired timers are set again in the checkpoint of {id}"),
            Ok(Err(fault)) => log::warn!("{id}: timers may be dead in a copy: {}", Chain(&fault)),
            Err(error) => log::warn!("{id}: timers may be dead in a copy: {}", Chain(&error)),
        }
    }

    async fn call_runtime(
        &self,
        inside: &Path,
        work: &WorkDir,
        cancel: &CancellationToken,
    ) -> Result<(), RuncError> {
        let request = self.request;
        let bounds = Bounds {
            // As with the stock shim: alone it keeps nobody waiting.
            deadline: request
                .meeting
                .is_some()
                .then_some(self.transaction.config.deadlines.criu_dump),
            journal: &self.transaction.journal,
            cancel,
            freezer: None,
        };
        let call = Checkpoint {
            image: inside,
            work: &work.path,
            leave_running: !request.exit,
            plugins: self.plugins.as_deref(),
            ..request.call(&request.flags, bounds)
        };
        let dumped = self.transaction.container.runc.checkpoint(call).await;
        dumped.map_err(|error| error.with_path(inside, request.image.path()))
    }

    /// Sets the freezer after a dump. With others [`Self::run`] does it after a success, once all are done.
    async fn set_freezer_after(&self, succeeded: bool, cancel: &CancellationToken) {
        if succeeded && self.request.meeting.is_some() {
            return;
        }
        // What CRIU has ended could not end as long as it is frozen.
        let stays_frozen = self.transaction.was_frozen && !(succeeded && self.request.exit);
        reset_freezer(self.transaction.container, stays_frozen, cancel).await;
    }
}

/// Freezes the container, and returns when all others that are checkpointed at the same moment stand still.
async fn stand_still(
    container: &Container,
    meeting: &Meeting,
    cancel: &CancellationToken,
) -> Result<(), EffectError> {
    join(meeting, 1, cancel).await?;
    container.cgroup()?.freeze_when(is_outside_vfork, RESET).await?;
    join(meeting, 2, cancel).await
}

/// Freezes the container, also one that its client has frozen, while no process is between vfork and exec:
/// CRIU, which would freeze it at any moment, gives up after 10 s if one is.
async fn freeze_outside_vfork(container: &Container, cancel: &CancellationToken) {
    let frozen = async { container.cgroup()?.freeze_when(is_outside_vfork, RESET).await };
    if let Some(frozen) = cancel.unless_cancelled(frozen).await {
        frozen.unless_absent().or_warn(format_args!(
            "{}: a process may be between vfork and exec",
            container.id
        ));
    }
}

/// Writes the dump to the journal and takes hold of the image directory.
async fn enter_image(
    container: &Container,
    image: &ImageDir,
    journal: &Journal,
) -> Result<(), CheckpointError> {
    let noted = async {
        journal.image(image.was(), image.id()).await?;
        journal.enter(Phase::CriuDump).await
    };
    noted
        .await
        .map_err(|error| CheckpointError::refused(container, error))?;
    // The mode of a client's own directory stays as it is, as with the stock shim.
    match image.at(|image| image.enter(None)).await {
        Ok(()) => {}
        Err(gone @ ImageDirError::Gone { .. }) => {
            return Err(CheckpointError::refused(container, gone));
        }
        // The OCI runtime reports a directory that cannot be used.
        Err(error) => log::debug!("{}", Chain(&error)),
    }
    Ok(())
}

/// Closes a complete image to other users.
async fn seal(image: &ImageDir) {
    let sealed = image.at(|image| {
        image.seal();
        Ok(())
    });
    sealed
        .await
        .or_warn(format_args!("cannot close the image to others"));
}

/// Sets the freezer to its state before the dump, which a killed CRIU may have changed. A container that is
/// being killed is thawed instead: with cgroup v1 it could not end.
pub(super) async fn reset_freezer(container: &Container, was_frozen: bool, cancel: &CancellationToken) {
    let reset = async {
        let cgroup = container.cgroup()?;
        let is_frozen = cgroup.freezer_state()? != FreezerState::Thawed;
        let set = async {
            match was_frozen {
                true if !is_frozen => cgroup.freeze(RESET).await,
                false if is_frozen => cgroup.thaw(RESET).await,
                _ => Ok(()),
            }
        };
        let set = cancel.unless_cancelled(set).await;
        journal::point("dump-reset").await;
        match set {
            Some(set) if !cancel.is_cancelled() => set,
            _ => cgroup.thaw(RESET).await,
        }
    };
    if procfs::is_alive(container.init.pid()) {
        let reset = reset.await.unless_absent();
        reset.or_warn(format_args!("cannot reset the freezer of {}", container.id));
    }
}

#[cfg(test)]
mod tests;
