//! The calls of containerd's gRPC API that firn's programs make, and their messages.
//!
//! The messages are written by hand, with the fields that are used: what is left out is skipped when it is
//! read, and a default when it is sent. A message whose only field is its first is a `String` or `u32` of
//! prost; `()` skips all fields. Types and modules have the API's names.
//!
//! This crate has no transport: `firn` calls by tonic, which knows every status, the shim by a small client
//! of its own, for tonic in every shim would cost memory.

#![forbid(unsafe_code)]

pub mod containers;
pub mod content;
pub mod events;
pub mod images;
pub mod leases;
pub mod node;
pub mod runc;
pub mod snapshots;
pub mod tasks;
mod types;

pub use prost::{DecodeError, Message};
pub use types::{Any, Descriptor, FieldMask, Mount, Timestamp};
