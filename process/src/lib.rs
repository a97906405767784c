//! Processes of a container on Linux: cgroups, children, ptrace, pidfds, unmounts, waits that have an end.
//!
//! The crate knows neither OCI runtimes nor checkpoints: what a transaction does with processes is up to
//! firn-transaction.
#![deny(unsafe_code)]

pub mod blocking;
pub mod call;
pub mod cancel;
pub mod cgroup;
#[cfg(any(test, fuzzing, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
pub mod panics;
pub mod pidfd;
pub mod reaper;
pub mod sys;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
#[allow(
    clippy::unwrap_used,
    reason = "a test that cannot be set up is a test that fails"
)]
pub mod testing;
pub mod tracer;
pub mod unmount;
mod warn;

pub use warn::OrWarn;
