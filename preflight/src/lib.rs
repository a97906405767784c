//! Whether a container can be checkpointed, decided before anything is touched.
//!
//! [`check_node`] and [`check`] hold all rules. The shim's transaction fails with the first [`Refusal`],
//! `firn audit` shows all of them. The rules read /proc, the container's spec, and the host's free memory and
//! disk space. They change nothing.
#![deny(unsafe_code)]

mod addresses;
mod check;
mod criu;
mod environment;
mod finding;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;
mod refusal;
mod settings;
mod sys;
mod target;
mod workload;

pub use addresses::Address;
pub use check::{CheckError, Node, Outcome, check, check_node, check_until_refused, expect_criu};
pub use criu::CriuLimits;
pub use environment::{OtherGpus, Tree, image_bytes};
pub use finding::{
    Certainty, Connection, Finding, Inherited, Object, OtherEnd, RefusedBefore, UnixKind, UnixSocket,
    Unreadable, is_outside_vfork, read_connections, user_namespace,
};
pub use refusal::Refusal;
pub use settings::{LostSettings, lost_settings};
pub use target::{Unfit, expect_addresses, expect_cpu, expect_named, takes_any_cpu};
pub use workload::{Assertions, Capacity, OtherVendors, STARTS, STARTS_LOOK, Workload};
