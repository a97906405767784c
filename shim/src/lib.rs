//! The containerd shim of firn, as a library so that tests reach below the RPC layer.
#![deny(unsafe_code)]

mod account;
mod actions;
mod args;
mod blocking;
mod bootstrap;
mod cgroup;
mod checkpoint;
mod container;
mod convert;
mod delete;
mod events;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod hold;
mod journal;
mod logger;
mod look;
mod mounts;
mod options;
mod panics;
mod pidfd;
mod reaper;
mod recovery;
mod restore;
mod runc;
mod server;
mod stdio;
mod sys;
mod task;
mod worker;

use firn_host::procfs;

pub use actions::{ActionError, run};
pub use logger::Chain;
