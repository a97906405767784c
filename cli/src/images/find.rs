//! The checkpoints that are known on this node.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::Result;
use firn_config::{Config, Keys, names};
use firn_gpu::GpuUuid;
use firn_host::{FileId, ProblemReport};
use firn_image::form::{self, CheckpointDir};
use firn_image::manifest::{Manifest, UntrustedDir};
use firn_image::referrer::named_directories;
use firn_store::Digest;
use serde::Serialize;

use super::args::Common;
use crate::containerd::{CallError, Containerd, Image, block_on};
use crate::image::{ImageSummary, Sizes};
use crate::leftovers::{self, Leftover};
use crate::oci_image::{self, ImageError, Index, Part, media};
use crate::output::note;
use crate::{stored, text};

/// Where a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Kind {
    /// An image of containerd.
    Image,
    /// A directory below `[restore] from-dir`.
    Directory,
    /// A name in the store.
    Store,
    /// Left by a failed checkpoint, or by containerd.
    Left,
}

/// A checkpoint.
pub struct Checkpoint {
    pub kind: Kind,
    /// The image, or the directory.
    pub name: String,
    /// Of containerd, or of Kubernetes.
    pub namespace: String,
    pub manifest: Option<Manifest>,
    /// Why its manifest cannot be read, or its memory is missing.
    pub failure: Option<ProblemReport>,
    /// The container, and the image that it began with.
    pub container: Option<String>,
    pub base: Option<String>,
    /// In seconds since 1970.
    pub made: u64,
    pub sizes: Sizes,
    /// Of an image: the parts of the index, and at the end the index.
    pub blobs: Vec<Part>,
    /// Of a directory: which one was looked at.
    pub id: Option<FileId>,
}

/// A checkpoint.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CheckpointRow<'a> {
    /// The image, or the directory.
    name: &'a str,
    /// Where it is.
    kind: Kind,
    /// Namespace of containerd, or of Kubernetes for a directory and a name in the store; absent for what is
    /// left.
    namespace: Option<&'a str>,
    /// Id of the container; absent if it is not known.
    container: Option<&'a str>,
    /// Name of the image that the container began with; absent if it is not known.
    image: Option<&'a str>,
    /// When it was made, UTC; absent if it is not known.
    #[cfg_attr(test, schemars(extend("format" = "date-time")))]
    time: Option<String>,
    /// The same in seconds since 1970.
    made: Option<u64>,
    /// Name of the node that it was made on; absent if it is not known.
    host: Option<&'a str>,
    /// The command of the container's first process; absent if it is not known.
    command: Option<&'a str>,
    /// UUIDs of the GPUs whose state it holds; absent if it has no manifest.
    gpus: Option<Vec<&'a GpuUuid>>,
    /// Its size by class.
    sizes: Sizes,
    /// Its size in bytes.
    bytes: u64,
    /// Why its manifest cannot be read, or its memory is not in the node's store; absent if both are as they
    /// should be, or if there is no manifest.
    failure: Option<&'a ProblemReport>,
}

impl Checkpoint {
    pub fn shown(&self) -> CheckpointRow<'_> {
        let manifest = self.manifest.as_ref();
        let origin = manifest.and_then(|manifest| manifest.origin.as_ref());
        CheckpointRow {
            name: &self.name,
            kind: self.kind,
            namespace: text::some(&self.namespace),
            container: self.container.as_deref(),
            image: self.base.as_deref().and_then(text::some),
            time: text::utc(self.made),
            made: Some(self.made).filter(|made| *made > 0),
            host: origin.and_then(|origin| text::some(&origin.host)),
            command: origin.and_then(|origin| text::some(&origin.command)),
            gpus: manifest.map(|manifest| manifest.gpus.iter().map(|gpu| &gpu.uuid).collect()),
            sizes: self.sizes,
            bytes: self.sizes.all(),
            failure: self.failure.as_ref(),
        }
    }

    /// Looks whether the node's store has the memory that it needs. Returns whether that is so.
    pub fn look_for_memory(&mut self) -> bool {
        let missing = self.manifest.as_ref().and_then(stored::missing);
        let is_there = missing.is_none();
        self.failure = self.failure.take().or(missing);
        is_there
    }

    /// The index in a store that it needs.
    pub fn index(&self) -> Option<Digest> {
        Some(self.manifest.as_ref()?.bulk.as_ref()?.index)
    }

    /// One without a manifest.
    #[cfg(test)]
    pub fn unread(kind: Kind, name: &str, namespace: &str) -> Self {
        Self::new(kind, name.to_owned(), namespace, Ok(None))
    }

    fn new(kind: Kind, name: String, namespace: &str, read: Result<Option<Manifest>, ProblemReport>) -> Self {
        let (manifest, failure) = match read {
            Ok(manifest) => (manifest, None),
            Err(failure) => (None, Some(failure)),
        };
        let origin = manifest.as_ref().and_then(|manifest| manifest.origin.clone());
        let origin = origin.unwrap_or_default();
        let some = |text: String| (!text.is_empty()).then_some(text);
        Self {
            kind,
            name,
            namespace: namespace.to_owned(),
            manifest,
            failure,
            container: some(origin.container),
            base: some(origin.image),
            made: origin.made,
            sizes: Sizes::default(),
            blobs: Vec::new(),
            id: None,
        }
    }
}

/// All of them, and whether every place could be read.
pub fn find(common: &Common) -> Result<(Vec<Checkpoint>, bool)> {
    let config = Config::load(Keys::STORE).map_err(ProblemReport::from)?;
    let (mut found, mut is_whole) = (Vec::new(), true);
    if !common.no_containerd {
        match block_on(of_containerd(&common.socket.address))? {
            Ok(images) => found.extend(images),
            Err(error) => {
                note!("firn: {}", ProblemReport::from(ImageError::from(error)));
                is_whole = false;
            }
        }
    }
    let named = config
        .restore
        .from_dir
        .iter()
        .map(|dir| (Kind::Directory, dir.clone()));
    let store = config.images.store.iter();
    let in_store = store.map(|store| (Kind::Store, store.join(names::STORE_NAMED)));
    for (kind, dir) in named.chain(in_store) {
        let below = named_directories(&dir).map_err(ProblemReport::from)?;
        let named = below
            .iter()
            .filter(|path| path.file_name() != Some(form::IMAGE.as_ref()));
        for path in named {
            let namespace = path.parent().and_then(Path::file_name).unwrap_or_default();
            // The operator may have put a link there.
            let dir = UntrustedDir::open(path).ok();
            found.extend(dir.and_then(|dir| of_directory(kind, path, &namespace.to_string_lossy(), &dir)));
        }
    }
    found.extend(left(leftovers::directories(&config, &common.socket.address)));
    found.sort_by(|a, b| (a.made, &a.namespace, &a.name).cmp(&(b.made, &b.namespace, &b.name)));
    Ok((found, is_whole))
}

/// The images among what containerd and firn have left.
pub fn left(left: impl Iterator<Item = Leftover>) -> impl Iterator<Item = Checkpoint> {
    left.filter_map(|left| of_directory(Kind::Left, &left.path, "", &left.dir))
}

/// None if there is no image in the directory.
fn of_directory(kind: Kind, path: &Path, namespace: &str, opened: &UntrustedDir) -> Option<Checkpoint> {
    let CheckpointDir {
        image: dir, layer, ..
    } = CheckpointDir::find(&opened.path()).ok()??;
    let shown = if dir == opened.path() {
        path.to_owned()
    } else {
        path.join(form::IMAGE)
    };
    let manifest = Manifest::read_by(&dir, &shown).map_err(ProblemReport::from);
    let mut checkpoint = Checkpoint::new(kind, path.display().to_string(), namespace, manifest);
    checkpoint.id = opened.itself().ok().map(|itself| FileId::of(&itself));
    let written = layer.and_then(|layer| Some(layer.metadata().ok()?.len()));
    checkpoint.sizes = match &checkpoint.manifest {
        Some(_) => sizes(&checkpoint, written),
        None => Sizes {
            state: bytes_in(&dir),
            files: written.unwrap_or(0),
            ..Sizes::default()
        },
    };
    if checkpoint.made == 0 {
        let modified = fs::metadata(&dir).and_then(|dir| dir.modified()).ok();
        let since = modified.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        checkpoint.made = since.map_or(0, |since| since.as_secs());
    }
    Some(checkpoint)
}

fn sizes(checkpoint: &Checkpoint, written: Option<u64>) -> Sizes {
    let manifest = checkpoint.manifest.clone();
    let images = manifest
        .iter()
        .flat_map(|manifest| manifest.images.clone())
        .collect();
    Sizes::of(&ImageSummary { manifest, images }, written)
}

fn bytes_in(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
}

/// The checkpoints among the images of containerd.
async fn of_containerd(socket: &Path) -> Result<Vec<Checkpoint>, CallError> {
    let mut found = Vec::new();
    let any = Containerd::connect(socket, "default").await?;
    for namespace in any.namespaces().await? {
        let containerd = any.for_namespace(&namespace)?;
        for image in containerd.images().await? {
            found.extend(of_image(&containerd, &namespace, image).await?);
        }
    }
    Ok(found)
}

/// None if the image is no checkpoint.
async fn of_image(
    containerd: &Containerd,
    namespace: &str,
    image: Image,
) -> Result<Option<Checkpoint>, CallError> {
    let target = image.target.clone().unwrap_or_default();
    if target.media_type != media::INDEX {
        return Ok(None);
    }
    let index = match Index::read(containerd, &image.name, &target.digest).await {
        Ok(index) => index,
        Err(ImageError::Call(error)) if !error.is_absent() => return Err(error),
        Err(_) => return Ok(None),
    };
    let part = index.part(media::CHECKPOINT).cloned().unwrap_or_default();
    let manifest = match oci_image::manifest(containerd, &part).await {
        Ok(None) => Ok(None),
        Ok(Some(bytes)) => Manifest::decode(&bytes, &PathBuf::from(&image.name))
            .map(Some)
            .map_err(Into::into),
        Err(error) => Err(ImageError::from(error).into()),
    };
    let mut checkpoint = Checkpoint::new(Kind::Image, image.name, namespace, manifest);
    let written = index.part(media::LAYER).map(|layer| layer.size);
    checkpoint.sizes = match &checkpoint.manifest {
        Some(_) => sizes(&checkpoint, written),
        None => Sizes {
            state: part.size,
            files: written.unwrap_or(0),
            ..Sizes::default()
        },
    };
    checkpoint.container = checkpoint
        .container
        .or_else(|| index.container().map(str::to_owned));
    checkpoint.base = Some(index.base().to_owned());
    if checkpoint.made == 0 {
        checkpoint.made = image
            .created_at
            .map_or(0, |at| u64::try_from(at.seconds).unwrap_or(0));
    }
    checkpoint.blobs = index.manifests;
    checkpoint.blobs.push(Part::here(target));
    Ok(Some(checkpoint))
}

/// A row of `ls`.
pub fn row(checkpoint: &Checkpoint) -> [String; 7] {
    let none = || "-".to_owned();
    let gpus = match &checkpoint.manifest {
        Some(manifest) => manifest.gpus.len().to_string(),
        None if checkpoint.failure.is_some() => "?".to_owned(),
        None => none(),
    };
    let kind = match checkpoint.kind {
        Kind::Image => "image",
        Kind::Directory => "directory",
        Kind::Store => "store",
        Kind::Left => "left",
    };
    [
        checkpoint.name.clone(),
        Some(checkpoint.namespace.clone())
            .filter(|name| !name.is_empty())
            .unwrap_or_else(none),
        kind.to_owned(),
        checkpoint.container.clone().unwrap_or_else(none),
        if checkpoint.made == 0 {
            none()
        } else {
            text::time(checkpoint.made)
        },
        text::bytes(checkpoint.sizes.all()),
        gpus,
    ]
}
