//! What the parts of the simulated driver share: where its nodes are, the table of a node's GPUs, GPU memory
//! with its owners, signs of CUDA processes in /proc, and scripted faults.
//!
//! A simulated GPU is the block node of a loop device over anonymous memory. So the device cgroup gates it,
//! CRIU refuses its descriptors and mappings, its memory lies outside the process, and all openers see the
//! same bytes (one page cache per block device). Nothing here is part of firn: it stands in for hardware in
//! tests.

pub mod fault;
mod mapping;
mod memory;
pub mod paths;
mod process;
mod robust;
mod slots;
mod table;
mod uuid;

pub use mapping::Mapping;
pub use memory::{CHUNK, GpuMemory, Run, punch};
pub use process::{CudaProcess, SERVICE_PREFIX, TOKEN_PREFIX, service_comm, token_comm};
pub use slots::{SLOT_COUNT, SLOT_TABLE_SIZE, Slots};
pub use table::{
    Control, GpuInfo, Node, NodeTable, NvLinkEnd, NvLinks, TABLE_SIZE, TableError, branch_of, punch_managed,
};
pub use uuid::{BadUuid, Uuid};

/// A size or offset as the index type; every platform that the simulator runs on has 64-bit addresses.
pub fn index(value: u64) -> usize {
    usize::try_from(value).expect("addresses have 64 bits")
}
