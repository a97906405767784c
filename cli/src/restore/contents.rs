//! What a checkpoint image holds, as containerd gets it: the index of its parts, the spec, the image of the
//! root file system, firn's manifest, the files.

use std::fs::File;
use std::io;
use std::path::Path;

use firn_config::names;
use firn_containerd::Message;
use firn_image::manifest::Manifest;
use firn_oci::Spec;

use super::STDIN;
use super::error::RestoreError;
use super::made::Creations;
use crate::containerd::{Any, Containerd, Image, Runtime, Snapshot};
use crate::oci_image::{self, BaseImage, ImageError, Index, Part, media};
use crate::place::Location;
use crate::steps::Steps;

/// Largest manifest and spec that are read.
const MAX_BYTES: u64 = 16 << 20;

/// The index of the checkpoint, whose parts are in the content store.
pub(super) async fn index(
    place: &Location,
    containerd: &Containerd,
    steps: &mut Steps,
) -> Result<Index, RestoreError> {
    let (what, from): (String, Box<dyn io::Read>) = match place {
        Location::Ref(name) if name == STDIN => ("standard input".to_owned(), Box::new(io::stdin().lock())),
        Location::Ref(name) => {
            let image = containerd.image(name).await?;
            let target = image.and_then(|image| image.target);
            let target = target.ok_or_else(|| ImageError::NoImage { name: name.clone() })?;
            return Ok(Index::read(containerd, name, &target.digest).await?);
        }
        Location::File(path) | Location::Dir(path) => {
            let file = File::open(path);
            let file = file.map_err(ImageError::file(format!("open {}", path.display())))?;
            (path.display().to_string(), Box::new(file))
        }
    };
    steps.begin("read");
    let (_, index) = oci_image::read(containerd, &what, from, steps).await?;
    Ok(index)
}

/// The spec of the source, with the type that containerd gives it.
pub(super) async fn spec(containerd: &Containerd, index: &Index) -> Result<(String, Spec), RestoreError> {
    let part = index.part(media::SPEC).cloned().unwrap_or_default();
    let bytes = containerd.content(&part.digest, 0, MAX_BYTES).await?;
    let damaged = |why: String| ImageError::NoCheckpoint {
        what: part.digest.clone(),
        why,
    };
    let any = Any::decode(&*bytes).map_err(|error| damaged(error.to_string()))?;
    let value: serde_json::Value =
        serde_json::from_slice(&any.value).map_err(|error| damaged(error.to_string()))?;
    Ok((any.type_url, Spec::from(value)))
}

/// The image of the root file system: containerd's, or one that comes with the checkpoint.
///
/// The first whose layers are those that the container began with: a tag may have been moved since. One that
/// is brought while its name leads to another image gets a name of its own.
pub(super) async fn base(
    containerd: &Containerd,
    index: &Index,
    made: Option<&mut Creations>,
) -> Result<BaseImage, RestoreError> {
    let (name, chain) = (index.base(), index.base_chain());
    let own_name = chain.and_then(oci_image::own_name);
    let mut candidates = Vec::new();
    for name in [Some(name), own_name.as_deref()].into_iter().flatten() {
        if let Some(target) = containerd.image(name).await?.and_then(|image| image.target) {
            candidates.push((name, Part::here(target), false));
        }
    }
    let is_moved = !candidates.is_empty();
    let mut parts = index.manifests.iter();
    if let Some(part) = parts.find(|part| media::IMAGES.contains(&&*part.media_type)) {
        let name = match &own_name {
            Some(own) if is_moved => own,
            _ => name,
        };
        candidates.push((name, part.clone(), true));
    }
    let mut failure = None;
    for (name, part, is_new) in candidates {
        // One that cannot be read whole is none.
        match BaseImage::read(containerd, name, part).await {
            Ok(base) if chain.is_none_or(|chain| chain == base.chain) => {
                if let (true, Some(made)) = (is_new, made) {
                    keep(containerd, &base, index.snapshotter(), made).await?;
                }
                return Ok(base);
            }
            Ok(_) => {}
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    let name = name.to_owned();
    Err(match (chain, failure) {
        (_, Some(failure)) => failure,
        (Some(chain), None) if is_moved => ImageError::BaseMoved {
            name,
            chain: chain.to_owned(),
        },
        _ => ImageError::NoImage { name },
    }
    .into())
}

/// Makes an image of one that was brought.
async fn keep(
    containerd: &Containerd,
    base: &BaseImage,
    snapshotter: &str,
    made: &mut Creations,
) -> Result<(), RestoreError> {
    for (digest, keeps) in base.keeps() {
        containerd.label_blob(digest, oci_image::labels(keeps)).await?;
    }
    // As containerd's own unpacking does: the layers stay with the image when the container goes.
    let label = format!("containerd.io/gc.ref.snapshot.{snapshotter}");
    let labels = std::collections::HashMap::from([(label, base.chain.clone())]);
    containerd.label_blob(base.config(), labels).await?;
    let image = Image {
        name: base.name.clone(),
        labels: std::collections::HashMap::new(),
        target: base.parts.first().map(Part::descriptor),
        created_at: None,
    };
    containerd.create_image(image).await?;
    made.image = Some(base.name.clone());
    Ok(())
}

/// firn's manifest in the archive of the processes; none if firn has not made it.
pub(super) async fn manifest(containerd: &Containerd, part: &Part) -> Result<Option<Manifest>, RestoreError> {
    let bytes = oci_image::manifest(containerd, part).await?;
    let manifest = bytes.map(|bytes| Manifest::decode(&bytes, Path::new(names::MANIFEST)));
    Ok(manifest.transpose()?)
}

/// The root file system, with the files that the source had written.
pub(super) async fn files(
    containerd: &Containerd,
    index: &Index,
    base: &BaseImage,
    own: Snapshot<'_>,
    made: &mut Creations,
) -> Result<(), RestoreError> {
    let mut below = String::new();
    for layer in &base.layers {
        let chain = &layer.chain;
        let snapshot = Snapshot { key: chain, ..own };
        if containerd.parent_of(snapshot).await?.is_none() {
            let key = format!("firn-{}-{chain}", std::process::id());
            let extract = Snapshot { key: &key, ..own };
            let mounts = containerd.prepare(extract, &below).await?;
            let found = containerd.apply(layer.part.descriptor(), mounts).await?;
            // Other containers get a snapshot by its name.
            if found != layer.diff_id {
                containerd.remove_snapshot(extract).await?;
                let why = format!("layer {} has {found}, not {}", layer.part.digest, layer.diff_id);
                let what = index.base().to_owned();
                return Err(ImageError::NoCheckpoint { what, why }.into());
            }
            containerd.commit(extract, chain).await?;
        }
        below.clone_from(chain);
    }
    let mounts = containerd.prepare(own, &base.chain).await?;
    made.snapshot = Some((own.snapshotter.to_owned(), own.key.to_owned()));
    if let Some(layer) = index.part(media::LAYER) {
        containerd.apply(layer.descriptor(), mounts).await?;
    }
    Ok(())
}

pub(super) async fn runtime(containerd: &Containerd, index: &Index) -> Result<Runtime, RestoreError> {
    let options = match index.part(media::RUNTIME_OPTIONS) {
        None => None,
        Some(part) => {
            let bytes = containerd.content(&part.digest, 0, MAX_BYTES).await?;
            let why = |error: firn_containerd::DecodeError| error.to_string();
            let damaged = |error| ImageError::NoCheckpoint {
                what: part.digest.clone(),
                why: why(error),
            };
            Some(Any::decode(&*bytes).map_err(damaged)?)
        }
    };
    Ok(Runtime {
        name: index.runtime().to_owned(),
        options,
    })
}
