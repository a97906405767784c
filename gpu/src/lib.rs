//! GPUs of a node as plain data, how they reach each other, and the protocol between the shim and its driver
//! worker.
#![forbid(unsafe_code)]

mod backend;
pub mod protocol;
mod source;
mod topology;
mod types;

pub use backend::Backend;
pub use source::SourceGpu;
pub use topology::{Link, PciePath, Topology};
pub use types::{
    BadUuid, CudaProcess, CudaState, DeviceId, DeviceNode, Gpu, GpuPair, GpuUuid, Inventory, NodeType,
};
