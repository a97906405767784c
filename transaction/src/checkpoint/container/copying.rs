//! Memory that firn copies next to CRIU (firn_image::memory).

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use firn_config::{Bulk, InlineCopy, find_program, names};
use firn_host::procfs;
use firn_host::{Chain, proc_maps};
use firn_image::manifest::{ImageFile, StoredMemory};
use firn_image::memory::call::{MakeReady, Ready, Request, Rest, Save, Saved};
use firn_image::memory::{Kept, Process};
use firn_oci::Spec;
use firn_process::cancel::{CancellationToken, Interrupted};
use serde::de::DeserializeOwned;

use super::ContainerEffects;
use crate::checkpoint::dump::{begin, bounded, dump};
use crate::checkpoint::error::EffectError;
use crate::effects::Dump;
use crate::memory::{Copier, CopyError};
use crate::phase::Phase;
use crate::pod_shm;
use crate::runc::Bounds;

/// A copy of the container's memory, while CRIU describes it.
pub(super) struct Copying {
    copier: Copier,
    cancel: CancellationToken,
    /// What the store gets; none: nothing.
    save: Option<Save>,
    /// Those that CRIU dumps.
    processes: Vec<Process>,
    /// How many pages files CRIU may write at most.
    files: usize,
}

/// What was copied next to CRIU.
#[derive(Default)]
pub(super) struct Copied {
    /// What the store has.
    pub memory: Option<StoredMemory>,
    /// Pages files with their checksums.
    pub files: Vec<ImageFile>,
}

impl ContainerEffects<'_> {
    fn copier(&self) -> Result<Copier, EffectError> {
        Ok(Copier {
            hook: find_program(names::HOOK_PROGRAM, self.transaction.config.hook.path.as_deref())?,
            reaper: self.transaction.reaper.clone(),
            limit: self.transaction.config.deadlines.criu_dump,
            container: self.transaction.container.id.clone(),
            bundle: self.transaction.container.bundle.clone(),
            journal: Some(self.transaction.journal.clone()),
        })
    }

    /// Makes the store ready that gets large memory, before the container stands still. One that cannot be
    /// used refuses the checkpoint here.
    pub(super) async fn make_store_ready(&mut self) -> Result<(), EffectError> {
        let Some(store) = self.source().store.clone() else {
            return Ok(());
        };
        let images = &self.transaction.config.images;
        let request = Request::Ready(MakeReady {
            store,
            key: images.store_key.clone(),
            cap: images.store_cap,
        });
        match self
            .copier()?
            .ask::<Ready>(request, self.transaction.cancel())
            .await
        {
            Ok(ready) => self.progress.store_ready = Some(ready),
            // The copy itself may succeed, or CRIU makes it.
            Err(Interrupted::Failed(error)) if error.is_odd() => {
                let id = &self.transaction.container.id;
                log::warn!("the store is not made ready for {id}: {}", Chain(&error));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Who copies the memory next to CRIU; none where CRIU has to do it.
    pub(super) async fn copying(&self) -> Result<Option<Copying>, EffectError> {
        let store = self.source().store.clone();
        if store.is_none() && self.transaction.config.images.inline_copy == InlineCopy::Criu {
            return Ok(None);
        }
        // Which pages file is whose would be a guess.
        if self.progress.omitted > 0 {
            self.warn_of_criu("CRIU leaves processes out");
            return Ok(None);
        }
        let processes: Vec<Process> = self.cgroup.pids()?.into_iter().filter_map(process).collect();
        let of = processes.clone();
        let (what, limit) = ("look for shared memory", self.transaction.config.deadlines.look);
        let shared = bounded(what, limit, self.transaction.cancel(), move || shared_files(&of)).await?;
        let save = store.map(|store| Save {
            store,
            key: self.transaction.config.images.store_key.clone(),
            cap: self.transaction.config.images.store_cap,
            ready: self.progress.store_ready.clone(),
            exit: self.request.exit,
            processes: processes.clone(),
            owner: self.source().owner.clone(),
            checkpoint: self.transaction.id.clone(),
            container: self.transaction.container.id.clone(),
            image: self.request.image.path().to_owned(),
        });
        Ok(Some(Copying {
            copier: self.copier()?,
            cancel: self.transaction.cancel().clone(),
            save,
            files: processes.len() + shared,
            processes,
        }))
    }

    /// Dumps the container, and copies memory next to CRIU where firn does that. What firn cannot copy CRIU
    /// copies, in a second dump.
    pub(super) async fn dump_memory(&mut self) -> Result<Copied, EffectError> {
        let (transaction, cgroup) = (self.transaction, self.cgroup.clone());
        let (plugins, limit) = (self.configure_criu()?, transaction.config.deadlines.criu_dump);
        let flags = self.source().dump.clone();
        let bounds = Bounds {
            deadline: Some(limit),
            journal: &transaction.journal,
            cancel: transaction.cancel(),
            freezer: Some(&cgroup),
        };
        let mut copying = self.copying().await?;
        let files = copying.as_ref().map_or(0, |copying| copying.files);
        let others = transaction.config.checkpoint.open_image_dir;
        let left = &mut self.progress.leftovers;
        begin(transaction.container, self.request, others, files, bounds, left).await?;
        if self.keeps_shm_in_dump() {
            pod_shm::keep_in_dump(transaction.container, &self.request.image)?;
        }
        // At most twice.
        loop {
            transaction.journal.measure(Phase::CriuDump);
            // CRIU thaws the cgroup while it holds the tasks.
            self.progress.still = None;
            let failed = CancellationToken::default();
            let dumping = async {
                let dumped = dump(transaction.container, self.request, &flags, &plugins, bounds).await;
                // The container stands still for the copy: nobody needs it any more.
                dumped.inspect_err(|_| failed.cancel())
            };
            let saving = async {
                match &copying {
                    Some(copying) => copying.save(&failed).await,
                    None => Ok(Saved::default()),
                }
            };
            // CRIU to its end: nobody cleans up after one that is left alone.
            let (dumped, saved) = tokio::join!(dumping, saving);
            if let Err(error) = dumped {
                return Err(self.refusal_in_dump().await.unwrap_or(error));
            }
            self.expect_frozen().await?;
            let Some(copying) = copying.take() else {
                return Ok(Copied::default());
            };
            transaction.journal.show(Phase::CopyMemory);
            let image = self.request.image.clone();
            let copied = match saved {
                Ok(saved) => copying.rest(image.inside(), saved).await,
                Err(error) => Err(error),
            };
            match copied {
                Err(Interrupted::Failed(error)) if error.is_odd() => {
                    self.warn_of_criu(&Chain(&error).to_string())
                }
                Err(Interrupted::Cancelled) => return Err(EffectError::stopped(transaction.cancel())),
                copied => return Ok(copied?),
            }
            let empty = move || image.empty_discarded_pages();
            bounded("empty the pages files", limit, transaction.cancel(), empty).await??;
        }
    }

    /// Why firn-hook, which CRIU has called, has failed; none if it has not.
    async fn refusal_in_dump(&self) -> Option<EffectError> {
        if !self.keeps_shm_in_dump() {
            return None;
        }
        let refusal = pod_shm::refusal_in_dump(self.transaction.container).await;
        refusal.map(Into::into)
    }

    fn warn_of_criu(&self, why: &str) {
        log::warn!(
            "CRIU copies all memory of {} into the image: {why}",
            self.transaction.container.id
        );
    }

    /// Logs what the store got.
    pub(super) fn log_saved(&self, memory: Option<&StoredMemory>) {
        if let Some(memory) = memory {
            log::info!(
                "container={} store_index={} bytes={} new={} reused={}",
                self.transaction.container.id,
                memory.index.short(),
                memory.bytes,
                memory.written,
                memory.reused
            );
        }
    }

    /// The store that gets large memory of a container with this spec, if any does.
    pub(super) fn store_for(&self, spec: &Spec) -> Result<Option<PathBuf>, EffectError> {
        if self.request.inline {
            return Ok(None);
        }
        let images = &self.transaction.config.images;
        let annotation = spec.annotation(names::ANNOTATION_BULK);
        let unknown = || EffectError::BulkSetting {
            word: annotation.unwrap_or_default().to_owned(),
        };
        match images.bulk_for(annotation).ok_or_else(unknown)? {
            Bulk::Inline => Ok(None),
            Bulk::Store => images.store.clone().map(Some).ok_or(EffectError::NoStore),
        }
    }
}

/// How many files CRIU may write for memory that processes share: it numbers them among those of processes.
fn shared_files(processes: &[Process]) -> usize {
    let mut files = BTreeSet::new();
    for process in processes {
        // What cannot be read now cannot be read later either: the copy fails, and CRIU does it.
        let _ = proc_maps::each(Path::new("/proc"), process.pid, |mapping| {
            if mapping.perms.ends_with(b"s") && !mapping.path.starts_with(b"/dev/nvidia") {
                files.insert(mapping.file);
            }
            ControlFlow::Continue(())
        });
    }
    files.len()
}

/// A process with memory: a zombie has none.
fn process(pid: i32) -> Option<Process> {
    let inside = procfs::inner_pid(&pid.to_string())?;
    (procfs::state(pid) != Some('Z')).then_some(Process { pid, inside })
}

impl Copying {
    /// Copies large memory into the store, unless the transaction is stopped or `failed` is cancelled.
    async fn save(&self, failed: &CancellationToken) -> Result<Saved, Interrupted<CopyError>> {
        match self.save.clone() {
            Some(save) => self.ask(Request::Save(save), failed).await,
            None => Ok(Saved::default()),
        }
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        request: Request,
        failed: &CancellationToken,
    ) -> Result<T, Interrupted<CopyError>> {
        let mut asked = Box::pin(self.copier.ask(request, failed));
        tokio::select! {
            done = &mut asked => done,
            () = self.cancel.stopped() => {
                failed.cancel();
                asked.await
            }
        }
    }

    /// Writes the pages files, once CRIU is done.
    async fn rest(self, image: PathBuf, saved: Saved) -> Result<Copied, Interrupted<CopyError>> {
        let rest = Request::Rest(Rest {
            image,
            processes: self.processes.clone(),
            bulk: saved.bulk,
        });
        let kept: Kept = self.ask(rest, &CancellationToken::default()).await?;
        Ok(Copied {
            memory: saved.memory,
            files: kept.files,
        })
    }
}
