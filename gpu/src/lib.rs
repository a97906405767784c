//! GPU inventory, remap planning, preflight signs and the driver worker.
//!
//! [`plan`] and [`preflight`] are plain code over plain data and files of /proc; the shim uses them and never loads the
//! driver. [`worker`] is what the binary `firn-gpu` runs: it alone opens libcuda.so.1 and libnvidia-ml.so.1, and the
//! shim talks to it in the lines of [`protocol`].
//!
//! `unsafe` is confined to the three modules below that say why they need it.

#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "calls libcuda through C function pointers")]
mod cuda;
mod maps;
#[allow(unsafe_code, reason = "calls libnvidia-ml through C function pointers")]
mod nvml;
pub mod plan;
pub mod preflight;
pub mod procfile;
pub mod protocol;
#[allow(
    unsafe_code,
    reason = "dlopen and dlsym, an inherited descriptor, leaving without exit handlers"
)]
mod sys;
mod topology;
mod types;
pub mod worker;

pub use topology::{Link, PciePath, Topology};
pub use types::{BadUuid, CudaState, DeviceNode, Gpu, GpuPair, GpuUuid, Inventory, NodeType};
