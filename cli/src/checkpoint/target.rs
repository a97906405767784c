//! What a checkpoint becomes: made before the container stands still, and removed after a failure.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use firn_config::names;
use firn_host::UnlessAbsent;
use firn_host::durable::{self, NotOnDisk};
use firn_image::form::{self, CheckpointDir};
use firn_image::manifest::Manifest;
use firn_transaction::end_proof::{Durable, EndProof};
use serde_json::json;

use super::aside::aside;
use super::error::CheckpointError;
use super::source::Source;
use crate::containerd::{CallError, Containerd, Image};
use crate::moves::is_firns;
use crate::oci_image::{self, ImageError, Index, Layout, media};
use crate::outlet::Outlet;
use crate::output::note;
use crate::place::Location;
use crate::steps::Steps;

/// How long a file may take nothing.
const WRITE: Duration = Duration::from_secs(1800);

/// The place of a checkpoint that is being made.
pub enum Target {
    /// With the digest of what containerd was asked to record under this name.
    Image(String, Option<String>),
    File(PathBuf, File),
    /// With whether the directory was made, too.
    Dir(PathBuf, bool),
}

impl Target {
    /// Fails if something is there already.
    pub async fn begin(containerd: &Containerd, place: &Location) -> Result<Self, CheckpointError> {
        match place {
            Location::Ref(name) => match containerd.image(name).await? {
                None => Ok(Self::Image(name.clone(), None)),
                Some(_) => Err(CheckpointError::Exists {
                    what: format!("image {name}"),
                }),
            },
            Location::File(path) => {
                let file = OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(path);
                Ok(Self::File(path.clone(), file.map_err(made(path))?))
            }
            Location::Dir(path) => {
                let path = std::path::absolute(path).map_err(made(path))?;
                let is_new = match DirBuilder::new().mode(0o700).create(&path) {
                    Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => false,
                    result => result.map(|()| true).map_err(made(&path))?,
                };
                let exists = |path: &Path| CheckpointError::Exists {
                    what: path.display().to_string(),
                };
                // Order matters: next to another image nobody could restore this one.
                if CheckpointDir::find(&path).map_err(ImageError::from)?.is_some() {
                    return Err(exists(&path));
                }
                for name in [form::IMAGE, form::LAYER] {
                    let inside = path.join(name);
                    if inside.symlink_metadata().is_ok() {
                        return Err(exists(&inside));
                    }
                }
                Ok(Self::Dir(path, is_new))
            }
        }
    }

    /// Checkpoints the container, which stands still. Returns the bytes of the checkpoint.
    pub async fn fill(&mut self, source: &Source, steps: &mut Steps) -> Result<u64, CheckpointError> {
        match self {
            Self::Image(name, recorded) => {
                let taken = source.take(steps).await?;
                let descriptor = taken.part.descriptor();
                // Order matters: who is interrupted does not know what containerd does with the call.
                *recorded = Some(descriptor.digest.clone());
                let image = Image {
                    name: name.clone(),
                    target: Some(descriptor),
                    ..Image::default()
                };
                match source.containerd().create_image(image).await {
                    Err(error) if error.is_there() => {
                        *recorded = None;
                        let what = format!("image {name}");
                        return Err(CheckpointError::Exists { what });
                    }
                    created => created?,
                }
                Ok(taken.index.bytes())
            }
            Self::File(path, file) => {
                let taken = source.take_whole(steps).await?;
                steps.begin("write");
                let layout = Layout {
                    name: &format!("checkpoint/{}", source.container.id),
                    index: &taken.part,
                    parts: &taken.index.manifests,
                };
                let failed = || ImageError::file(format!("write {}", path.display()));
                let to = file.try_clone().map_err(failed())?;
                let mut out = Outlet::new(to, WRITE, |_written| Ok(())).map_err(failed())?;
                let nothing = async || Ok::<_, ImageError>(());
                let bytes = oci_image::write(&source.containerd, &layout, &mut out, steps, nothing).await?;
                out.end().await.map_err(failed())?;
                steps.end();
                Ok(bytes)
            }
            Self::Dir(path, _) => directory(source, path, steps).await,
        }
    }

    /// The manifest of a checkpoint that may need the store: a file does not.
    ///
    /// # Errors
    /// It cannot be read, or the image is not there.
    pub async fn manifest(&self, containerd: &Containerd) -> Result<Option<Manifest>, CheckpointError> {
        match self {
            Self::Image(name, _) => {
                let image = containerd.image(name).await?;
                let target = image.and_then(|image| image.target).unwrap_or_default();
                let index = Index::read(containerd, name, &target.digest).await?;
                let part = index.part(media::CHECKPOINT).cloned().unwrap_or_default();
                let bytes = oci_image::manifest(containerd, &part).await?;
                let manifest = bytes.map(|bytes| Manifest::decode(&bytes, Path::new(name)));
                Ok(manifest.transpose()?)
            }
            Self::File(..) => Ok(None),
            Self::Dir(path, _) => Ok(Manifest::read(&path.join(form::IMAGE))?),
        }
    }

    /// Shows that the checkpoint is on its disk.
    pub async fn durable(&self, steps: &mut Steps) -> Result<EndProof, CheckpointError> {
        let sync: Box<dyn FnOnce() -> Result<Durable, NotOnDisk> + Send> = match self {
            Self::Image(name, _) => return Ok(EndProof::committed(name)),
            Self::File(path, _) => {
                let path = path.clone();
                Box::new(move || Durable::file(&path))
            }
            Self::Dir(path, is_new) => {
                let (path, is_new) = (path.clone(), *is_new);
                Box::new(move || of_directory(&path, is_new))
            }
        };
        steps.begin("sync");
        let synced = aside("sync", sync).await?;
        steps.end();
        Ok(synced?.into())
    }

    /// Removes what was made. May be called again.
    pub async fn discard(&mut self, containerd: &Containerd) {
        let removed = match self {
            Self::Image(name, recorded) => {
                // Order matters: what containerd was asked for may come after a look, so that the next one
                // looks again.
                if let Some(digest) = recorded
                    && let Err(error) = forgotten(containerd, name, digest).await
                {
                    note!("firn: image {name} is left: {error}");
                }
                return;
            }
            Self::File(path, _) => fs::remove_file(&*path).unless_absent(),
            Self::Dir(path, is_new) => empty(path, *is_new),
        };
        if let (Err(error), Self::File(path, _) | Self::Dir(path, _)) = (removed, self) {
            note!("firn: {} is left: {error}", path.display());
        }
    }
}

/// Removes the record of an image, if it has this one.
async fn forgotten(containerd: &Containerd, name: &str, digest: &str) -> Result<(), CallError> {
    let image = containerd.image(name).await?;
    match image.and_then(|image| image.target) {
        Some(target) if target.digest == digest => containerd.delete_target(name, Some(target)).await,
        _ => Ok(()),
    }
}

/// The image, the layer, and the directory that has both.
fn of_directory(path: &Path, is_new: bool) -> Result<Durable, NotOnDisk> {
    let image = Durable::tree(&path.join(form::IMAGE), &AtomicBool::new(false))?;
    let layer = path.join(form::LAYER);
    if layer.symlink_metadata().is_ok() {
        durable::sync_file(&layer)?;
    }
    durable::sync_names(path)?;
    if is_new && let Some(above) = path.parent() {
        durable::sync_names(above)?;
    }
    Ok(image)
}

/// Removes the image from a directory, and the directory if it is ours.
fn empty(path: &Path, is_new: bool) -> io::Result<()> {
    fs::remove_dir_all(path.join(form::IMAGE)).unless_absent()?;
    fs::remove_file(path.join(form::LAYER)).unless_absent()?;
    if is_new {
        fs::remove_dir(path).unless_absent()
    } else {
        Ok(())
    }
}

fn made(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| match source.kind() {
        ErrorKind::AlreadyExists => CheckpointError::Exists {
            what: path.display().to_string(),
        },
        _ => CheckpointError::Make { path, source },
    }
}

/// The shim writes the image directory, as for the containers of a pod.
async fn directory(source: &Source, path: &Path, steps: &mut Steps) -> Result<u64, CheckpointError> {
    let (id, image) = (&source.container.id, path.join(form::IMAGE));
    let wanted = json!({id: image}).to_string();
    let mut annotations = source.overrides.clone();
    annotations.insert(names::ANNOTATION_CHECKPOINT_POD.to_owned(), wanted);
    steps.begin("checkpoint");
    let call = source.containerd.annotate(id, annotations);
    let done = steps
        .follow(&source.containerd, &source.namespace, id, call)
        .await;
    steps.end();
    match done {
        Err(CallError::Call { status, .. }) if !is_firns(status.message()) => Err(CheckpointError::Shim {
            id: id.clone(),
            message: status.message().to_owned(),
        }),
        done => {
            done?;
            let files = fs::read_dir(&image).into_iter().flatten().flatten();
            let sizes = files.filter_map(|file| Some(file.metadata().ok()?.len()));
            let layer = fs::metadata(path.join(form::LAYER)).map_or(0, |file| file.len());
            Ok(sizes.sum::<u64>() + layer)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::containerd::block_on;
    use crate::containerd::fake::Fake;

    #[test]
    fn no_checkpoint_is_made_next_to_another_image() {
        let fake = Fake::new(|call, _| panic!("{call}"));
        let dir = tempfile::tempdir().unwrap();
        let begin = || {
            block_on(async {
                let containerd = Containerd::connect(&fake.socket(), "default").await.unwrap();
                let place = Location::Dir(dir.path().to_owned());
                Target::begin(&containerd, &place).await.map(drop)
            })
            .unwrap()
        };
        begin().unwrap();
        for name in [form::INVENTORY, "firn.json", form::LAYER] {
            fs::write(dir.path().join(name), "").unwrap();
            let refused = begin().unwrap_err();
            assert!(
                matches!(refused, CheckpointError::Exists { .. }),
                "{name}: {refused}"
            );
            fs::remove_file(dir.path().join(name)).unwrap();
        }
        begin().unwrap();
    }
}
