//! The hooks of the job in a checkpoint.

use firn_gpu::SourceGpu;
use firn_host::{Chain, Problem};
use firn_oci::job_hook::{Facts, FactsOfGpu, JobHook};
use firn_process::OrWarn;
use firn_process::cancel::Interrupted;
use firn_process::cgroup::FreezerState;
use firn_process::reaper::Reaper;

use super::container::ContainerEffects;
use super::error::{CheckpointError, EffectError};
use crate::configured::configured;
use crate::container::Container;
use crate::effects::Device;
use crate::job_hook::{Caller, HookError, address, facts};
use crate::parked::Parked;
use crate::phase::Phase;
use crate::timings;

impl ContainerEffects<'_> {
    /// Calls the hook `prepare`. It runs also in a container that the client has paused, as every client does
    /// for a checkpoint; afterwards the freezer is as it was found.
    pub(super) async fn call_prepare(&mut self) -> Result<(), EffectError> {
        self.progress.prepared = true;
        if !self.caller().names(JobHook::Prepare)? {
            return Ok(());
        }
        self.transaction.journal.enter(Phase::Prepare).await?;
        let was_frozen = self.is_frozen();
        if was_frozen {
            self.thaw().await?;
        }
        let called = self.call_hook(self.facts(JobHook::Prepare)).await;
        if was_frozen {
            let frozen = self.keep_frozen().await;
            frozen.or_warn(format_args!("the container is not frozen again yet"));
        }
        called?;
        Ok(self.transaction.journal.enter(Phase::Inspect).await?)
    }

    /// Calls the hook `resumed` in a container that continues, or lets Resume call it.
    pub(super) async fn call_resumed(&mut self) -> Result<(), Interrupted<HookError>> {
        let facts = self.facts(JobHook::Resumed);
        if !self.caller().names(JobHook::Resumed)? || self.is_left_to_resume(&facts) {
            return Ok(());
        }
        self.transaction.journal.enter_anyway(Phase::Resumed).await;
        let called = self.call_hook(facts).await;
        if called.is_err() {
            timings::fail();
        }
        called
    }

    /// Calls the hook `failed` in a container that continues after its checkpoint has failed by `error`, or
    /// lets Resume call it.
    pub(super) async fn call_failed(&mut self, error: &EffectError) {
        let mut facts = self.facts(JobHook::Failed);
        facts.error = Some(format!("{}: {}", error.code(), Chain(error)));
        let is_named = self.caller().names(JobHook::Failed).is_ok_and(|named| named);
        if is_named && !self.is_left_to_resume(&facts) {
            let called = self.call_hook(facts).await;
            called.or_warn(format_args!("{}", self.transaction.container.id));
        }
    }

    fn is_frozen(&self) -> bool {
        !matches!(self.cgroup.freezer_state(), Ok(FreezerState::Thawed))
    }

    /// Whether the client has paused the container: then the hook is called when it continues.
    fn is_left_to_resume(&self, facts: &Facts) -> bool {
        let is_frozen = self.is_frozen();
        if is_frozen {
            self.transaction.container.put_pending_hook(facts.clone());
        }
        is_frozen
    }

    fn facts(&self, hook: JobHook) -> Facts {
        let source = self.progress.source.as_ref();
        let gpus = source.map_or(&[][..], |source| &source.gpus);
        let named = |gpu: &SourceGpu| address(&gpu.uuid, &gpu.pci_address);
        let of_gpu = |old: &SourceGpu, new: Option<&SourceGpu>| FactsOfGpu {
            old: Some(named(old)),
            new: new.map(named),
        };
        let gpus: Vec<FactsOfGpu> = match &self.progress.parked {
            Some(Parked { home, gpus, .. }) => {
                let moved = home.iter().zip(gpus);
                moved.map(|(old, new)| of_gpu(old, Some(new))).collect()
            }
            None => gpus.iter().map(|gpu| of_gpu(gpu, None)).collect(),
        };
        Facts {
            pci_changed: gpus.iter().any(FactsOfGpu::has_moved),
            gpus,
            operation: self.transaction.operation.name().to_owned(),
            ..facts(hook, &self.transaction.id, self.request.image.path())
        }
    }

    fn caller(&self) -> Caller<'_> {
        Caller {
            container: self.transaction.container,
            config: &self.transaction.config,
            reaper: self.transaction.reaper,
            cancel: self.transaction.cancel(),
        }
    }

    async fn call_hook(&self, facts: Facts) -> Result<(), Interrupted<HookError>> {
        Box::pin(self.caller().call(self.transaction.container.init.pid(), facts)).await
    }
}

/// Calls the hook that a checkpoint has left to Resume, because the client had paused the container. It runs
/// now.
pub async fn call_pending(container: &Container, reaper: &Reaper) -> Result<(), CheckpointError> {
    let Some(facts) = container.take_pending_hook() else {
        return Ok(());
    };
    let config = configured();
    let guard = container.transaction.begin();
    let caller = Caller {
        container,
        config: &config,
        reaper,
        cancel: &guard.cancel,
    };
    let called = Box::pin(caller.call(container.init.pid(), facts)).await;
    called.map_err(|cause| CheckpointError::Hook {
        container: container.id.clone(),
        cause: cause.into(),
    })
}
