//! The image of a container: its dump, its manifest, and its way to the disk.

use std::time::Instant;

use firn_gpu::CudaProcess;
use firn_preflight::{STARTS, STARTS_LOOK};
use tokio::time::sleep;

use super::{ContainerEffects, unless_cancelled};
use crate::checkpoint::dump::sync;
use crate::checkpoint::error::EffectError;
use crate::checkpoint::join;
use crate::effects::Dump;
use crate::end_proof::EndProof;
use crate::phase::Phase;
use crate::{killed_criu, layer, look, pod_shm};

impl Dump for ContainerEffects<'_> {
    async fn inspect(&mut self, may_start: bool) -> Result<Vec<CudaProcess>, EffectError> {
        self.transaction.journal.measure(Phase::Inspect);
        let first = self.progress.source.is_none();
        let parked = self.progress.parked.clone();
        if first {
            let cancel = self.transaction.cancel().clone();
            self.progress.source = Some(unless_cancelled(&cancel, self.read_source()).await?);
            if self.is_dump() {
                self.make_store_ready().await?;
            }
            if self.finds_files_copied() {
                self.progress.copied_at = Some(look::moment().await);
            }
            // That of a parked container was called at its pause.
            if parked.is_none() {
                self.call_prepare().await?;
            }
        }
        let pids = self.cgroup.pids()?;
        let cuda = match &parked {
            Some(parked) if !parked.is_whole() || self.transaction.container.has_pieces() => {
                return Err(EffectError::Split);
            }
            Some(parked) => parked.processes.clone(),
            None if !self.transaction.container.traits.has_nvidia() => Vec::new(),
            None => unless_cancelled(self.transaction.cancel(), self.gpu.discover(pids.clone())).await?,
        };
        let may_start = may_start && self.may_run();
        self.refuse_by_process(&pids, &cuda, may_start).await?;
        if first {
            self.refuse_by_environment(pids, &cuda).await?;
        }
        self.transaction.journal.cuda(&cuda).await?;
        self.progress.cuda = cuda.clone();
        if !first && parked.is_none() {
            // It was a part of that phase.
            self.transaction.journal.measure(Phase::GpuCheckpoint);
        }
        Ok(cuda)
    }

    fn is_starting(&self) -> bool {
        self.progress.is_starting
    }

    async fn expect_started(&mut self) -> Result<(), EffectError> {
        let until = Instant::now() + STARTS;
        while self.progress.is_starting {
            sleep(STARTS_LOOK).await;
            let pids = self.cgroup.pids()?;
            let cuda = unless_cancelled(self.transaction.cancel(), self.gpu.discover(pids.clone())).await?;
            self.refuse_by_process(&pids, &cuda, Instant::now() < until)
                .await?;
        }
        Ok(())
    }

    async fn expect_files(&mut self) -> Result<(), EffectError> {
        let Some(since) = self.progress.copied_at else {
            return Ok(());
        };
        let request = look::Request::Written {
            init: self.transaction.container.init.pid(),
            pids: self.cgroup.pids()?,
            since,
        };
        match self.look(request).await? {
            None => Ok(()),
            Some(written) => Err(EffectError::Written(written)),
        }
    }

    async fn meet(&mut self) -> Result<(), EffectError> {
        let Some(meeting) = &self.request.meeting else {
            return Ok(());
        };
        self.progress.met += 1;
        join(meeting, self.progress.met, self.transaction.cancel()).await
    }

    async fn dump(&mut self, processes: &[CudaProcess]) -> Result<(), EffectError> {
        if let Some(archive) = &self.request.layer {
            let kept = self.transaction.cancel().unless_stopped(layer::keep(
                self.transaction.container,
                archive,
                self.transaction.reaper,
            ));
            kept.await
                .ok_or_else(|| EffectError::stopped(self.transaction.cancel()))??;
        }
        // Read before the dump: they may have gone when the image is complete.
        self.progress.described = self.inside(processes);
        self.progress.copied = self.dump_memory().await?;
        self.progress.is_dumped = true;
        if !self.keeps_shm_in_dump() {
            let (transaction, image) = (self.transaction, &self.request.image);
            let kept = pod_shm::keep(transaction.container, image, false, transaction.reaper);
            let kept = transaction.cancel().unless_stopped(kept).await;
            kept.ok_or_else(|| EffectError::stopped(transaction.cancel()))??;
        }
        self.keep_library().await?;
        self.log_saved(self.progress.copied.memory.as_ref());
        Ok(())
    }

    async fn expect_frozen(&mut self) -> Result<(), EffectError> {
        let still = self.cgroup.still(self.transaction.config.deadlines.freeze);
        let still = unless_cancelled(self.transaction.cancel(), still).await?;
        let since = self.progress.still.get_or_insert(still);
        match still.unlike(since) {
            None => Ok(()),
            Some(how) => Err(EffectError::Thawed { how }),
        }
    }

    async fn describe(&mut self) -> Result<(), EffectError> {
        self.close_connections().await?;
        self.set_expired_timers().await?;
        self.transaction.journal.show(Phase::Manifest);
        self.describe_image().await
    }

    async fn complete(&mut self) -> Result<(), EffectError> {
        self.write_manifest().await?;
        self.meet().await?;
        self.progress.complete = true;
        self.progress.rescued = self.link_image().await;
        Ok(())
    }

    async fn sync(&mut self) -> Result<EndProof, EffectError> {
        self.transaction.journal.show(Phase::Sync);
        let (limit, cancel) = (
            self.transaction.config.deadlines.criu_dump,
            self.transaction.cancel(),
        );
        let synced = sync(
            &self.request.image,
            self.progress.rescued.as_deref(),
            self.progress.images.clone(),
            limit,
            cancel,
        )
        .await;
        if synced
            .as_ref()
            .is_err_and(|error| !matches!(error, EffectError::Killed))
        {
            self.progress.complete = false;
            let left = &mut self.progress.leftovers;
            left.image.get_or_insert_with(|| self.request.image.clone());
            left.is_unsynced = true;
        }
        synced.map(EndProof::from)
    }

    async fn release_from_criu(&mut self) {
        // Without a work directory CRIU was not started.
        if let Some(work) = &self.progress.leftovers.work {
            killed_criu::release(
                self.transaction.container,
                &work.log(),
                self.transaction.cancel(),
                self.transaction.reaper,
            )
            .await;
        }
    }
}
