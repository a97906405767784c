//! A restore from an image or a tar file into a container that containerd knows, such as one that nerdctl has
//! made: the processes and the files come from the checkpoint. The container is as it was until its task is
//! made, and again if that fails.

use std::time::{SystemTime, UNIX_EPOCH};

use super::Restored;
use super::contents;
use super::error::RestoreError;
use super::gpus::{self, Mode};
use super::made::Creations;
use super::plan::Plan;
use super::unpack::unpack;
use super::{dir, named};
use crate::args::restore::RestoreArgs;
use crate::containerd::{Container, ContainerSpec, Containerd, Snapshot};
use crate::oci_image::{Index, media};
use crate::steps::Steps;
use crate::view::View;
use crate::work_dir::WorkDir;

/// Restores into the container that is called so, or shows whether that would be accepted.
pub(super) async fn restore(
    args: &RestoreArgs,
    mode: &Mode,
    index: &Index,
    word: &str,
    containerd: &Containerd,
    made: &mut Creations,
    steps: &mut Steps,
) -> Result<Restored, RestoreError> {
    let namespace = &args.containerd.namespace;
    let (container, alone) = named::known(containerd, namespace, word).await?;
    made.alone = Some(alone);
    // The container has its image already: the archive decides about processes and files alone.
    let base = contents::base(containerd, index, None).await?;
    let own = Snapshot::of(&container);
    let begins_with = match own.key {
        "" => None,
        _ => containerd.parent_of(own).await?,
    };
    if begins_with.as_deref() != Some(&*base.chain) {
        let (id, base) = (container.id, index.base().to_owned());
        return Err(RestoreError::OtherBase { id, base });
    }
    let checkpoint = index.part(media::CHECKPOINT).cloned().unwrap_or_default();
    let manifest = contents::manifest(containerd, &checkpoint).await?;
    let mut spec = container.spec();
    gpus::choose(args, mode.gpus(), &mut spec, manifest.as_ref())?;
    let mut restored = Restored::of_image(&container.id, index);
    if let Mode::DryRun(node) = mode {
        let view = View::of_index(containerd, &args.from, index.clone(), &args.work_dir).await?;
        restored.plan = Some(Plan::of_view(node, spec, &view, &args.work_dir)?);
        return Ok(restored);
    }
    steps.begin("unpack");
    let work = WorkDir::make(&args.work_dir, &container.id)?;
    unpack(containerd, &checkpoint, work.path(), steps).await?;
    steps.begin("files");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let key = format!("{}-firn-{}", container.id, now.as_nanos());
    contents::files(containerd, index, &base, Snapshot { key: &key, ..own }, made).await?;
    steps.begin("restore");
    // Order matters: nothing else names it until the end.
    containerd.keep_snapshot(Snapshot::of(&container)).await?;
    let chosen = Container {
        snapshot_key: key.clone(),
        ..container.with_spec(spec)
    };
    let start = dir::start_once(containerd, made, &container, &chosen, work.path(), args);
    let started = steps.follow(containerd, namespace, &container.id, start).await;
    restored.pid = Some(started?);
    restored.log = made.log.take();
    steps.end();
    made.replaced = Some((container.snapshotter, container.snapshot_key));
    Ok(restored)
}
