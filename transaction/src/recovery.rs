//! Recovery from a checkpoint or restore whose shim was killed, by its journal.
//!
//! runc ends with a killed shim, but CRIU does not: it continues, holds the tasks, and may complete an image
//! that nobody wants any more. Recovery ends CRIU first. Once the container is dead, it clears an incomplete
//! image from a directory that was empty before the dump; a complete image is kept. Every step may be
//! repeated.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::names;
use firn_host::procfs;
use firn_process::OrWarn;
use firn_process::blocking::{blocking, remove, tidy};
use firn_process::pidfd;
use tokio::time::{Instant, sleep, timeout};

use crate::configured::configured;
use crate::criu_leftovers::unmount_yards;
use crate::image_dir::{ImageDir, rescue};
use crate::journal::{self, ChildProcess, ImageWas, Operation, Record, Role};
use crate::phase::Phase;
use crate::{huge_pages, killed_criu};

/// CRIU's name as the kernel has it.
const CRIU: &str = "criu";

/// Pause between two searches for remaining programs.
const PAUSE: Duration = Duration::from_millis(5);

/// How long the link of an image to a second directory may take. The action `delete` has not much more time.
const RESCUE: Duration = Duration::from_millis(1500);

/// How long the programs of an earlier transaction may take to end when a container is created in its bundle.
const LIMIT: Duration = Duration::from_secs(10);

/// A transaction whose journal is still in the bundle.
pub struct Recovery(Record);

impl Recovery {
    /// The open transaction of the container in `bundle`, if there is one.
    pub fn of(bundle: &Path) -> Option<Self> {
        let file = bundle.join(journal::FILE);
        let record = Record::read(bundle).or_warn(format_args!("cannot read {}", file.display()))?;
        record.map(Self)
    }

    /// Kills the runtime and CRIU of the transaction and waits until they are gone.
    pub async fn end_programs(&self, limit: Duration) {
        let begun = Instant::now();
        loop {
            let record = self.0.clone();
            let Ok(left) = timeout(limit, blocking(move || kill(&record))).await else {
                return log::warn!("cannot look for the programs of a transaction within {limit:?}");
            };
            if left.is_empty() {
                return;
            }
            if begun.elapsed() >= limit {
                return log::warn!("cannot end {left:?}: still there after {limit:?}");
            }
            sleep(PAUSE).await;
        }
    }

    /// CRIU's log of a dump.
    pub fn criu_log(&self) -> PathBuf {
        self.0.begin.work.join(killed_criu::DUMP_LOG)
    }

    /// Removes what the transaction has left outside the container.
    pub async fn clear(&self) {
        let Record { begin, .. } = &self.0;
        unmount_yards(&begin.work).await;
        if begin.op != Operation::Checkpoint {
            return;
        }
        if begin.work_is_ours {
            let work = begin.work.clone();
            remove("remove CRIU's work directory", work, |work| {
                fs::remove_dir_all(work)
            })
            .await;
        }
        if let (false, None, Some(was)) = (self.is_complete(), self.0.outcome, self.0.image_was) {
            let (path, id) = (begin.image.clone(), self.0.image_id);
            tidy("remove an incomplete image", move || {
                ImageDir::known(&path, was, id).clear();
            })
            .await;
        }
    }

    /// Links a complete image into a second directory if containerd may remove the first, as it does after
    /// the shim's end.
    pub async fn rescue(&mut self, bundle: &Path) {
        let config = configured();
        self.rescue_to(config.checkpoint.rescue_dir(), bundle).await;
    }

    async fn rescue_to(&mut self, root: &Path, bundle: &Path) {
        let record = &self.0;
        let begin = &record.begin;
        if let Some(half) = record.rescue.clone().filter(|dir| !rescue::is_complete(dir)) {
            blocking(move || rescue::remove(&half)).await;
        }
        if self.is_rescued() || !begin.gpu || !self.is_complete() {
            return;
        }
        let dir = rescue::place(root, bundle, &begin.container);
        let was = record.image_was.unwrap_or(ImageWas::Filled);
        let (path, id) = (begin.image.clone(), record.image_id);
        let put = blocking(move || {
            let image = ImageDir::known(&path, was, id);
            if !image.is_containerds() {
                return None;
            }
            let sibling = rescue::sibling(&path, &dir);
            match rescue::link(&image, &dir) {
                Ok(()) => Some(dir),
                Err(_) => rescue::link_sibling(&image, &sibling).ok().map(|()| sibling),
            }
        });
        if let Ok(Some(dir)) = tokio::time::timeout(RESCUE, put).await {
            self.0.rescue = Some(dir);
        }
    }

    fn is_rescued(&self) -> bool {
        self.0.rescue.as_deref().is_some_and(rescue::is_complete)
    }

    /// Where the image is, if it is complete.
    pub fn image(&self) -> &Path {
        match &self.0.rescue {
            Some(dir) if rescue::is_complete(dir) => dir,
            _ => &self.0.begin.image,
        }
    }

    /// Logs what the transaction was about to do when its shim was killed, and where a complete image is.
    pub fn report_image(&self) {
        let (begin, image) = (&self.0.begin, self.image());
        let container = &begin.container;
        if self.0.outcome.is_none() {
            let phase = self.0.phase.unwrap_or(Phase::Inspect);
            log::warn!("the shim of {container} was killed when about to {phase}");
        }
        // The client may have removed the image since.
        if begin.op == Operation::Checkpoint && self.is_complete() && image.exists() {
            let image = image.display();
            log::warn!("the checkpoint of {container} in {image} is complete and can be restored");
        }
    }

    /// Removes the journal: there is nothing left to do.
    pub async fn forget(&self, bundle: &Path) {
        let file = bundle.join(journal::FILE);
        remove("remove the journal", file, |file| fs::remove_file(file)).await;
    }

    /// The content of the journal.
    pub fn record(&self) -> &Record {
        &self.0
    }

    /// Whether the image can be restored.
    pub fn is_complete(&self) -> bool {
        let Record { begin, image_was, .. } = &self.0;
        let has_manifest = || {
            begin.gpu
                && image_was.is_some_and(|was| was != ImageWas::Filled)
                && begin.image.join(names::MANIFEST).is_file()
        };
        self.is_rescued() || self.0.dumped || has_manifest()
    }
}

/// Ends and clears what an earlier transaction has left, before a container is created in its bundle.
pub async fn recover(bundle: &Path) {
    let Some(mut recovery) = Recovery::of(bundle) else {
        return;
    };
    recovery.rescue(bundle).await;
    recovery.report_image();
    huge_pages::recover().await;
    recovery.end_programs(LIMIT).await;
    recovery.clear().await;
    recovery.forget(bundle).await;
}

/// Sends SIGKILL once to every process that works for the transaction, and returns those that are left.
fn kill(record: &Record) -> Vec<i32> {
    // Pids of another boot mean nothing: those processes have ended.
    if !record.same_boot {
        return Vec::new();
    }
    pidfd::kill_all(|pid| works_for(record, pid))
}

/// Whether a process is the runtime of the transaction, or CRIU in its process group or work directory.
fn works_for(record: &Record, pid: i32) -> bool {
    let runtimes = || record.children.iter().filter(|child| child.role == Role::Runc);
    let is = |child: &ChildProcess| pid == child.pid && procfs::started(pid) == Some(child.started);
    if runtimes().any(is) {
        return true;
    }
    if procfs::comm(pid) != CRIU {
        return false;
    }
    let in_group = |child: &ChildProcess| pidfd::is_in_group(pid, child.pid, child.started);
    let in_work = || {
        let Record { begin, .. } = record;
        begin.work_is_ours && procfs::is_in(pid, &begin.work)
    };
    runtimes().any(in_group) || in_work()
}

#[cfg(test)]
mod tests;
