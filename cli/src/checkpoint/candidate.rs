//! A container that can be checkpointed, before anything is begun.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use firn_host::Alone;

use super::aside::aside;
use super::error::CheckpointError;
use super::source::Source;
use crate::containerd::{BUNDLES, Container, ContainerSpec, Containerd, Snapshot};
use crate::oci_image::{self, BaseImage, ImageError, Part};
use crate::serving::other_shim;

/// A container that can be checkpointed, by what containerd knows of it.
pub struct Candidate {
    pub container: Container,
    pub namespace: String,
    pub(super) pid: u32,
    pub(super) was_paused: bool,
    pub(super) alone: Alone,
}

impl Candidate {
    /// A checkpoint image names the image and the snapshotter of its container.
    pub fn expect_base(&self) -> Result<(), CheckpointError> {
        if self.container.image.is_empty() || self.container.snapshot_key.is_empty() {
            Err(CheckpointError::NoBase {
                id: self.container.id.clone(),
            })
        } else {
            Ok(())
        }
    }

    /// Chain id of the layers that it began with; none if they are no image's, or its snapshotter does not
    /// show them.
    pub async fn chain(&self, containerd: &Containerd) -> Option<String> {
        if self.container.snapshot_key.is_empty() {
            return None;
        }
        let below = containerd.parent_of(Snapshot::of(&self.container)).await;
        below.ok().flatten().filter(|below| oci_image::is_chain(below))
    }

    /// This node can send the image that the container began with: its tag may have been moved.
    pub async fn expect_base_image(
        &self,
        containerd: &Containerd,
        chain: Option<&str>,
    ) -> Result<(), ImageError> {
        let name = &self.container.image;
        let target = containerd.image(name).await?.and_then(|image| image.target);
        let target = target.ok_or_else(|| ImageError::NoImage { name: name.clone() })?;
        let base = BaseImage::read(containerd, name, Part::here(target)).await?;
        for part in &base.parts {
            match containerd.size(&part.digest).await {
                Ok(_) => {}
                Err(error) if error.is_absent() => {
                    return Err(ImageError::NotWhole {
                        name: name.clone(),
                        digest: part.digest.clone(),
                    });
                }
                Err(error) => return Err(error.into()),
            }
        }
        match chain {
            Some(chain) if chain != base.chain => Err(ImageError::BaseMoved {
                name: name.clone(),
                chain: chain.to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// The bundle of its task; containerd's socket is in its state directory.
    pub fn bundle(&self, socket: &Path) -> PathBuf {
        let state = socket.parent().unwrap_or(Path::new(""));
        state.join(BUNDLES).join(&self.namespace).join(&self.container.id)
    }

    /// Pid of its first process.
    pub fn init(&self) -> i32 {
        i32::try_from(self.pid).unwrap_or_default()
    }

    /// The shim of somebody else takes no GPU memory into a checkpoint: CRIU fails, and the container has
    /// stood still for nothing.
    pub async fn expect_firn(&self) -> Result<(), CheckpointError> {
        if !self.container.spec().requests_gpu() {
            return Ok(());
        }
        let pid = self.init();
        match aside("the look at its shim", move || other_shim(pid)).await? {
            None => Ok(()),
            Some(shim) => Err(CheckpointError::OtherShim {
                id: self.container.id.clone(),
                shim,
            }),
        }
    }

    /// Begins a lease for what will be written, and a checkpoint for which `overrides` count.
    pub async fn begin(
        self,
        containerd: &Containerd,
        overrides: HashMap<String, String>,
    ) -> Result<Source, CheckpointError> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanos = now.unwrap_or_default().as_nanos();
        let lease = format!("firn-{}-{nanos}", std::process::id());
        Ok(Source {
            containerd: containerd.with_lease(&lease).await?,
            container: self.container,
            namespace: self.namespace,
            overrides,
            lease,
            pid: self.pid,
            was_paused: self.was_paused,
            paused_for: None,
            not_ours: AtomicBool::new(false),
            _alone: self.alone,
        })
    }
}
