//! GPU inventory, remap planning, preflight signs and the driver worker.
//!
//! The library part is plain data and plain code and loads no driver. Only the worker binary `firn-gpu` opens
//! libcuda.so.1 and libnvidia-ml.so.1; the shim talks to it in the lines of [`protocol`].

mod types;
pub mod protocol;

pub use types::{
    BadUuid, CudaState, DeviceNode, Gpu, GpuPair, GpuUuid, Inventory, NodeType,
};
