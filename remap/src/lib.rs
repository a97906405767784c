//! Which GPUs of this node replace those of a checkpoint: what the target's spec grants, the map that was
//! requested, the policy, and the plan.
#![forbid(unsafe_code)]

mod assignment;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod grant;
pub mod plan;
mod policy;
mod requested_map;

pub use assignment::{AssignmentError, GpuAssignment, Occupied};
pub use grant::{Basis, Grant, GrantError};
pub use policy::PolicyError;
pub use requested_map::{MapError, MapOrigin, RequestedMap};
