//! Memory that firn copies next to CRIU (firn_image::memory).

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use firn_config::{Bulk, find_program, names};
use firn_host::proc_maps;
use firn_image::memory::call::{Request, Rest, Save, Saved};
use firn_image::memory::{Kept, Process};
use firn_oci::Spec;

use super::ContainerEffects;
use crate::cancel::CancellationToken;
use crate::checkpoint::dump::bounded;
use crate::checkpoint::error::EffectError;
use crate::memory::{Copier, CopyError};
use crate::procfs;

/// A copy of the container's memory, while CRIU describes it.
pub(super) struct Copying {
    copier: Copier,
    cancel: CancellationToken,
    /// What the store gets.
    save: Save,
    /// Those that CRIU dumps.
    pub processes: Vec<Process>,
}

impl ContainerEffects<'_> {
    /// Who copies the memory next to CRIU; none where CRIU has to do it.
    pub(super) async fn copying(&self) -> Result<Option<Copying>, EffectError> {
        let Some(store) = self.source().store.clone() else {
            return Ok(None);
        };
        let processes: Vec<Process> = self.cgroup.pids()?.into_iter().filter_map(process).collect();
        let of = processes.clone();
        let (what, limit) = ("look for memory files", self.config.deadlines.look);
        let has_memory_files = move || of.iter().any(|process| has_memory_files(process.pid));
        // Which pages file is whose would be a guess.
        let odd = match self.progress.omitted {
            0 => bounded(what, limit, &self.cancel, has_memory_files)
                .await?
                .then_some("a process has a memfd"),
            _ => Some("CRIU leaves processes out"),
        };
        if let Some(odd) = odd {
            log::warn!(
                "the image of {} gets all memory, none goes into the store: {odd}",
                self.container.id
            );
            return Ok(None);
        }
        let save = Save {
            store,
            cap: self.config.images.store_cap,
            processes: processes.clone(),
            checkpoint: self.checkpoint.clone(),
            container: self.container.id.clone(),
            image: self.request.image.path().to_owned(),
        };
        Ok(Some(Copying {
            copier: Copier {
                hook: find_program(names::HOOK_PROGRAM, self.config.hook.path.as_deref())?,
                reaper: self.reaper.clone(),
                limit: self.config.deadlines.criu_dump,
            },
            cancel: self.cancel.clone(),
            save,
            processes,
        }))
    }

    /// The store that gets large memory of a container with this spec, if any does.
    pub(super) fn store_for(&self, spec: &Spec) -> Result<Option<PathBuf>, EffectError> {
        let images = &self.config.images;
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

/// Whether a process has files of memfd_create(2) open or mapped. CRIU numbers their pages files among those
/// of processes.
fn has_memory_files(pid: i32) -> bool {
    let is_one = |path: &[u8]| path.starts_with(b"/memfd:");
    let mut found = false;
    let read = proc_maps::each(Path::new("/proc"), pid, |mapping| {
        found |= is_one(mapping.path);
        match found {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    let open = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    let mut links = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    read.is_err() || found || links.any(|link| is_one(link.as_os_str().as_encoded_bytes()))
}

/// A process with memory: a zombie has none.
fn process(pid: i32) -> Option<Process> {
    let inside = procfs::inner_pid(&pid.to_string())?;
    (procfs::state(pid) != Some('Z')).then_some(Process { pid, inside })
}

impl Copying {
    /// Copies large memory into the store.
    pub(super) async fn save(&self) -> Result<Saved, CopyError> {
        let save = Request::Save(self.save.clone());
        self.copier.ask(&save, &self.cancel).await
    }

    /// Writes the pages files, once CRIU is done.
    pub(super) async fn rest(self, image: PathBuf, saved: &Saved) -> Result<Kept, CopyError> {
        let rest = Request::Rest(Rest {
            image,
            processes: self.processes,
            bulk: saved.bulk.clone(),
        });
        self.copier.ask(&rest, &self.cancel).await
    }
}
