//! Names and places of the simulated driver's files, each declared once.

use std::path::PathBuf;

/// Environment variable naming the directory that stands in for `/dev`, so that tests leave the host's alone.
pub const DEV_ENV: &str = "SIMGPU_DEV";
/// Environment variable naming the directory of the fault script instead of `/run/simgpu`.
pub const STATE_ENV: &str = "SIMGPU_STATE";
/// Table of the node's GPUs.
pub const CONTROL: &str = "nvidiactl";
/// Stands in for unified memory.
pub const UVM: &str = "nvidia-uvm";
/// Opened by nobody; containers get it with the others.
pub const UVM_TOOLS: &str = "nvidia-uvm-tools";
/// File below [`state_dir`] with the limits of memory that were asked for.
pub const LIMITS: &str = "memory-limits";
/// Where a driver's libraries lie on Debian.
pub const LIBRARY_DIR: &str = "/usr/lib/x86_64-linux-gnu";

/// Name of the node of the GPU with this minor number.
pub fn gpu(minor: u32) -> String {
    format!("nvidia{minor}")
}

/// Directory of the device nodes.
pub fn dev_dir() -> PathBuf {
    std::env::var_os(DEV_ENV).map_or_else(|| PathBuf::from("/dev"), PathBuf::from)
}

/// Directory of the fault script.
pub fn state_dir() -> PathBuf {
    std::env::var_os(STATE_ENV).map_or_else(|| PathBuf::from("/run/simgpu"), PathBuf::from)
}
