//! What a restore makes in containerd, and what becomes of it if the restore fails.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use firn_host::Alone;
use tokio::time::sleep;

use super::error::RestoreError;
use crate::containerd::{Container, Containerd, Snapshot};
use crate::logs;
use crate::output::note;

/// How long the end of a container may take whose restore has failed.
const END: Duration = Duration::from_secs(60);

/// How often it is tried.
const POLL: Duration = Duration::from_millis(200);

/// What a restore has made, in this order.
#[derive(Default)]
pub(super) struct Creations {
    /// Held until all is removed again: another command would take what is there meanwhile for the container.
    pub alone: Option<Alone>,
    pub image: Option<String>,
    pub snapshot: Option<(String, String)>,
    pub container: Option<Container>,
    /// A container that was there, as it was: it has another spec and snapshot now.
    pub changed: Option<Container>,
    /// The file that gets what the container writes, if one does.
    pub log: Option<PathBuf>,
    /// The same, if it is one of firn.
    pub own_log: Option<PathBuf>,
    /// Id of a container that may have a task of this restore.
    pub task_of: Option<String>,
    /// The snapshot that a container had before this restore, which nobody needs after it.
    pub replaced: Option<(String, String)>,
}

impl Creations {
    /// Removes what the restore has replaced. Not to be interrupted: the container runs.
    pub async fn remove_replaced(self, containerd: &Containerd) {
        if let Some((snapshotter, key)) = &self.replaced {
            let snapshot = Snapshot { snapshotter, key };
            report(
                &format!("snapshot {key}"),
                containerd.remove_snapshot(snapshot).await,
            );
        }
    }

    /// Removes all of it after this error. Returns the error of the restore.
    pub async fn roll_back(self, containerd: &Containerd, error: RestoreError) -> RestoreError {
        match self.discard(containerd).await {
            Some(id) => RestoreError::Left {
                id,
                message: error.shown(),
            },
            None => error,
        }
    }

    /// Gives up all of it: somebody else has made a task of the container, which may run on these files.
    pub fn leave(&mut self) {
        let alone = self.alone.take();
        *self = Self {
            alone,
            ..Self::default()
        };
    }

    /// Removes all of it. Returns the container whose task may be left, and may run.
    async fn discard(self, containerd: &Containerd) -> Option<String> {
        let left = match self.task_of {
            Some(id) if !end(containerd, &id).await => Some(id),
            _ => None,
        };
        if let Some(before) = &self.changed {
            // What its task may use is not taken away.
            if left.is_some() {
                return left;
            }
            if let Err(error) = containerd.update(before).await {
                note!(
                    "firn: {} keeps the spec and the files of this restore: {error}",
                    before.id
                );
                return left;
            }
        }
        if let Some(log) = &self.own_log {
            logs::remove_if_empty(log);
        }
        if let Some(Container { id, .. }) = &self.container {
            report(&format!("container {id}"), containerd.delete_container(id).await);
        }
        if let Some((snapshotter, key)) = &self.snapshot {
            let snapshot = Snapshot { snapshotter, key };
            report(
                &format!("snapshot {key}"),
                containerd.remove_snapshot(snapshot).await,
            );
        }
        if let Some(name) = &self.image {
            report(&format!("image {name}"), containerd.delete_image(name).await);
        }
        left
    }
}

/// Ends a task that may have been started. False: it may be left.
async fn end(containerd: &Containerd, id: &str) -> bool {
    let until = Instant::now() + END;
    loop {
        let deleted = containerd.delete(id).await;
        match deleted {
            Ok(()) => return true,
            Err(error) if error.is_absent() => return true,
            Err(error) if Instant::now() > until => {
                report(&format!("the task of {id}"), Err(error));
                return false;
            }
            Err(_) => {
                // What cannot be killed has ended, or is deleted in the next round.
                let _ended = containerd.kill(id).await;
                sleep(POLL).await;
            }
        }
    }
}

fn report(what: &str, removed: Result<(), crate::containerd::CallError>) {
    if let Err(error) = removed
        && !error.is_absent()
    {
        note!("firn: {what} is left: {error}");
    }
}
