//! Memory of stopped processes, copied next to CRIU: several threads, and no containerd in between.
//!
//! At a dump CRIU's pages files are links to /dev/null, so CRIU describes all memory and copies none. What
//! takes its place reads the memory of the processes, which stand still:
//!
//! | memory                                        | goes to                                  |
//! |-----------------------------------------------|------------------------------------------|
//! | large private anonymous mappings ([`find`])   | extents of the store ([`save`])          |
//! | all other pages that CRIU has listed ([`rest`]) | CRIU's pages files, without zero pages |
//!
//! The image is then one that CRIU restores with holes, which [`fill`] fills while the processes are stopped.
//! Nothing is changed in the source, so a failure costs nothing there.
//!
//! [`export`] and [`import`] turn an image of the one kind into one of the other.

pub mod call;
mod error;
mod export;
mod fill;
mod find;
mod image_copy;
mod import;
mod pages;
pub mod progress;
mod remote;
mod rest;
mod save;
mod shared;

pub use error::MemoryError;
pub use export::export;
pub use fill::fill;
pub use find::find;
pub use image_copy::ImageCopyError;
pub use import::import;
pub use rest::{Kept, empty_discarded_pages, rest};
pub use save::save;

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A process whose memory is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its pid on the host.
    pub pid: i32,
    /// Its pid in the container, by which CRIU's files name it.
    pub inside: i32,
}

/// Memory of a process that the store gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bulk {
    pub process: Process,
    /// Addresses, at the bounds of mappings.
    pub at: Range<u64>,
}
