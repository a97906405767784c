//! Checkpoint, restore, suspend and resume of a container, as transactions: every failure has one rollback.
//!
//! The crate calls the OCI runtime and the driver worker. It knows neither ttrpc nor containerd: the shim and
//! the command line call it.
#![forbid(unsafe_code)]

pub mod checkpoint;
mod configured;
pub mod container;
pub mod create;
pub mod criu_leftovers;
mod driver;
mod effects;
pub mod end_proof;
#[cfg(any(test, fuzzing, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
mod gpu_request;
pub mod history;
pub mod huge_pages;
pub mod image_dir;
mod interposer;
pub mod job_hook;
pub mod journal;
pub mod killed_criu;
pub mod layer;
pub mod lease;
pub mod look;
pub mod meeting;
mod memory;
pub mod memory_owner;
pub mod options;
pub mod parked;
pub mod phase;
pub mod pieces;
pub mod pod_shm;
pub mod prepared_restore;
pub mod recording;
pub mod recovery;
pub mod restore;
pub mod runc;
pub mod stdio;
pub mod steps;
pub mod timings;
mod transaction;
pub mod transfer;
