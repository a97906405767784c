//! `libnvidia-ml.so.1` of the simulated driver: what an inventory, monitors and NVIDIA's tools ask of NVML.
//!
//! Shows the GPUs whose nodes can be opened, as in a container that was granted only some. A device handle is
//! the GPU's place in that list plus one.

mod abi;
mod api;
mod library;
mod monitor;
