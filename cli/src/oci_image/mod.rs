//! A checkpoint as an image: the index and its parts, as `ctr containers checkpoint` makes them and
//! `ctr containers restore` takes them.

mod error;
mod index;
mod layout;

use firn_config::names;
use firn_image::manifest::MAX_BYTES;

use crate::archive;
use crate::containerd::{CallError, Containerd};

pub use error::ImageError;
pub use index::{BaseImage, Blob, Index, MAX_JSON, Part, is_chain, labels, no_checkpoint, own_name};
pub use layout::{Layout, read, write};

/// The bytes of firn's manifest in the archive of the processes, of which nothing else is read. None if there
/// is none, or one that is too large.
pub async fn manifest(containerd: &Containerd, part: &Part) -> Result<Option<Vec<u8>>, CallError> {
    let read = async |from, size| containerd.content(&part.digest, from, size).await;
    let place = archive::find(names::MANIFEST, part.size, read).await?;
    match place.filter(|place| place.length <= MAX_BYTES) {
        None => Ok(None),
        Some(place) => read(place.from, place.length).await.map(Some),
    }
}

/// Types of the parts. containerd has these names.
pub mod media {
    pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
    pub const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
    /// Of an image that a container began with.
    pub const IMAGES: [&str; 4] = [
        INDEX,
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    ];
    pub const CHECKPOINT: &str = "application/vnd.containerd.container.criu.checkpoint.criu.tar";
    pub const SPEC: &str = "application/vnd.containerd.container.checkpoint.config.v1+proto";
    pub const OPTIONS: &str = "application/vnd.containerd.container.checkpoint.options.v1+proto";
    pub const RUNTIME_OPTIONS: &str = "application/vnd.containerd.container.checkpoint.runtime.options+proto";
}
