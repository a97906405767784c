//! Recovery from a checkpoint or restore whose shim was killed, by what its journal says.
//!
//! A killed shim takes runc along, and not CRIU: that one goes on, holds the tasks, and may finish an image that nobody
//! asked for any more. It is ended first. Then, once the container is dead, an image that is not complete is cleared from
//! a directory that had nothing in it before; a complete one is kept. Every step may be repeated.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::{Config, names};
use tokio::time::{Instant, sleep, timeout};

use crate::blocking::{blocking, tidy};
use crate::criu_leftovers::unmount_yards;
use crate::image_dir::{ImageDir, rescue};
use crate::journal::{self, ChildProcess, ImageWas, Operation, Record, Role};
use crate::phase::Phase;
use crate::{pidfd, procfs};

/// CRIU's name as the kernel has it.
const CRIU: &str = "criu";

/// Pause between two looks at who is left.
const PAUSE: Duration = Duration::from_millis(5);

/// How long an image may take to get a second place. The action `delete` has not much more.
const RESCUE: Duration = Duration::from_millis(1500);

/// How long the programs of a transaction may take to end when a container is made in its bundle.
const LIMIT: Duration = Duration::from_secs(10);

/// A transaction that nobody has ended.
pub struct Recovery(Record);

impl Recovery {
    /// That of the container in `bundle`, if there is one.
    pub fn of(bundle: &Path) -> Option<Self> {
        match Record::read(bundle) {
            Ok(record) => Some(Self(record?)),
            Err(error) => {
                log::warn!("cannot read {}: {error}", bundle.join(journal::FILE).display());
                None
            }
        }
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

    /// Removes what the transaction has left outside the container.
    pub async fn clear(&self) {
        let Record { begin, .. } = &self.0;
        unmount_yards(&begin.work).await;
        if begin.op != Operation::Checkpoint {
            return;
        }
        if begin.work_is_ours
            && let Err(error) = remove(begin.work.clone()).await
        {
            log::warn!("cannot remove {}: {error}", begin.work.display());
        }
        if let (false, None, Some(was)) = (self.is_complete(), self.0.outcome, self.0.image_was) {
            let (path, id) = (begin.image.clone(), self.0.image_id);
            tidy("remove an incomplete image", move || {
                ImageDir::known(&path, was, id).clear();
            })
            .await;
        }
    }

    /// Gives a complete image a second place that its client may remove; containerd is at it already.
    pub async fn rescue(&mut self, bundle: &Path) {
        let config = Config::load().unwrap_or_default();
        self.rescue_to(config.checkpoint.rescue_dir(), bundle).await;
    }

    async fn rescue_to(&mut self, root: &Path, bundle: &Path) {
        let Record {
            begin,
            rescue,
            image_was,
            image_id,
            ..
        } = &self.0;
        if let Some(half) = rescue.clone().filter(|dir| !rescue::is_complete(dir)) {
            blocking(move || rescue::remove(&half)).await;
        }
        if self.is_rescued() || !begin.gpu || !self.is_complete() {
            return;
        }
        let dir = rescue::place(root, bundle, &begin.container);
        let (path, was, id) = (
            begin.image.clone(),
            image_was.unwrap_or(ImageWas::Filled),
            *image_id,
        );
        let put = blocking(move || {
            let image = ImageDir::known(&path, was, id);
            if !image.is_containerds() {
                return None;
            }
            let beside = rescue::beside(&path, &dir);
            match rescue::link(&image, &dir) {
                Ok(()) => Some(dir),
                Err(_) => rescue::link_beside(&image, &beside).ok().map(|()| beside),
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

    /// What the transaction did before its shim was killed, and what is left of it.
    pub fn tell(&self) {
        let Record {
            begin,
            phase,
            outcome,
            ..
        } = &self.0;
        if outcome.is_none() {
            let phase = phase.unwrap_or(Phase::Inspect);
            log::warn!("the shim of {} was killed when about to {phase}", begin.container);
        }
        // Its client may have removed it since.
        if begin.op == Operation::Checkpoint && self.is_complete() && self.image().exists() {
            log::warn!(
                "the checkpoint of {} in {} is complete and can be restored",
                begin.container,
                self.image().display()
            );
        }
    }

    /// Removes the journal: there is nothing left to do.
    pub async fn forget(&self, bundle: &Path) {
        if let Err(error) = remove_file(bundle.join(journal::FILE)).await {
            log::warn!("cannot remove the journal: {error}");
        }
    }

    /// What the journal tells.
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

/// Ends whatever a transaction has left that was under way in this bundle before a container is made in it.
pub async fn recover(bundle: &Path) {
    let Some(mut recovery) = Recovery::of(bundle) else {
        return;
    };
    recovery.rescue(bundle).await;
    recovery.tell();
    recovery.end_programs(LIMIT).await;
    recovery.clear().await;
    recovery.forget(bundle).await;
}

async fn remove(dir: PathBuf) -> std::io::Result<()> {
    let removed = tidy("remove CRIU's work directory", move || {
        Some(std::fs::remove_dir_all(dir))
    });
    absent_is_fine(removed.await.unwrap_or(Ok(())))
}

async fn remove_file(file: PathBuf) -> std::io::Result<()> {
    let removed = tidy("remove the journal", move || Some(std::fs::remove_file(file)));
    absent_is_fine(removed.await.unwrap_or(Ok(())))
}

fn absent_is_fine(removed: std::io::Result<()>) -> std::io::Result<()> {
    match removed {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Kills once whoever works for the transaction, and tells who is left.
fn kill(record: &Record) -> Vec<i32> {
    // Pids of another boot, or of programs that the kernel has ended with it, say nothing.
    if !record.same_boot {
        return Vec::new();
    }
    let works = |pid: &i32| works_for(record, *pid) && procfs::is_alive(*pid);
    let mut left = procfs::all();
    left.retain(|pid| {
        works(pid)
            && pidfd::signal(*pid, libc::SIGKILL, || works(pid))
                .inspect_err(|error| log::debug!("cannot kill {pid}: {error}"))
                .unwrap_or(true)
    });
    left
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
