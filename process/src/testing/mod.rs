//! Helpers for the unit tests of this crate and of the crates that depend on it.

pub mod log;
pub mod mounts;
mod program;

pub use program::write_program;
