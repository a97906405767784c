//! The containerd shim of firn, as a library so that tests reach below the RPC layer.
#![forbid(unsafe_code)]

mod action_io;
mod actions;
mod args;
mod bootstrap;
mod daemon;
mod delete;
mod error;
mod events;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod history;
mod logger;
mod metrics;
mod mounts;
mod options;
mod server;
mod task;

use firn_host::procfs;

pub use actions::run;
pub use error::ActionError;
pub use firn_host::Chain;
