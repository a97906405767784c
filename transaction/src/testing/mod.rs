//! What unit tests of this crate and of those above it need.

pub mod log;
pub mod mounts;
