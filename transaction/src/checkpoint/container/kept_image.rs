//! Keeps a complete image that the client may remove.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_host::Chain;
use firn_process::blocking::{blocking, tidy};

use super::ContainerEffects;
use crate::checkpoint::dump::bounded;
use crate::container::Container;
use crate::image_dir::{ImageDir, rescue};
use crate::journal::ImageWas;

/// How long firn waits for the file system of the rescue directory.
const RESCUE: Duration = Duration::from_secs(10);

impl ContainerEffects<'_> {
    /// Links the image into a second directory if containerd may remove the first: it does so as soon as the
    /// shim is killed.
    pub(super) async fn link_image(&self) -> Option<PathBuf> {
        let image = self.request.image.clone();
        if !image.is_containerds() {
            return None;
        }
        let dir = self.rescue_dir();
        let sibling = rescue::sibling(image.path(), &dir);
        for (dir, link) in [
            (dir, rescue::link as fn(&ImageDir, &Path) -> std::io::Result<()>),
            (sibling, rescue::link_sibling),
        ] {
            self.transaction.journal.rescue(&dir).await;
            let (image, to) = (image.clone(), dir.clone());
            let link = move || link(&image, &to);
            match bounded("link the image", RESCUE, self.transaction.cancel(), link).await {
                Ok(Ok(())) => return Some(dir),
                Ok(Err(error)) => log::debug!("cannot link the image to {}: {error}", dir.display()),
                Err(error) => {
                    log::warn!("{}", Chain(&error));
                    return None;
                }
            }
        }
        None
    }

    fn rescue_dir(&self) -> PathBuf {
        let Container { bundle, id, .. } = self.transaction.container;
        rescue::place(self.transaction.config.checkpoint.rescue_dir(), bundle, id)
    }

    /// The directory in which a complete image stays for the client that reads the error. None: the image has
    /// gone.
    pub(in crate::checkpoint) async fn keep_image(&mut self) -> Option<PathBuf> {
        let linked = self.progress.rescued.take();
        let root = self.transaction.config.checkpoint.rescue_dir();
        let is_sibling = |dir: &PathBuf| !dir.starts_with(root);
        let image = match linked.clone() {
            Some(dir) if !is_sibling(&dir) => return Some(dir),
            Some(dir) => blocking(move || ImageDir::known(&dir, ImageWas::Filled, None)).await,
            None if self.request.image.is_containerds() => self.request.image.clone(),
            None => {
                let path = self.request.image.path().to_owned();
                return (!self.has_lost_image().await).then_some(path);
            }
        };
        let dir = self.rescue_dir();
        match rescue::copy_within(
            &image,
            &dir,
            self.transaction.config.deadlines.criu_dump,
            self.transaction.cancel(),
        )
        .await
        {
            Ok(()) => {
                self.transaction.journal.rescue(&dir).await;
                if let Some(sibling) = linked {
                    remove(sibling).await;
                }
                Some(dir)
            }
            Err(error) => {
                log::warn!("cannot copy the image to {}: {error}", dir.display());
                let path = self.request.image.path().to_owned();
                match linked {
                    None if self.has_lost_image().await => None,
                    linked => Some(linked.unwrap_or(path)),
                }
            }
        }
    }

    /// Whether the image has gone, for example with its client.
    pub(in crate::checkpoint) async fn has_lost_image(&self) -> bool {
        let image = self.request.image.clone();
        tidy("look at the image", move || image.check().is_err()).await
    }

    /// Removes the image's second directory: the client has the first.
    pub(in crate::checkpoint) async fn drop_rescue(&mut self) {
        if let Some(dir) = self.progress.rescued.take() {
            remove(dir).await;
        }
    }
}

async fn remove(dir: PathBuf) {
    tidy("remove the second directory of an image", move || {
        rescue::remove(&dir)
    })
    .await;
}
