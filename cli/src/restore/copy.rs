//! A restore into a new container, from an image or a tar file.

use std::fs::File;
use std::io;
use std::path::Path;

use firn_config::names;
use firn_image::manifest::Manifest;
use firn_oci::Spec;
use prost::Message;

use super::error::RestoreError;
use super::gpus::Here;
use super::made::Made;
use super::named::is_id;
use super::unpack::unpack;
use super::{Restored, STDIN, dir, gpus, into};
use crate::args::restore::RestoreArgs;
use crate::checkpoint::Interrupts;
use crate::containerd::{Any, Container, Containerd, Image, NERDCTL_STATE, Runtime, Snapshot};
use crate::oci_image::{self, BaseImage, ImageError, Index, Part, media};
use crate::output::note;
use crate::place::Place;
use crate::steps::Steps;
use crate::work_dir::WorkDir;

/// Largest manifest and spec that are read.
const MAX_BYTES: u64 = 16 << 20;

/// Restores into a new container or into the one that is named, or shows whether that would be accepted.
pub async fn restore(
    (args, here): (&RestoreArgs, Option<&Here>),
    place: &Place,
    steps: &mut Steps,
) -> Result<Restored, RestoreError> {
    let plain = Containerd::connect(&args.containerd.socket.address, &args.containerd.namespace).await?;
    let mut interrupts = Interrupts::new()?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let lease = format!(
        "firn-{}-{}",
        std::process::id(),
        now.unwrap_or_default().as_nanos()
    );
    let containerd = plain.with_lease(&lease).await?;
    let mut made = Made::default();
    let work = async {
        let index = index(place, &containerd, steps).await?;
        match &args.into {
            Some(word) => into::restored((args, here), (&index, word), &containerd, &mut made, steps).await,
            None => restored((args, here), &index, &containerd, &mut made, steps).await,
        }
    };
    let done = match interrupts.unless(work).await {
        Some(done) => done,
        None => Err(RestoreError::Interrupted {
            id: args
                .name
                .as_ref()
                .or(args.into.as_ref())
                .unwrap_or(&args.from)
                .clone(),
        }),
    };
    let done = match done {
        Err(error) => Err(made.discarded(&containerd, error).await),
        Ok(restored) => {
            made.done(&containerd).await;
            Ok(restored)
        }
    };
    if let Err(error) = plain.end_lease(&lease).await {
        note!("firn: what was read of the checkpoint is left for a day: {error}");
    }
    done
}

async fn restored(
    (args, here): (&RestoreArgs, Option<&Here>),
    index: &Index,
    containerd: &Containerd,
    made: &mut Made,
    steps: &mut Steps,
) -> Result<Restored, RestoreError> {
    let checkpoint = index.part(media::CHECKPOINT).cloned().unwrap_or_default();
    let (type_url, mut spec) = spec(containerd, index).await?;
    let id = named(args, index, &spec)?;
    if !spec.author().owns_node() {
        return Err(RestoreError::Kubernetes { id });
    }
    expect_files_of_nerdctl(&spec, &id)?;
    let key = Snapshot {
        snapshotter: index.snapshotter(),
        key: &id,
    };
    expect_none(containerd, &id, key).await?;
    let base = base(containerd, index, Some(made)).await?;
    let manifest = manifest(containerd, &checkpoint).await?;
    gpus::choose(args, here, &mut spec, manifest.as_ref())?;
    own_cgroup(&mut spec, index, &id, &args.containerd.namespace)?;
    let mut restored = Restored::new(&id, index.bytes());
    if let (true, Some(here)) = (args.dry_run, here) {
        restored.map = gpus::plan(here, &spec, manifest.as_ref(), &args.work_dir)?;
        return Ok(restored);
    }
    steps.begin("unpack");
    let work = WorkDir::make(&args.work_dir, &id)?;
    unpack(containerd, &checkpoint, work.path(), steps).await?;
    steps.begin("files");
    files(containerd, index, &base, key, made).await?;
    let container = Container {
        id: id.clone(),
        image: index.base().to_owned(),
        runtime: Some(runtime(containerd, index).await?),
        spec: Some(Any {
            type_url,
            value: spec.into_value().to_string().into_bytes(),
        }),
        snapshotter: index.snapshotter().to_owned(),
        snapshot_key: id.clone(),
        ..Container::default()
    };
    containerd.create_container(container.clone()).await?;
    let container = &*made.container.insert(container);
    steps.begin("restore");
    made.task_of = Some(id.clone());
    let start = dir::start(containerd, container, work.path(), args.log.as_deref());
    let place = (&*args.containerd.namespace, &*id);
    restored.pid = Some(steps.follow(containerd, place, start).await?);
    steps.end();
    Ok(restored)
}

/// The index of the checkpoint, whose parts are in the content store.
async fn index(place: &Place, containerd: &Containerd, steps: &mut Steps) -> Result<Index, RestoreError> {
    let (what, from): (String, Box<dyn io::Read>) = match place {
        Place::Ref(name) if name == STDIN => ("standard input".to_owned(), Box::new(io::stdin().lock())),
        Place::Ref(name) => {
            let image = containerd.image(name).await?;
            let target = image.and_then(|image| image.target);
            let target = target.ok_or_else(|| ImageError::NoImage { name: name.clone() })?;
            return Ok(Index::read(containerd, name, &target.digest).await?);
        }
        Place::File(path) | Place::Dir(path) => {
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
async fn spec(containerd: &Containerd, index: &Index) -> Result<(String, Spec), RestoreError> {
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

/// The id of the new container.
fn named(args: &RestoreArgs, index: &Index, spec: &Spec) -> Result<String, RestoreError> {
    let of_source = || index.container().or_else(|| by_cgroup(spec)).map(str::to_owned);
    let id = args.name.clone().or_else(of_source);
    let id = id.ok_or_else(|| RestoreError::NoName {
        dir: args.from.clone(),
    })?;
    if is_id(&id) {
        Ok(id)
    } else {
        Err(RestoreError::NoId { id })
    }
}

/// nerdctl keeps files of a container that its spec mounts, and its hook of the spec needs.
fn expect_files_of_nerdctl(spec: &Spec, id: &str) -> Result<(), RestoreError> {
    match spec.annotation(NERDCTL_STATE) {
        Some(dir) if !Path::new(dir).is_dir() => Err(RestoreError::Nerdctl {
            id: id.to_owned(),
            dir: dir.to_owned(),
        }),
        _ => Ok(()),
    }
}

/// containerd's clients name the cgroup after the container: `/NAMESPACE/ID`, `SLICE:PREFIX:ID`.
fn by_cgroup(spec: &Spec) -> Option<&str> {
    let last = spec.cgroups_path()?.rsplit(['/', ':']).next()?;
    Some(last).filter(|last| !last.is_empty())
}

/// Under another id the container gets a cgroup of its own: that of the source may be in use.
fn own_cgroup(spec: &mut Spec, index: &Index, id: &str, namespace: &str) -> Result<(), RestoreError> {
    let source = index
        .container()
        .or_else(|| by_cgroup(spec))
        .unwrap_or_default()
        .to_owned();
    let Some(path) = spec.cgroups_path().filter(|_| source != id) else {
        return Ok(());
    };
    let own = match path.strip_suffix(&*source) {
        Some(parent) if !source.is_empty() => format!("{parent}{id}"),
        _ => format!("/{namespace}/{id}"),
    };
    let linux = spec
        .object_mut("linux")
        .map_err(|error| RestoreError::Plan(error.into()))?;
    linux.insert("cgroupsPath".to_owned(), own.into());
    Ok(())
}

async fn expect_none(containerd: &Containerd, id: &str, snapshot: Snapshot<'_>) -> Result<(), RestoreError> {
    let what = match containerd.container(id).await {
        Ok(_) => format!("container {id}"),
        Err(error) if !error.is_absent() => return Err(error.into()),
        Err(_) if containerd.parent_of(snapshot).await?.is_some() => format!("snapshot {id}"),
        Err(_) => return Ok(()),
    };
    Err(RestoreError::Exists { what })
}

/// The image of the root file system: containerd's, or one that comes with the checkpoint.
pub(super) async fn base(
    containerd: &Containerd,
    index: &Index,
    made: Option<&mut Made>,
) -> Result<BaseImage, RestoreError> {
    let name = index.base();
    let image = containerd.image(name).await?.and_then(|image| image.target);
    let brought = index
        .manifests
        .iter()
        .find(|part| media::IMAGES.contains(&&*part.media_type));
    let (part, is_new) = match (image, brought) {
        (Some(target), _) => (Part::here(target), false),
        (None, Some(part)) => (part.clone(), true),
        (None, None) => {
            return Err(ImageError::NoImage {
                name: name.to_owned(),
            }
            .into());
        }
    };
    let base = BaseImage::read(containerd, name, part).await?;
    if let (true, Some(made)) = (is_new, made) {
        for (digest, keeps) in base.keeps() {
            containerd.label_blob(digest, oci_image::labels(keeps)).await?;
        }
        let target = base.parts.first().map(Part::descriptor);
        let (name, labels) = (name.to_owned(), std::collections::HashMap::new());
        containerd
            .create_image(Image {
                name: name.clone(),
                labels,
                target,
                created_at: None,
            })
            .await?;
        made.image = Some(name);
    }
    Ok(base)
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
    made: &mut Made,
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

async fn runtime(containerd: &Containerd, index: &Index) -> Result<Runtime, RestoreError> {
    let options = match index.part(media::RUNTIME_OPTIONS) {
        None => None,
        Some(part) => {
            let bytes = containerd.content(&part.digest, 0, MAX_BYTES).await?;
            let why = |error: prost::DecodeError| error.to_string();
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
