//! The checkpoint image: the manifest `firn.json`, checksums of CRIU's files, the directory that holds them, and what CRIU
//! wrote into its own files.
//!
//! Everything here comes from whoever made the image and is hostile until checked.
#![forbid(unsafe_code)]

mod block_hash;
mod checksums;
pub mod criu;
mod dir;
#[cfg(any(test, fuzzing, feature = "fixtures"))]
#[doc(hidden)]
pub mod fixtures;
pub mod manifest;
