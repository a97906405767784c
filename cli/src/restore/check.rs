//! What `firn move` on another node has to know of this one before it begins.

use std::io::{self, Read};

use firn_image::criu;
use firn_oci::Spec;
use firn_preflight::{expect_addresses, expect_cpu};
use firn_remap::plan::GpuMap;
use serde::{Deserialize, Serialize};

use super::error::RestoreError;
use super::facts::Facts;
use super::gpus::{self, NodeGpus};
use super::plan::Plan;
use super::room;
use crate::args::restore::RestoreArgs;
use crate::containerd::{Containerd, Snapshot, Task, block_on};
use crate::oci_image::{self, BaseImage, ImageError, Part};
use crate::output::{self, Printed};

/// containerd's usual snapshotter: that of a container that is not there is not known.
const SNAPSHOTTER: &str = "overlayfs";

/// Most bytes of facts that are read.
const MAX_FACTS: u64 = 32 << 20;

/// What is known of this node. The firn that reads it is of the same release: it has no schema.
#[derive(Serialize, Deserialize)]
pub struct Node {
    pub version: String,
    /// Whether there is a container or a snapshot of the name.
    pub exists: bool,
    /// Whether it has the image that the container began with.
    pub has_image: bool,
    /// The task of the container of that name.
    pub task: Option<Task>,
    /// Whether it was given the facts of a container, and has looked whether it would restore it.
    #[serde(default)]
    pub has_looked: bool,
    /// Why it would not restore the container, with code and hint.
    #[serde(default)]
    pub failure: Option<String>,
    /// The GPUs that it would get; none if it has none.
    #[serde(default)]
    pub map: Option<GpuMap>,
}

impl Printed for Node {}

/// Prints it. Standard input has the facts of the container, or nothing.
pub fn run(args: &RestoreArgs, image: &str) -> anyhow::Result<bool> {
    let facts = match read() {
        Ok(facts) => facts,
        Err(error) => return output::failed(true, error.shown()),
    };
    let chain = facts.as_ref().and_then(|facts| facts.chain.clone());
    let content = match block_on(look(args, image, chain.as_deref()))? {
        Ok(content) => content,
        Err(error) => return output::failed(true, error.shown()),
    };
    let has_looked = facts.is_some();
    let planned = match facts {
        // The name is known to be taken.
        Some(facts) if !content.exists => planned(args, facts),
        _ => Ok(None),
    };
    let (map, failure) = match planned {
        Ok(map) => (map, None),
        Err(error) => (None, Some(error.shown())),
    };
    output::json(&Node {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        exists: content.exists,
        has_image: content.has_image,
        task: content.task,
        has_looked,
        failure,
        map,
    })?;
    Ok(true)
}

fn read() -> Result<Option<Facts>, RestoreError> {
    let mut text = Vec::new();
    let read = io::stdin().lock().take(MAX_FACTS).read_to_end(&mut text);
    read.map_err(ImageError::file("read the facts of the container"))?;
    if text.is_empty() {
        return Ok(None);
    }
    let facts = serde_json::from_slice(&text);
    facts
        .map(Some)
        .map_err(|error| RestoreError::Node(error.to_string()))
}

/// The GPUs that the container would get here.
fn planned(args: &RestoreArgs, facts: Facts) -> Result<Option<GpuMap>, RestoreError> {
    let socket = &args.containerd.socket.address;
    let room = room::expect_memory(facts.memory)
        .and_then(|()| room::expect_disk(facts.bytes, &room::content(socket), &args.work_dir));
    room.map_err(|error| RestoreError::Plan(error.into()))?;
    let node = NodeGpus::read(None, socket)?;
    let mut spec = Spec::from(facts.spec);
    gpus::choose(args, Some(&node), &mut spec, facts.manifest.as_ref())?;
    expect_cpu(&facts.cpu, &spec)
        .and_then(|()| expect_addresses(&facts.addresses, &spec))
        .map_err(|error| RestoreError::Plan(error.into()))?;
    let plan = Plan::make(&node, spec.clone(), facts.manifest, &args.work_dir)?;
    criu::expect_files(&facts.files, &spec, &args.work_dir)
        .and_then(|()| facts.huge_pages.expect())
        .and_then(|()| facts.pids.expect(&spec))
        .map_err(|error| RestoreError::Plan(error.into()))?;
    Ok(plan.map().cloned())
}

/// What containerd has here.
struct LocalContent {
    exists: bool,
    has_image: bool,
    task: Option<Task>,
}

async fn look(args: &RestoreArgs, image: &str, chain: Option<&str>) -> Result<LocalContent, RestoreError> {
    let at = &args.containerd;
    let containerd = Containerd::connect(&at.socket.address, &at.namespace).await?;
    let id = args.name.as_deref().unwrap_or_default();
    let snapshot = Snapshot {
        snapshotter: SNAPSHOTTER,
        key: id,
    };
    let exists = match containerd.container(id).await {
        Ok(_) => true,
        Err(error) if error.is_absent() => containerd.parent_of(snapshot).await?.is_some(),
        Err(error) => return Err(error.into()),
    };
    Ok(LocalContent {
        exists,
        has_image: has_image(&containerd, image, chain).await?,
        task: containerd.task(id).await?,
    })
}

/// Whether containerd has an image of this name with these layers, or the one that firn has named for them.
/// One that cannot be read whole is none.
async fn has_image(containerd: &Containerd, name: &str, chain: Option<&str>) -> Result<bool, RestoreError> {
    let own_name = chain.and_then(oci_image::own_name);
    for name in [Some(name), own_name.as_deref()].into_iter().flatten() {
        let Some(target) = containerd.image(name).await?.and_then(|image| image.target) else {
            continue;
        };
        match BaseImage::read(containerd, name, Part::here(target)).await {
            Ok(base) if chain.is_none_or(|chain| chain == base.chain) => return Ok(true),
            Err(ImageError::Call(error)) if !error.is_absent() => return Err(error.into()),
            _ => {}
        }
    }
    Ok(false)
}
