//! What `firn move` on another node has to know of this one before it begins.

use firn_config::{Config, Keys};
use firn_gpu::Inventory;
use serde::{Deserialize, Serialize};

use super::error::RestoreError;
use crate::args::restore::RestoreArgs;
use crate::containerd::{Containerd, Snapshot, Task, block_on};
use crate::output::{self, Printed};
use crate::program;

/// containerd's usual snapshotter: that of a container that is not there is not known.
const SNAPSHOTTER: &str = "overlayfs";

/// What is known of this node. The firn that reads it is of the same release: it has no schema.
#[derive(Serialize, Deserialize)]
pub struct Node {
    pub version: String,
    /// Whether there is a container or a snapshot of the name.
    pub exists: bool,
    pub has_image: bool,
    /// The task of the container of that name.
    pub task: Option<Task>,
    pub inventory: Option<Inventory>,
}

impl Printed for Node {}

/// Prints it.
pub fn run(args: &RestoreArgs, image: &str) -> anyhow::Result<bool> {
    let inventory = Config::load(Keys::RESTORE)
        .ok()
        .and_then(|config| program::inventory(&config).ok());
    match block_on(look(args, image))? {
        Ok(found) => {
            output::json(&Node {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                exists: found.exists,
                has_image: found.has_image,
                task: found.task,
                inventory,
            })?;
            Ok(true)
        }
        Err(error) => output::failed(true, error.shown()),
    }
}

/// What containerd has here.
struct LocalContent {
    exists: bool,
    has_image: bool,
    task: Option<Task>,
}

async fn look(args: &RestoreArgs, image: &str) -> Result<LocalContent, RestoreError> {
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
        has_image: containerd.image(image).await?.is_some(),
        task: containerd.task(id).await?,
    })
}
