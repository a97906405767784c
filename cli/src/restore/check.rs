//! What `firn move` on another node has to know of this one before it begins.

use firn_config::{Config, Keys};
use serde_json::json;

use super::error::RestoreError;
use crate::args::restore::RestoreArgs;
use crate::containerd::{Containerd, Snapshot, block_on};
use crate::{output, program};

/// containerd's usual snapshotter: that of a container that is not there is not known.
const SNAPSHOTTER: &str = "overlayfs";

/// Prints it.
pub fn run(args: &RestoreArgs, image: &str) -> anyhow::Result<bool> {
    let inventory = Config::load(Keys::RESTORE)
        .ok()
        .and_then(|config| program::inventory(&config).ok());
    match block_on(look(args, image))? {
        Ok((exists, has_image)) => {
            output::json(&json!({
                "version": env!("CARGO_PKG_VERSION"), "exists": exists, "has_image": has_image,
                "inventory": inventory,
            }))?;
            Ok(true)
        }
        Err(error) => output::failed(true, error.shown()),
    }
}

async fn look(args: &RestoreArgs, image: &str) -> Result<(bool, bool), RestoreError> {
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
    Ok((exists, containerd.image(image).await?.is_some()))
}
