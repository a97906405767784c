//! The dump of a frozen GPU container by the OCI runtime and CRIU, and what is removed after it.

use std::fs::{DirBuilder, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::OpenImageDir;
use firn_host::UnlessAbsent;
use firn_image::manifest::{DumpFlags, ImageFile, describe_images_by};
use firn_process::OrWarn;
use firn_process::blocking::{Left, stoppable_until};
use firn_process::cancel::CancellationToken;

use super::error::{DumpError, EffectError};
use super::{KEPT_LOG, Request};
use crate::container::Container;
use crate::end_proof::Durable;
use crate::image_dir::{ImageDir, ImageDirError, error_lines};
use crate::journal::ImageWas;
use crate::killed_criu::DUMP_LOG;
use crate::recording;
use crate::runc::{Bounds, Checkpoint, RuncError};

/// How long a finished checkpoint may wait for the file systems of its image and log.
pub(super) const LEFTOVERS: Duration = Duration::from_secs(30);

/// The same once the container is killed.
const LEFTOVERS_KILLED: Duration = Duration::from_secs(5);

/// CRIU's work directory: the client's, or a temporary one.
#[derive(Clone)]
pub(super) struct WorkDir {
    pub path: PathBuf,
    pub ours: bool,
}

impl WorkDir {
    pub(super) fn choose(container: &Container, request: &Request) -> Self {
        match &request.work {
            Some(path) => Self {
                path: path.clone(),
                ours: false,
            },
            None => Self {
                path: container.bundle.join("work").join("criu-work"),
                ours: true,
            },
        }
    }

    /// CRIU's log.
    pub(super) fn log(&self) -> PathBuf {
        self.path.join(DUMP_LOG)
    }

    /// Creates the directory, which crun does not, and removes the log of an earlier dump.
    pub(super) fn make(&self) {
        let path = &self.path;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.or_warn(format_args!("cannot make {}", path.display()));
        let removed = std::fs::remove_file(self.log()).unless_absent();
        removed.or_warn(format_args!("cannot remove the log of an earlier dump"));
    }

    /// Copies the dump log to where users look for it.
    pub(super) fn keep_log(&self, kept: &Path) {
        // The history may still read that of an earlier failure, which must not pass for this one's.
        let _ = std::fs::remove_file(kept);
        let kept_log = std::fs::copy(self.log(), kept)
            .and_then(|_| std::fs::set_permissions(kept, Permissions::from_mode(0o600)));
        if kept_log.or_warn(format_args!("cannot keep CRIU's log")).is_none() {
            let _ = std::fs::remove_file(kept);
        }
    }

    fn remove(self) {
        if self.ours {
            let removed = std::fs::remove_dir_all(&self.path).unless_absent();
            removed.or_warn(format_args!("cannot remove {}", self.path.display()));
        }
    }
}

/// Makes the directories that the dump writes to. Cleans nothing up, also after a failure: see [`Leftovers`].
/// CRIU's first `discarded` pages files go nowhere: the caller writes them.
pub(super) async fn begin(
    container: &Container,
    request: &Request,
    others: OpenImageDir,
    discarded: usize,
    bounds: Bounds<'_>,
    left: &mut Leftovers,
) -> Result<(), EffectError> {
    let Bounds { journal, cancel, .. } = bounds;
    let limit = bounds.deadline.unwrap_or(Duration::MAX);
    let image = &request.image;
    journal.image(image.was(), image.id()).await?;
    left.image = Some(image.clone());
    let entered = image.clone();
    let enter = move || {
        entered.enter(Some(others))?;
        entered.discard_pages(discarded)
    };
    bounded("enter the image directory", limit, cancel, enter).await??;
    if image.was() == ImageWas::Absent {
        journal.image(image.was(), image.id()).await?;
    }
    left.work = Some(WorkDir::choose(container, request));
    Ok(())
}

/// Runs `runc checkpoint` for a GPU container, which stays frozen, into directories that [`begin`] has made.
pub(super) async fn dump(
    container: &Container,
    request: &Request,
    flags: &DumpFlags,
    plugins: &Path,
    bounds: Bounds<'_>,
) -> Result<(), EffectError> {
    let limit = bounds.deadline.unwrap_or(Duration::MAX);
    let (image, cancel) = (&request.image, bounds.cancel);
    let work = WorkDir::choose(container, request);
    let made = work.clone();
    bounded("make CRIU's work directory", limit, cancel, move || made.make()).await?;
    let inside = image.inside();
    let call = Checkpoint {
        image: &inside,
        work: &work.path,
        plugins: Some(plugins),
        ..request.call(flags, bounds)
    };
    let failed = |source: RuncError| {
        if cancel.is_withdrawn() {
            EffectError::stopped(cancel)
        } else {
            EffectError::Dump(DumpError::Failed {
                cause: source.with_path(&inside, image.path()),
                lines: Vec::new(),
                log: container.bundle.join(KEPT_LOG),
            })
        }
    };
    container.runc.checkpoint(call).await.map_err(failed)?;
    let image = image.clone();
    let look = move || image.check().and_then(|()| image.check_complete());
    Ok(bounded("look at the image", limit, cancel, look).await??)
}

/// Does `work` on files while the container is frozen. Waits no longer than `limit`, and not once the
/// container is to end or the checkpoint is withdrawn.
pub(super) async fn bounded<T: Send + 'static>(
    what: &'static str,
    limit: Duration,
    cancel: &CancellationToken,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, EffectError> {
    let done = stoppable_until(limit, cancel.stopped(), move |_| work()).await;
    done.map_err(|left| match left {
        Left::Cancelled => EffectError::stopped(cancel),
        Left::Late => DumpError::Stalled { what, limit }.into(),
    })
}

/// What the clean-up of a failed dump has found.
#[derive(Default)]
pub(super) struct FailedDump {
    /// The first errors of CRIU's log.
    pub lines: Vec<String>,
    /// The image directory has gone, which makes CRIU fail too.
    pub gone: Option<ImageDirError>,
}

/// What a dump leaves apart from a complete image. Order matters: it is removed once the workload runs again
/// or has ended, because neither may wait for a file system.
#[derive(Default)]
pub(super) struct Leftovers {
    pub image: Option<ImageDir>,
    pub work: Option<WorkDir>,
    /// The image has a manifest, and is not on its disk.
    pub is_unsynced: bool,
}

impl Leftovers {
    /// Those of a dump without a manifest.
    pub(super) fn of(image: Option<ImageDir>, work: WorkDir) -> Self {
        Self {
            image,
            work: Some(work),
            is_unsynced: false,
        }
    }

    /// Keeps CRIU's log if `keep_log`, and removes everything but a complete image. Work that takes too
    /// long continues in the background.
    pub(super) async fn tidy(
        self,
        container: &Container,
        keep_log: bool,
        complete: bool,
        cancel: &CancellationToken,
    ) -> FailedDump {
        let Self {
            image,
            work,
            is_unsynced,
        } = self;
        let kept = keep_log.then(|| container.bundle.join(KEPT_LOG));
        let clean = move || {
            let mut found = FailedDump::default();
            if let (Some(work), Some(kept)) = (&work, kept) {
                work.keep_log(&kept);
                found.lines = error_lines(&kept);
                if let Some(recording) = recording::current() {
                    recording.keep_log(&kept);
                }
            }
            if let (Some(image), false) = (image, complete) {
                found.gone = image.check().err();
                if is_unsynced {
                    image.remove_manifest();
                }
                image.clear();
            }
            if let Some(work) = work {
                work.remove();
            }
            found
        };
        let killed = cancel.cancelled_for(LEFTOVERS_KILLED);
        let tidied = stoppable_until(LEFTOVERS, killed, move |_| clean()).await;
        tidied.unwrap_or_else(|_| {
            log::warn!(
                "cannot remove the files of the checkpoint of {} in time",
                container.id
            );
            FailedDump::default()
        })
    }
}

/// CRIU's files with their checksums. Reads every byte of those that are not `known` while the container is
/// frozen. Stops at `limit`, and once the container is to end.
pub(super) async fn describe(
    image: &ImageDir,
    known: Vec<ImageFile>,
    limit: Duration,
    cancel: &CancellationToken,
) -> Result<Vec<ImageFile>, EffectError> {
    let image = image.clone();
    let described = stoppable_until(limit, cancel.stopped(), move |stop| {
        describe_images_by(&image.inside(), image.path(), &known, stop)
    });
    match described.await {
        Ok(described) => Ok(described?),
        Err(Left::Cancelled) => Err(EffectError::stopped(cancel)),
        Err(Left::Late) => Err(DumpError::Checksums { limit }.into()),
    }
}

/// Makes sure that an image is on its disk, after which a workload may end for it: in its directory, or in
/// the second one that firn has made of it, if the client has gone and removed the first. Without `files`
/// only the watch of the directory shows that some were removed.
pub(super) async fn sync(
    image: &ImageDir,
    rescued: Option<&Path>,
    files: Vec<ImageFile>,
    limit: Duration,
    cancel: &CancellationToken,
) -> Result<Durable, EffectError> {
    let (image, rescued) = (image.clone(), rescued.map(Path::to_owned));
    let synced = stoppable_until(limit, cancel.stopped(), move |stop| {
        let kept = rescued.and_then(|dir| Durable::rescued(&dir, &files, stop).or_log());
        match (image.sync(&files, stop), kept) {
            (Err(removed), Some(kept)) if removed.source.kind() == ErrorKind::NotFound => Ok(kept),
            // Order matters: what is removed after that had been there as a whole.
            (Ok(synced), kept) => match (image.check(), kept) {
                (Ok(()), _) => Ok(synced),
                (Err(_), Some(kept)) => Ok(kept),
                (Err(lost), None) => Err(EffectError::from(lost)),
            },
            (Err(failed), _) => Err(failed.into()),
        }
    });
    match synced.await {
        Ok(synced) => Ok(synced?),
        Err(Left::Cancelled) => Err(EffectError::stopped(cancel)),
        Err(Left::Late) => {
            let what = "write the image to its disk";
            Err(DumpError::Stalled { what, limit }.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn checksums_that_take_too_long_are_left_and_nobody_reads_on() {
        let dir = tempfile::tempdir().unwrap();
        let pages = std::fs::File::create(dir.path().join("pages-1.img")).unwrap();
        // A thread that reads all of it would keep the test from ending.
        pages.set_len(1 << 40).unwrap();
        let limit = Duration::from_millis(50);
        let image = ImageDir::find(dir.path(), false).await.unwrap();
        let late = describe(&image, Vec::new(), limit, &CancellationToken::default())
            .await
            .unwrap_err();
        assert!(
            matches!(late, EffectError::Dump(DumpError::Checksums { .. })),
            "{late}"
        );
        let cancel = CancellationToken::default();
        let kill = async {
            tokio::task::yield_now().await;
            cancel.cancel();
        };
        let (killed, ()) = tokio::join!(describe(&image, Vec::new(), Duration::MAX, &cancel), kill);
        assert!(matches!(killed, Err(EffectError::Killed)), "{killed:?}");
    }

    /// A client that goes away lets containerd remove its directory, at any moment.
    #[tokio::test]
    async fn no_workload_ends_for_an_image_that_its_client_has_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (of_client, second) = (dir.path().join("image"), dir.path().join("second"));
        for dir in [&of_client, &second] {
            std::fs::create_dir(dir).unwrap();
            for name in ["inventory.img", "pages-1.img", "firn.json"] {
                std::fs::write(dir.join(name), "x").unwrap();
            }
        }
        let image = ImageDir::find(&of_client, false).await.unwrap();
        let cancel = CancellationToken::default();
        let proof_of = async |rescued: Option<&Path>| {
            let synced = sync(&image, rescued, Vec::new(), Duration::from_secs(60), &cancel).await;
            synced.map(|durable| durable.path().to_owned())
        };
        assert_eq!(proof_of(None).await.unwrap(), of_client);
        assert_eq!(proof_of(Some(&second)).await.unwrap(), of_client);
        // What is removed first is chance.
        std::fs::remove_file(of_client.join("inventory.img")).unwrap();
        assert!(proof_of(None).await.is_err());
        std::fs::remove_dir_all(&of_client).unwrap();
        assert!(proof_of(None).await.is_err());
        assert_eq!(proof_of(Some(&second)).await.unwrap(), second);
        std::fs::remove_file(second.join("inventory.img")).unwrap();
        assert!(proof_of(Some(&second)).await.is_err());
        // The half that is left has the file that each image has.
        std::fs::write(second.join("inventory.img"), "x").unwrap();
        let half = dir.path().join("half");
        let removed = ImageDir::find(&half, false).await.unwrap();
        removed.enter(None).unwrap();
        for name in ["inventory.img", "pages-1.img"] {
            std::fs::write(half.join(name), "x").unwrap();
        }
        let limit = Duration::from_secs(60);
        let whole = sync(&removed, None, Vec::new(), limit, &cancel).await;
        assert_eq!(whole.unwrap().path(), half);
        std::fs::remove_file(half.join("pages-1.img")).unwrap();
        assert!(sync(&removed, None, Vec::new(), limit, &cancel).await.is_err());
        let kept = sync(&removed, Some(&second), Vec::new(), limit, &cancel).await;
        assert_eq!(kept.unwrap().path(), second);
        // Another failure than that it is gone is one.
        std::fs::write(second.join("inventory.img"), "x").unwrap();
        std::fs::create_dir(&of_client).unwrap();
        std::os::unix::fs::symlink("pages-1.img", of_client.join("inventory.img")).unwrap();
        let image = ImageDir::find(&of_client, false).await.unwrap();
        let synced = sync(
            &image,
            Some(&second),
            Vec::new(),
            Duration::from_secs(60),
            &cancel,
        )
        .await;
        assert!(synced.is_err());
    }

    /// Where the directory cannot be watched, and the client's removal is in its middle.
    #[tokio::test]
    async fn an_image_without_one_of_its_files_is_no_proof() {
        let dir = tempfile::tempdir().unwrap();
        let [of_client, second] = ["image", "second"].map(|name| dir.path().join(name));
        let names = ["inventory.img", "pstree.img", "pages-1.img", "firn.json"];
        for dir in [&of_client, &second] {
            std::fs::create_dir(dir).unwrap();
            for name in names {
                std::fs::write(dir.join(name), name).unwrap();
            }
        }
        let unwatched = ImageDir::find(&of_client, false).await.unwrap();
        let cancel = CancellationToken::default();
        let files = describe(&unwatched, Vec::new(), Duration::MAX, &cancel)
            .await
            .unwrap();
        assert_eq!(files.len(), 3);
        let proof_of = async |rescued: Option<&Path>| {
            let synced = sync(&unwatched, rescued, files.clone(), Duration::MAX, &cancel).await;
            synced.map(|durable| durable.path().to_owned())
        };
        assert_eq!(proof_of(Some(&second)).await.unwrap(), of_client);
        for name in names {
            std::fs::remove_file(of_client.join(name)).unwrap();
            assert!(proof_of(None).await.is_err(), "{name}");
            assert_eq!(proof_of(Some(&second)).await.unwrap(), second, "{name}");
            std::fs::rename(second.join(name), dir.path().join(name)).unwrap();
            assert!(proof_of(Some(&second)).await.is_err(), "{name}");
            std::fs::rename(dir.path().join(name), second.join(name)).unwrap();
            std::fs::write(of_client.join(name), name).unwrap();
        }
        std::fs::write(of_client.join("pages-1.img"), "short").unwrap();
        assert!(proof_of(Some(&second)).await.is_err(), "another size");
    }
}
