//! The checkpoint image: the manifest `firn.json`, checksums of CRIU's files, the directory that holds them,
//! and the content of CRIU's own files.
//!
//! Everything here comes from the maker of the image and is hostile until checked.
#![forbid(unsafe_code)]

mod checksums;
pub mod criu;
#[cfg(any(test, fuzzing, feature = "fixtures"))]
#[doc(hidden)]
pub mod fixtures;
pub mod form;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
pub mod manifest;
pub mod memory;
pub mod pod_shm;
pub mod referrer;
pub mod signature;
