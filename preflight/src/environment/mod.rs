//! Rules about what surrounds the processes of a container: the node's driver, how the container got its
//! GPUs, GPUs of other vendors, processes that CRIU leaves out, memory and disk space, external mounts and
//! standard streams.

mod capacity;
mod external;
mod memory_limit;
mod node;
mod process_tree;
mod vendor;

pub use capacity::image_bytes;
pub(crate) use capacity::{Needs, by_capacity};
pub(crate) use external::{Known, by_mounts, by_streams};
pub(crate) use memory_limit::MemoryLimit;
pub(crate) use node::{by_driver, by_hook, by_mig};
pub use process_tree::Tree;
pub(crate) use process_tree::by_left_out;
pub use vendor::OtherGpus;
pub(crate) use vendor::by_vendor;
