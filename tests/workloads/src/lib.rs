//! Parts of the test workloads: the CUDA driver opened at run time, and the counter that computes in GPU
//! memory.
//!
//! The same programs run on the simulated driver and on real GPUs.

pub mod children;
pub mod counter;
pub mod driver;
pub mod habits;
pub mod huge;
pub mod shared;
