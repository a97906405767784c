//! A checkpoint as an image: the index and its parts, as `ctr containers checkpoint` makes them and
//! `ctr containers restore` takes them.

mod error;
mod index;
mod layout;

pub use error::ImageError;
pub use index::{BaseImage, Blob, Index, Part, labels};
pub use layout::{Layout, read, write};

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
