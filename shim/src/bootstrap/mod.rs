//! The actions that containerd runs before there is a server: `start`, and the questions `-info` and `-v`.
//!
//! containerd reads stdout and stderr of `start` together, so nothing here logs; what goes wrong is an error.
//! docs/design/decisions/0001-bootstrap-reply.md explains why the reply looks different for each daemon.

mod confine;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod info;
mod params;
mod socket;
mod start;

pub(crate) use socket::remove_dead as remove_dead_socket;

pub use info::{info, version};
pub use start::start;

/// The descriptor on which `start` passes the listener to the server.
pub(crate) const LISTENER_FD: i32 = 3;

/// Names of the environment variables that containerd sets for a shim.
pub(crate) mod env {
    /// containerd's socket for events.
    pub(crate) const TTRPC_ADDRESS: &str = "TTRPC_ADDRESS";
    /// Set when the shim and its containers shall share no core with strangers.
    pub(crate) const SCHED_CORE: &str = "SCHED_CORE";

    /// containerd's socket for events; empty when there is none.
    pub(crate) fn ttrpc_address() -> String {
        std::env::var(TTRPC_ADDRESS).unwrap_or_default()
    }
}
