//! What the fuzz targets call of firn-hook, which itself is a program. Empty but for them.
#![cfg(fuzzing)]
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "of each module the targets call a part")]

mod cap;
mod checkpoint_image;
mod layer;
mod rights;
mod shm;

pub use checkpoint_image::fuzz::checkpoint_image;
pub use layer::fuzz::layer;
pub use shm::fuzz::pod_shm;
