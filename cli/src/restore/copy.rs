//! A restore into a new container, from an image or a tar file.

use std::path::Path;

use firn_oci::Spec;

use super::error::RestoreError;
use super::gpus::Mode;
use super::made::Creations;
use super::plan::Plan;
use super::unpack::unpack;
use super::{Restored, contents, dir, gpus, into};
use crate::args::restore::RestoreArgs;
use crate::checkpoint::Interrupts;
use crate::containerd::{Any, CallError, Container, Containerd, NERDCTL_STATE, Snapshot, is_id};
use crate::oci_image::{Index, media};
use crate::output::note;
use crate::place::Location;
use crate::steps::Steps;
use crate::view::View;
use crate::work_dir::WorkDir;

/// Restores into a new container or into the one that is named, or shows whether that would be accepted.
pub async fn restore(
    args: &RestoreArgs,
    mode: &Mode,
    place: &Location,
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
    let mut made = Creations::default();
    let work = async {
        let index = contents::index(place, &containerd, steps).await?;
        match &args.into {
            Some(word) => into::restore(args, mode, &index, word, &containerd, &mut made, steps).await,
            None => restore_new(args, mode, &index, &containerd, &mut made, steps).await,
        }
    };
    let done = match interrupts.unless(Box::pin(work)).await {
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
        Err(error) => Err(made.roll_back(&containerd, error).await),
        Ok(restored) => {
            made.remove_replaced(&containerd).await;
            Ok(restored)
        }
    };
    // Where a task may be left, the container may have the files of either.
    if matches!(done, Err(RestoreError::Left { .. })) {
        return done;
    }
    if let Err(error) = plain.end_lease(&lease).await {
        note!("firn: what was read of the checkpoint is left for a day: {error}");
    }
    done
}

/// Restores into a new container, or shows whether that would be accepted.
async fn restore_new(
    args: &RestoreArgs,
    mode: &Mode,
    index: &Index,
    containerd: &Containerd,
    made: &mut Creations,
    steps: &mut Steps,
) -> Result<Restored, RestoreError> {
    let checkpoint = index.part(media::CHECKPOINT).cloned().unwrap_or_default();
    let (type_url, mut spec) = contents::spec(containerd, index).await?;
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
    // A dry run leaves no image.
    let kept = matches!(mode, Mode::Restore(_)).then_some(&mut *made);
    let base = contents::base(containerd, index, kept).await?;
    let manifest = contents::manifest(containerd, &checkpoint).await?;
    own_cgroup(&mut spec, index, &id, &args.containerd.namespace)?;
    let unchosen = spec.clone();
    gpus::choose(args, mode.gpus(), &mut spec, manifest.as_ref())?;
    let is_chosen = spec.value() != unchosen.value();
    let mut restored = Restored::of_image(&id, index);
    if let Mode::DryRun(node) = mode {
        let view = View::of_index(containerd, &args.from, index.clone(), &args.work_dir).await?;
        restored.plan = Some(Plan::of_view(node, spec, &view, &args.work_dir)?);
        return Ok(restored);
    }
    steps.begin("unpack");
    let work = WorkDir::make(&args.work_dir, &id)?;
    unpack(containerd, &checkpoint, work.path(), steps).await?;
    steps.begin("files");
    contents::files(containerd, index, &base, key, made).await?;
    let container = Container {
        id: id.clone(),
        image: base.name.clone(),
        runtime: Some(contents::runtime(containerd, index).await?),
        spec: Some(any(type_url.clone(), spec)),
        snapshotter: index.snapshotter().to_owned(),
        snapshot_key: id.clone(),
        ..Container::default()
    };
    create(containerd, made, &container).await?;
    steps.begin("restore");
    let start = dir::start(containerd, made, &container, work.path(), args);
    let namespace = &args.containerd.namespace;
    restored.pid = Some(steps.follow(containerd, namespace, &id, start).await?);
    restored.log = made.log.take();
    steps.end();
    if is_chosen {
        forget_choice(containerd, &container, type_url, unchosen).await;
    }
    Ok(restored)
}

/// Makes the container. One that is there already is of somebody else; one whose making is interrupted may be
/// there.
async fn create(
    containerd: &Containerd,
    made: &mut Creations,
    container: &Container,
) -> Result<(), CallError> {
    made.container = Some(container.clone());
    let created = containerd.create_container(container.clone()).await;
    if created.as_ref().is_err_and(CallError::is_there) {
        made.container = None;
    }
    created
}

/// Gives containerd the spec without the choice of GPUs, which the bundle has: the container's next
/// checkpoint has other GPUs than this one.
async fn forget_choice(containerd: &Containerd, container: &Container, type_url: String, unchosen: Spec) {
    let kept = Container {
        spec: Some(any(type_url, unchosen)),
        ..container.clone()
    };
    if let Err(error) = containerd.update(&kept).await {
        note!(
            "firn: {} keeps the annotations of this restore: {error}",
            container.id
        );
    }
}

fn any(type_url: String, spec: Spec) -> Any {
    Any {
        type_url,
        value: spec.into_value().to_string().into_bytes(),
    }
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
