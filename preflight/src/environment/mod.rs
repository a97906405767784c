//! Rules about what surrounds the processes of a container: GPUs of other vendors, processes that CRIU leaves
//! out, memory and disk space, external mounts and standard streams.

mod capacity;
mod external;
mod memory_limit;
mod process_tree;
mod vendor;

pub use capacity::image_bytes;
pub(crate) use capacity::{Needs, by_capacity, by_memory};
pub(crate) use external::{Known, by_mounts, by_streams};
pub(crate) use memory_limit::MemoryLimit;
pub use process_tree::Tree;
pub(crate) use process_tree::by_left_out;
pub use vendor::OtherGpus;
pub(crate) use vendor::by_vendor;
